"""The wide steps of the objectives with their gradients written out, so that little of size (N, V) is ever held.

All work goes through blocks of rows that fit a cache. Of size (N, V) there are the student's logits, the teacher's rows
and one gradient buffer. Half-precision logits are computed with in float32.

Legend: N rows, V common vocabulary, K ids, C columns, n rows of a block. p student, q teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.objectives import formulas
from distill.objectives.formulas import Formula, Pair

BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Logits a block holds: 1 MiB of float32, which stays in a core's cache, or enough to fill a GPU."""


def row_blocks(rows_NV: Tensor) -> Iterator[slice]:
    """Rows taken together, so that what is computed from them stays small."""
    count, width = rows_NV.shape
    step = max(1, BLOCK_ELEMENTS.get(rows_NV.device.type, BLOCK_ELEMENTS["cuda"]) // max(width, 1))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class FullRows:
    """What comparing full rows gives; all (N,), and only `loss` has a gradient."""

    loss: Tensor
    kl: Tensor
    """KL(p || q), of the teacher before smoothing."""
    entropy_gap: Tensor
    """H(q) - H(p)"""
    mass: Tensor
    """Sum of the teacher's probabilities: 1, for a teacher that is whole."""


def compare_full(logits_NV: Tensor, log_q_NV: Tensor, formula: Formula, *, smoothing: float = 0.0) -> FullRows:
    """`formula` of softmax(logits) and the teacher's rows, which may be of another floating dtype."""
    return FullRows(*_Full.apply(logits_NV, log_q_NV, formula, smoothing))


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logits_NV: Tensor, log_q_NV: Tensor, formula: Formula, smoothing: float
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(logits_NV, log_q_NV)
        ctx.how = (formula, smoothing)
        ctx.gradient_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        results_4N = _sweep(logits_NV, log_q_NV, formula, smoothing, ctx.gradient_NV)
        ctx.mark_non_differentiable(*results_4N[1:])
        ctx.set_materialize_grads(False)
        return results_4N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_4N: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_N = grads_4N[0]
        if grad_N is None or not ctx.needs_input_grad[0]:
            return None, None, None, None
        # the buffer is given away; a second backward pass over a retained graph fills a new one
        gradient_NV, ctx.gradient_NV = ctx.gradient_NV, None
        if gradient_NV is None:
            logits_NV, log_q_NV = ctx.saved_tensors
            gradient_NV = torch.empty_like(logits_NV)
            formula, smoothing = ctx.how
            _sweep(logits_NV, log_q_NV, formula, smoothing, gradient_NV)
        return gradient_NV.mul_(grad_N[:, None]), None, None, None


def _log_softmax(logits_nV: Tensor, dtype: torch.dtype) -> Tensor:
    """In float64, which only comparisons use, log-sum-exp is rounded as a number of its own, as in the golden data: its
    last bit moves p by 1e-14, and a KL of 200 at T = 0.05 makes 2e-11 of that, more than their tolerance allows."""
    if dtype == torch.float64:
        return logits_nV - logits_nV.logsumexp(-1, keepdim=True)
    return logits_nV.log_softmax(-1, dtype=dtype)


def _sweep(
    logits_NV: Tensor, log_q_NV: Tensor, formula: Formula, smoothing: float, gradient_NV: Tensor | None
) -> tuple[Tensor, ...]:
    """The members of FullRows; d loss / d logits goes to `gradient_NV`."""
    dtype = compute_dtype(logits_NV)
    results_4N = tuple(logits_NV.new_empty(len(logits_NV), dtype=dtype) for _ in range(4))
    for block in row_blocks(logits_NV):
        log_p_nV = _log_softmax(logits_NV[block], dtype)
        plain = Pair.of(log_p_nV, log_q_NV[block].to(dtype))
        target = plain
        if smoothing:
            log_q_nV = formulas.smooth(plain.log_q, smoothing)
            target = Pair(plain.log_p, log_q_nV, plain.p, log_q_nV.exp())
        loss_n, u_nV = formula(target)
        kl_n = loss_n if formula is formulas.reverse_kl and not smoothing else formulas.reverse_kl(plain)[0]
        # q = 0 < p times a p that has underflowed is NaN, and means infinity
        kl_n = kl_n.nan_to_num(nan=torch.inf, posinf=torch.inf)
        values = (loss_n, kl_n, formulas.entropy_gap(plain), plain.q.sum(-1))
        for result_N, value_n in zip(results_4N, values, strict=True):
            result_N[block] = value_n
        if gradient_NV is not None:
            gradient_NV[block] = u_nV.addcmul_(target.p, u_nV.sum(-1, keepdim=True), value=-1.0)
    return results_4N


def compare_columns(log_p_NC: Tensor, log_q_NC: Tensor, formula: Formula) -> Tensor:
    """`formula` of two sets of log-probabilities, (N,), with its gradient with respect to log p."""
    return _Columns.apply(log_p_NC, log_q_NC, formula)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_p_NC: Tensor, log_q_NC: Tensor, formula: Formula) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss_N, u_NC = formula(Pair.of(log_p_NC, log_q_NC))
        ctx.save_for_backward(u_NC)
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.saved_tensors[0] * grad_N[:, None], None, None


