"""What every off-policy correction is made of: its inputs, the three kinds, the checks of its bounds.

Legend: N response tokens. p student, mu the distribution that sampled the token, r = p/mu, R = exp(mean of log r over
the sample's trained tokens).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from distill.errors import ConfigError, StudentError
from distill.objectives.rows import TokenRows, first


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Sampled tokens, each (N,). Only `log_p_N` carries a gradient."""

    log_p_N: Tensor
    advantage_N: Tensor
    behaviour_logp_N: Tensor
    """log mu."""
    prox_logp_N: Tensor | None = None
    """log pi; None: the student as it is now."""
    gate_N: Tensor | None = None
    """What `SequenceCorrection.gate` found for the token's sample."""

    @property
    def log_ratio(self) -> Tensor:
        """log r, constant."""
        return self.log_p_N.detach() - self.behaviour_logp_N

    def live_log_ratio(self, keep_N: Tensor) -> Tensor:
        """log r with its gradient where `keep_N`, and a constant 0 elsewhere: an infinite exp() there would turn the
        gradient of a token that is left out into NaN."""
        return torch.where(keep_N, self.log_p_N - self.behaviour_logp_N, 0.0)


class Correction(ABC):
    """Base of the methods. Frozen dataclasses; `name` chooses the class in a configuration."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    reads_sampler: ClassVar[bool] = True
    """log mu is used, so it must be a number."""

    @property
    def changes_objective(self) -> bool:
        """The expected gradient is another one, even where mu = p."""
        return False

    @property
    def note(self) -> str:
        """What a contract has to add."""
        return ""

    @abstractmethod
    def __call__(self, tokens: Sampled) -> tuple[Tensor, Tensor]:
        """(loss (N,), differentiable; the constant weight (N,) in it, 0 exactly where the token is left out)."""


class TokenWeight(Correction, ABC):
    """The loss is -sg[w] A log p with a weight w from the token's own ratio."""

    @abstractmethod
    def weight(self, log_ratio_N: Tensor) -> Tensor: ...

    def __call__(self, tokens: Sampled) -> tuple[Tensor, Tensor]:
        weight_N = self.weight(tokens.log_ratio)
        return -weight_N * tokens.advantage_N * tokens.log_p_N, weight_N


class SequenceCorrection(Correction, ABC):
    """A correction whose weight depends on all trained tokens of the sample."""

    @abstractmethod
    def gate(self, mean_log_ratio_N: Tensor) -> Tensor:
        """The weight that the sample's log R, given at each of its tokens, earns them."""

    def __call__(self, tokens: Sampled) -> tuple[Tensor, Tensor]:
        assert tokens.gate_N is not None, "the objective's condition() sets the gate"
        weight_N = tokens.gate_N * self.beside(tokens.log_ratio)
        return -weight_N * tokens.advantage_N * tokens.log_p_N, weight_N

    def beside(self, log_ratio_N: Tensor) -> Tensor:
        """A further weight of the token's own."""
        return torch.ones_like(log_ratio_N)


def require_bounded(loss_N: Tensor, weight_N: Tensor, tokens: Sampled, rows: TokenRows) -> None:
    """Raises StudentError, naming the row, for a loss that is no number because its weight is too large."""
    bad_N = ~loss_N.detach().isfinite() & (weight_N > 1)  # log p and A are finite there
    if not bool(bad_N.any()):
        return
    row = first(bad_N)
    place = rows.describe(row)
    log_p, log_mu = float(tokens.log_p_N[row].detach()), float(tokens.behaviour_logp_N[row])
    raise StudentError(
        f"{place}: the importance weight p/mu of the sampled token overflows: log p is {log_p:.4g} and log mu "
        f"{log_mu:.4g}, so the log ratio is {log_p - log_mu:.4g}",
        why="the objective's correction puts no bound on the weight, and this one leaves no finite loss",
        fix="use one that does: objective.importance=tis caps it, icepop leaves the token out; a ratio like this says "
        "that another distribution sampled the token: compare rollout.temperature, top_p and trainer.max_staleness",
        **place.blame,
    )


def require_band(kind: str, low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high or low == high:
        raise ConfigError(
            f"objective.importance ({kind}): [{low}, {high}] must have 1 inside",
            why="a token that the present student sampled has the ratio 1 and must be kept",
        )


def require_cap(kind: str, cap: float) -> None:
    if not cap >= 1:
        raise ConfigError(
            f"objective.importance.cap ({kind}): must be at least 1, got {cap}",
            why="a token that the present student sampled has the ratio 1, and must count whole",
        )


def require_positive(kind: str, **settings: float) -> None:
    for name, value in settings.items():
        if not value > 0:
            raise ConfigError(f"objective.importance.{name} ({kind}): must be above 0, got {value}")


def inside(ratio_N: Tensor, low: float, high: float) -> Tensor:
    return (ratio_N >= low) & (ratio_N <= high)
