"""Which code computes log p of the sampled tokens: our chunks, or cut-cross-entropy's kernel on CUDA.

cut-cross-entropy ("Cut your losses", arXiv 2411.09009) never writes logits to memory. It gives log p of one token a row
and its gradient, which is all that an objective on sampled tokens needs of the student; no other objective can use it.
Left to its defaults it drops small gradients and adds up the others in half precision: both are switched off here.

This module loads neither torch nor the kernel before a kernel is called: what a run will use is told before it starts.

Legend: N rows, V common vocabulary, D hidden.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from distill.errors import ConfigError, DistillError, MissingDependency

if TYPE_CHECKING:
    from torch import Tensor

Asked = Literal["auto", "portable", "cut_cross_entropy"]
"""`student.loss_kernel`"""
KEY = "student.loss_kernel"
PACKAGE = "cut_cross_entropy"
INSTALL = "pip install 'cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy.git'"
EXACT: dict[str, Any] = {"filter_eps": None, "accum_e_fp32": True, "accum_c_fp32": True}
"""Keywords of `linear_cross_entropy`: every gradient counts, however small, and sums are float32. A release that lacks
one of them is not used: 25.1.1, the one on PyPI, which also rounds the terms of the token's logit to half precision."""
AMPERE = (8, 0)
BLOCK = 256
"""Columns of its widest block. It masks the columns beyond the vocabulary with -inf, and caps afterwards."""


@dataclass(frozen=True, slots=True)
class Head:
    """What there is to compute, as far as it decides who can. What is None is not known yet, and rules out nothing."""

    device: str | None
    """As torch names its type: cpu, cuda."""
    dtype: str
    """In which hidden states and weights are multiplied, as torch spells it."""
    sampled_only: bool
    """`Contract.reads_sampled_only` of the objective."""
    vocab_size: int = 0
    transform: tuple[float, float | None] | None = None
    """(scale, soft cap) of the logits behind the head, with (1, None) where nothing happens to them."""
    capability: tuple[int, int] | None = None
    """Of the CUDA device."""


@dataclass(frozen=True, slots=True)
class Choice:
    kernel: bool
    why: str
    """Why not the kernel; empty where it is used."""


def choose(asked: Asked, head: Head, installed: Callable[[], str]) -> Choice:
    """Who computes it. `installed`: `why_unusable`, asked last, because to answer may load the package.

    Raises ConfigError or MissingDependency when cut_cross_entropy is asked for and cannot be used.
    """
    if asked == "portable":
        return Choice(False, f"{KEY}=portable")
    fault = _misfit(head) or _lacking(installed())
    if fault is None:
        return Choice(True, "")
    if asked == "cut_cross_entropy":
        raise fault
    return Choice(False, fault.why)


def _misfit(head: Head) -> DistillError | None:
    """The first thing about the run that the kernel cannot do."""
    cannot = partial(ConfigError, f"{KEY} is cut_cross_entropy, which cannot be used here", fix=f"set {KEY}=auto")
    scale, cap = head.transform or (1.0, None)
    if not head.sampled_only:
        return cannot(
            why="the objective looks at more of the student than log p of the sampled tokens",
            fix=f"set {KEY}=auto, or use an objective on sampled tokens: policy_gradient, sampled_kl, span_kl",
        )
    if head.dtype not in ("bfloat16", "float16"):
        return cannot(
            why=f"its gradients need half precision, and the student computes in {head.dtype}",
            fix=f"set student.dtype=bfloat16, or {KEY}=auto",
        )
    if scale != 1.0:
        return cannot(why=f"the model multiplies its logits by {scale:g}, and the kernel knows a soft cap only")
    if cap is not None and head.vocab_size % BLOCK:
        return cannot(
            why=f"under a soft cap it counts the columns that fill its last block as tokens with the logit -{cap:g}, "
            f"and {head.vocab_size} tokens leave such columns"
        )
    if head.device not in (None, "cuda"):
        return cannot(why=f"it runs on CUDA devices, and the student is on the {head.device}")
    if head.capability is not None and head.capability < AMPERE:
        has = ".".join(map(str, head.capability))
        return cannot(why=f"it needs a GPU of Ampere or newer, and this one has compute capability {has}")
    return None


def _lacking(why: str) -> MissingDependency | None:
    if not why:
        return None
    return MissingDependency(
        f"{KEY} is cut_cross_entropy, which is not there", why=why, fix=f"{INSTALL}, or set {KEY}=auto"
    )


def why_absent() -> str:
    """Why the package cannot be imported, as far as can be told without doing so; empty: it is there."""
    return "" if importlib.util.find_spec(PACKAGE) else "cut-cross-entropy is not installed"


def why_unusable() -> str:
    """Why the package cannot be used in this process; empty: it can. Imports it, and with it Triton."""
    absent = why_absent()
    if absent:
        return absent
    try:
        parameters = inspect.signature(_linear_cross_entropy()).parameters
    except (ImportError, AttributeError, RuntimeError) as error:  # RuntimeError: Triton without a driver
        return f"cut-cross-entropy cannot be imported: {error}"
    missing = [name for name in ("bias", *EXACT) if name not in parameters]
    if missing:
        return f"the cut-cross-entropy that is installed is too old: it has no {', '.join(missing)}"
    return ""


def _linear_cross_entropy() -> Callable[..., Any]:
    return importlib.import_module(PACKAGE).linear_cross_entropy


def sampled_logp(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    tokens_N: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
) -> Tensor:
    """log p of `tokens_N` (N,), float32, by the kernel; differentiable in hidden, weight and bias. Takes what `choose`
    let through, and at least one row.

    Rows of the weight beyond `vocab_size` have no part in it and get a gradient of exactly 0. Gradients are multiplied
    in the dtype of the head, as by `head_loss`. Memory: nothing of size (N, V); in the backward pass the gradients in
    float32.
    """
    import torch

    from distill.objectives.head import gemm_dtype

    dtype = gemm_dtype(hidden_ND, weight_VD)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        nll_N: Tensor = _linear_cross_entropy()(
            hidden_ND.to(dtype),
            weight_VD[:vocab_size].to(dtype),
            tokens_N,
            bias=None if bias_V is None else bias_V[:vocab_size],
            softcap=softcap,
            reduction="none",
            **EXACT,
        )
    return -nll_N
