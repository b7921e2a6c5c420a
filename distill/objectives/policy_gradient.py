"""Distillation from the log-probability of the sampled token alone, as a policy gradient.

Legend: N response tokens, V common vocabulary. p student, q teacher, mu the distribution that sampled the token y.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives import advantages
from distill.objectives.correction import Sampled, SequenceCorrection, require_bounded
from distill.objectives.corrections import DEFAULT, Importance
from distill.objectives.rows import TokenRows, refuse_ignored, require_finite
from distill.objectives.sampled import (
    ESTIMATORS,
    LEAST,
    MOST,
    check_clip,
    k1,
    require_advantage,
    sampler_logp,
    token_logp,
    weight_metrics,
)
from distill.objectives.teacher_rows import require_teacher
from distill.protocols import Contract
from distill.registry import did_you_mean
from distill.types import Signal, SignalSpec

LEAST_POWER = 1e-9
"""(q^a - p^a)/a is the log ratio there to all digits of float32, and far below it 0/0."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """-sg[w] sg[A] log p(y), A = clip(log q(y) - log p(y)), w a gated importance weight p/mu.

    With y sampled from p, the expected gradient of -(log q - log p) log p is that of KL(p || q). The weight corrects
    for a mu that is older or hotter than p. Source: Thinking Machines' on-policy distillation; MiMo-V2-Flash
    (arXiv 2601.02780) and MOPD (arXiv 2606.30406).
    """

    estimator: Annotated[str, Field(json_schema_extra={"enum": list(ESTIMATORS)})] = "k1"
    """A = -k of the token: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, d = log p - log q. Only k1 has the gradient of a
    KL; the other two are what some engines subtract from an advantage, and optimise neither direction."""
    reference: Literal["student", "sampler"] = "student"
    """What q is compared with. sampler: log mu in the place of log p, as Thinking Machines' recipe has it: the
    gradient of KL(p || q) only while mu = p."""
    power: float = 0.0
    """a of PowerOPD (arXiv 2606.17199): A = (q^a - p^a)/a, bounded by 1/a; 0 is its limit, the log ratio."""
    advantage_clip: float | None = 5.0
    """Largest |A| of a token in nats, before any sum over tokens, as MOPD clips it (arXiv 2606.30406); None for no
    clipping. It biases the gradient only where the two models differ by more than a factor of exp(advantage_clip)."""
    discount: float = 0.0
    """g of sum over j >= t of g^(j-t) A_j in the place of A_t: a token answers for what follows it. 0 is the token
    alone; 1 gives the gradient of the KL of whole answers."""
    return_normalisation: Literal["none", "length"] = "none"
    """length: the sum is divided by the number of its tokens, as in MiniLLM (arXiv 2306.08543, section 2.2), so that
    early tokens do not have the largest returns."""
    iw_gain: float = 0.0
    """g of IW-OPD, as TRL has it with 0.5: A_t is multiplied by 1 + g (1 - sum_{j<t} |A_j| / sum_j |A_j|), so that
    tokens before the first disagreements count for more."""
    importance: Importance = DEFAULT
    """What corrects for mu: a name, or a mapping of `name` and settings; see `corrections`."""

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ConfigError(
                f"objective.estimator: there is no {self.estimator!r} of the sampled token",
                why="an advantage must depend on which token was sampled: a sum over the vocabulary or a top-k is the "
                "same for all of them, and its expected gradient is zero",
                fix=did_you_mean(self.estimator, ESTIMATORS) + "; to learn from a divergence, use it as the objective",
            )
        check_clip(self.advantage_clip)
        for name, least, most in (("power", LEAST_POWER, 1.0), ("discount", LEAST, 1.0), ("iw_gain", LEAST, MOST)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ConfigError(f"objective.{name}: must be between 0 and {most:g}, got {value}")
            if 0 < value < least:
                raise ConfigError(
                    f"objective.{name}: must be 0 or at least {least:g}, got {value}",
                    why="float32 holds seven digits: what it would change of an advantage is rounded away",
                    fix=f"remove objective.{name}",
                )
        if self.estimator != "k1":
            refuse_ignored(self, ("power",), f"with estimator={self.estimator}: it replaces k1")
        if self.discount == 0:
            refuse_ignored(self, ("return_normalisation",), "with discount=0: there is no sum to divide")
        elif self.iw_gain:
            raise ConfigError(
                "objective.iw_gain: cannot be combined with objective.discount",
                why="both say how much an early token counts for what follows it",
                fix="leave one of them at 0",
            )

    @property
    def spec(self) -> SignalSpec:
        return SignalSpec(Signal.SAMPLED)

    @property
    def contract(self) -> Contract:
        return Contract(
            optimises=self._claim(),
            depends_on_action=True,
            source="arXiv 2601.02780; arXiv 2606.30406",
            couples_tokens=self._sums or isinstance(self.importance, SequenceCorrection),
            reads_sampled_only=True,
        )

    @property
    def _sums(self) -> bool:
        return self.discount > 0 or self.iw_gain > 0

    def _claim(self) -> str:
        if self.estimator != "k1":
            return f"neither KL(p || q) nor KL(q || p): {self.estimator} as an advantage has another gradient"
        if self.importance.changes_objective:
            return "neither KL(p || q) nor KL(q || p): the gradient through the weight has a part of its own"
        if self.power:
            what = f"the density power divergence of p from q, of order {self.power:g}"
        elif self.discount == 1.0 and self.return_normalisation == "none":
            what = "KL(p || q) of whole answers"
        else:
            what = "KL(p || q)"
        notes = [
            "over sampled tokens",
            "the advantage of a token is that of all that follow it" if 0 < self.discount < 1 else "",
            "returns divided by their length" if self.return_normalisation == "length" else "",
            f"early tokens weighted up to {1 + self.iw_gain:g}" if self.iw_gain else "",
            "q compared with mu" if self.reference == "sampler" else "",
            self.importance.note,
        ]
        return f"{what} in expectation " + ", ".join(note for note in notes if note)

    def condition(self, rows: TokenRows, student_logp_N: Tensor) -> TokenRows:
        """Returns and weights over whole samples (`advantage_N`), and the gate of the sample (`gate_N`).

        Raises TeacherError or StudentError, naming the row, for an advantage or a probability that is no number.
        """
        changes: dict[str, Tensor] = {}
        sample_N = advantages.sample_numbers(rows.sample_N, len(rows.tokens_N))
        if self._sums:
            token_N = self._token_advantage(rows, student_logp_N)
            changes["advantage_N"] = advantages.along_samples(token_N, self._along, sample_N)
        if isinstance(self.importance, SequenceCorrection):
            log_ratio_N = student_logp_N - sampler_logp(rows).to(student_logp_N.dtype)
            mean_N = advantages.along_samples(log_ratio_N, advantages.mean_of_sample, sample_N)
            changes["gate_N"] = self.importance.gate(mean_N)
        return replace(rows, **changes)

    def _along(self, token_N: advantages.Floats, sample_N: advantages.Ints) -> advantages.Floats:
        if self.iw_gain:
            return token_N * advantages.front_loading(token_N, self.iw_gain, sample_N)
        return_N = advantages.discounted_future(token_N, self.discount, sample_N)
        return return_N / advantages.tokens_left(sample_N) if self.return_normalisation == "length" else return_N

    def __call__(self, rows: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (N,) and metrics (N,): `kl`, the k1 estimate log p(y) - log q(y), whose mean over y ~ p is KL(p || q);
        `importance_weight`; `gated_low` and `gated_high`, 1 where the correction leaves the token out.

        Raises TeacherError or StudentError, naming the row and the rule, for a row whose loss is not a finite number.
        """
        log_p_N = token_logp(rows)
        return self.loss(rows, log_p_N, self.advantage(rows, log_p_N.detach()))

    def advantage(self, rows: TokenRows, current_N: Tensor) -> Tensor:
        """A (N,), constant: as `condition` found it, else from the token itself. `current_N` is log p."""
        if rows.advantage_N is not None:
            return rows.advantage_N.to(current_N.dtype)
        assert not self._sums, "returns are over whole samples: condition() comes first"
        return self._token_advantage(rows, current_N)

    def _token_advantage(self, rows: TokenRows, current_N: Tensor) -> Tensor:
        log_q_N = require_teacher(rows, "teacher_logp_N").to(current_N.dtype)
        mine_N = current_N if self.reference == "student" else sampler_logp(rows).to(current_N.dtype)
        if self.power:
            # (q^a - p^a)/a, without cancellation where a is small
            advantage_N = (self.power * mine_N).exp() * (self.power * (log_q_N - mine_N)).expm1() / self.power
        else:
            advantage_N = -ESTIMATORS[self.estimator](mine_N, log_q_N)
        if self.advantage_clip is not None:
            advantage_N = advantage_N.clamp(-self.advantage_clip, self.advantage_clip)
        require_advantage(advantage_N, rows, current_N, log_q_N)
        return advantage_N

    def loss(self, rows: TokenRows, log_p_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The corrected loss of given advantages, and the metrics, as `__call__` returns them."""
        log_q_N = require_teacher(rows, "teacher_logp_N")
        current_N = log_p_N.detach()
        behaviour_N = sampler_logp(rows) if self.importance.reads_sampler else current_N
        prox_N = None if rows.prox_logp_N is None else rows.prox_logp_N.to(current_N.dtype)
        gate_N = None if rows.gate_N is None else rows.gate_N.to(current_N.dtype)
        sampled = Sampled(
            log_p_N=log_p_N,
            advantage_N=advantage_N,
            behaviour_logp_N=behaviour_N,
            prox_logp_N=prox_N,
            gate_N=gate_N,
        )
        loss_N, weight_N = self.importance(sampled)
        require_bounded(loss_N, weight_N, sampled, rows)
        require_finite(loss_N, rows, log_q_N)
        return loss_N, {"kl": k1(current_N, log_q_N), **weight_metrics(weight_N, sampled.log_ratio)}
