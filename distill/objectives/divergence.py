"""Divergences between the student's and the teacher's next-token distributions, over all tokens or the top k.

All of them act on the temperature-1 distributions of both models; the sampling temperature only shapes which prefixes
the student is asked about. Their gradient does not depend on which token was sampled.

Legend: N response tokens, V common vocabulary. p student, q teacher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives import formulas
from distill.objectives.formulas import Formula
from distill.objectives.fused import compare_full
from distill.objectives.rows import TokenRows, refuse_ignored, require_finite
from distill.objectives.teacher_rows import full_of_teacher, require_teacher, require_whole
from distill.objectives.topk import FORMS, WHOSE, compare_topk
from distill.protocols import Contract
from distill.registry import did_you_mean
from distill.types import Signal, SignalSpec, Support

NEAREST = 1e-6
"""How near a share of a mixture may come to an end where the mixture is one of the distributions itself: some ten times
the resolution of float32 next to 1."""
SUPPORTS = ("full", *(support.value for support in Support))


@dataclass(frozen=True, kw_only=True)
class _Divergence(ABC):
    """What the divergences share: where the two distributions are compared."""

    support: Literal["full", "teacher_topk", "student_topk", "union"] = "full"
    """full: the whole vocabulary. teacher_topk: the teacher's k most probable tokens. student_topk: those of the
    weights that wrote the sample. union: both, each token once."""
    k: int = 0
    """Most probable tokens of each model in the support; only with a support other than full."""
    form: Literal["tail", "renormalised", "truncated", "corrected"] = "tail"
    """What becomes of the tokens outside of a top-k support.

    tail: one more outcome with all their mass; a divergence of k+1 outcomes, a lower bound of the full one, 0 with no
    gradient at p = q. renormalised: both models are scaled to the support, and the loss is blind to what the student
    does elsewhere. truncated: the plain sum, no divergence. corrected: the sum of p log(p/q) - p + q, never negative
    (MOPD, arXiv 2606.30406). The last two exist for the two KLs."""

    _masses: ClassVar[Mapping[str, Formula]] = {}
    """`truncated` and `corrected`, where the divergence has them: sums over tokens whose mass is not 1."""

    def __post_init__(self) -> None:
        if self.support not in SUPPORTS:
            raise ConfigError(
                f"objective.support: there is no {self.support!r}", fix=did_you_mean(self.support, SUPPORTS)
            )
        if self.form not in FORMS:
            raise ConfigError(f"objective.form: there is no {self.form!r}", fix=did_you_mean(self.form, FORMS))
        if self.support == "full":
            refuse_ignored(self, ("k", "form"), "with support=full")
            return
        if self.k < 1:
            given = f"got {self.k}" if self.k else "and was not given"
            raise ConfigError(
                f"objective.k: must be at least 1 with support={self.support}, {given}",
                fix="set objective.k, to no more than the ids of the vocabulary: 64 covers nearly all of the mass of a "
                "trained model; or remove objective.support",
            )
        if self.k == 1 and self.form == "renormalised":
            raise ConfigError(
                "objective: the top 1 renormalised optimises nothing",
                why="one token renormalised has probability 1 in every model: value and gradient are always 0"
                + (", and so it is in a union wherever both models prefer the same token" * (self.support == "union")),
                fix="set objective.form=tail, or objective.k to at least 2",
            )
        if self.form in ("truncated", "corrected") and self.form not in self._masses:
            raise ConfigError(
                f"objective.form: {self.form} is defined for reverse_kl and forward_kl only",
                why="this divergence compares distributions, and the masses on a support are none",
                fix="use form=tail, or form=renormalised",
            )

    @property
    def spec(self) -> SignalSpec:
        if self.support == "full":
            return SignalSpec(Signal.FULL)
        return SignalSpec(Signal.TOPK, self.k, Support(self.support))

    @property
    def contract(self) -> Contract:
        formula, source = self._claim()
        where = ""
        if self.support != "full":
            where = f" over {WHOSE[Support(self.support)].format(k=self.k)}, {FORMS[self.form]}"
        return Contract(optimises=formula + where, depends_on_action=False, source=source)

    def __call__(self, rows: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (N,) and metrics (N,): `kl` = KL(p || q) over the outcomes that are compared (truncated and corrected:
        the corrected sum), and for a full signal `entropy_gap` = H(q) - H(p). `kl` is of the teacher as it is, before
        any smoothing, and may be infinite where the loss is not.

        Raises TeacherError or StudentError, naming the row and the rule, for a row whose loss is not a finite number.
        """
        require_teacher(rows, "teacher_logp_N")  # not compared, but NaN there is a broken teacher
        if self.support == "full":
            return self._full(rows)
        formula = self._masses.get(self.form, self._formula)
        loss_N, metrics, log_p_NC, log_q_NC = compare_topk(rows, self.spec, self.form, formula)
        self._require_finite(loss_N, rows, log_p_NC, log_q_NC)
        return loss_N, metrics

    @abstractmethod
    def _claim(self) -> tuple[str, str]:
        """What is minimised over the full vocabulary, and its source."""

    @property
    @abstractmethod
    def _formula(self) -> Formula: ...

    @property
    def _smoothing(self) -> float:
        return 0.0

    @property
    def _ends_at_teacher_zero(self) -> bool:
        """It is infinite where q = 0 < p. The others are infinite where p = 0 < q, or nowhere."""
        return False

    def _require_finite(self, loss_N: Tensor, rows: TokenRows, log_p_NC: Tensor, log_q_NC: Tensor) -> None:
        """`log_p_NC` may be logits: only what is -inf matters."""
        if not bool(loss_N.detach().isfinite().all()):
            harmless_NC = log_p_NC.detach() == -torch.inf if self._ends_at_teacher_zero else log_q_NC == -torch.inf
            require_finite(loss_N, rows, log_q_NC.masked_fill(harmless_NC, 0.0))

    def _full(self, rows: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        log_q_NV = full_of_teacher(rows)
        got = compare_full(rows.student_logits_NV, log_q_NV, self._formula, smoothing=self._smoothing)
        require_whole(rows, got.mass)
        self._require_finite(got.loss, rows, rows.student_logits_NV, log_q_NV)
        return got.loss, {"kl": got.kl, "entropy_gap": got.entropy_gap}


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

    @property
    def _smoothing(self) -> float:
        return self.teacher_smoothing

    def _smoothing_note(self) -> str:
        return f", q smoothed by {self.teacher_smoothing:g}" if self.teacher_smoothing else ""


@dataclass(frozen=True, kw_only=True)
class ReverseKL(_Smoothed):
    """KL(p || q) = sum_v p log(p/q): mode-seeking; the student drops what the teacher would not do.

    Source: the per-token form of MiniLLM (arXiv 2306.08543), over the full vocabulary as in MOPD (arXiv 2606.30406).
    """

    _masses: ClassVar[Mapping[str, Formula]] = {
        "truncated": formulas.truncated_reverse_kl,
        "corrected": formulas.corrected_reverse_kl,
    }

    def _claim(self) -> tuple[str, str]:
        return "KL(p || q)" + self._smoothing_note(), "arXiv 2306.08543; arXiv 2606.30406"

    @property
    def _ends_at_teacher_zero(self) -> bool:
        return True

    @property
    def _formula(self) -> Formula:
        return formulas.reverse_kl


@dataclass(frozen=True, kw_only=True)
class ForwardKL(_Divergence):
    """KL(q || p) = sum_v q log(q/p): mass-covering; the student must allow all that the teacher would do.

    Source: Hinton et al., arXiv 1503.02531, at temperature 1; on the student's own samples: GKD, arXiv 2306.13649.
    """

    _masses: ClassVar[Mapping[str, Formula]] = {
        "truncated": formulas.truncated_forward_kl,
        "corrected": formulas.corrected_forward_kl,
    }

    def _claim(self) -> tuple[str, str]:
        return "KL(q || p)", "arXiv 1503.02531; arXiv 2306.13649"

    @property
    def _formula(self) -> Formula:
        return formulas.forward_kl


@dataclass(frozen=True, kw_only=True)
class JSD(_Smoothed):
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p: bounded, hence calm gradients.

    Source: GKD, arXiv 2306.13649, eq. 3. beta = 0 is KL(q || p) and beta = 1 is KL(p || q), by special case.
    """

    beta: float = 0.5
    """The teacher's share of the mixture; 0 is KL(q || p), 1 is KL(p || q)."""
    scaled: bool = False
    """Divide by beta (1 - beta). The plain value fades towards both ends and jumps to a KL there; the scaled one runs
    continuously from KL(q || p) to KL(p || q), and so does the gradient's size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(
                f"objective.beta: must be between 0 and 1, got {self.beta}",
                why="it is the teacher's share of the mixture",
            )
        if 0.0 < min(self.beta, 1.0 - self.beta) < NEAREST:
            raise ConfigError(
                f"objective.beta: {self.beta} is nearer to an end than {NEAREST}",
                why="the two distributions of a divergence differ by less than float32 can tell there",
                fix="use 0 for KL(q || p), or 1 for KL(p || q)",
            )

    def _claim(self) -> tuple[str, str]:
        inside = 0.0 < self.beta < 1.0
        kl = "KL(p || q)" if self.beta else "KL(q || p)"
        jsd = f"JSD_{self.beta:g}(p, q)" + (" / (beta (1 - beta))" if self.scaled else "")
        return (jsd if inside else kl) + self._smoothing_note(), "arXiv 2306.13649"

    @property
    def _ends_at_teacher_zero(self) -> bool:
        return self.beta == 1.0

    @property
    def _formula(self) -> Formula:
        return partial(formulas.jsd, beta=self.beta, scaled=self.scaled)


@dataclass(frozen=True, kw_only=True)
class SkewKL(_Divergence):
    """A KL against a mixture of both models, which keeps it finite and its gradient small where they differ much.

    forward: KL(q || a q + (1 - a) p). reverse: KL(p || (1 - a) q + a p). Source: DistiLLM, arXiv 2402.03898.
    """

    alpha: float = 0.1
    """Share of the distribution on the left in the mixture; 0.1 is DistiLLM's choice. 0 is the plain KL."""
    direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(q || a q + (1 - a) p). reverse: KL(p || (1 - a) q + a p)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.direction not in ("forward", "reverse"):
            raise ConfigError(
                f"objective.direction: there is no {self.direction!r}",
                fix=did_you_mean(str(self.direction), ("forward", "reverse")),
            )
        if not 0.0 <= self.alpha <= 1.0 - NEAREST:
            raise ConfigError(
                f"objective.alpha: must be at least 0 and at most {1.0 - NEAREST}, got {self.alpha}",
                why="at 1 a distribution is compared with itself, which teaches nothing",
            )

    def _claim(self) -> tuple[str, str]:
        a = f"{self.alpha:g}"
        claims = {
            "forward": f"KL(q || {a} q + (1 - {a}) p)",
            "reverse": f"KL(p || (1 - {a}) q + {a} p)",
        }
        return claims[self.direction], "arXiv 2402.03898"

    @property
    def _ends_at_teacher_zero(self) -> bool:
        return self.direction == "reverse" and self.alpha == 0.0

    @property
    def _formula(self) -> Formula:
        forms = {"forward": formulas.skew_forward_kl, "reverse": formulas.skew_reverse_kl}
        return partial(forms[self.direction], alpha=self.alpha)


@dataclass(frozen=True, kw_only=True)
class TotalVariation(_Divergence):
    """TV(p, q) = sum_v |p - q| / 2, at most 1. The gradient sees only which of the two is larger, not by how much, and
    is 0 where they are equal up to rounding.

    Source: f-distill, arXiv 2307.15190.
    """

    def _claim(self) -> tuple[str, str]:
        return "TV(p, q), which has a corner at p = q", "arXiv 2307.15190"

    @property
    def _formula(self) -> Formula:
        return partial(formulas.total_variation, has_rest=self.support != "full" and self.form == "tail")
