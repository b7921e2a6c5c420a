"""One YAML file as the user wrote it: its values, and on which line each key stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill.config.schema import KeyPath, dotted
from distill.errors import ConfigError
from distill.registry import nearest

MOST_VALUES = 20_000
"""Of a file, aliases written out. A run with a thousand teachers has a quarter of that."""


@dataclass(frozen=True)
class Document:
    """`values` keeps interpolations as text; `lines` counts from 1."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]

    def place(self, key: KeyPath) -> str:
        """`teachers.yaml:7`, or the bare file name for a key that it does not hold."""
        line = self.lines.get(key)
        return f"{self.path}:{line}" if line else str(self.path)

    def has_section(self, key: KeyPath) -> bool:
        """There is a mapping at `key`."""
        value: Any = self.values
        for part in key:
            value = value.get(part) if isinstance(value, dict) else None
        return isinstance(value, dict)


def find(path: Path) -> Path:
    """The YAML file that the user means: a file, or a folder that holds a teachers.yaml. Raises ConfigError."""
    path = path.expanduser().absolute()
    if path.is_dir():
        inside = path / "teachers.yaml"
        if inside.is_file():
            return inside
        raise ConfigError(f"{path} is a folder without a teachers.yaml", fix=_nearby(inside))
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is a pipe, a socket or a device", fix="a run is described by an ordinary file")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", fix=_nearby(path))
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path} is not a YAML file", fix="a run is described by a file whose name ends in .yaml")
    return path


def _nearby(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        above = next(parent for parent in path.parents if parent.is_dir())
        return f"the folder {folder} does not exist; the last one of it that does is {above}"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))
    guess = nearest(path.name, names)
    if guess:
        return f"did you mean {folder / guess}?"
    return f"YAML files in {folder}: {', '.join(names[:20])}" if names else f"there is no YAML file in {folder}"


def read(path: Path, *, may_be_empty: bool = False) -> Document:
    """Raises ConfigError for a syntax error, a duplicate key or a file that is not a mapping, with the line."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{_place(path, error)}: not valid YAML: {_problem(error)}", fix="check indentation, colons and quotes"
        ) from error
    except RecursionError as error:
        raise _too_deep(path) from error
    if node is None and may_be_empty:
        return Document(path, {}, {})
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} holds no settings", why="a run is a mapping: student, teachers, data, ...")
    lines: dict[KeyPath, int] = {}
    try:
        _walk(node, (), lines, path)
        values: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except RecursionError as error:
        raise _too_deep(path) from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{_place(path, error)}: {_problem(error)}") from error
    except ValueError as error:  # of PyYAML: a 13th month, thousands of digits
        raise ConfigError(f"{path} holds a number or a date that cannot be: {str(error).partition(';')[0]}") from error
    return Document(path, {str(key): value for key, value in values.items()}, lines)


def _walk(node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    lines.setdefault(at, node.start_mark.line + 1)
    if len(lines) > MOST_VALUES:
        raise ConfigError(
            f"{path} holds more than {MOST_VALUES} values",
            why="an alias (*name) counts as often as it is used, with everything below it",
            fix="put prompts into data files; use fewer aliases",
        )
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*at, index), lines, path)
    elif isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key: KeyPath = (*at, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str" and key_node.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(
                    f"{path}:{line}: the key {dotted(key)} is not a text for YAML",
                    why="YAML reads 1, no and null as a number, a truth value and nothing",
                    fix=f'put it in quotes: "{key_node.value}"',
                )
            if key in lines:
                raise ConfigError(
                    f"{path}:{line}: the key {dotted(key)} is given twice, first on line {lines[key]}",
                    why="one of the two would be ignored",
                    fix="keep one of them",
                )
            lines[key] = line
            _walk(value_node, key, lines, path)


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is nested too deeply to be read",
        why="a run has few levels; an alias (*name) that stands within what it names (&name) has no end",
    )


def _place(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{path}:{mark.line + 1}" if mark is not None else str(path)


def _problem(error: Exception) -> str:
    context, problem = getattr(error, "context", None), getattr(error, "problem", None)
    return " ".join(str(part) for part in (problem, context) if part) or str(error).splitlines()[0]
