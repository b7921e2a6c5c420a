"""The files of the user's own that a defaults list names, looked at before Hydra reads them.

Hydra reads any YAML file to its end, whatever that costs, and says of a wrong one neither the line nor the kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distill.config.document import Document, read
from distill.errors import ConfigError

_WORDS = ("override ", "optional ")


def check_included(document: Document, choices: Mapping[str, str]) -> None:
    """Read every file that `document` includes, directly or not; `choices` are group -> name. Raises ConfigError."""
    roots = [document.path.parent, *_folders(document.values.get("hydra"))]
    chosen = [{group: name} for group, name in choices.items()]
    _check(document, "", chosen, roots, (document.path,))


def _check(document: Document, group: str, more: list[Any], roots: list[Path], way: tuple[Path, ...]) -> None:
    for name in _names([*_defaults(document), *more], group):
        path = next((file for root in roots if (file := root / f"{name}.yaml").is_file()), None)
        if path is None:  # a part of distill, or a mistake that Hydra explains
            continue
        if path in way:
            raise ConfigError(
                f"{document.place(('defaults',))}: its defaults list leads back to {path}",
                why="files that include one another have no end",
                fix=f"take {name} out of the list",
            )
        _check(read(path, may_be_empty=True), name.rpartition("/")[0], [], roots, (*way, path))


def _defaults(document: Document) -> list[Any]:
    written = document.values.get("defaults", [])
    return written if isinstance(written, list) else []


def _names(entries: Iterable[Any], group: str) -> Iterator[str]:
    """Config names as Hydra has them, from its root: `group/name`. What is computed (`${...}`) cannot be told here."""
    for entry in entries:
        below, name = next(iter(entry.items())) if isinstance(entry, Mapping) and entry else ("", entry)
        for word in _WORDS:
            below = str(below).removeprefix(word)
        for each in name if isinstance(name, list) else [name]:
            if not isinstance(each, str) or each == "_self_" or "${" in each:
                continue
            path = "/".join(part for part in (below.partition("@")[0], each.partition("@")[0]) if part)
            yield path.removeprefix("/") if path.startswith("/") or not group else f"{group}/{path}"


def _folders(hydra: Any) -> Iterator[Path]:
    searchpath = hydra.get("searchpath", []) if isinstance(hydra, Mapping) else []
    for entry in searchpath if isinstance(searchpath, list) else []:
        if isinstance(entry, str) and not entry.startswith("pkg://") and "${" not in entry:
            yield Path(entry.removeprefix("file://")).expanduser()
