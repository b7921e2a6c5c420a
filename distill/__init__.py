"""Distill: a multi-teacher on-policy distillation engine. `from distill import run, RunConfig`; loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.build import run
    from distill.config import RunConfig

__all__ = ["RunConfig", "__version__", "run"]
__version__ = "0.1.0"


_LAZY = {"run": "distill.build", "RunConfig": "distill.config"}


def __getattr__(name: str) -> Any:
    # Looked up on first use: `import distill` must stay cheap.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'distill' has no attribute {name!r}")
