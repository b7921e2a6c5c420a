"""Host memory in front of the one disk: what is in it, and what goes when something is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distill.teacher_manager.timeline.case import HostTier, Teacher


class HostMemory:
    """With `tier` None all weights are in host memory and nothing is ever read from disk.

    An object that is read from disk is kept if it fits after the oldest objects that are no source of a transfer are
    dropped; else it passes through.
    """

    def __init__(self, tier: HostTier | None, teachers: Sequence[Teacher]) -> None:
        self._tier = tier
        self._teachers = teachers
        self._stamps = dict.fromkeys(tier.initial if tier else (), -1)
        """Object -> last use in ns."""
        self._sources = Counter[int]()
        """Transfers under way, by the object in host memory that they read."""
        self._used_bytes = sum(teachers[item].bytes for item in self._stamps)
        self._keep = False
        """Room is reserved for what is being read from disk."""
        self.disk_is_busy = False

    def holds(self, item: int) -> bool:
        return self._tier is None or item in self._stamps

    def begin(self, item: int, now_ns: int) -> bool:
        """A transfer of the object starts; True: it holds the disk too, which must be idle."""
        if self._tier is None:
            return False
        if item in self._stamps:
            self._stamps[item] = now_ns
            self._sources[item] += 1
            return False
        assert not self.disk_is_busy
        self.disk_is_busy = True
        self._keep = self._make_room(self._teachers[item].bytes, self._tier.budget_bytes)
        return True

    def end(self, item: int, now_ns: int, *, from_disk: bool) -> None:
        if self._tier is None:
            return
        if not from_disk:
            self._sources[item] -= 1
            return
        self.disk_is_busy = False
        if self._keep:
            self._stamps[item] = now_ns

    def fail(self, item: int, *, from_disk: bool) -> None:
        """The transfer did not end: what it read from disk is not kept."""
        if self._tier is None:
            return
        if not from_disk:
            self._sources[item] -= 1
            return
        self.disk_is_busy = False
        if self._keep:
            self._used_bytes -= self._teachers[item].bytes

    def _make_room(self, wanted: int, budget: int) -> bool:
        """Reserves `wanted` bytes if they fit. What was dropped for them stays dropped."""
        if wanted > budget:
            return False
        for item in sorted(self._stamps, key=lambda item: (self._stamps[item], item)):
            if self._used_bytes + wanted <= budget:
                break
            if not self._sources[item]:
                del self._stamps[item]
                self._used_bytes -= self._teachers[item].bytes
        fits = self._used_bytes + wanted <= budget
        if fits:
            self._used_bytes += wanted
        return fits
