"""A schedule as it is written down: what was copied, evicted and visited, and when.

The rows are what the JSON holds, so that anybody can check a schedule without knowing who made it.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import msgspec

from distill.errors import ConfigError


class Mode(IntEnum):
    RESIDENT = 0
    STREAM = 1


class CopyRow(msgspec.Struct, array_like=True, frozen=True):
    link: int
    device: int
    item: int
    """The weight object: a teacher's id."""
    start_ns: int
    end_ns: int
    from_disk: int
    """1: read from disk."""


class EvictionRow(msgspec.Struct, array_like=True, frozen=True):
    device: int
    item: int
    t_ns: int


class VisitRow(msgspec.Struct, array_like=True, frozen=True):
    device: int
    teacher: int
    mode: Mode
    start_ns: int
    end_ns: int
    jobs: tuple[int, ...]
    """In the order in which they are served."""


class Schedule(msgspec.Struct):
    copies: list[CopyRow] = msgspec.field(default_factory=list[CopyRow])
    evictions: list[EvictionRow] = msgspec.field(default_factory=list[EvictionRow])
    visits: list[VisitRow] = msgspec.field(default_factory=list[VisitRow])


def write_schedule(schedule: Schedule, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(schedule))


def read_schedule(path: Path) -> Schedule:
    """Raises ConfigError. Whether it is a schedule that obeys the rules is `checker.check`'s to say."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Schedule)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: {error}",
            why="a schedule is an object of copies, evictions and visits, each a list of rows",
            fix="give [link, device, object, start, end, from_disk], [device, object, t] and "
            "[device, teacher, mode, start, end, [jobs]]",
        ) from error
