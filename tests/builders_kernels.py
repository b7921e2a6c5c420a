"""A stand-in for cut-cross-entropy: its call, computed by torch with all logits at once, on any device and dtype."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.objectives import kernels


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
) -> Tensor:
    assert reduction == "none" and filter_eps is None and accum_e_fp32 and accum_c_fp32, "asked for less than exact"
    assert e.dtype == c.dtype and not (targets == ignore_index).any()
    logits = e.float() @ c.float().T if e.dtype is not torch.float64 else e @ c.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def install_stand_in(patch: pytest.MonkeyPatch, function: Callable[..., Any] = linear_cross_entropy) -> None:
    module: Any = ModuleType(kernels.PACKAGE)
    module.__spec__ = ModuleSpec(kernels.PACKAGE, None)
    module.linear_cross_entropy = function
    patch.setitem(sys.modules, kernels.PACKAGE, module)
