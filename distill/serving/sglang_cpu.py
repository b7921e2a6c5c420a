"""Start SGLang on a host without a GPU, from what PyPI has: `python sglang_cpu.py --model-path ...`.

Two things stand in its way there, and both are put right in this process; no installed file is changed.
1. The torchvision wheel is a CUDA build. Beside a CPU torch its compiled half does not load, and its Python half
   wants two operators to be declared before it can be imported. They are declared, never defined.
2. `sgl_kernel` has no CPU build. SGLang takes its own torch paths on a CPU without AMX, but imports names from that
   module on the way. A stand-in gives it the names; each raises when it is called, so no number can come from here.

Run by path, and imported again by the processes that SGLang spawns: it needs nothing but torch and sglang.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

_TORCHVISION_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class KernelStandIn(types.ModuleType):
    """A module that has every name. What the names stand for raises NotImplementedError when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = "0+cpu"
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} has no CPU build")

        return missing


def prepare() -> None:
    """Make `import sglang` work in this process."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # the folder of a script comes first in sys.path; SGLang must not find our modules under its own names
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    import torch

    for operator in _TORCHVISION_OPERATORS:
        try:
            torch.library.define(f"torchvision::{operator}", _SCHEMA)
        except RuntimeError:
            pass  # a torchvision that fits has declared it already
    sys.modules["sgl_kernel"] = KernelStandIn("sgl_kernel")


if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
