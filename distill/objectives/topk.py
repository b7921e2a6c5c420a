"""Divergences over a few tokens of the vocabulary: whose tokens, and what becomes of the rest.

Legend: N response tokens, V common vocabulary, K slots of a row, C outcomes compared (K, or K + 1 with the tail).
p student, q teacher, S the tokens of a row, P and Q the mass of p and q on S. p is always a softmax over all of V.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distill.objectives import formulas
from distill.objectives.formulas import Formula
from distill.objectives.fused import compare_columns, compute_dtype, logp_and_tail, logp_at
from distill.objectives.rows import TokenRows
from distill.objectives.teacher_rows import TopK, require_mass, topk_of_teacher
from distill.types import SignalSpec, Support

FORMS: Mapping[str, str] = {
    "tail": "and one outcome for all the others",
    "renormalised": "with both models renormalised over them",
    "truncated": "cut off: no divergence, it may be negative, and its gradient is not 0 at p = q",
    "corrected": "with each summand corrected by the masses: bounded below by 0, which it is at p = q",
}
"""What `form` does with the tokens outside of S, as a contract says it."""
WHOSE: Mapping[Support, str] = {
    Support.TEACHER: "the teacher's top {k}",
    Support.STUDENT: "the top {k} of the student that wrote the sample",
    Support.UNION: "the union of the teacher's and the writing student's top {k}",
}


def compare_topk(
    rows: TokenRows, spec: SignalSpec, form: str, formula: Formula
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """Loss (N,), the metrics `kl` and `overlap` (N,), and log p and log q of the compared outcomes (N, C).

    Raises TeacherError for scores that are not what `spec` asks for, ConfigError for a k above the vocabulary.
    """
    topk = topk_of_teacher(rows, spec)
    if form == "tail":
        log_p_NC, log_q_NC = _with_tail(rows, topk)
    else:
        log_p_NC, log_q_NC = logp_at(rows.student_logits_NV, topk.ids_NK), topk.log_q_NK
        if form == "renormalised":
            require_mass(rows, topk, "nothing of it is left that could be renormalised")
            log_p_NC, log_q_NC = log_p_NC.log_softmax(-1), log_q_NC.log_softmax(-1)
    loss_N = compare_columns(log_p_NC, log_q_NC, formula)
    with torch.no_grad():
        # without the rest of the mass the plain sum is no divergence; the corrected one is, of unnormalised masses
        metric = formulas.reverse_kl if form in ("tail", "renormalised") else formulas.corrected_reverse_kl
        kl_N = compare_columns(log_p_NC, log_q_NC, metric).nan_to_num(nan=torch.inf, posinf=torch.inf)
        shared = _overlap(rows.student_logits_NV, topk.ids_NK, spec)
    return loss_N, {"kl": kl_N, **shared}, log_p_NC, log_q_NC


def _overlap(logits_NV: Tensor, ids_NK: Tensor, spec: SignalSpec) -> dict[str, Tensor]:
    """The metric `overlap`, where the scores tell it: the student's own ids say nothing of the teacher's."""
    if spec.support is Support.STUDENT:
        return {}
    shared_N = overlap(logits_NV, ids_NK) if spec.support is Support.TEACHER else union_overlap(ids_NK, spec.k)
    return {"overlap": shared_N.to(compute_dtype(logits_NV))}


def _with_tail(rows: TokenRows, topk: TopK) -> tuple[Tensor, Tensor]:
    """log p and log q of the K outcomes and of the tail, each row a distribution."""
    log_p_NK, log_p_tail_N = logp_and_tail(rows.student_logits_NV, topk.ids_NK)
    if bool(topk.whole_N.all()):
        return log_p_NK, topk.log_q_NK
    return (
        torch.cat([log_p_NK, log_p_tail_N[:, None]], -1),
        torch.cat([topk.log_q_NK, topk.log_tail_N[:, None]], -1),
    )


def overlap(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Share of the ids, another model's top K, that are among this model's top K, (N,)."""
    edge_N1 = logits_NV.topk(ids_NK.shape[-1], -1, sorted=False).values.amin(-1, keepdim=True)
    return (logits_NV.gather(-1, ids_NK) >= edge_N1).float().mean(-1)


def union_overlap(ids_NK: Tensor, k: int) -> Tensor:
    """The same from the union of two models' top k: what they share stands in it once, (N,)."""
    return 2.0 - (ids_NK >= 0).sum(-1) / k
