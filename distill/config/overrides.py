"""`key=value` on the command line: read with Hydra's grammar, checked against the models before Hydra composes.

Every key that passed goes to Hydra as "set it, whether or not the file has it" (`++`), so Hydra has no reason to give
advice of its own about `+`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from distill.config.models import RunConfig
from distill.config.schema import (
    KeyPath,
    UnknownKey,
    annotation_at,
    describe,
    dotted,
    holds,
    holds_list,
    is_mapping,
    may_be_null,
    split,
    suggestion,
)
from distill.errors import ConfigError
from distill.registry import did_you_mean, nearest

COMMAND_LINE = "the command line"
GROUPS: Mapping[str, str] = {
    "student": "backend",
    "server": "program",
    "store": "name",
    "mesh": "transport",
    "objective": "name",
}
"""Section that is a Hydra group -> the key in it that names the implementation."""


@dataclass
class Overrides:
    """What the command line asked for."""

    choices: dict[str, str] = field(default_factory=dict[str, str])
    """Group -> implementation."""
    settings: list[str] = field(default_factory=list[str])
    """In Hydra's grammar, in order."""
    keys: set[KeyPath] = field(default_factory=set[KeyPath])

    def sets(self, key: KeyPath) -> bool:
        """The value at `key` was given here, by itself or as a part of something larger."""
        return any(key[: len(given)] == given for given in self.keys)


def read_overrides(
    arguments: Sequence[str], teachers: Iterable[str], data: int, has_section: Callable[[KeyPath], bool]
) -> Overrides:
    """`teachers` are the names, `data` the number of entries that the file has; `has_section`: it has a mapping there.

    Raises ConfigError.
    """
    result, names = Overrides(), set(teachers)
    for argument in arguments:
        written = _split(argument)
        _check_key(written, names, data)
        override, value = _parse(written)
        key = written.key
        if written.sign == "~":
            _check_removal(written)
            result.settings.append(f"~{dotted(key)}")
            continue
        group = str(key[0])
        if group in GROUPS and (len(key) == 1 or key[1:] == (GROUPS[group],)):
            result.choices[group] = _choice(argument, group, override)
            result.keys.add((group, GROUPS[group]))
            continue
        _check_shape(written, override.value(), laid_over=has_section(key))
        if holds_list(annotation_at(key)):  # Hydra would lay it over what is there, or fail to
            result.settings.append(f"++{dotted(key)}=null")
        result.settings.append(f"++{dotted(key)}={value}")
        result.keys.add(key)
    return result


@dataclass(frozen=True)
class _Written:
    """One argument, taken apart at its sign (`+`, `++`, `~` or none) and its first `=`."""

    argument: str
    sign: str
    key: KeyPath
    value: str | None


def _split(argument: str) -> _Written:
    text, equals, value = argument.partition("=")
    name = text.lstrip("+~")
    sign = text[: len(text) - len(name)]
    if sign not in ("", "+", "++", "~"):
        raise ConfigError(
            f"{COMMAND_LINE}: {argument!r} begins with {sign!r}", fix="+ adds a teacher, ~ removes a setting"
        )
    if not equals and sign != "~":
        raise ConfigError(f"{COMMAND_LINE}: {argument!r} is not key=value", fix=f"write {argument}=VALUE")
    if not name or not all(str(part) for part in split(name)):
        raise ConfigError(
            f"{COMMAND_LINE}: {argument!r} has an empty key", fix="write key=VALUE, as in trainer.steps=100"
        )
    return _Written(argument, sign, split(name), value if equals else None)


def _choice(argument: str, group: str, override: Override) -> str:
    value = override.value()
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{COMMAND_LINE}: {argument!r}: {group} takes the name of an implementation",
            why=f"it is chosen as a whole with {group}=NAME; {group}.{GROUPS[group]}=NAME means the same",
            fix=f"set its other settings one by one: {group}.KEY=VALUE",
        )
    return value


def _parse(written: _Written) -> tuple[Override, str | None]:
    """The override as Hydra reads it, and its value in Hydra's grammar."""
    argument, name = written.argument, dotted(written.key)
    value = None if written.value is None else _quoted(written.key, written.value)
    try:
        override = OverridesParser.create().parse_override(
            f"{written.sign}{name}" + ("" if value is None else f"={value}")
        )
    except HydraException as error:
        if not name.isascii():
            raise ConfigError(
                f"{COMMAND_LINE}: {argument!r}: a key here can hold ASCII characters only",
                fix="set it in the file",
            ) from error
        raise ConfigError(
            f"{COMMAND_LINE}: cannot read {argument!r}: {str(error).splitlines()[0]}",
            fix=f"put the value in quotes inside the shell's: '{name}=\"{written.value or ''}\"'",
        ) from error
    except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise ConfigError(f"{COMMAND_LINE}: the value of {name} is too large or too deep to be read") from error
    if override.is_sweep_override():
        raise ConfigError(
            f"{COMMAND_LINE}: {argument!r} holds several values",
            why="distill-run runs one configuration",
            fix=f"write a list as {name}=[{value}], and start one run for each value otherwise",
        )
    return override, value


