"""Several teachers of one sample as one: the arithmetic or the geometric mixture of their distributions.

The weights are divided by their sum. For any distribution p and normalised weights w (sums over teachers i):

    sum w_i KL(p || q_i) = KL(p || geometric) - log Z      and      grad sum w_i KL(q_i || p) = grad KL(arithmetic || p)

so that, for weights that add up to 1, a weighted reverse KL learns the geometric mixture and a weighted forward KL the
arithmetic one. DeepSeek-V4 (arXiv 2606.19348) weighs reverse KLs. The other combinations learn something else.

Legend: M teachers, N response tokens, V common vocabulary, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distill.errors import ConfigError, TeacherError
from distill.objectives.fused import compute_dtype, row_blocks
from distill.objectives.rows import TokenRows, first
from distill.objectives.teacher_rows import distributions, require_teacher, topk_of_teacher
from distill.types import Signal, SignalSpec, Support


def mix_rows(mixture: str, parts: Sequence[TokenRows], weights: Tensor) -> TokenRows:
    """The same N tokens as M teachers scored them, as one teacher's. `weights`: (M,) or (M, N), not negative.

    A teacher is never read where its weight is 0. All parts hold one kind of signal, one that `build_objective` allows.
    Raises ConfigError for bad weights, TeacherError for teachers that do not fit together.
    """
    shares_MN = _shares(weights, len(parts), len(parts[0].tokens_N))
    read = [index for index, share_N in enumerate(shares_MN) if bool((share_N > 0).any())]
    parts, shares_MN = [parts[index] for index in read], shares_MN[read]
    rows = parts[0]
    # each teacher by itself: a mixture may look whole where one of them is broken
    sampled = [require_teacher(part, "teacher_logp_N")[:, None] for part in parts]
    if rows.full_logp_NV is not None:
        log_q_NV, log_z_N = log_mixture(mixture, [distributions(part) for part in parts], shares_MN)
        empty_N = log_z_N == -torch.inf
        if bool(empty_N.any()):
            raise TeacherError(
                f"{rows.describe(first(empty_N))}: no token has a probability with every teacher",
                why="the geometric mixture has no mass there",
                fix="use objective.mixture=arithmetic or weighted",
            )
        sampled_N = log_q_NV.gather(-1, rows.tokens_N[:, None])[:, 0]
        return replace(rows, full_logp_NV=log_q_NV, teacher_logp_N=sampled_N)
    assert mixture == "arithmetic", "build_objective lets no other mixture through"
    mixed = {"teacher_logp_N": _arithmetic(sampled, shares_MN)[:, 0]}
    if rows.topk_ids_NK is not None:
        mixed |= _mix_topk(parts, shares_MN)
    return replace(rows, **mixed)


def combine(mixture: str, parts: Sequence[TokenRows], weights: Sequence[Tensor]) -> tuple[TokenRows, Tensor]:
    """`mix_rows` for `head_loss`: the weights (N,) of a teacher's rows in the loss are its share of the mixture times
    the row's own weight, which is what comes back beside the mixed rows."""
    weights_MN = torch.stack(list(weights))
    return mix_rows(mixture, parts, weights_MN), weights_MN.sum(0)


def _mix_topk(parts: Sequence[TokenRows], shares_MN: Tensor) -> dict[str, Tensor]:
    ids_NK = parts[0].topk_ids_NK
    assert ids_NK is not None
    for index, part in enumerate(parts[1:], 1):
        if part.topk_ids_NK is None or not torch.equal(part.topk_ids_NK, ids_NK):
            raise TeacherError(
                f"{part.describe(0)}: the teachers number 0 and {index} of a mixture answered for other ids",
                why="a mixture is taken token by token",
                fix="use objective.support=student_topk: every teacher answers for the same ids",
            )
    spec = SignalSpec(Signal.TOPK, ids_NK.shape[-1], Support.STUDENT)  # build_objective lets no other through
    topks = [topk_of_teacher(part, spec) for part in parts]
    return {
        "topk_logp_NK": _arithmetic([topk.log_q_NK for topk in topks], shares_MN),
        "log_tail_N": _arithmetic([topk.log_tail_N[:, None] for topk in topks], shares_MN)[:, 0],
    }


def log_mixture(mixture: str, log_q: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """log of the mixture of M full rows (N, V), and log Z (N,), which is 0 for an arithmetic one.

    A geometric mixture of teachers without a common token has log Z = -inf. Weights as in `mix_rows`.
    """
    shares_MN = _shares(weights, len(log_q), len(log_q[0]))
    mixed_NV = _MIX[mixture](log_q, shares_MN)
    log_z_N = mixed_NV.new_zeros(len(mixed_NV))
    if mixture == "geometric":
        for block in row_blocks(mixed_NV):
            log_z_N[block] = mixed_NV[block].logsumexp(-1)
            mixed_NV[block] -= log_z_N[block, None]
    return mixed_NV, log_z_N


def _arithmetic(log_q: Sequence[Tensor], shares_MN: Tensor) -> Tensor:
    """log sum_i w_i q_i"""
    mixed_NV = torch.full_like(log_q[0], -torch.inf, dtype=compute_dtype(log_q[0]))
    for block in row_blocks(mixed_NV):
        for log_q_NV, share_N in zip(log_q, shares_MN, strict=True):
            share_n1 = share_N[block, None].to(mixed_NV.dtype)
            addend_nV = torch.where(share_n1 > 0, log_q_NV[block].to(mixed_NV.dtype) + share_n1.log(), -torch.inf)
            torch.logaddexp(mixed_NV[block], addend_nV, out=mixed_NV[block])
    return mixed_NV


def _geometric(log_q: Sequence[Tensor], shares_MN: Tensor) -> Tensor:
    """sum_i w_i log q_i, without its normaliser"""
    mixed_NV = torch.zeros_like(log_q[0], dtype=compute_dtype(log_q[0]))
    for block in row_blocks(mixed_NV):
        for log_q_NV, share_N in zip(log_q, shares_MN, strict=True):
            share_n1 = share_N[block, None].to(mixed_NV.dtype)
            mixed_NV[block] += torch.where(share_n1 > 0, log_q_NV[block].to(mixed_NV.dtype) * share_n1, 0.0)
    return mixed_NV


_MIX: Mapping[str, Callable[[Sequence[Tensor], Tensor], Tensor]] = {"arithmetic": _arithmetic, "geometric": _geometric}


def _shares(weights: Tensor, teachers: int, count: int) -> Tensor:
    """(M, N), adding up to 1 over the teachers."""
    weights_MN = weights[:, None].expand(-1, count) if weights.ndim == 1 else weights
    assert weights_MN.shape == (teachers, count), f"{tuple(weights.shape)} weights of {teachers} teachers"
    total_N = weights_MN.sum(0)
    good_N = weights_MN.isfinite().all(0) & (weights_MN >= 0).all(0) & (total_N > 0)
    if not bool(good_N.all()):
        bad = weights_MN[:, first(~good_N)].tolist()
        raise ConfigError(
            f"objective.mixture: the teachers' weights are {', '.join(f'{weight:g}' for weight in bad)}",
            why="the weights of a mixture are not negative and have a sum above 0",
            fix="correct the weights in the `teachers` of that entry of data",
        )
    return weights_MN / total_N
