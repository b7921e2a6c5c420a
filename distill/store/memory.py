"""Scored samples in memory, given out in the order of their ordinals, with a snapshot for checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from distill.errors import ConfigError
from distill.packing import PackingError
from distill.store.codec import Snapshot, decode, encode
from distill.types import ScoredSample


class MemoryStore:
    """Bounded: `put` waits while a sample is `capacity` or more ahead of the next one to be trained."""

    def __init__(self, *, capacity: int, first_ordinal: int = 0) -> None:
        self.capacity = capacity
        self._next = first_ordinal
        """The first ordinal that is not committed."""
        self._taken = first_ordinal
        self._items: dict[int, ScoredSample] = {}
        self._skipped: set[int] = set()
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def ordinals(self) -> frozenset[int]:
        return frozenset(self._items) | self._skipped

    async def put(self, item: ScoredSample) -> None:
        ordinal = item.sample.ordinal
        async with self._changed:
            await self._changed.wait_for(lambda: ordinal < self._next + self.capacity)
            if ordinal < self._next or self._is_settled(ordinal):
                raise AssertionError(f"sample {ordinal} was stored before")
            self._items[ordinal] = item
            self._changed.notify_all()

    async def skip(self, ordinal: int) -> None:
        """This sample was set aside: nobody waits for it, and if it is here it goes."""
        async with self._changed:
            if ordinal < self._next or ordinal in self._skipped:
                raise AssertionError(f"sample {ordinal} was trained or set aside before")
            self._items.pop(ordinal, None)
            self._skipped.add(ordinal)
            self._changed.notify_all()

    async def take(self, count: int) -> tuple[ScoredSample, ...]:
        """The samples with the next `count` ordinals, less those set aside. They stay in snapshots until `commit`."""
        wanted = range(self._taken, self._taken + count)
        async with self._changed:
            await self._changed.wait_for(lambda: not self.missing(count))
        self._taken += count
        return tuple(self._items[ordinal] for ordinal in wanted if ordinal in self._items)

    def missing(self, count: int) -> list[int]:
        """Which of the next `count` ordinals are not here yet: what a waiting trainer waits for."""
        return [ordinal for ordinal in range(self._taken, self._taken + count) if not self._is_settled(ordinal)]

    def _is_settled(self, ordinal: int) -> bool:
        return ordinal in self._items or ordinal in self._skipped

    async def commit(self, samples: Sequence[ScoredSample]) -> None:
        async with self._changed:
            for item in samples:
                del self._items[item.sample.ordinal]
            while self._next < self._taken and self._next not in self._items:
                self._skipped.discard(self._next)
                self._next += 1
            self._changed.notify_all()

    def snapshot(self) -> bytes:
        """What is held and not committed, for a checkpoint."""
        return encode(Snapshot(self._next, list(self._items.values()), self._skipped))

    def restore(self, data: bytes) -> None:
        """Take over a snapshot. Raises ConfigError for a file that is not one."""
        try:
            found = decode(data)
        except PackingError as error:
            raise ConfigError(f"a checkpoint's samples are broken: {error}", fix="resume from an older one") from error
        self._next = self._taken = found.first_ordinal
        self._items = {item.sample.ordinal: item for item in found.items}
        self._skipped = set(found.skipped)
