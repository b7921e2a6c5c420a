"""Takes the keys of a mapping one by one, checks each, and refuses what is left over."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from distill.errors import ConfigError
from distill.registry import did_you_mean


class Section:
    """A mapping of a file. `place` is where it stands ("hosts.train"), for errors, which are all ConfigError."""

    def __init__(self, values: object, place: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{place or 'the file'}: a mapping is needed, not {_shown(values)}")
        self._values = {str(key): value for key, value in cast(Mapping[object, object], values).items()}
        self._taken: set[str] = set()
        self.place = place

    def __contains__(self, key: str) -> bool:
        return self._get(key) is not None

    def where(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def text(self, key: str, default: str | None = None, among: Collection[str] = ()) -> str:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not (value or default == ""):
            raise self.fault(key, value, "a word is needed")
        if among and value not in among:
            raise ConfigError(f"{self.where(key)}: {value!r} is not known", fix=did_you_mean(value, among))
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A finite number greater than `least`."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= least:
            raise self.fault(key, value, f"a number greater than {least:g} is needed")
        return float(value)

    def whole(self, key: str, default: int, least: int, most: int) -> int:
        value = self._get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fault(key, value, f"a whole number from {least} to {most} is needed")
        return value

    def flag(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool | None):
            raise self.fault(key, value, "true or false is needed")
        return bool(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        items = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in cast(list[Any], items)):
            raise self.fault(key, value, "a list of words is needed")
        return tuple(cast(list[str], items))

    def sections(self, key: str) -> Iterator[tuple[str, Section]]:
        """Of a mapping of mappings: name and section. `name: ` with nothing behind it is an empty section."""
        outer = Section(self._get(key) or {}, self.where(key))
        for name, value in outer._values.items():
            yield name, Section({} if value is None else value, outer.where(name))

    def items(self, key: str) -> Iterator[Section]:
        """Of a list of mappings."""
        value = self._get(key)
        if not isinstance(value, list | None):
            raise self.fault(key, value, "a list is needed")
        for number, item in enumerate(cast(list[object], value or [])):
            yield Section(item, f"{self.where(key)}[{number}]")

    def inner(self, key: str) -> Section:
        return Section(self._get(key), self.where(key))

    def plain(self) -> dict[str, object]:
        """All of it, unchecked."""
        self._taken.update(self._values)
        return dict(self._values)

    def close(self) -> None:
        """Raises ConfigError for a key that nobody took."""
        for key in self._values:
            if key not in self._taken:
                raise ConfigError(f"{self.where(key)}: there is no such key", fix=did_you_mean(key, self._taken))

    def fault(self, key: str, value: object, needed: str) -> ConfigError:
        return ConfigError(
            f"{self.where(key)}: {needed}, {'but it is not there' if value is None else f'not {_shown(value)}'}"
        )

    def _get(self, key: str) -> object:
        self._taken.add(key)
        return self._values.get(key)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
