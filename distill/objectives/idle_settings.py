"""Settings that an objective's class takes, because code may call it so, and that do nothing in a run: refused."""

from __future__ import annotations

from dataclasses import fields

from distill.config.models import OutcomeConfig
from distill.errors import ConfigError
from distill.objectives.corrections import Correction, DecoupledPPO, IcePopPPO
from distill.objectives.divergence import JSD
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import refuse_ignored
from distill.protocols import Objective


def refuse_idle(objective: Objective, outcome: OutcomeConfig | None) -> None:
    """Raises ConfigError for the first of them that is not left at its default."""
    if isinstance(objective, JSD) and objective.beta in (0.0, 1.0):
        refuse_ignored(objective, ("scaled",), f"with beta={objective.beta:g}, which is a plain KL by itself")
    if not isinstance(objective, PolicyGradient):
        return
    _refuse_idle_of(objective.importance)
    if outcome is not None and outcome.mix == "advantage" and outcome.teacher_weight == 0:
        of_teachers = tuple(field.name for field in fields(objective) if field.name != "importance")
        refuse_ignored(
            objective, of_teachers, "with objective.outcome.teacher_weight=0: the advantage is the outcome's alone"
        )


def _refuse_idle_of(importance: Correction) -> None:
    """What needs a proximal policy pi between mu and p, of PPO and its kin: no part of a run tells one, so it is p."""
    if isinstance(importance, IcePopPPO) and importance.eps != IcePopPPO.eps:
        raise _no_effect("eps", importance, "remove it; decoupled_ppo with alpha has a pi of its own to clip against")
    if not isinstance(importance, DecoupledPPO):
        return
    if importance.alpha == 1.0:
        raise _no_effect("alpha=1", importance, "remove it, or set it below 1, which puts pi between mu and p")
    if importance.alpha is None and importance.eps != DecoupledPPO.eps:
        raise _no_effect("eps", importance, "set objective.importance.alpha below 1, or remove it")
    if importance.alpha == 0.0 and importance.cap is not None:
        raise ConfigError(
            "objective.importance.cap (decoupled_ppo): has no effect with alpha=0",
            why="pi is mu then, so pi/mu is 1 and below every cap",
            fix="remove it",
        )


def _no_effect(setting: str, importance: IcePopPPO | DecoupledPPO, fix: str) -> ConfigError:
    return ConfigError(
        f"objective.importance.{setting} ({importance.name}): has no effect",
        why="a batch is one optimiser step, so the proximal policy pi is the student itself: p/pi is 1, and nothing is "
        "clipped",
        fix=fix,
    )
