"""Checks of `routing`, and of what a teacher alone reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from distill import registry
from distill.config.explain import Finding
from distill.config.models import RunConfig
from distill.config.routing import GROUP_MARK, PROMPT, MatchConfig, RuleConfig, group_name
from distill.config.schema import KeyPath, dotted

TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
LEAST_SHARE = 1e-3
"""Of a group in `routing.mix`. Less is a prompt in thousands: nobody could tell it from none."""


def _rules_are_complete(config: RunConfig) -> Iterator[Finding]:
    for index, rule in enumerate(config.routing.rules):
        yield from _rule(("routing", "rules", index), rule)


def _rule(at: KeyPath, rule: RuleConfig) -> Iterator[Finding]:
    name = dotted(at)
    if (rule.match is None) == (rule.call is None):
        said = "neither `match` nor `call`" if rule.match is None else "both `match` and `call`"
        yield (
            at,
            f"{name} has {said}",
            "write {match: {domain: math}, teachers: [math]}, or {call: package.module:name}",
        )
        return
    if rule.call is not None:
        if rule.teachers is not None:
            yield (
                (*at, "teachers"),
                f"{name}.teachers has no effect: what {rule.call} returns decides",
                "remove it, or give the rule a `match` in place of `call`",
            )
        if not TARGET.fullmatch(rule.call):
            yield (
                (*at, "call"),
                f"{name}.call: {rule.call!r} does not say where a function is",
                "write my_package.my_module:name",
            )
        return
    if rule.teachers is None:
        yield at, f"{name} has no `teachers`", "name those of the rows that match"
    if rule.match is not None:
        yield from _match((*at, "match"), rule.match)


def _match(at: KeyPath, match: MatchConfig) -> Iterator[Finding]:
    if match.domain is match.tag is match.column is match.regex is None:
        fix = "give it a domain, a tag or a regex; routing.default is for the rows that nothing else fits"
        yield at, f"{dotted(at)} is empty, so it fits every row", fix
    if match.column is not None and match.regex is None:
        yield (
            (*at, "column"),
            f"{dotted(at)}.column has no effect without regex",
            "give the regular expression to look for in that column, or remove it",
        )
    if match.regex is not None:
        try:
            re.compile(match.regex)
        except re.error as error:
            yield (
                (*at, "regex"),
                f"{dotted(at)}.regex: {match.regex!r} is no regular expression: {error}",
                "write it in single quotes, so that YAML leaves backslashes as they are",
            )


def _default_is_a_teacher(config: RunConfig) -> Iterator[Finding]:
    default = config.routing.default
    if default is not None and default not in config.teachers:
        yield (
            ("routing", "default"),
            f"routing.default is {default!r}, which is not one of the teachers",
            registry.did_you_mean(default, config.teachers),
        )


def _routing_has_rows(config: RunConfig) -> Iterator[Finding]:
    routing = config.routing
    if not all(source.teachers is not None for source in (*config.data, *config.evaluation.data)):
        return
    for name in ("rules", "default"):
        if getattr(routing, name):
            yield (
                ("routing", name),
                f"routing.{name} has no effect: every entry of data gives its `teachers`",
                "remove it, or take `teachers` out of the entries whose rows it is to route",
            )


def _mix_can_be_met(config: RunConfig) -> Iterator[Finding]:
    """Which groups of prompts there are is known once the rows are read."""
    mix, key = config.routing.mix, ("routing", "mix")
    if mix is None:
        return
    if not mix:
        yield key, "routing.mix is empty", "name the share of each teacher, or remove it"
    seen: dict[str, str] = {}
    for name, share in mix.items():
        parts = name.split(GROUP_MARK)
        unknown = [part for part in parts if part not in config.teachers]
        if unknown:
            yield (
                (*key, name),
                f"routing.mix names {unknown[0]!r}, which is not one of the teachers",
                registry.did_you_mean(unknown[0], config.teachers),
            )
        same = seen.setdefault(group_name(parts), name)
        if same != name:
            yield (*key, name), f"routing.mix has shares for {same!r} and for {name!r}, the same teachers", "name one"
        if share < LEAST_SHARE * sum(mix.values()):
            yield (
                (*key, name),
                f"routing.mix.{name} is {share:g} of {sum(mix.values()):g}, less than {LEAST_SHARE:g} of all prompts",
                "give it a larger share, or take its prompts out of the data",
            )
    if config.rollout.epochs is not None:
        yield (
            ("rollout", "epochs"),
            f"rollout.epochs is {config.rollout.epochs}, and with routing.mix there is no epoch: some prompts come "
            "more often than others",
            "remove one of the two",
        )


def _contexts_say_something(config: RunConfig) -> Iterator[Finding]:
    for name, teacher in config.teachers.items():
        context, key = teacher.context, ("teachers", name, "context")
        if context is None:
            continue
        if context.system is None and context.template is None:
            yield key, f"{dotted(key)} is empty", "give it a `system` text or a `template`, or remove it"
        if context.template is None:
            continue
        try:
            names = context.names()
        except ValueError as error:
            yield (
                (*key, "template"),
                f"{dotted(key)}.template cannot be filled in: {error}",
                "columns stand in braces, {answer}; braces of the text itself are doubled",
            )
            continue
        if PROMPT not in names:
            yield (
                (*key, "template"),
                f"{dotted(key)}.template has no {{prompt}}",
                "the teacher would not read what the student was asked: write {prompt} where that belongs",
            )


ROUTING_CHECKS: tuple[Callable[[RunConfig], Iterable[Finding]], ...] = (
    _rules_are_complete,
    _default_is_a_teacher,
    _routing_has_rows,
    _mix_can_be_met,
    _contexts_say_something,
)
