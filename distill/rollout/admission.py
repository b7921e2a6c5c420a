"""How far rollout may run ahead of the trainer.

AReaL's rule (arXiv 2505.24298): with eta = max_staleness, B = samples a step, v = the version that is published,
capacity(v) = (eta + v + 1) * B - accepted - running. Samples are admitted in the order of their ordinals and trained in
the same order, so sample o is admitted only once v >= o // B - eta and trained at version o // B: no token of a trained
sample lags more than eta versions behind.
"""

from __future__ import annotations

import asyncio


class Admission:
    """Hands out sample ordinals as versions are published."""

    def __init__(self, *, batch_size: int, max_staleness: int, total: int, version: int = 0) -> None:
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.total = total
        self.version = version
        self.accepted = version * batch_size
        self.running = 0
        self._next = self.accepted
        self._changed = asyncio.Event()

    @property
    def capacity(self) -> int:
        """Samples that may start now."""
        allowed = (self.max_staleness + self.version + 1) * self.batch_size
        return min(allowed, self.total) - self.accepted - self.running

    async def next(self, size: int, *, held: frozenset[int] = frozenset()) -> list[int]:
        """Up to `size` ordinals to start now; waits while there are none; empty when every sample was started.

        `held` are ordinals that need no rollout, because a checkpoint already holds them; they count as accepted.
        """
        while self._next < self.total:
            taken: list[int] = []
            while self.capacity > 0 and len(taken) < size:
                ordinal, self._next = self._next, self._next + 1
                if ordinal in held:
                    self.accepted += 1
                else:
                    self.running += 1
                    taken.append(ordinal)
            if taken:
                return taken
            self._changed.clear()
            if self._next < self.total:
                await self._changed.wait()
        return []

    def accept(self, count: int = 1) -> None:
        """`count` running samples are scored and stored."""
        self.running -= count
        self.accepted += count

    def publish(self, version: int) -> None:
        """The rollout servers have committed `version`."""
        self.version = version
        self._changed.set()
