"""From the `objective` section of a configuration to an objective. Loads torch only with the objective it builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from distill import registry
from distill.config.models import ObjectiveConfig
from distill.errors import ConfigError
from distill.protocols import Objective
from distill.types import Signal, SignalSpec, Support


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `config` names, with its settings checked.

    Raises ConfigError for an unknown name or setting, a value of the wrong type or range, and settings that would be
    ignored or would optimise nothing.
    """
    kind: Any = registry.load("objective", config.name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ConfigError(
            f"objective.name: {config.name!r} is not a dataclass",
            why="the fields of an objective's class are its settings",
            fix="give the class as 'package.module:Class' and decorate it with @dataclass(frozen=True)",
        )
    known = [field.name for field in fields(kind) if field.init]
    for option in config.options:
        if option not in known:
            raise ConfigError(
                f"objective.{option}: {config.name} has no such setting", fix=registry.did_you_mean(option, known)
            )
    _require_plain(kind, config.options)
    try:
        objective: Any = TypeAdapter(kind).validate_python(config.options)
    except ValidationError as error:
        raise _refusal(("objective",), error) from error
    if not isinstance(objective, Objective):
        raise ConfigError(
            f"objective.name: {config.name!r} does not implement Objective",
            fix="give it `spec`, `contract` and `__call__`, as distill.protocols.Objective says",
        )
    _check_mixture(config.mixture, objective.spec)
    if config.outcome is None:
        return objective
    # here, because it loads torch
    from distill.objectives.outcome_mix import with_outcome

    return with_outcome(objective, config.outcome)


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


def _require_plain(kind: type, options: Mapping[str, Any]) -> None:
    """Numbers and truth values are what they are written as: no text or truth value passes for a number."""
    hints = get_type_hints(kind)
    for option, value in options.items():
        hint = hints[option]
        if {hint, *get_args(hint)} & {int, float, bool} and isinstance(value, int | float | bool | str):
            try:
                TypeAdapter(hint).validate_python(value, strict=True)
            except ValidationError as error:
                raise _refusal(("objective", option), error) from error


def _refusal(at: tuple[str, ...], error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    path = ".".join([*at, *(str(part) for part in first["loc"])])
    return ConfigError(f"{path}: {first['msg']}, got {first['input']!r}")
