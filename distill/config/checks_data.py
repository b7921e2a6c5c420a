"""Checks of teachers, data, weights and domains: who is named where, and whether it can have any effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from distill import registry
from distill.config.explain import Finding
from distill.config.fields import LEAST_WEIGHT, MOST_WEIGHT, NAME
from distill.config.models import DataConfig, RunConfig
from distill.config.schema import KeyPath, dotted


def _sources(config: RunConfig) -> Iterator[tuple[KeyPath, DataConfig]]:
    yield from ((("data", index), source) for index, source in enumerate(config.data))
    yield from ((("evaluation", "data", index), source) for index, source in enumerate(config.evaluation.data))


def _namings(config: RunConfig) -> Iterator[tuple[KeyPath, list[str] | dict[str, float]]]:
    """Every `teachers` that is given, with its key."""
    for at, source in _sources(config):
        if source.teachers is not None:
            yield (*at, "teachers"), source.teachers
    for index, rule in enumerate(config.routing.rules):
        if rule.teachers is not None:
            yield ("routing", "rules", index, "teachers"), rule.teachers


def _named_teachers_exist(config: RunConfig) -> Iterator[Finding]:
    for name in config.teachers:
        if not NAME.fullmatch(name):
            key = ("teachers", name)
            yield (
                key,
                f"the teacher's name {name!r} holds other characters than letters, digits, '_', '.' and '-'",
                "rename it",
            )
    for key, named in _namings(config):
        if not named:
            yield key, f"{dotted(key)} is empty", "name a teacher, or leave the key out"
        weights = named if isinstance(named, dict) else {}
        for position, name in enumerate(named):
            place: KeyPath = (*key, name if weights else position)
            if name in list(named)[:position]:
                yield (
                    place,
                    f"{dotted(key)} names {name!r} twice",
                    f"name it once; a mapping gives it another weight: {{{name}: 2.0}}",
                )
            elif name not in config.teachers:
                yield (
                    place,
                    f"{dotted(key)} names {name!r}, which is not one of the teachers",
                    registry.did_you_mean(name, config.teachers),
                )
            elif weights and not weights[name] > 0:
                yield (
                    place,
                    f"{dotted(place)} must be more than 0, and is {weights[name]:g}",
                    "leave out a teacher without weight",
                )


def _every_teacher_has_work(config: RunConfig) -> Iterator[Finding]:
    """Only where the configuration tells: rows may name teachers and domains themselves."""
    used: set[str] = set()
    for source in config.data:
        if source.teachers is not None:
            used |= set(source.teachers)
        else:
            return
    for name in config.teachers:
        if name not in used:
            yield (
                ("teachers", name),
                f"teachers.{name} is named by no entry of data",
                "name it in the `teachers` of an entry of data, or remove it",
            )


def _weights_are_used(config: RunConfig) -> Iterator[Finding]:
    """Only where the configuration tells: rows may name teachers with weights, or without."""
    if not all(isinstance(source.teachers, dict) for source in config.data):
        return
    for name, teacher in config.teachers.items():
        if teacher.weight != type(teacher).model_fields["weight"].default:
            yield (
                ("teachers", name, "weight"),
                f"teachers.{name}.weight has no effect: every entry of data gives its teachers weights of its own",
                "remove it, or name the teacher without a weight",
            )


def _domains_are_names(config: RunConfig) -> Iterator[Finding]:
    for at, source in _sources(config):
        if source.domain is not None and not NAME.fullmatch(source.domain):
            yield (
                (*at, "domain"),
                f"{dotted(at)}.domain is {source.domain!r}, which is more than letters, digits, '_', '.' and '-'",
                "rename it: it becomes a part of the metrics' names",
            )


def _weights_can_be_felt(config: RunConfig) -> Iterator[Finding]:
    """A weight of 0 is left to others: it means something, or is refused already."""
    for key, weight in _weights(config):
        if 0 < weight < LEAST_WEIGHT or weight > MOST_WEIGHT:
            yield (
                key,
                f"{dotted(key)} must be between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, and is {weight:g}",
                "bring the weights nearer to 1: a step is summed up in float32, where one part would drown another",
            )


def _weights(config: RunConfig) -> Iterator[tuple[KeyPath, float]]:
    """Every weight of the configuration."""
    yield from ((("teachers", name, "weight"), teacher.weight) for name, teacher in config.teachers.items())
    for key, named in _namings(config):
        if isinstance(named, dict):
            yield from (((*key, name), weight) for name, weight in named.items())
    objective, at = config.objective, ("objective",)
    yield from (((*at, "domain_weights", name), weight) for name, weight in (objective.domain_weights or {}).items())
    if objective.outcome is not None:
        yield from (((*at, "outcome", name), getattr(objective.outcome, name)) for name in ("weight", "teacher_weight"))


def _domain_weights_are_of_domains(config: RunConfig) -> Iterator[Finding]:
    weights, key = config.objective.domain_weights, ("objective", "domain_weights")
    if weights is None:
        return
    if config.objective.reduction != "domain_balanced":
        yield (
            key,
            f"objective.domain_weights has no effect with objective.reduction={config.objective.reduction}",
            "set objective.reduction=domain_balanced, or remove it",
        )
    if not any(weights.values()):
        yield key, "objective.domain_weights leaves every domain out", "give a domain a weight above 0"
    domains = {source.domain for source in config.data}
    if None in domains:
        # rows may name domains themselves
        return
    known = {str(domain) for domain in domains}
    for name in weights:
        if name not in known:
            what = f"objective.domain_weights names {name!r}, which is not a domain of data"
            yield (*key, name), what, registry.did_you_mean(name, known)
    for name in sorted(known - set(weights)):
        yield key, f"objective.domain_weights has none for the domain {name!r}", "give it one; 0 leaves it out"


def _a_mixture_has_several_teachers(config: RunConfig) -> Iterator[Finding]:
    """Only where the configuration tells: rows may name teachers themselves."""
    alone = all(source.teachers is not None and len(source.teachers) < 2 for source in config.data)
    if config.objective.mixture != "weighted" and (alone or len(config.teachers) == 1):
        yield (
            ("objective", "mixture"),
            f"objective.mixture is {config.objective.mixture}, but every sample has a single teacher",
            "name several `teachers` in an entry of data, or remove it",
        )


def _evaluation_is_complete(config: RunConfig) -> Iterator[Finding]:
    evaluation = config.evaluation
    if not evaluation.data:
        for name in ("every", "limit", "kl", "max_new_tokens"):
            if getattr(evaluation, name):
                yield (
                    ("evaluation", name),
                    f"evaluation.{name} is given, but evaluation.data is empty",
                    "name held-out prompts there",
                )
    domains = {source.domain for source in config.data}
    if None in domains or config.routing.rules or config.routing.default:
        return
    known = {str(domain) for domain in domains} | set(config.teachers)
    for index, source in enumerate(evaluation.data):
        if source.domain is not None and source.domain not in known and source.teachers is None:
            yield (
                ("evaluation", "data", index, "domain"),
                f"evaluation.data.{index}.domain is {source.domain!r}, which is neither a domain of data nor a teacher",
                registry.did_you_mean(source.domain, known) + "; or give the entry its `teachers`",
            )


DATA_CHECKS: tuple[Callable[[RunConfig], Iterable[Finding]], ...] = (
    _named_teachers_exist,
    _every_teacher_has_work,
    _weights_are_used,
    _evaluation_is_complete,
    _domains_are_names,
    _weights_can_be_felt,
    _domain_weights_are_of_domains,
    _a_mixture_has_several_teachers,
)
