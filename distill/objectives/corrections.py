"""What corrects a policy gradient for tokens that another distribution sampled: weights, gates and clips.

One class a method, its settings are its fields. Every method is a loss per token from log p of the sampled token (the
only input with a gradient), an advantage A and log mu; sg is a constant. A gate sets the weight of a token to 0; the
token still counts in the reduction's denominators. A ratio that overflows to infinity is capped or left out like any
other that is too large; where it is neither, the loss is infinite, which the objective refuses by name.

Legend: N response tokens. p student, mu the distribution that sampled the token, r = p/mu, pi the proximal policy of
decoupled PPO (p at an earlier optimiser step), R = exp(mean of log r over the sample's trained tokens).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.correction import (
    Correction,
    Sampled,
    SequenceCorrection,
    TokenWeight,
    inside,
    require_band,
    require_cap,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class NoCorrection(TokenWeight):
    """-A log p: exact only when mu = p."""

    name: Literal["none"] = "none"
    reads_sampler: ClassVar[bool] = False

    @property
    def note(self) -> str:
        return "only while mu = p"

    def weight(self, log_ratio_N: Tensor) -> Tensor:
        return torch.ones_like(log_ratio_N)


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(Correction):
    """-A r with the gradient through r: unbiased, and as noisy as the largest ratio. The loss of tinker's
    `importance_sampling`."""

    name: Literal["is"] = "is"

    def __call__(self, tokens: Sampled) -> tuple[Tensor, Tensor]:
        ratio_N = (tokens.log_p_N - tokens.behaviour_logp_N).exp()
        return -tokens.advantage_N * ratio_N, ratio_N.detach()


@dataclass(frozen=True, kw_only=True)
class TruncatedImportanceSampling(TokenWeight):
    """-sg[min(r, cap)] A log p. Source: Ionides 2008; verl, slime."""

    name: Literal["tis"] = "tis"
    cap: float = 2.0
    """As verl and slime have it."""

    def __post_init__(self) -> None:
        require_cap(self.name, self.cap)

    def weight(self, log_ratio_N: Tensor) -> Tensor:
        return log_ratio_N.exp().clamp(max=self.cap)


@dataclass(frozen=True, kw_only=True)
class Clamp(TokenWeight):
    """-sg[clip(r, low, high)] A log p: no token is left out, none counts for more than `high`."""

    name: Literal["clamp"] = "clamp"
    low: float = 0.2
    """Least weight of a token."""
    high: float = 5.0
    """The bounds of NeMo-RL's multi-teacher recipe."""

    def __post_init__(self) -> None:
        require_band(self.name, self.low, self.high)

    def weight(self, log_ratio_N: Tensor) -> Tensor:
        return log_ratio_N.exp().clamp(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class SAO(Correction):
    """f(r) = r where 1 - eps_low < r < 1 + eps_high, else 0, whatever the sign of A. Source: SAO, arXiv 2607.07508.

    The paper does not say where the gradient goes. detached: -sg[f] A log p. through: -f A log p with the gradient
    through f too, A r (1 + log p). surrogate: -f A through r, which has the gradient of detached and another value.
    """

    name: Literal["sao"] = "sao"
    eps_low: float = 0.3
    """How far below 1 a ratio may be."""
    eps_high: float = 5.0
    """The paper's band for reasoning; (0.8, 3.0) is its band for coding."""
    variant: Literal["detached", "through", "surrogate"] = "detached"
    """Where the gradient goes: through log p alone, through f as well, or through f in the place of log p."""

    def __post_init__(self) -> None:
        require_positive(self.name, eps_low=self.eps_low, eps_high=self.eps_high)

    @property
    def changes_objective(self) -> bool:
        return self.variant == "through"

    def __call__(self, tokens: Sampled) -> tuple[Tensor, Tensor]:
        ratio_N = tokens.log_ratio.exp()
        keep_N = (ratio_N > 1.0 - self.eps_low) & (ratio_N < 1.0 + self.eps_high)
        weight_N = ratio_N.masked_fill(~keep_N, 0.0)
        if self.variant == "detached":
            return -weight_N * tokens.advantage_N * tokens.log_p_N, weight_N
        live_N = tokens.live_log_ratio(keep_N).exp() * keep_N
        loss_N = -live_N * tokens.advantage_N
        return loss_N * tokens.log_p_N if self.variant == "through" else loss_N, weight_N


@dataclass(frozen=True, kw_only=True)
class IcePop(TokenWeight):
    """-sg[r] A log p where low <= r <= high, else 0. Source: IcePop (Ring-1T, arXiv 2510.18855); as the gate of
    distillation in MiMo-V2-Flash (arXiv 2601.02780)."""

    name: Literal["icepop"] = "icepop"
    low: float = 0.5
    """Tokens with a smaller ratio are left out."""
    high: float = 2.0
    """The band of Nemotron-Cascade 2 (arXiv 2603.19220), and of GLM-5 (arXiv 2602.15763)."""

    def __post_init__(self) -> None:
        require_band(self.name, self.low, self.high)

    def weight(self, log_ratio_N: Tensor) -> Tensor:
        ratio_N = log_ratio_N.exp()
        return ratio_N.masked_fill(~inside(ratio_N, self.low, self.high), 0.0)


DEFAULT = IcePop()
"""What the objectives take where nothing is said: exact on-policy, and no token far from it can do harm."""


def clipped_surrogate(tokens: Sampled, prox_logp_N: Tensor, eps: float, keep_N: Tensor) -> Tensor:
    """min(rho A, clip(rho, 1 - eps, 1 + eps) A), rho = p/pi: PPO's objective (arXiv 1707.06347), to be maximised.

    A constant where the clipped side is the smaller one, and 0 where not `keep_N`.
    """
    rho_N = (tokens.log_p_N.detach() - prox_logp_N).exp()
    clipped_N = rho_N.clamp(1.0 - eps, 1.0 + eps) * tokens.advantage_N
    live_N = keep_N & (rho_N * tokens.advantage_N <= clipped_N)
    # as in live_log_ratio: no exp() that may overflow where its gradient is not wanted
    moving_N = torch.where(live_N, tokens.log_p_N - prox_logp_N, 0.0).exp() * tokens.advantage_N
    return torch.where(live_N, moving_N, clipped_N * keep_N)


@dataclass(frozen=True, kw_only=True)
class IcePopPPO(Correction):
    """-sg[k] min(rho A, clip(rho) A) where low <= k <= high, else 0; k = pi/mu, rho = p/pi: IcePop around PPO's clip.

    Source: arXiv 2510.18855. With one optimiser step a batch pi = p, and this is `icepop`'s gradient.
    """

    name: Literal["icepop_ppo"] = "icepop_ppo"
    low: float = 0.5
    """Tokens with a smaller k are left out."""
    high: float = 2.0
    """Tokens with a larger k are left out."""
    eps: float = 0.2
    """PPO's clip range (arXiv 1707.06347)."""

    def __post_init__(self) -> None:
        require_band(self.name, self.low, self.high)
        require_positive(self.name, eps=self.eps)

    def __call__(self, tokens: Sampled) -> tuple[Tensor, Tensor]:
        prox_N = tokens.log_p_N.detach() if tokens.prox_logp_N is None else tokens.prox_logp_N
        ratio_N = (prox_N - tokens.behaviour_logp_N).exp()
        keep_N = inside(ratio_N, self.low, self.high)
        weight_N = ratio_N.masked_fill(~keep_N, 0.0)
        return -weight_N * clipped_surrogate(tokens, prox_N, self.eps, keep_N), weight_N


@dataclass(frozen=True, kw_only=True)
class _SequenceBand(SequenceCorrection, ABC):
    """1 for samples with low <= R <= high, 0 for the others."""

    # The band usual for geometric rejection sampling: a mean is far steadier than one token's ratio.
    low: Annotated[float, Field(description="Samples with a smaller R are left out.")] = 0.99
    high: Annotated[float, Field(description="Samples with a larger R are left out.")] = 1.01

    def __post_init__(self) -> None:
        require_band("seq_geo_mask", self.low, self.high)

    def gate(self, mean_log_ratio_N: Tensor) -> Tensor:
        return inside(mean_log_ratio_N.exp(), self.low, self.high).to(mean_log_ratio_N.dtype)


@dataclass(frozen=True, kw_only=True)
class SequenceGeometricMask(_SequenceBand):
    """-A log p for samples with low <= R <= high; the others are left out whole. Source: geometric rejection sampling
    in verl's rollout correction."""

    name: Literal["seq_geo_mask"] = "seq_geo_mask"


@dataclass(frozen=True, kw_only=True)
class SequenceGeometricMaskTIS(_SequenceBand):
    """-sg[min(r, cap)] A log p for samples with low <= R <= high; the others are left out whole."""

    name: Literal["seq_geo_mask_tis"] = "seq_geo_mask_tis"
    cap: float = 2.0
    """As in `tis`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_cap(self.name, self.cap)

    def beside(self, log_ratio_N: Tensor) -> Tensor:
        return log_ratio_N.exp().clamp(max=self.cap)


@dataclass(frozen=True, kw_only=True)
class SequenceGeometricTruncation(SequenceCorrection):
    """-sg[min(R, cap)] A log p: nothing is left out."""

    name: Literal["seq_geo_trunc"] = "seq_geo_trunc"
    cap: float = 2.0
    """As in `tis`."""

    def __post_init__(self) -> None:
        require_cap(self.name, self.cap)

    def gate(self, mean_log_ratio_N: Tensor) -> Tensor:
        return mean_log_ratio_N.exp().clamp(max=self.cap)


@dataclass(frozen=True, kw_only=True)
class _ProbabilityDifference(Correction, ABC):
    """-keep A r + kl_tau (log r)^2, with the gradient through r; keep is 0 where the probability has already moved far
    in the direction of A. The second term is on every token."""

    low: Annotated[
        float, Field(description="Fall of the probability p - mu beyond which a token is left out, as in prime-rl.")
    ] = 0.2
    kl_tau: Annotated[float, Field(description="Weight of the second term, as in prime-rl.")] = 1e-3

    def __post_init__(self) -> None:
        require_positive("prob_diff", low=self.low)
        if not self.kl_tau >= 0:
            raise ConfigError(f"objective.importance.kl_tau (prob_diff): must be at least 0, got {self.kl_tau}")

    @property
    def note(self) -> str:
        return f"plus {self.kl_tau:g} (log p/mu)^2" if self.kl_tau else ""

    @abstractmethod
    def keep(self, change_N: Tensor, advantage_N: Tensor) -> Tensor: ...

    def __call__(self, tokens: Sampled) -> tuple[Tensor, Tensor]:
        keep_N = self.keep(tokens.log_p_N.detach().exp() - tokens.behaviour_logp_N.exp(), tokens.advantage_N)
        ratio_N = tokens.live_log_ratio(keep_N).exp() * keep_N
        distance_N = (tokens.log_p_N - tokens.behaviour_logp_N).square()
        return -tokens.advantage_N * ratio_N + self.kl_tau * distance_N, ratio_N.detach()


@dataclass(frozen=True, kw_only=True)
class ProbabilityDifference(_ProbabilityDifference):
    """keep = 0 where A > 0 and p - mu > high, or A <= 0 and p - mu < -low. Source: the default loss of prime-rl."""

    name: Literal["prob_diff_rl"] = "prob_diff_rl"
    high: float = 0.2
    """Rise of the probability beyond which a token is left out, as in prime-rl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self.name, high=self.high)

    def keep(self, change_N: Tensor, advantage_N: Tensor) -> Tensor:
        return torch.where(advantage_N > 0, change_N <= self.high, change_N >= -self.low)


