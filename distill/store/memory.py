"""Scored samples in memory, given out in the order of their ordinals, with a snapshot for checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from distill.errors import ConfigError
from distill.packing import PackingError
from distill.store.codec import decode, encode
from distill.types import ScoredSample


class MemoryStore:
    """Bounded: `put` waits while a sample is `capacity` or more ahead of the next one to be trained."""

    def __init__(self, *, capacity: int, first_ordinal: int = 0) -> None:
        self.capacity = capacity
        self._next = first_ordinal
        """The first ordinal that is not committed."""
        self._taken = first_ordinal
        self._items: dict[int, ScoredSample] = {}
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def ordinals(self) -> frozenset[int]:
        return frozenset(self._items)

    async def put(self, item: ScoredSample) -> None:
        ordinal = item.sample.ordinal
        async with self._changed:
            await self._changed.wait_for(lambda: ordinal < self._next + self.capacity)
            if ordinal < self._next or ordinal in self._items:
                raise AssertionError(f"sample {ordinal} was stored before")
            self._items[ordinal] = item
            self._changed.notify_all()

    async def take(self, count: int) -> tuple[ScoredSample, ...]:
        """The next `count` samples by ordinal. They stay in snapshots until `commit`."""
        wanted = range(self._taken, self._taken + count)
        async with self._changed:
            await self._changed.wait_for(lambda: all(ordinal in self._items for ordinal in wanted))
        self._taken += count
        return tuple(self._items[ordinal] for ordinal in wanted)

    def missing(self, count: int) -> list[int]:
        """Which of the next `count` ordinals are not here yet: what a waiting trainer waits for."""
        return [ordinal for ordinal in range(self._taken, self._taken + count) if ordinal not in self._items]

    async def commit(self, samples: Sequence[ScoredSample]) -> None:
        async with self._changed:
            for item in samples:
                del self._items[item.sample.ordinal]
            self._next += len(samples)
            self._changed.notify_all()

    def snapshot(self) -> bytes:
        """What is held and not committed, for a checkpoint."""
        return encode(self._next, list(self._items.values()))

    def restore(self, data: bytes) -> None:
        """Take over a snapshot. Raises ConfigError for a file that is not one."""
        try:
            self._next, items = decode(data)
        except PackingError as error:
            raise ConfigError(f"a checkpoint's samples are broken: {error}", fix="resume from an older one") from error
        self._taken = self._next
        self._items = {item.sample.ordinal: item for item in items}
