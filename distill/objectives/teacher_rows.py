"""What a teacher's rows must be: the checks that all forms of all objectives share, and mixtures before they mix.

Every error is a TeacherError that names the row, with it the sample and the teacher, and the rule that it breaks.

Legend: N response tokens, V common vocabulary, K slots of a top-k row. q teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.errors import ConfigError, TeacherError
from distill.objectives.fused import compute_dtype, row_blocks
from distill.objectives.rows import LOGP_SLACK, TokenRows, first
from distill.types import SignalSpec, Support

MASS_SLACK = 2e-2
"""How far from 1 rounding may move the sum of a teacher's probabilities: float16 rounds log q
down to -32 by up to 2^-7, and a sum whose terms all err to one side is off by as much. Beyond is no distribution."""


def require_teacher(rows: TokenRows, name: str) -> Tensor:
    """The member `name` of the rows in the dtype of the losses, checked to hold log-probabilities.

    Raises TeacherError when the teacher did not give it, or where it holds NaN, +inf or a value above 0. -inf is a
    probability of zero and is allowed.
    """
    value = _given(rows, name).to(compute_dtype(rows.student_logits_NV))
    # amax carries a NaN along, and a NaN compares false
    if value.numel() and not bool(value.amax() <= LOGP_SLACK):
        row = first(~(value.reshape(len(value), -1).amax(-1) <= LOGP_SLACK))
        place = rows.describe(row)
        raise TeacherError(
            f"{place}: the teacher's {name.rsplit('_', 1)[0]} holds NaN, +inf or a value above 0",
            why="a log-probability is at most 0; nothing is clamped, so that a broken teacher cannot go unnoticed",
            fix="check the teacher's weights and dtype: float16 overflows in some models",
            **place.blame,
        )
    return value


def full_of_teacher(rows: TokenRows) -> Tensor:
    """log q (N, V) as the teacher gave it: whoever goes through it hands each row's mass to `require_whole`."""
    log_q_NV = _given(rows, "full_logp_NV")
    if log_q_NV.shape != rows.student_logits_NV.shape:
        raise TeacherError(
            f"{rows.describe(0)}: the teacher's rows are {tuple(log_q_NV.shape)}, "
            f"the student's {tuple(rows.student_logits_NV.shape)}",
            why="both are cut to the common vocabulary before they are compared",
        )
    return log_q_NV


def require_whole(rows: TokenRows, mass_N: Tensor) -> None:
    """Every full row is a distribution. `mass_N`: the sum of its probabilities."""
    whole_N = (mass_N - 1.0).abs() <= MASS_SLACK
    if bool(whole_N.all()):
        return
    require_teacher(rows, "full_logp_NV")
    row = first(~whole_N)
    place = rows.describe(row)
    raise TeacherError(
        f"{place}: the teacher's probabilities add up to {float(mass_N[row]):.6g}, not 1",
        why="a row must be a distribution over the common vocabulary",
        fix="cut padded rows of the teacher's head before its softmax, and send log-probabilities, not logits",
        **place.blame,
    )


def distributions(rows: TokenRows) -> Tensor:
    """log q (N, V) in the dtype of the losses, checked, for those who would not see the mass otherwise: one more pass
    over it."""
    log_q_NV = full_of_teacher(rows).to(compute_dtype(rows.student_logits_NV))
    mass_N = log_q_NV.new_empty(len(log_q_NV))
    for block in row_blocks(log_q_NV):
        mass_N[block] = log_q_NV[block].exp().sum(-1)
    require_whole(rows, mass_N)
    return log_q_NV


@dataclass(frozen=True, slots=True)
class TopK:
    """What a teacher says of a few tokens, checked: with the tail each row is a distribution."""

    ids_NK: Tensor
    """-1 in empty slots."""
    log_q_NK: Tensor
    """-inf in empty slots."""
    log_tail_N: Tensor
    """-inf where the ids are the whole vocabulary."""
    whole_N: Tensor
    """Where they are."""