@dataclass(frozen=True, kw_only=True)
class ProbabilityDifferenceOneSided(_ProbabilityDifference):
    """keep = 0 where p - mu < -low, whatever the sign of A. Source: the distillation loss of prime-rl, whose A is
    log q - log p as it is, so with `advantage_clip: null`."""

    name: Literal["prob_diff_refkl"] = "prob_diff_refkl"

    def keep(self, change_N: Tensor, advantage_N: Tensor) -> Tensor:
        return change_N >= -self.low


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(Correction):
    """-sg[w] min(rho A, clip(rho, 1 - eps, 1 + eps) A), w = pi/mu, rho = p/pi. Source: AReaL, arXiv 2505.24298.

    pi is `TokenRows.prox_logp_N`, else the student as it is now. With `alpha` it is interpolated instead:
    log pi = log mu + alpha (log p - log mu), constant.
    """

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    eps: float = 0.2
    """PPO's clip range (arXiv 1707.06347)."""
    cap: float | None = None
    """Tokens with w above it are left out; None keeps all."""
    alpha: float | None = None
    """Share of the way from mu to p; 0 is mu, 1 is p."""

    def __post_init__(self) -> None:
        require_positive(self.name, eps=self.eps)
        if self.cap is not None:
            require_cap(self.name, self.cap)
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"objective.importance.alpha ({self.name}): must be between 0 and 1, got {self.alpha}")

    def prox_logp(self, tokens: Sampled) -> Tensor:
        """log pi (N,), constant."""
        if self.alpha is not None:
            return tokens.behaviour_logp_N + self.alpha * tokens.log_ratio
        return tokens.log_p_N.detach() if tokens.prox_logp_N is None else tokens.prox_logp_N

    def __call__(self, tokens: Sampled) -> tuple[Tensor, Tensor]:
        prox_N = self.prox_logp(tokens)
        ratio_N = (prox_N - tokens.behaviour_logp_N).exp()
        keep_N = ratio_N <= (torch.inf if self.cap is None else self.cap)
        weight_N = ratio_N.masked_fill(~keep_N, 0.0)
        return -weight_N * clipped_surrogate(tokens, prox_N, self.eps, keep_N), weight_N


