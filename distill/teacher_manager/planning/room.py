"""The bytes that teachers share on a device, and what it costs to bring one there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distill.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Room:
    """Teacher i takes `size[i]` of `budget` bytes while it is resident; to load or to stream it costs `cost[i]`.

    `stream_size[i]` are the bytes that a streamed visit needs; None: a visit always loads. Raises ConfigError.
    """

    size: tuple[int, ...]
    cost: tuple[int, ...]
    budget: int
    stream_size: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not len(self.size) == len(self.cost) == len(self.passing) or min(self.size, default=1) < 1:
            raise ConfigError(
                f"teachers with {self.size} bytes and loads that cost {self.cost}",
                why="each teacher has one size of at least a byte and one cost",
                fix="give both for every teacher",
            )
        for teacher, size in enumerate(self.passing):
            if size > self.budget:
                raise ConfigError(
                    f"teacher {teacher} needs {size} bytes, the budget is {self.budget}",
                    why="a teacher whose turn it is must fit, even if nothing else does",
                    fix="raise the budget, or let the teacher be streamed",
                )

    @property
    def passing(self) -> tuple[int, ...]:
        """(N,): the bytes of a visit that leaves nothing behind."""
        return self.size if self.stream_size is None else self.stream_size

    @property
    def uniform(self) -> bool:
        """Whether one teacher is as good as another, so that only the next use counts."""
        return self.stream_size is None and len(set(self.size)) <= 1 and len(set(self.cost)) <= 1

    def reordered(self, order: Sequence[int]) -> Room:
        """Teacher k of the result is teacher `order[k]` of this one."""
        size, cost = tuple(self.size[teacher] for teacher in order), tuple(self.cost[teacher] for teacher in order)
        streamed = None if self.stream_size is None else tuple(self.stream_size[teacher] for teacher in order)
        return Room(size, cost, self.budget, streamed)
