"""Outcome rewards mixed into an objective: in its advantage, or beside its loss.

Legend: N response tokens. p student, q teacher, y the sampled token, A_o the advantage of the sample's outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from distill.config.models import OutcomeConfig
from distill.errors import ConfigError, StudentError
from distill.objectives.corrections import DEFAULT, Clamp, IcePop, NoCorrection, TruncatedImportanceSampling
from distill.objectives.fused import compute_dtype
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import TokenRows
from distill.objectives.sampled import WEIGHT_METRICS, token_logp
from distill.protocols import Contract, Objective, SequenceObjective
from distill.types import SignalSpec

CORRECTIONS: dict[str, NoCorrection | TruncatedImportanceSampling | Clamp | IcePop] = {
    "icepop": DEFAULT,
    "none": NoCorrection(),
    "tis": TruncatedImportanceSampling(),
    "clamp": Clamp(),
}


def with_outcome(objective: Objective, outcome: OutcomeConfig | None) -> Objective:
    """The objective with outcomes mixed in as `outcome` says; itself without. Raises ConfigError where it cannot be."""
    if outcome is None:
        return objective
    if outcome.mix == "loss":
        policy = PolicyGradient(importance=CORRECTIONS[outcome.importance])
        return LossMix(objective=objective, policy=policy, teacher_share=outcome.teacher_share)
    if not isinstance(objective, PolicyGradient):
        raise ConfigError(
            "objective.outcome.mix: advantage needs an objective with an advantage",
            why="only a policy gradient has one to add the outcome's to",
            fix="set objective.outcome.mix=loss, or objective.name=policy_gradient",
        )
    return AdvantageMix(objective=objective, weight=outcome.weight, teacher_weight=outcome.teacher_weight)


def require_outcome(rows: TokenRows) -> Tensor:
    """A_o (N,) in the dtype of the losses."""
    if rows.outcome_N is None:
        raise StudentError(
            f"{rows.describe(0)}: no outcome beside its scores",
            why="the objective mixes rewards in, so every sample needs one",
            fix="a student of your own must fill TokenRows.outcome_N",
        )
    return rows.outcome_N.to(compute_dtype(rows.student_logits_NV))


@dataclass(frozen=True, kw_only=True)
class AdvantageMix:
    """A policy gradient whose advantage is a A_o + c A, A that of `objective`, which clips it or sums it over tokens.

    Source: MiMo-V2-Flash, arXiv 2601.02780.
    """

    objective: PolicyGradient
    weight: float = 1.0
    """a"""
    teacher_weight: float = 1.0
    """c"""

    @property
    def spec(self) -> SignalSpec:
        return self.objective.spec

    @property
    def contract(self) -> Contract:
        inner = self.objective.contract
        teachers = f" and {self.teacher_weight:g} times {inner.optimises}" if self.teacher_weight else ""
        return replace(inner, optimises=f"{self.weight:g} times the loss of the outcome{teachers}")

    def condition(self, rows: TokenRows, student_logp_N: Tensor) -> TokenRows:
        return self.objective.condition(rows, student_logp_N)

    def __call__(self, rows: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """As `PolicyGradient.__call__`, and the metric `outcome_advantage`, |A_o|. Raises StudentError also where the
        rows have no outcome."""
        log_p_N = token_logp(rows)
        loss_N, metrics = self.objective.loss(rows, log_p_N, self.advantage(rows, log_p_N.detach()))
        return loss_N, {**metrics, "outcome_advantage": require_outcome(rows).abs()}

    def advantage(self, rows: TokenRows, current_N: Tensor) -> Tensor:
        """a A_o + c A (N,), constant. `current_N` is log p."""
        advantage_N = self.weight * require_outcome(rows)
        if not self.teacher_weight:
            return advantage_N
        return advantage_N + self.teacher_weight * self.objective.advantage(rows, current_N)


@dataclass(frozen=True, kw_only=True)
class LossMix:
    """(1 - share) L_o + share L: L of any objective, L_o = -sg[w] A_o log p(y) with the correction of `policy`."""

    objective: Objective
    policy: PolicyGradient
    teacher_share: float = 0.5

    @property
    def spec(self) -> SignalSpec:
        return self.objective.spec

    @property
    def contract(self) -> Contract:
        inner = self.objective.contract
        return replace(
            inner,
            optimises=f"{1 - self.teacher_share:g} times the loss of the outcome and {self.teacher_share:g} times "
            f"{inner.optimises}",
            depends_on_action=True,
        )

    def condition(self, rows: TokenRows, student_logp_N: Tensor) -> TokenRows:
        if isinstance(self.objective, SequenceObjective) and self.objective.contract.couples_tokens:
            return self.objective.condition(rows, student_logp_N)
        return rows

    def __call__(self, rows: TokenRows) -> tuple[Tensor, dict[str, Any]]:
        """Loss (N,), the metrics of `objective`, and beside them `outcome_advantage`, |A_o|, and what the correction of
        the outcome's loss does, which may be another than that of `objective`: `outcome_importance_weight`,
        `outcome_gated_low` and `outcome_gated_high`. Raises what `objective` raises, and StudentError without an
        outcome."""
        loss_N, metrics = self.objective(rows)
        outcome_N = require_outcome(rows)
        outcome_loss_N, corrected = self.policy.loss(rows, token_logp(rows), outcome_N)
        mixed_N = (1.0 - self.teacher_share) * outcome_loss_N + self.teacher_share * loss_N
        told = {f"outcome_{name}": corrected[name] for name in WEIGHT_METRICS}
        return mixed_N, {**metrics, "outcome_advantage": outcome_N.abs(), **told}