def _by_name(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict) or "name" not in value:
        raise PydanticCustomError("no_name", "a name, or a mapping of `name` and settings")
    return value


_ByName = Annotated[
    NoCorrection
    | ImportanceSampling
    | TruncatedImportanceSampling
    | Clamp
    | SAO
    | IcePop
    | IcePopPPO
    | SequenceGeometricMask
    | SequenceGeometricMaskTIS
    | SequenceGeometricTruncation
    | ProbabilityDifference
    | ProbabilityDifferenceOneSided
    | DecoupledPPO,
    Field(discriminator="name"),
]
_WeightByName = Annotated[NoCorrection | TruncatedImportanceSampling | Clamp | IcePop, Field(discriminator="name")]


def _names(union: Any) -> Any:
    """The names of a union of corrections, as a type."""
    return Literal[tuple(kind.name for kind in get_args(get_args(union)[0]))]


Importance = Annotated[_ByName, BeforeValidator(_by_name, json_schema_input_type=_names(_ByName) | _ByName)]
"""A correction in a configuration: its name alone, or a mapping of `name` and its settings."""

WeightOnly = Annotated[
    _WeightByName, BeforeValidator(_by_name, json_schema_input_type=_names(_WeightByName) | _WeightByName)
]
"""One of those that only weigh tokens, for losses that are no policy gradient."""
