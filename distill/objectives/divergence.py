"""Divergences between the student's and the teacher's next-token distributions: reverse KL, forward KL, JSD.

All of them act on the temperature-1 distributions of both models; the sampling temperature only shapes which prefixes
the student is asked about. Their gradient does not depend on which token was sampled.

Legend: N response tokens, V common vocabulary, K teacher's top-k, C columns compared (V, K, or K + 1 with the tail).
p student, q teacher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.errors import ConfigError, TeacherError
from distill.objectives import formulas
from distill.objectives.rows import TokenRows, first, refuse_ignored, require_finite, require_teacher
from distill.protocols import Contract
from distill.registry import did_you_mean
from distill.types import Signal, SignalSpec

SUPPORTS = ("full", "teacher_topk")


@dataclass(frozen=True, kw_only=True)
class _Divergence(ABC):
    """What the divergences share: where the two distributions are compared."""

    support: str = "full"
    """full: the whole vocabulary. teacher_topk: the teacher's k most probable tokens."""
    k: int = 0
    """Entries of a top-k row; only with a top-k support."""
    tail: bool = True
    """Put everything outside the top-k into one more bucket: a divergence of k+1 outcomes, a lower bound of the full
    one, which is 0 with no gradient at p = q. Without it both models are renormalised over the k tokens, and the loss
    is blind to what the student does elsewhere."""

    def __post_init__(self) -> None:
        if self.support == "student_topk":
            raise ConfigError(
                "objective.support: student_topk is not available yet",
                why="teachers give their own top-k; they cannot yet be asked about tokens of the student's choice",
                fix="use objective.support=teacher_topk or full",
            )
        if self.support not in SUPPORTS:
            raise ConfigError(
                f"objective.support: there is no {self.support!r}", fix=did_you_mean(self.support, SUPPORTS)
            )
        if self.support == "full":
            refuse_ignored(self, ("k", "tail"), "with support=full")
            return
        if self.k < 1:
            raise ConfigError(
                f"objective.k: must be at least 1 with support={self.support}, got {self.k}",
                fix="objective.k=64 covers nearly all of the mass of a trained model",
            )
        if self.k == 1 and not self.tail:
            raise ConfigError(
                "objective: the top 1 without its tail optimises nothing",
                why="one token renormalised has probability 1 in every model: value and gradient are always 0",
                fix="set objective.tail=true, or objective.k to at least 2",
            )

    @property
    def spec(self) -> SignalSpec:
        return SignalSpec(Signal.FULL) if self.support == "full" else SignalSpec(Signal.TOPK, self.k)

    @property
    def contract(self) -> Contract:
        formula, source = self._claim()
        if self.support == "full":
            where = ""
        elif self.tail:
            where = f" over the teacher's top {self.k} and one tail bucket"
        else:
            where = f" over the teacher's top {self.k}, both renormalised"
        return Contract(optimises=formula + where, depends_on_action=False, source=source)

    def __call__(self, rows: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (N,) and metrics (N,): `kl` = KL(p || q) over the columns that the signal tells, and for a full signal
        `entropy_gap` = H(q) - H(p). `kl` is of the teacher as it is, before any smoothing, and may be infinite where
        the loss is not.

        Raises TeacherError or StudentError, naming the row and the rule, for a row whose loss is not a finite number.
        """
        log_p_NC, log_q_NC = self._columns(rows)
        target_NC = self._target(log_q_NC)
        loss_N = self._divergence(log_p_NC, target_NC)
        require_finite(loss_N, rows, target_NC)
        with torch.no_grad():
            metrics = {"kl": formulas.kl(log_p_NC, log_q_NC)}
            if self.support == "full":
                metrics["entropy_gap"] = formulas.entropy(log_q_NC) - formulas.entropy(log_p_NC)
        return loss_N, metrics

    @abstractmethod
    def _claim(self) -> tuple[str, str]:
        """What is minimised over the full vocabulary, and its source."""

    @abstractmethod
    def _divergence(self, log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor: ...

    def _target(self, log_q_NC: Tensor) -> Tensor:
        return log_q_NC

    def _columns(self, rows: TokenRows) -> tuple[Tensor, Tensor]:
        """log p and log q of the outcomes that are compared, each row a distribution."""
        if self.support == "full":
            log_q_NV = require_teacher(rows, "full_logp_NV")
            if log_q_NV.shape != rows.student_logits_NV.shape:
                raise TeacherError(
                    f"{rows.describe(0)}: the teacher's rows are {tuple(log_q_NV.shape)}, "
                    f"the student's {tuple(rows.student_logits_NV.shape)}",
                    why="both are cut to the common vocabulary before they are compared",
                )
            return rows.student_logits_NV.log_softmax(-1), log_q_NV
        ids_NK, log_q_NK = self._topk(rows)
        log_p_NK = rows.student_logits_NV.log_softmax(-1).gather(-1, ids_NK)
        if ids_NK.shape[-1] == rows.vocab_size:
            return log_p_NK, log_q_NK
        if not self.tail:
            return log_p_NK.log_softmax(-1), log_q_NK.log_softmax(-1)
        log_tail_N = require_teacher(rows, "log_tail_N")
        student_tail_N = formulas.log_outside(rows.student_logits_NV, ids_NK)
        return (
            torch.cat([log_p_NK, student_tail_N[:, None]], -1),
            torch.cat([log_q_NK, log_tail_N[:, None]], -1),
        )

    def _topk(self, rows: TokenRows) -> tuple[Tensor, Tensor]:
        log_q_NK = require_teacher(rows, "topk_logp_NK")
        ids_NK = rows.topk_ids_NK
        expected = (len(rows.tokens_N), min(self.k, rows.vocab_size))
        if ids_NK is None or ids_NK.shape != expected or log_q_NK.shape != expected:
            got = None if ids_NK is None else tuple(ids_NK.shape)
            raise TeacherError(
                f"{rows.describe(0)}: the teacher's top-k rows have ids {got} and values {tuple(log_q_NK.shape)}, "
                f"asked for {expected}"
            )
        ordered_NK = ids_NK.sort(-1).values
        bad_N = (ordered_NK[:, 0] < 0) | (ordered_NK[:, -1] >= rows.vocab_size)
        bad_N |= (ordered_NK[:, 1:] == ordered_NK[:, :-1]).any(-1)
        if bool(bad_N.any()):
            raise TeacherError(
                f"{rows.describe(first(bad_N))}: the teacher's top-k names an id twice, or one outside of the common "
                f"vocabulary of {rows.vocab_size}"
            )
        return ids_NK, log_q_NK


@dataclass(frozen=True, kw_only=True)
class _Smoothed(_Divergence, ABC):
    teacher_smoothing: float = 0.0
    """Learn from (1 - eps) q + eps/V instead of q: a stabiliser, not part of the objective. It bounds log(p/q), whose
    spikes come from tokens that a sharp teacher gives almost no probability; the student's optimum moves by it too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.teacher_smoothing < 1.0:
            raise ConfigError(
                f"objective.teacher_smoothing: must be at least 0 and less than 1, got {self.teacher_smoothing}",
                why="at 1 nothing of the teacher is left",
            )
        if self.support != "full":
            refuse_ignored(self, ("teacher_smoothing",), f"with support={self.support}: it needs the full vocabulary")

    def _target(self, log_q_NC: Tensor) -> Tensor:
        return formulas.smooth(log_q_NC, self.teacher_smoothing) if self.teacher_smoothing else log_q_NC

    def _smoothing_note(self) -> str:
        return f", q smoothed by {self.teacher_smoothing:g}" if self.teacher_smoothing else ""


@dataclass(frozen=True, kw_only=True)
class ReverseKL(_Smoothed):
    """KL(p || q) = sum_v p log(p/q): mode-seeking; the student drops what the teacher would not do.

    Source: the per-token form of MiniLLM (arXiv 2306.08543), over the full vocabulary as in MOPD (arXiv 2606.30406).
    """

    def _claim(self) -> tuple[str, str]:
        return "KL(p || q)" + self._smoothing_note(), "arXiv 2306.08543; arXiv 2606.30406"

    def _divergence(self, log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
        return formulas.kl(log_p_NC, log_q_NC)


@dataclass(frozen=True, kw_only=True)
class ForwardKL(_Divergence):
    """KL(q || p) = sum_v q log(q/p): mass-covering; the student must allow all that the teacher would do.

    Source: Hinton et al., arXiv 1503.02531, at temperature 1; on the student's own samples: GKD, arXiv 2306.13649.
    """

    def _claim(self) -> tuple[str, str]:
        return "KL(q || p)", "arXiv 1503.02531; arXiv 2306.13649"

    def _divergence(self, log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
        return formulas.kl(log_q_NC, log_p_NC)


@dataclass(frozen=True, kw_only=True)
class JSD(_Smoothed):
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p: bounded, hence calm gradients.

    Source: GKD, arXiv 2306.13649, eq. 3. beta = 0 is KL(q || p) and beta = 1 is KL(p || q), by special case.
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(
                f"objective.beta: must be between 0 and 1, got {self.beta}",
                why="it is the teacher's share of the mixture",
            )

    def _claim(self) -> tuple[str, str]:
        return f"JSD_{self.beta:g}(p, q)" + self._smoothing_note(), "arXiv 2306.13649"

    def _divergence(self, log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
        return formulas.jsd(log_p_NC, log_q_NC, self.beta)
