"""What an objective is called with, and the checks that every objective shares.

Legend: N response tokens, V common vocabulary, K entries of a top-k row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.errors import ConfigError, DistillError, StudentError, TeacherError

LOGP_SLACK = 1e-2
"""How far above 0 rounding may lift a log-probability: float16 has 11 significant bits, and a sum over a large
vocabulary in float32 loses some more. Anything above is not a log-probability."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which row an error is about. `sample_id` and `teacher` are empty where nobody knows them."""

    text: str
    sample_id: str = ""
    teacher: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def blame(self) -> dict[str, str]:
        """For an error that is this row's alone: the run can go on without its sample."""
        return {"sample_id": self.sample_id, "teacher": self.teacher}


def _row_number(row: int) -> Place:
    return Place(f"row {row}")


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """N trained response tokens that one teacher scored. Row n is about the distribution that predicts `tokens_N[n]`.

    Both models at temperature 1, whatever temperature sampled the tokens; every vocabulary axis already cut to V.
    Tokens whose loss mask is 0 have no row. Rows of one sample stand together, in order.
    """

    student_logits_NV: Tensor
    """Raw logits. Results have its dtype, or float32 for half precision. Only it, or `student_logp_N`, has a gradient.
    """
    tokens_N: Tensor
    """int64: the sampled tokens."""
    behaviour_logp_N: Tensor
    """log mu of the sampled tokens: of the distribution, temperature included, that sampled them."""
    teacher_logp_N: Tensor
    """log q of the sampled tokens."""
    student_logp_N: Tensor | None = None
    """log p of the sampled tokens, where it was computed without logits, which then are (N, 0)."""
    topk_ids_NK: Tensor | None = None
    """int64, no id twice in a row; -1 in slots that are not used."""
    topk_logp_NK: Tensor | None = None
    """log q at those ids; -inf in slots that are not used."""
    log_tail_N: Tensor | None = None
    """log(1 - mass of q on those ids)."""
    full_logp_NV: Tensor | None = None
    sample_N: Tensor | None = None
    """int64: which sample a row belongs to, rising. None: every row is a sample of its own."""
    span_N: Tensor | None = None
    """int64: which byte span of its sample a token belongs to, where the teacher has another tokenizer; -1: none. A
    span's log q then stands at one of its rows in `teacher_logp_N`, 0 at the others; all of its tokens are trained."""
    outcome_N: Tensor | None = None
    """Advantage of the sample's outcome, the same for all of its rows, where rewards are mixed in."""
    prox_logp_N: Tensor | None = None
    """log of the proximal policy's probability of the token, for decoupled PPO. None: today's student."""
    advantage_N: Tensor | None = None
    """What `SequenceObjective.condition` found; constant."""
    gate_N: Tensor | None = None
    """What `SequenceObjective.condition` found; constant."""
    describe: Callable[[int], Place] = _row_number
    """Names a row in an error message: its sample, teacher and position."""

    @property
    def vocab_size(self) -> int:
        return self.student_logits_NV.shape[-1]

    def cut(self, keep: slice | Tensor, logits_CV: Tensor) -> TokenRows:
        """C of the rows, `keep` of them in rising order (an index lies on the CPU), with the logits of just these.

        The other members follow the logits to their device; a slice copies nothing that is there already.
        """
        members = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen = {
            name: value[keep].to(logits_CV.device)
            for name, value in members.items()
            if isinstance(value, Tensor) and name != "student_logits_NV"
        }
        describe = partial(_describe_cut, self.describe, keep)
        return replace(self, student_logits_NV=logits_CV, describe=describe, **chosen)


def _describe_cut(describe: Callable[[int], Place], keep: slice | Tensor, row: int) -> Place:
    return describe((keep.start or 0) + row if isinstance(keep, slice) else int(keep[row]))


def first(bad_N: Tensor) -> int:
    """Index of the first true element."""
    return int(bad_N.int().argmax())


def require_finite(loss_N: Tensor, rows: TokenRows, teacher: Tensor) -> None:
    """Every loss is a finite number, or an error that names the rule which the row breaks.

    `teacher` is what the loss was computed from, already checked by `require_teacher`: (N,) or (N, anything).
    """
    finite_N = loss_N.detach().isfinite()
    if bool(finite_N.all()):
        return
    raise _broken_row(rows, first(~finite_N), teacher)


def _broken_row(rows: TokenRows, row: int, teacher: Tensor) -> DistillError:
    where = rows.describe(row)
    if _has_broken_logits(rows, row):
        return broken_logits(where)
    if not bool(rows.behaviour_logp_N[row].isfinite()):
        return StudentError(
            f"{where}: the log-probability of the sampled token is {float(rows.behaviour_logp_N[row])}",
            why="the importance weight p/mu needs the probability with which the token was sampled",
            **where.blame,
        )
    if bool((teacher[row] == -torch.inf).any()):
        return TeacherError(
            f"{where}: the teacher gives probability 0 to what the student may do (q = 0 where p > 0)",
            why="the divergence is infinite there, and is not clamped",
            fix="use jsd, or teacher_smoothing with the full vocabulary, or forward_kl",
            **where.blame,
        )
    return StudentError(
        f"{where}: the student gives probability 0 to what the teacher may do (p = 0 where q > 0), or the loss is huge",
        why="the divergence is infinite there, and is not clamped",
        fix="use jsd or reverse_kl, or lower student.lr",
        **where.blame,
    )


def broken_logits(where: Place, more: str = "") -> StudentError:
    """The error for a student that gives no probabilities at all; `more` goes on with the sentence."""
    return StudentError(
        f"{where}: the student's logits hold NaN or infinity{more}",
        why="nothing can be learnt from such numbers, and no weight has changed because of them",
        fix="lower student.lr or student.max_grad_norm, or use student.dtype=float32; before the first step, check the "
        "weights of student.model",
    )


def _has_broken_logits(rows: TokenRows, row: int) -> bool:
    if rows.student_logp_N is not None:
        return bool(rows.student_logp_N[row].isnan())
    student_V = rows.student_logits_NV[row].detach()
    return (
        bool(student_V.isnan().any()) or bool((student_V == torch.inf).any()) or bool((student_V == -torch.inf).all())
    )


def refuse_ignored(objective: Any, names: tuple[str, ...], because: str) -> None:
    """Raise ConfigError when one of the settings `names` differs from its default although it would be ignored."""
    for field in fields(objective):
        if field.name in names and getattr(objective, field.name) != field.default:
            raise ConfigError(
                f"objective.{field.name}: has no effect {because}",
                why="a setting that is ignored is a mistake",
                fix=f"remove objective.{field.name}",
            )
