"""Which teachers a row goes to, and with which weights.

The first that says something decides: the data entry's `teachers`; the row's own `teacher` or `teachers`; the rules of
`routing`, in their order; the teacher named like the row's domain; for a held-out row, the teachers of its domain in
training; `routing.default`. A row that nothing gives a teacher is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from distill.config import DataConfig, RoutingConfig, RuleConfig, TeacherConfig
from distill.config.fields import LEAST_WEIGHT, MOST_WEIGHT
from distill.errors import ConfigError, DistillError
from distill.registry import did_you_mean, load_target

Messages = list[dict[str, Any]]
Routes = Mapping[str, Mapping[str, float]]
"""Domain -> its teachers."""
_SHOWN = 80
"""Letters of a prompt in an error."""


@dataclass(frozen=True, slots=True)
class Row:
    """What rules are held against."""

    place: str
    domain: str
    text: str
    """Of the prompt, as `text_of` makes it."""
    values: Mapping[str, Any]
    """Column -> what the row has there."""

    def tags(self) -> list[str]:
        """Raises ConfigError where the column holds something else than texts."""
        tags = self.values.get("tags")
        if tags is None:
            return []
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise ConfigError(
                f"{self.place}: `tags` is not a list of texts, but {_shown(tags)}",
                why="a rule of routing asks for a tag",
                fix='write "tags": ["proof"]',
            )
        return tags

    def column(self, name: str) -> str:
        """Empty where the row has nothing there. Texts of a list, and what chat messages say, become lines."""
        found = self.values.get(name)
        if isinstance(found, list):
            texts = [part.get("content") if isinstance(part, Mapping) else part for part in found]
            return "\n".join(text for text in texts if isinstance(text, str))
        return "" if found is None or isinstance(found, Mapping) else str(found)


class Router:
    """The run's rules, ready to be applied. It counts the rows that each rule decided about.

    Raises ConfigError for a function that cannot be imported.
    """

    def __init__(self, routing: RoutingConfig, teachers: Mapping[str, TeacherConfig]) -> None:
        self._routing = routing
        self._teachers = teachers
        self._rules = [_compiled(index, rule) for index, rule in enumerate(routing.rules)]
        self._counts = [0] * len(self._rules)
        self.columns: set[str] = set()
        """Of all rows so far."""

    def teachers_of(
        self,
        source: DataConfig,
        place: str,
        domain: str,
        prompt: str | Messages,
        values: Mapping[str, Any],
        routes: Routes,
    ) -> dict[str, float]:
        """Teacher -> weight, of the row `values` at `place`. Raises ConfigError."""
        self.columns.update(map(str, values))
        if source.teachers is not None:
            return self._weights(source.teachers, place, "`teachers` of the data entry")
        own = _own(place, values)
        if own is not None:
            return self._weights(own, place, "`teacher`")
        row = Row(place, domain, text_of(prompt), values)
        for index, rule in enumerate(self._rules):
            named = rule.decide(row)
            if named is not None:
                self._counts[index] += 1
                return self._weights(named, place, rule.who)
        if domain in self._teachers:
            return self._weights(domain, place, "its domain")
        if domain in routes:
            return dict(routes[domain])
        if self._routing.default is not None:
            return self._weights(self._routing.default, place, "routing.default")
        raise self._unrouted(row)

    def check_columns(self) -> None:
        """Once all rows are read. Raises ConfigError for a rule about a column that no row has."""
        for rule in self._rules:
            if rule.column is not None and rule.column not in self.columns:
                raise ConfigError(
                    f"{rule.setting}.match.{'column' if rule.column != 'tags' else 'tag'}: no row has a column "
                    f"{rule.column!r}",
                    why="the rule would never fit a row",
                    fix=did_you_mean(rule.column, self.columns),
                )

    def notes(self) -> list[str]:
        """Rules that decided about no row."""
        return [
            f"{rule.setting}: decides about none of the rows of data"
            for rule, count in zip(self._rules, self._counts, strict=True)
            if not count
        ]

    def _weights(self, named: Any, place: str, who: str) -> dict[str, float]:
        return teacher_weights(named, self._teachers, place, who)

    def _unrouted(self, row: Row) -> ConfigError:
        rules = "; ".join(f"{index}: {rule.said}" for index, rule in enumerate(self._rules))
        tags = f", tags {row.values['tags']!r}" if row.values.get("tags") else ""
        return ConfigError(
            f"{row.place}: nothing says who teaches this row: no teacher is named like its domain {row.domain!r}"
            + (f", and none of routing.rules fits ({rules})" if rules else "")
            + f": prompt {_shown(row.text)}{tags}",
            why="no teacher is taken by guessing",
            fix="give the data entry its `teachers`, or each row a `teacher`; or add a rule to routing.rules, or name "
            f"the teacher of all other rows in routing.default; {did_you_mean(row.domain, self._teachers)}",
        )


@dataclass(frozen=True, slots=True)
class _Rule:
    setting: str
    """Its key."""
    said: str
    """What it asks for, for people."""
    who: str
    """Whose word it is when a wrong teacher is named."""
    column: str | None
    """The column that it cannot do without."""
    decide: Callable[[Row], Any]
    """Teachers as a configuration or a row names them; None: the next rule is to decide."""


def _compiled(index: int, rule: RuleConfig) -> _Rule:
    setting = f"routing.rules.{index}"
    if rule.call is not None:
        who = f"{setting}.call: {rule.call}"
        return _Rule(setting, f"call {rule.call}", who, None, _called(f"{setting}.call", rule.call))
    match, teachers = rule.match, rule.teachers
    assert match is not None and teachers is not None, "the checks of a configuration let nothing else through"
    expression = re.compile(match.regex) if match.regex is not None else None
    column = match.column or ("tags" if match.tag is not None else None)

    def decide(row: Row) -> Any:
        if match.domain is not None and row.domain != match.domain:
            return None
        if match.tag is not None and match.tag not in row.tags():
            return None
        if expression is not None:
            text = row.text if match.column is None else row.column(match.column)
            if expression.search(text) is None:
                return None
        return teachers

    said = ", ".join(f"{name} {value!r}" for name, value in match.model_dump(exclude_none=True).items())
    return _Rule(setting, said, f"{setting}.teachers", column, decide)


def _called(setting: str, target: str) -> Callable[[Row], Any]:
    function = router_function(setting, target)

    def decide(row: Row) -> Any:
        try:
            return function(MappingProxyType({**row.values, "domain": row.domain}))
        except DistillError:
            raise
        except Exception as error:  # code of the user's: anything may come out of it
            raise ConfigError(
                f"{row.place}: {setting}: {target} fails for this row: {type(error).__name__}: {error}",
                why=f"it was given the row's columns {sorted(map(str, row.values))} and its domain",
                fix="mend it; it may return None where the next rule is to decide",
            ) from error

    return decide


def router_function(setting: str, target: str) -> Callable[[Mapping[str, Any]], Any]:
    """The function `package.module:function`. Raises ConfigError, MissingDependency."""
    try:
        function = load_target(target, setting)
    except DistillError:
        raise
    except Exception as error:  # code of the user's: anything may come out of its import
        raise ConfigError(
            f"{setting}: {target} cannot be imported: {type(error).__name__}: {error}", fix="mend the module it is in"
        ) from error
    if not callable(function):
        raise ConfigError(f"{setting}: {target} is no function, but {type(function).__name__}")
    return function


def _own(place: str, values: Mapping[str, Any]) -> Any:
    """What the row says itself."""
    one, several = values.get("teacher"), values.get("teachers")
    if one is not None and several is not None:
        raise ConfigError(
            f"{place}: the row has both `teacher` and `teachers`",
            why="one of the two would be ignored",
            fix='keep one; either may hold a name, names, or names with weights, {"math": 0.8}',
        )
    return several if one is None else one


def teacher_weights(named: Any, teachers: Mapping[str, TeacherConfig], place: str, who: str) -> dict[str, float]:
    """Teacher -> weight, of a name, names, or names with weights. `who` says in an error whose word it is.

    A name without a weight has the teacher's own.
    """
    if isinstance(named, Mapping):
        # A Parquet struct has every field in every row: null means that the teacher is not named here.
        weights: dict[str, Any] = {str(name): weight for name, weight in named.items() if weight is not None}
    else:
        listed: list[Any] = (
            [named] if isinstance(named, str) else list(named) if isinstance(named, list | tuple) else []
        )
        twice = next((name for index, name in enumerate(listed) if name in listed[:index]), None)
        if twice is not None:
            raise ConfigError(
                f"{place}: {twice!r} is named twice ({who})",
                why="a teacher scores a sample once",
                fix=f'name it once, or give it another weight: {{"{twice}": 2.0}}',
            )
        weights = {str(name): teachers[name].weight if name in teachers else 1.0 for name in listed}
    if not weights:
        raise ConfigError(
            f"{place}: {who} is neither a name, nor names, nor names with weights, but {_shown(named)}",
            fix='write "math" or {"math": 0.8}',
        )
    for name, weight in weights.items():
        if name not in teachers:
            raise ConfigError(f"{place}: {name!r} is not one of the teachers ({who})", fix=did_you_mean(name, teachers))
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ConfigError(
                f"{place}: the weight of {name!r} must be a number between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, "
                f"and is {weight!r}",
                why="a step is summed up in float32: beyond these bounds one part of it drowns another",
                fix="leave out a teacher without weight",
            )
    return {name: float(weight) for name, weight in weights.items()}


def text_of(prompt: str | Messages) -> str:
    """The prompt, or what its messages say, one below another."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt if isinstance(message.get("content"), str))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