def _check_removal(written: _Written) -> None:
    """What `~` cannot do, it must not seem to do."""
    key, name = written.key, dotted(written.key)
    if written.value is not None:
        raise ConfigError(f"{COMMAND_LINE}: {written.argument!r}: ~ removes, and takes no value", fix=f"write ~{name}")
    if isinstance(key[-1], int):
        raise ConfigError(
            f"{COMMAND_LINE}: {written.argument!r}: one entry of a list cannot be removed",
            why="the entries behind it would move, and other overrides name them by number",
            fix=f"write the whole list: {dotted(key[:-1])}=[...]",
        )
    if name in GROUPS or (len(key) == 2 and key[1] == GROUPS.get(str(key[0]))):
        raise ConfigError(
            f"{COMMAND_LINE}: {written.argument!r}: {key[0]} cannot be removed",
            why="a run has one of each: " + ", ".join(GROUPS),
            fix=f"choose another with {key[0]}=NAME, or remove one setting of the file with ~{key[0]}.KEY",
        )


def _check_shape(written: _Written, value: Any, *, laid_over: bool) -> None:
    """Hydra lays a mapping over the one that is there: an empty one changes nothing, and a list cannot be laid over.

    Where there is none, and there need not be one, an empty mapping asks for all of its defaults: `student.lora={}`.
    """
    annotation, name = annotation_at(written.key), dotted(written.key)
    if not is_mapping(annotation) or value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{COMMAND_LINE}: {name} must be {describe(annotation)}, and is {written.value or 'empty'}",
            fix=f"set what is below it: {name}.KEY=VALUE",
        )
    if not value and not laid_over and may_be_null(annotation):
        return
    empty = next(_empty_mappings(value, written.key), None)
    if empty is not None:
        raise ConfigError(
            f"{COMMAND_LINE}: {written.argument!r}: an empty mapping changes nothing",
            why="the mapping given here is laid over the one of the file, key by key",
            fix=f"remove what the file has with ~{dotted(empty)}.KEY",
        )


def _empty_mappings(value: Mapping[Any, Any], at: KeyPath) -> Iterator[KeyPath]:
    if not value:
        yield at
    for key, below in value.items():
        if isinstance(below, Mapping):
            yield from _empty_mappings(below, (*at, str(key)))


def _quoted(key: KeyPath, value: str) -> str:
    """Texts and paths need no quoting by the user: `student.model=~/a,b` means what it says."""
    try:
        annotation = annotation_at(key)
    except UnknownKey:
        return value
    if not holds(annotation, str, Path) or value in ("null", "") or value[0] in "'\"":
        return value
    if value[0] == "[" and holds_list(annotation):
        return value
    # Hydra reads backslashes as escapes only where a quote follows them.
    escaped = re.sub(r"(\\*)'", r"\1\1\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _check_key(written: _Written, teachers: set[str], data: int) -> None:
    key, argument = written.key, written.argument
    section = key[0]
    if section == "hydra" or "@" in str(section):
        raise ConfigError(
            f"{COMMAND_LINE}: {dotted(key)!r} is not a setting of a run",
            fix=did_you_mean(str(section), RunConfig.model_fields),
        )
    if section == "teachers" and len(key) > 1 and key[1] not in teachers:
        name = str(key[1])
        if written.sign != "+":
            guess = nearest(name, teachers)
            raise ConfigError(
                f"{COMMAND_LINE}: {dotted(key)}: there is no teacher {name!r}",
                fix=f"did you mean teachers.{guess}?"
                if guess
                else f"teachers: {', '.join(sorted(teachers))}; +{argument.lstrip('+~')} adds one",
            )
        teachers.add(name)
    if section == "data" and len(key) > 1 and not (isinstance(key[1], int) and key[1] < data):
        raise ConfigError(
            f"{COMMAND_LINE}: {dotted(key)}: there is no such entry of data",
            fix=f"the file has {data}, the first is data.0; data=[{{path: ...}}] replaces all of them",
        )
    try:
        annotation_at(key)
    except UnknownKey as unknown:
        word = str(unknown.path[-1])
        raise ConfigError(
            f"{COMMAND_LINE}: unknown key {dotted(key)}"
            + ("" if unknown.path == key else f" (at {dotted(unknown.path)})"),
            fix=suggestion(unknown.path[:-1], word, unknown.known),
        ) from None