def logp_at(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log softmax(logits) at the ids, (N, K). An id of -1 is an empty slot: -inf, without gradient."""
    return _LogProbs.apply(logits_NV, ids_NK, False)[0]


def logp_and_tail(logits_NV: Tensor, ids_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the log of the mass outside of the ids, (N,); -inf where they are the whole vocabulary.

    Each row needs at least one id.
    """
    return _LogProbs.apply(logits_NV, ids_NK, True)


class _LogProbs(torch.autograd.Function):
    """With g at the ids, t at the tail, G = sum(g) + t, and s the softmax over what is outside of the ids:

    gradient = g - G p at the ids,  s (t - G tail) = s t - G p elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NK: Tensor, with_tail: bool) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype = compute_dtype(logits_NV)
        empty_NK = ids_NK < 0
        # an empty slot repeats an id of its row
        ids_NK = torch.where(empty_NK, ids_NK.amax(-1, keepdim=True), ids_NK)
        # everything is relative to the largest logit: the log-sum-exp of large ones has no digits left for small masses
        top_N1 = logits_NV.amax(-1, keepdim=True).to(dtype)
        at_NK = logits_NV.gather(-1, ids_NK).to(dtype) - top_N1
        outer_N = logits_NV.new_empty(len(logits_NV), dtype=dtype)
        for block in row_blocks(logits_NV):
            block_nV = logits_NV[block].to(dtype) - top_N1[block]
            outer_N[block] = (
                formulas.logsumexp_outside(block_nV, ids_NK[block]) if with_tail else block_nV.logsumexp(-1)
            )
        lse_N = outer_N
        if with_tail:
            lse_N = torch.logaddexp(outer_N, at_NK.masked_fill(empty_NK, -torch.inf).logsumexp(-1))
        ctx.save_for_backward(logits_NV, ids_NK, empty_NK, top_N1, lse_N, outer_N)
        ctx.with_tail = with_tail
        return (at_NK - lse_N[:, None]).masked_fill_(empty_NK, -torch.inf), outer_N - lse_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: Tensor, grad_tail_N: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_NV, ids_NK, empty_NK, top_N1, lse_N, outer_N = ctx.saved_tensors
        dtype = lse_N.dtype
        grad_NK = grad_NK.masked_fill(empty_NK, 0.0)
        total_N = grad_NK.sum(-1)
        factor_N = -total_N
        if ctx.with_tail:
            total_N = total_N + grad_tail_N
            factor_N = grad_tail_N - total_N * (outer_N - lse_N).exp()
        # nothing is outside: a softmax of nothing is 0
        shift_N = torch.where(outer_N == -torch.inf, torch.inf, outer_N)
        gradient_NV = torch.empty_like(logits_NV)
        for block in row_blocks(logits_NV):
            block_nV, ids_nK = logits_NV[block].to(dtype) - top_N1[block], ids_NK[block]
            at_nK = (block_nV.gather(-1, ids_nK) - lse_N[block, None]).exp_()
            out_nV = block_nV.sub_(shift_N[block, None]).exp_().mul_(factor_N[block, None])
            # first what all ids share, then each one's own: an id that stands in empty slots too is right in any order
            out_nV.scatter_(-1, ids_nK, at_nK.mul_(-total_N[block, None])).scatter_add_(-1, ids_nK, grad_NK[block])
            gradient_NV[block] = out_nV
        return gradient_NV, None, None
