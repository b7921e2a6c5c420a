"""`key=value` on the command line: read with Hydra's grammar, checked against the models before Hydra composes.

Every key that passed goes to Hydra as "set it, whether or not the file has it" (`++`), so Hydra has no reason to give
advice of its own about `+`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from distill.config.models import RunConfig
from distill.config.schema import KeyPath, UnknownKey, annotation_at, dotted, holds, split
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


def read_overrides(arguments: Sequence[str], teachers: Iterable[str], data: int) -> Overrides:
    """`teachers` are the names, `data` the number of entries that the file has. Raises ConfigError."""
    result, names = Overrides(), set(teachers)
    for argument in arguments:
        override, key, value = _parse(argument)
        _check_key(argument, override, key, names, data)
        group = dotted(key) if len(key) == 1 else str(key[0])
        is_choice = group in GROUPS and (len(key) == 1 or key[1:] == (GROUPS[group],))
        if is_choice and override.type is not OverrideType.DEL:
            result.choices[group] = _choice(argument, group, override)
            continue
        if override.type is OverrideType.DEL:
            if isinstance(key[-1], int):
                raise ConfigError(
                    f"{COMMAND_LINE}: {argument!r}: one entry of a list cannot be removed",
                    why="the entries behind it would move, and other overrides name them by number",
                    fix=f"write the whole list: {dotted(key[:-1])}=[...]",
                )
            result.settings.append(f"~{dotted(key)}")
            continue
        result.settings.append(f"++{dotted(key)}={value}")
        result.keys.add(key)
    return result


def _choice(argument: str, group: str, override: Override) -> str:
    value = override.value()
    if not isinstance(value, str):
        raise ConfigError(
            f"{COMMAND_LINE}: {argument!r}: {group} takes the name of an implementation",
            why=f"it is chosen as a whole with {group}=NAME; {group}.{GROUPS[group]}=NAME means the same",
            fix=f"set its other settings one by one: {group}.KEY=VALUE",
        )
    return value


def _parse(argument: str) -> tuple[Override, KeyPath, str]:
    """The override, its key, and its value in Hydra's grammar."""
    key_text, equals, value = argument.partition("=")
    if not equals and not argument.startswith("~"):
        raise ConfigError(f"{COMMAND_LINE}: {argument!r} is not key=value", fix=f"write {argument}=VALUE")
    key = split(key_text.lstrip("+~"))
    value = _quoted(key, value)
    try:
        override = OverridesParser.create().parse_override(f"{key_text}={value}" if equals else argument)
    except HydraException as error:
        raise ConfigError(
            f"{COMMAND_LINE}: cannot read {argument!r}: {str(error).splitlines()[0]}",
            fix=f"put the value in quotes inside the shell's: '{key_text}=\"{value}\"'",
        ) from error
    if override.is_sweep_override():
        raise ConfigError(
            f"{COMMAND_LINE}: {argument!r} holds several values",
            why="distill-run runs one configuration",
            fix=f"write a list as {key_text}=[{value}], and start one run for each value otherwise",
        )
    if override.package is not None or key[0] == "hydra":
        raise ConfigError(
            f"{COMMAND_LINE}: {key_text!r} is not a setting of a run",
            fix=did_you_mean(str(key[0]), RunConfig.model_fields),
        )
    return override, key, value


def _quoted(key: KeyPath, value: str) -> str:
    """Texts and paths need no quoting by the user: `student.model=~/a,b` means what it says."""
    try:
        annotation = annotation_at(key)
    except UnknownKey:
        return value
    if not holds(annotation, str, Path) or value in ("null", "") or value[0] in "'\"":
        return value
    # Hydra reads backslashes as escapes only where a quote follows them.
    escaped = re.sub(r"(\\*)'", r"\1\1\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _check_key(argument: str, override: Override, key: KeyPath, teachers: set[str], data: int) -> None:
    section = key[0]
    if section == "teachers" and len(key) > 1 and key[1] not in teachers:
        name = str(key[1])
        if override.type is not OverrideType.ADD:
            guess = nearest(name, teachers)
            raise ConfigError(
                f"{COMMAND_LINE}: {dotted(key)}: there is no teacher {name!r}",
                fix=f"did you mean teachers.{guess}?"
                if guess
                else f"teachers: {', '.join(sorted(teachers))}; +{argument} adds one",
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


def suggestion(parent: KeyPath, word: str, known: Sequence[str]) -> str:
    """The nearest known key as a dotted path, or the keys that may stand there."""
    if not known:
        return f"{dotted(parent)} is a single value: nothing can stand below it"
    guess = nearest(word, known)
    return (
        f"did you mean {dotted((*parent, guess))}?"
        if guess
        else f"keys of {dotted(parent) or 'a run'}: {', '.join(known)}"
    )
