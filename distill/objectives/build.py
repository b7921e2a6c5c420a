"""From the `objective` section of a configuration to an objective. Loads torch only with the objective it builds."""

from __future__ import annotations

from distill.config.explain import gather, nowhere
from distill.config.models import ObjectiveConfig
from distill.config.options import option_findings, read_options, settings_class
from distill.errors import ConfigError
from distill.protocols import Objective
from distill.types import Signal, SignalSpec, Support


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `config` names, with its settings checked.

    Raises ConfigError for an unknown name or setting, a value of the wrong type or range, and settings that would be
    ignored or would optimise nothing. Unknown settings and wrong types are listed all at once.
    """
    kind = settings_class(config.name)
    findings = option_findings(kind, config.options)
    if findings:
        raise gather(findings, nowhere)
    read = read_options(kind, config.options)
    objective = kind(**{option: getattr(read, option) for option in config.options})
    if not isinstance(objective, Objective):
        raise ConfigError(
            f"objective.name: {config.name!r} does not implement Objective",
            fix="give it `spec`, `contract` and `__call__`, as distill.protocols.Objective says",
        )
    _check_mixture(config.mixture, objective.spec)
    # here, because it loads torch
    from distill.objectives.idle_settings import refuse_idle
    from distill.objectives.outcome_mix import with_outcome

    mixed = with_outcome(objective, config.outcome)
    refuse_idle(objective, config.outcome)
    return mixed


def _check_mixture(mixture: str, spec: SignalSpec) -> None:
    """Raises ConfigError for a mixture of teachers that their signal does not tell."""
    if mixture == "geometric" and spec.signal is not Signal.FULL:
        raise ConfigError(
            "objective.mixture: geometric needs the full vocabulary",
            why="its normaliser is a sum over all tokens",
            fix="use a divergence with support=full; or mixture=weighted, which for reverse_kl has the same gradient; "
            "or mixture=arithmetic, which sampled tokens and support=student_topk tell too",
        )
    if mixture == "arithmetic" and spec.signal is Signal.TOPK and spec.support is not Support.STUDENT:
        raise ConfigError(
            f"objective.mixture: arithmetic needs support=full or student_topk, not {spec.support.value}",
            why="teachers that answer for tokens of their own choice do not tell one another's probabilities",
            fix="use support=student_topk, or mixture=weighted",
        )