def topk_of_teacher(rows: TokenRows, spec: SignalSpec) -> TopK:
    """Raises TeacherError for scores that are not what `spec` asks for, ConfigError for a k above the vocabulary."""
    ids_NK, empty_NK = _ids(rows, spec)
    log_q_NK = require_teacher(rows, "topk_logp_NK").masked_fill(empty_NK, -torch.inf)
    whole_N = (~empty_NK).sum(-1) == rows.vocab_size
    # where nothing is outside, what a teacher's rounding left there would be infinitely far from the student's nothing
    log_tail_N = require_teacher(rows, "log_tail_N").masked_fill(whole_N, -torch.inf)
    mass_N = log_q_NK.exp().sum(-1)
    _refuse(
        rows, mass_N > 1.0 + MASS_SLACK, mass_N, "the teacher's top-k probabilities add up to {mass:.6g}, more than 1"
    )
    total_N = mass_N + log_tail_N.exp()
    _refuse(
        rows,
        (total_N - 1.0).abs() > MASS_SLACK,
        total_N,
        "the teacher's probabilities and its tail add up to {mass:.6g}, not 1",
    )
    got = TopK(ids_NK, log_q_NK, log_tail_N, whole_N)
    if spec.support is not Support.STUDENT:
        require_mass(rows, got, "its most probable tokens are among them, and some token has a probability")
    return got


def require_mass(rows: TokenRows, topk: TopK, why: str) -> None:
    """In every row some token has a probability above 0."""
    none_N = (topk.log_q_NK == -torch.inf).all(-1)
    if bool(none_N.any()):
        place = rows.describe(first(none_N))
        raise TeacherError(
            f"{place}: the teacher gives probability 0 to every token of its top-k row",
            why=why,
            fix="check the teacher's weights and dtype; a teacher that rules tokens out needs objective.form=tail",
            **place.blame,
        )


def _given(rows: TokenRows, name: str) -> Tensor:
    value: Tensor | None = getattr(rows, name)
    if value is None:
        raise TeacherError(
            f"{rows.describe(0)}: the scores have no {name.rsplit('_', 1)[0]}",
            why="the objective needs a richer signal than this teacher gave",
            fix="choose an objective that needs less, or a teacher backend that can give it",
        )
    return value


def _refuse(rows: TokenRows, bad_N: Tensor, mass_N: Tensor, what: str) -> None:
    if bool(bad_N.any()):
        row = first(bad_N)
        place = rows.describe(row)
        raise TeacherError(
            f"{place}: {what.format(mass=float(mass_N[row]))}",
            why="the tail is the mass of all other tokens of the common vocabulary",
            fix="check what the teacher's server reports: log-probabilities at temperature 1, not logits",
            **place.blame,
        )


def _ids(rows: TokenRows, spec: SignalSpec) -> tuple[Tensor, Tensor]:
    """The ids (N, K), and which of the slots are empty."""
    if spec.k > rows.vocab_size:
        raise ConfigError(
            f"objective.k: {spec.k} tokens are asked for, and the common vocabulary has {rows.vocab_size}",
            fix="take a smaller k, or support=full",
        )
    log_q_NK, ids_NK = _given(rows, "topk_logp_NK"), rows.topk_ids_NK
    expected = (len(rows.tokens_N), spec.columns)
    if ids_NK is None or ids_NK.shape != expected or log_q_NK.shape != expected:
        got = None if ids_NK is None else tuple(ids_NK.shape)
        raise TeacherError(
            f"{rows.describe(0)}: the teacher's top-k rows have ids {got} and values {tuple(log_q_NK.shape)}, "
            f"asked for {expected}"
        )
    empty_NK = ids_NK == -1 if spec.support is Support.UNION else torch.zeros_like(ids_NK, dtype=torch.bool)
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
    return ids_NK, empty_NK
