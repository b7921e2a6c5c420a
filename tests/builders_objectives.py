"""Rows for objectives, from two models' logits. Legend: N rows, V common vocabulary, K slots of a top-k row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.objectives.rows import TokenRows
from distill.protocols import Objective
from distill.types import Signal, SignalSpec, Support


def random_logits(seed: int, shape: tuple[int, int] = (5, 9), *, scale: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def log_outside(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log of the softmax mass outside the ids, (N,)."""
    return logits_NV.scatter(-1, ids_NK, -torch.inf).logsumexp(-1) - logits_NV.logsumexp(-1)


def support_ids(student_NV: Tensor, teacher_NV: Tensor, spec: SignalSpec) -> Tensor:
    """(N, spec.columns); the student that wrote the sample is the present one."""
    teacher_NK, student_NK = teacher_NV.topk(spec.k, -1).indices, student_NV.topk(spec.k, -1).indices
    if spec.support is not Support.UNION:
        return teacher_NK if spec.support is Support.TEACHER else student_NK
    known_NK = (student_NK[:, :, None] == teacher_NK[:, None, :]).any(-1)
    return torch.cat([teacher_NK, student_NK.masked_fill(known_NK, -1)], -1)


def rows_for(
    objective: Objective, student_NV: Tensor, teacher_NV: Tensor, tokens_N: Tensor | None = None, **changes: Any
) -> TokenRows:
    """Rows that hold exactly the signal that `objective` asks for, sampled on-policy; token 0 unless given."""
    spec, log_q_NV = objective.spec, teacher_NV.log_softmax(-1)
    if tokens_N is None:
        tokens_N = torch.zeros(len(student_NV), dtype=torch.int64)
    sampled_N1 = tokens_N[:, None]
    values: dict[str, Any] = {
        "student_logits_NV": student_NV,
        "tokens_N": tokens_N,
        "behaviour_logp_N": student_NV.detach().log_softmax(-1).gather(-1, sampled_N1)[:, 0],
        "teacher_logp_N": log_q_NV.gather(-1, sampled_N1)[:, 0],
    }
    if spec.signal is Signal.FULL:
        values["full_logp_NV"] = log_q_NV
    if spec.signal is Signal.TOPK:
        ids_NK = support_ids(student_NV.detach(), teacher_NV, spec)
        # an id that is there anyway stands in for an empty slot
        used_NK = torch.where(ids_NK < 0, ids_NK[:, :1], ids_NK)
        values |= {
            "topk_ids_NK": ids_NK,
            "topk_logp_NK": log_q_NV.gather(-1, used_NK).masked_fill(ids_NK < 0, -torch.inf),
            "log_tail_N": log_outside(teacher_NV, used_NK),
        }
    return TokenRows(**(values | changes))


def gradient(objective: Objective, student_NV: Tensor, teacher_NV: Tensor, **changes: Any) -> Tensor:
    """Of the sum of the rows' losses with respect to the student's logits."""
    leaf_NV = student_NV.clone().requires_grad_()
    loss_N, _ = objective(rows_for(objective, leaf_NV, teacher_NV, **changes))
    return torch.autograd.grad(loss_N.sum(), leaf_NV)[0]
