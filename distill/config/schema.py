"""Questions about the shape of a configuration: which keys exist, what they hold, which of them are paths.

A key path is a tuple of names and list positions, written with dots for people: `data.0.teachers.math`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from distill.config.models import RunConfig
from distill.registry import nearest

KeyPath = tuple[str | int, ...]


class UnknownKey(Exception):
    """`path` ends with the first key that does not exist; `known` are the names that may stand there."""

    def __init__(self, path: KeyPath, known: tuple[str, ...]) -> None:
        super().__init__(dotted(path))
        self.path = path
        self.known = known


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def split(key: str) -> KeyPath:
    """The key path that a user wrote with dots, or with brackets for list positions: `data[0].path`."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def members(annotation: Any) -> list[Any]:
    """What a value may be: the parts of a union, without None and without pydantic's `Annotated`."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for each in get_args(annotation) for part in members(each)]
    return [] if annotation is type(None) else [annotation]


def _settings(annotation: Any) -> dict[str, Any] | None:
    """Name -> what it holds, where the value is a mapping of known settings: a model, or a dataclass."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: entry.annotation for name, entry in annotation.model_fields.items()}
    if not is_dataclass(annotation):
        return None
    hints = get_type_hints(annotation)
    return {field.name: hints[field.name] for field in fields(annotation)}


def tagged(annotation: Any) -> dict[str, Any]:
    """Name -> kind, where several kinds of settings may stand in one place and their `name` tells which it is."""
    kinds = members(annotation)
    if len(kinds) < 2:
        return {}
    names = {kind: (_settings(kind) or {}).get("name") for kind in kinds}
    return {tag: kind for kind, name in names.items() for tag in get_args(name)}


def tags_with(annotation: Any, settings: Iterable[str]) -> list[str]:
    """The names among those of `tagged` whose kind has all of these settings."""
    return [tag for tag, kind in tagged(annotation).items() if set(settings) <= set(_settings(kind) or {})]


def without_tags(path: KeyPath, root: Any) -> KeyPath:
    """`path` as a user has it: pydantic names the kind of settings in it wherever several may stand."""
    kept: list[str | int] = []
    annotation = root
    for key in path:
        if key not in tagged(annotation):
            kept.append(key)
        _, annotation, _ = _child(annotation, key)
    return tuple(kept)


def _is_fixed(kind: Any) -> bool:
    """A list of a fixed length."""
    return get_origin(kind) is tuple and get_args(kind)[-1] is not Ellipsis


def _child(annotation: Any, key: str | int) -> tuple[bool, Any, tuple[str, ...]]:
    """(does `key` exist below a value of this kind, what it holds, the names that may stand there)."""
    tags = tagged(annotation)
    if key in tags:
        return True, tags[str(key)], ()
    known: tuple[str, ...] = ()
    for kind in members(annotation):
        fields = _settings(kind)
        if fields is not None:
            if key in fields:
                return True, fields[str(key)], tuple(fields)
            if issubclass(kind, BaseModel) and kind.model_config.get("extra") == "allow":
                return True, Any, tuple(fields)
            known += tuple(fields)
        elif get_origin(kind) is dict:
            return True, get_args(kind)[1], ()
        elif _is_fixed(kind) and isinstance(key, int) and key < len(get_args(kind)):
            return True, get_args(kind)[key], ()
        elif (get_origin(kind) in (list, tuple) and isinstance(key, int) and not _is_fixed(kind)) or kind is Any:
            return True, (get_args(kind) or (Any,))[0], ()
    return False, None, known


def annotation_at(path: KeyPath, root: Any = RunConfig) -> Any:
    """What the value at `path` must be. Raises UnknownKey."""
    annotation = root
    for depth, key in enumerate(path):
        exists, annotation, known = _child(annotation, key)
        if not exists:
            raise UnknownKey(path[: depth + 1], known)
    return annotation


def holds(annotation: Any, *kinds: type) -> bool:
    """The value may be one of `kinds` itself (not a list or a mapping of it)."""
    return any(kind in members(annotation) for kind in kinds)


def is_mapping(annotation: Any) -> bool:
    """The value must be a mapping: of settings, or of names."""
    kinds = members(annotation)
    return bool(kinds) and all(_settings(kind) is not None or get_origin(kind) is dict for kind in kinds)


def may_be_null(annotation: Any) -> bool:
    """The value may be left out, as null."""
    if get_origin(annotation) is Annotated:
        return may_be_null(get_args(annotation)[0])
    return type(None) in get_args(annotation)


def holds_list(annotation: Any) -> bool:
    """The value may be a list."""
    return any(get_origin(kind) in (list, tuple) for kind in members(annotation))


def known_names(path: KeyPath, root: Any = RunConfig) -> tuple[str, ...]:
    """The names that may stand in the place of `path`'s last key, where the models say."""
    try:
        annotation = annotation_at(path[:-1], root)
    except UnknownKey:
        return ()
    return tuple(name for kind in members(annotation) for name in _settings(kind) or ())


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


def path_values(value: Any, annotation: Any = RunConfig, at: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text in the composed tree `value` that the models declare to be a path, with the key that holds it."""
    if isinstance(value, str):
        if holds(annotation, Path):
            yield at, value
        return
    entries: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, Mapping):
        entries = ((str(key), entry) for key, entry in value.items())
    elif isinstance(value, list):
        entries = iter(enumerate(value))
    for key, entry in entries:
        exists, below, _ = _child(annotation, key)
        if exists:
            yield from path_values(entry, below, (*at, key))


def describe(annotation: Any) -> str:
    """What a value must be, in words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    said: list[str] = []
    for kind in members(annotation):
        if get_origin(kind) in (list, tuple) and not _is_fixed(kind):
            said.append(f"a list of {_plural(get_args(kind)[0])}")
        elif _is_fixed(kind):
            said.append(f"a list of {len(get_args(kind))} {_plural(get_args(kind)[0])}")
        elif get_origin(kind) is dict:
            said.append(f"a mapping of names to {_plural(get_args(kind)[1])}")
        elif get_origin(kind) is Literal:
            said.append(f"one of {', '.join(map(str, get_args(kind)))}")
        else:
            said.append("a mapping of settings" if _settings(kind) is not None else words.get(kind, str(kind)))
    return " or ".join(dict.fromkeys(said))


def _plural(annotation: Any) -> str:
    kind = members(annotation)[0]
    if _settings(kind) is not None:
        return "settings"
    return {str: "names", float: "numbers", int: "whole numbers"}.get(kind, "values")
