"""Holds works back until all that were announced for the same weights are there, for runs that are to be reproducible.

The last bits of a score depend on what it was computed together with. Behind the barrier that depends on the samples
alone, and not on the times at which they came.
"""

from __future__ import annotations

from collections import defaultdict

from distill.teacher_manager.work import Work, in_order


class Barrier:
    """Works by item. `opened` gives what may go."""

    def __init__(self) -> None:
        self._announced: defaultdict[int, set[int]] = defaultdict(set)
        """Item -> rollouts that are still being written."""
        self._held: defaultdict[int, list[Work]] = defaultdict(list)

    def announce(self, rollout: int, item: int) -> None:
        self._announced[item].add(rollout)

    def end(self, rollout: int, item: int) -> list[Work]:
        """The rollout will not arrive, or has. What goes now, in order."""
        self._announced[item].discard(rollout)
        return self._open(item)

    def hold(self, work: Work) -> list[Work]:
        """Takes a work that arrived. What goes now, in order: nothing, or all that is held for its item."""
        self._held[work.item].append(work)
        if work.rollout is not None:
            self._announced[work.item].discard(work.rollout)
        return self._open(work.item)

    def forget(self, work: Work) -> None:
        if work in self._held[work.item]:
            self._held[work.item].remove(work)

    def _open(self, item: int) -> list[Work]:
        if self._announced[item]:
            return []
        return in_order(self._held.pop(item, []))
