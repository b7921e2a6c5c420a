"""Divergences over a few tokens of the vocabulary: whose tokens, and what becomes of the rest.

Legend: N response tokens, V common vocabulary, K slots of a row, C outcomes compared (K, or K + 1 with the tail).
p student, q teacher, S the tokens of a row, P and Q the mass of p and q on S. p is always a softmax over all of V.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distill.errors import ConfigError, TeacherError
from distill.objectives import formulas
from distill.objectives.formulas import Formula
from distill.objectives.fused import compare_columns, compute_dtype, logp_and_tail, logp_at
from distill.objectives.rows import MASS_SLACK, TokenRows, first, require_teacher
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
    ids_NK, log_q_NK = _scores(rows, spec)
    if form == "tail":
        log_p_NC, log_q_NC = _with_tail(rows, ids_NK, log_q_NK)
    else:
        log_p_NC, log_q_NC = logp_at(rows.student_logits_NV, ids_NK), log_q_NK
        if form == "renormalised":
            log_p_NC, log_q_NC = log_p_NC.log_softmax(-1), log_q_NC.log_softmax(-1)
    loss_N = compare_columns(log_p_NC, log_q_NC, formula)
    with torch.no_grad():
        # without the rest of the mass the plain sum is no divergence; the corrected one is, of unnormalised masses
        metric = formulas.reverse_kl if form in ("tail", "renormalised") else formulas.corrected_reverse_kl
        kl_N = compare_columns(log_p_NC, log_q_NC, metric).nan_to_num(nan=torch.inf, posinf=torch.inf)
        shared = _overlap(rows.student_logits_NV, ids_NK, spec)
    return loss_N, {"kl": kl_N, **shared}, log_p_NC, log_q_NC


def _overlap(logits_NV: Tensor, ids_NK: Tensor, spec: SignalSpec) -> dict[str, Tensor]:
    """The metric `overlap`, where the scores tell it: the student's own ids say nothing of the teacher's."""
    if spec.support is Support.STUDENT:
        return {}
    shared_N = overlap(logits_NV, ids_NK) if spec.support is Support.TEACHER else union_overlap(ids_NK, spec.k)
    return {"overlap": shared_N.to(compute_dtype(logits_NV))}


def _with_tail(rows: TokenRows, ids_NK: Tensor, log_q_NK: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log q of the K outcomes and of the tail, each row a distribution."""
    log_p_NK, log_p_tail_N = logp_and_tail(rows.student_logits_NV, ids_NK)
    whole_N = (ids_NK >= 0).sum(-1) == rows.vocab_size
    if bool(whole_N.all()):
        return log_p_NK, log_q_NK
    # where nothing is outside, what a teacher's rounding left there would be infinitely far from the student's nothing
    log_q_tail_N = require_teacher(rows, "log_tail_N").masked_fill(whole_N, -torch.inf)
    mass_N = log_q_NK.exp().sum(-1) + log_q_tail_N.exp()
    bad_N = ~whole_N & ((mass_N - 1.0).abs() > MASS_SLACK)
    if bool(bad_N.any()):
        row = first(bad_N)
        place = rows.describe(row)
        raise TeacherError(
            f"{place}: the teacher's probabilities and its tail add up to {float(mass_N[row]):.6g}, not 1",
            why="the tail is the mass of all other tokens of the common vocabulary",
            **place.blame,
        )
    return torch.cat([log_p_NK, log_p_tail_N[:, None]], -1), torch.cat([log_q_NK, log_q_tail_N[:, None]], -1)


def _scores(rows: TokenRows, spec: SignalSpec) -> tuple[Tensor, Tensor]:
    """The teacher's ids and log q, checked; -inf in empty slots."""
    if spec.k > rows.vocab_size:
        raise ConfigError(
            f"objective.k: {spec.k} tokens are asked for, and the common vocabulary has {rows.vocab_size}",
            fix="take a smaller k, or support=full",
        )
    log_q_NK = require_teacher(rows, "topk_logp_NK")
    ids_NK = rows.topk_ids_NK
    expected = (len(rows.tokens_N), spec.columns)
    if ids_NK is None or ids_NK.shape != expected or log_q_NK.shape != expected:
        got = None if ids_NK is None else tuple(ids_NK.shape)
        raise TeacherError(
            f"{rows.describe(0)}: the teacher's top-k rows have ids {got} and values {tuple(log_q_NK.shape)}, "
            f"asked for {expected}"
        )
    empty_NK = ids_NK == -1 if spec.support is Support.UNION else torch.zeros_like(ids_NK, dtype=torch.bool)
    _require_ids(rows, ids_NK, empty_NK)
    log_q_NK = log_q_NK.masked_fill(empty_NK, -torch.inf)
    over_N = log_q_NK.exp().sum(-1) > 1.0 + MASS_SLACK
    if bool(over_N.any()):
        row = first(over_N)
        mass = float(log_q_NK[row].exp().sum())
        place = rows.describe(row)
        raise TeacherError(
            f"{place}: the teacher's top-k probabilities add up to {mass:.6g}, more than 1", **place.blame
        )
    return ids_NK, log_q_NK


def _require_ids(rows: TokenRows, ids_NK: Tensor, empty_NK: Tensor) -> None:
    ordered_NK = ids_NK.sort(-1).values
    twice_NK = (ordered_NK[:, 1:] == ordered_NK[:, :-1]) & (ordered_NK[:, 1:] >= 0)
    bad_N = ((ids_NK < 0) & ~empty_NK).any(-1) | (ids_NK >= rows.vocab_size).any(-1) | twice_NK.any(-1)
    if bool(bad_N.any()):
        place = rows.describe(first(bad_N))
        raise TeacherError(
            f"{place}: the teacher's top-k names an id twice, or one outside of the common vocabulary of "
            f"{rows.vocab_size}",
            **place.blame,
        )
    none_N = empty_NK.all(-1)
    if bool(none_N.any()):
        place = rows.describe(first(none_N))
        raise TeacherError(f"{place}: the teacher's top-k has no token at all", **place.blame)


def overlap(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Share of the ids, another model's top K, that are among this model's top K, (N,)."""
    edge_N1 = logits_NV.topk(ids_NK.shape[-1], -1, sorted=False).values.amin(-1, keepdim=True)
    return (logits_NV.gather(-1, ids_NK) >= edge_N1).float().mean(-1)


def union_overlap(ids_NK: Tensor, k: int) -> Tensor:
    """The same from the union of two models' top k: what they share stands in it once, (N,)."""
    return 2.0 - (ids_NK >= 0).sum(-1) / k
