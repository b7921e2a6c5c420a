"""Estimators of a KL divergence from the sampled token alone, differentiated as they are.

Legend: N response tokens. p student, q teacher, mu the distribution that sampled the token y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.corrections import DEFAULT, WeightOnly
from distill.objectives.rows import TokenRows, require_finite
from distill.objectives.sampled import k1, k2, k3, require_advantage, sampler_logp, token_logp, weight_metrics
from distill.objectives.teacher_rows import require_teacher
from distill.protocols import Contract
from distill.registry import did_you_mean
from distill.types import Signal, SignalSpec

CLAIMS = {"k2": "KL(p || q)", "k3": "KL(q || p)", "k3_value_k2_gradient": "KL(p || q)"}
"""Whose gradient the estimator's has in expectation over y ~ p."""


@dataclass(frozen=True, kw_only=True)
class SampledKL:
    """sg[w] k(log p(y) - log q(y)), with the gradient through k.

    With d = log p(y) - log q(y) and y sampled from p: k2 = d^2/2 has the expected gradient of KL(p || q), and
    k3 = exp(-d) - 1 + d that of KL(q || p), although its value estimates KL(p || q). Source: Schulman, Approximating
    KL Divergence (2020), for the values; the gradients follow from E_p[d log p] = 0.
    """

    estimator: Annotated[str, Field(json_schema_extra={"enum": list(CLAIMS)})] = "k2"
    """k2 | k3 | k3_value_k2_gradient: the value of k3, which is unbiased, with the gradient of k2."""
    importance: WeightOnly = DEFAULT
    """none | tis | clamp | icepop, as in `policy_gradient`: the weight w."""

    def __post_init__(self) -> None:
        if self.estimator == "k1":
            raise ConfigError(
                "objective.estimator: k1 as a loss optimises nothing",
                why="its gradient is that of log p(y), which is zero in expectation whatever the teacher says",
                fix="use objective=policy_gradient, where k1 is the advantage, or objective.estimator=k2",
            )
        if self.estimator not in CLAIMS:
            raise ConfigError(
                f"objective.estimator: there is no {self.estimator!r}", fix=did_you_mean(self.estimator, CLAIMS)
            )

    @property
    def spec(self) -> SignalSpec:
        return SignalSpec(Signal.SAMPLED)

    @property
    def contract(self) -> Contract:
        note = self.importance.note
        return Contract(
            optimises=f"{CLAIMS[self.estimator]} in expectation over sampled tokens{f', {note}' if note else ''}",
            depends_on_action=True,
            source="Schulman, Approximating KL Divergence (2020)",
            reads_sampled_only=True,
        )

    def __call__(self, rows: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (N,) and metrics (N,): `kl` = d; `importance_weight` = w; `gated_low` and `gated_high`, 1 where w is 0.

        Raises TeacherError or StudentError, naming the row and the rule, for a row whose loss is not a finite number:
        k3 is not clamped, and overflows float32 where q/p is above e^88.
        """
        log_p_N = token_logp(rows)
        current_N = log_p_N.detach()
        log_q_N = require_teacher(rows, "teacher_logp_N").to(log_p_N.dtype)
        gap_N = k1(current_N, log_q_N)
        require_advantage(gap_N, rows, current_N, log_q_N)
        log_ratio_N = current_N - (sampler_logp(rows) if self.importance.reads_sampler else current_N)
        weight_N = self.importance.weight(log_ratio_N)
        loss_N = weight_N * self._estimate(log_p_N, log_q_N)
        require_finite(loss_N, rows, log_q_N)
        return loss_N, {"kl": gap_N, **weight_metrics(weight_N, log_ratio_N)}

    def _estimate(self, log_p_N: Tensor, log_q_N: Tensor) -> Tensor:
        if self.estimator == "k3":
            return k3(log_p_N, log_q_N)
        moving_N = k2(log_p_N, log_q_N)
        if self.estimator == "k2":
            return moving_N
        return moving_N + (k3(log_p_N, log_q_N) - moving_N).detach()
