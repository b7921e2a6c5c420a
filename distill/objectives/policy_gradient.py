"""Distillation from the log-probability of the sampled token alone.

Legend: N response tokens, V common vocabulary. p student, q teacher, mu the distribution that sampled the token y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.rows import TokenRows, refuse_ignored, require_finite, require_teacher
from distill.protocols import Contract
from distill.types import Signal, SignalSpec


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """-sg[w] sg[A] log p(y), A = clip(log q(y) - log p(y)), w a gated importance weight p/mu.

    With y sampled from p, the expected gradient of -(log q - log p) log p is that of KL(p || q). The weight corrects
    for a mu that is older or hotter than p. Source: Thinking Machines' on-policy distillation; MiMo-V2-Flash
    (arXiv 2601.02780) and MOPD (arXiv 2606.30406).
    """

    importance: Literal["none", "tis", "band"] = "band"
    """none: w = 1, exact only when mu = p. tis: w = min(p/mu, tis_cap). band: w = p/mu inside [band_low, band_high],
    else 0: the token is left out, although it still counts in the token mean."""
    tis_cap: float = 2.0
    """Largest weight of `tis`: truncated importance sampling (Ionides 2008), with the cap that verl and slime use."""
    band_low: float = 0.5
    band_high: float = 2.0
    """The band of Nemotron-Cascade 2 (arXiv 2603.19220)."""
    advantage_clip: float | None = 5.0
    """Largest |A| in nats, as MOPD clips it (arXiv 2606.30406); None for no clipping. Clipping biases the gradient only
    at tokens whose probability the two models see differently by more than a factor of exp(advantage_clip)."""

    def __post_init__(self) -> None:
        if self.importance != "tis":
            refuse_ignored(self, ("tis_cap",), f"with importance={self.importance}")
        if self.importance != "band":
            refuse_ignored(self, ("band_low", "band_high"), f"with importance={self.importance}")
        if not self.tis_cap > 0:
            raise ConfigError(
                f"objective.tis_cap: must be above 0, got {self.tis_cap}", why="0 would weigh every token 0"
            )
        if not 0 <= self.band_low <= 1 <= self.band_high or self.band_low == self.band_high:
            raise ConfigError(
                f"objective.band_low, band_high: [{self.band_low}, {self.band_high}] must have 1 inside",
                why="a token that is sampled by the present student has weight 1 and must be kept",
            )
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise ConfigError(
                f"objective.advantage_clip: must be above 0, got {self.advantage_clip}",
                why="an advantage clipped to 0 optimises nothing",
                fix="objective.advantage_clip=null turns clipping off",
            )

    @property
    def spec(self) -> SignalSpec:
        return SignalSpec(Signal.SAMPLED)

    @property
    def contract(self) -> Contract:
        return Contract(
            optimises="KL(p || q) in expectation over sampled tokens",
            depends_on_action=True,
            source="arXiv 2601.02780; arXiv 2606.30406",
        )

    def __call__(self, rows: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (N,) and metric `kl` (N,): the k1 estimate log p(y) - log q(y), whose mean over y ~ p is KL(p || q).

        Raises TeacherError or StudentError, naming the row and the rule, for a row whose loss is not a finite number.
        """
        log_q_N = require_teacher(rows, "teacher_logp_N")
        log_p_N = rows.student_logits_NV.log_softmax(-1).gather(-1, rows.tokens_N[:, None]).squeeze(-1)
        current_N = log_p_N.detach()
        advantage_N = log_q_N - current_N
        if self.advantage_clip is not None:
            advantage_N = advantage_N.clamp(-self.advantage_clip, self.advantage_clip)
        loss_N = -self._weight(current_N, rows.behaviour_logp_N.to(current_N.dtype)) * advantage_N * log_p_N
        require_finite(loss_N, rows, log_q_N)
        return loss_N, {"kl": current_N - log_q_N}

    def _weight(self, current_N: Tensor, behaviour_N: Tensor) -> Tensor:
        if self.importance == "none":
            return torch.ones_like(current_N)
        # a ratio that overflows to infinity is capped or left out like any other that is too large; NaN stays NaN
        ratio_N = (current_N - behaviour_N).exp()
        if self.importance == "tis":
            return ratio_N.clamp(max=self.tis_cap)
        return ratio_N.masked_fill((ratio_N < self.band_low) | (ratio_N > self.band_high), 0.0)
