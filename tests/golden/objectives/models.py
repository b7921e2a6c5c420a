"""Two models' logits, as the data have them, to the rows that objectives are called with.

Legend: N rows (B x T of the data), V common vocabulary, K slots of a top-k row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.objectives.rows import TokenRows
from distill.protocols import Objective
from distill.types import Signal, SignalSpec
from tests.builders_objectives import log_outside
from tests.golden.objectives.data import Case


def logits(case: Case, name: str, precision: str) -> Tensor:
    """(N, V): cut to the common vocabulary, then divided by the temperature."""
    return cut(case, case.tensor(name, precision))


def cut(case: Case, raw: Tensor) -> Tensor:
    return raw.reshape(-1, raw.shape[-1])[:, : case.params["V"]] / case.params.get("temperature", 1.0)


def full_rows(student_NV: Tensor, teacher_NV: Tensor, tokens_N: Tensor | None = None, **changes: Any) -> TokenRows:
    """Rows that tell everything of the teacher; token 0 was sampled on-policy unless said otherwise."""
    log_q_NV = teacher_NV.log_softmax(-1)
    if tokens_N is None:
        tokens_N = torch.zeros(len(student_NV), dtype=torch.int64)
    values: dict[str, Any] = {
        "student_logits_NV": student_NV,
        "tokens_N": tokens_N,
        "behaviour_logp_N": student_NV.detach().log_softmax(-1).gather(-1, tokens_N[:, None])[:, 0],
        "teacher_logp_N": log_q_NV.gather(-1, tokens_N[:, None])[:, 0],
        "full_logp_NV": log_q_NV,
    }
    return TokenRows(**(values | changes))


def topk_rows(student_NV: Tensor, teacher_NV: Tensor, ids_NK: Tensor, spec: SignalSpec) -> TokenRows:
    """Rows that tell what the teacher says at the ids; slots with -1 and those beyond them are empty."""
    missing = spec.columns - ids_NK.shape[-1]
    ids_NK = torch.nn.functional.pad(ids_NK, (0, missing), value=-1)
    empty_NK = ids_NK < 0
    used_NK = torch.where(empty_NK, ids_NK.amax(-1, keepdim=True), ids_NK)
    return full_rows(
        student_NV,
        teacher_NV,
        full_logp_NV=None,
        topk_ids_NK=ids_NK,
        topk_logp_NK=teacher_NV.log_softmax(-1).gather(-1, used_NK).masked_fill(empty_NK, -torch.inf),
        log_tail_N=log_outside(teacher_NV, used_NK),
    )


def loss_and_gradient(case: Case, precision: str, loss_of: Any) -> dict[str, Tensor]:
    """`value` (N,) of `loss_of(student_NV)`, and the gradient of its sum with respect to the raw logits as stored."""
    raw = case.tensor("student_logits", precision).requires_grad_()
    value_N = loss_of(cut(case, raw))
    (gradient,) = torch.autograd.grad(value_N.sum(), raw)
    assert value_N.dtype == gradient.dtype == raw.dtype
    return {"value": value_N.detach(), "grad_student_logits": gradient}


def rows_for(objective: Objective, student_NV: Tensor, teacher_NV: Tensor, ids_NK: Tensor | None) -> TokenRows:
    """What `objective` asks for, and no more."""
    if objective.spec.signal is Signal.FULL:
        return full_rows(student_NV, teacher_NV)
    assert ids_NK is not None
    return topk_rows(student_NV, teacher_NV, ids_NK, objective.spec)
