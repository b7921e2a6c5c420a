"""Which kinds of work went on when: exact busy and overlap seconds, in bounded memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Interval = tuple[float, float]
OVERLAPPING = ("rollout", "score", "train")
"""The kinds of work that an asynchronous run does at the same time."""


class Union:
    """A set of moments, kept as disjoint sorted intervals."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: float, end: float) -> None:
        if end <= start:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self.seconds += (end - start) - sum(self._ends[first:last]) + sum(self._starts[first:last])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def within(self, start: float, end: float) -> list[Interval]:
        """The intervals, cut to [start, end]."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        pairs = zip(self._starts[first:last], self._ends[first:last], strict=True)
        return [(max(low, start), min(high, end)) for low, high in pairs]

    def drop_before(self, moment: float) -> None:
        """Forget what lies before `moment`; `seconds` keeps counting it."""
        first = bisect_right(self._ends, moment)
        del self._starts[:first], self._ends[:first]
        if self._starts:
            self._starts[0] = max(self._starts[0], moment)

    def middle(self) -> float:
        return self._starts[len(self._starts) // 2]


def union(intervals: Iterable[Interval]) -> Union:
    found = Union()
    for start, end in intervals:
        found.add(start, end)
    return found


def seconds_together(sets: Sequence[Sequence[Interval]], at_least: int) -> float:
    """Seconds in which at least `at_least` of these sets of disjoint intervals were busy."""
    edges = sorted(edge for intervals in sets for low, high in intervals for edge in ((low, 1), (high, -1)))
    total, depth, since = 0.0, 0, 0.0
    for moment, change in edges:
        if depth >= at_least:
            total += moment - since
        depth, since = depth + change, moment
    return total


class Timeline:
    """Busy intervals of every kind of work.

    Beyond `limit` intervals of one kind the older half of the run is folded into totals: busy and overlap seconds stay
    exact, except for spans that are added later and began before the fold; they count from the fold on.
    """

    def __init__(self, limit: int = 20_000) -> None:
        self._limit = limit
        self._busy: dict[str, Union] = {}
        self._folded_overlap = 0.0
        self._horizon = 0.0

    def add(self, kind: str, start: float, end: float) -> None:
        busy = self._busy.setdefault(kind, Union())
        busy.add(max(start, self._horizon), end)
        if len(busy) > self._limit:
            self._fold(busy.middle())

    def seconds(self) -> dict[str, float]:
        """Busy seconds of each kind since the run began."""
        return {kind: busy.seconds for kind, busy in self._busy.items()}

    def intervals(self, kind: str, start: float, end: float) -> list[Interval]:
        return self._busy[kind].within(start, end) if kind in self._busy else []

    def overlap(self) -> float:
        """Seconds in which at least two of rollout, score and train were busy."""
        return self._folded_overlap + self._together(float("inf"))

    def state(self) -> dict[str, Any]:
        return {"seconds": self.seconds(), "overlap": self.overlap()}

    def restore(self, state: Mapping[str, Any], horizon: float) -> None:
        """Take over the totals of a run that went on until `horizon`. The timeline must be new."""
        assert not self._busy, "restore comes before the first span"
        self._folded_overlap, self._horizon = float(state["overlap"]), horizon
        for kind, seconds in state["seconds"].items():
            self._busy[kind] = Union()
            self._busy[kind].seconds = float(seconds)

    def _together(self, end: float) -> float:
        return seconds_together([self.intervals(kind, self._horizon, end) for kind in OVERLAPPING], at_least=2)

    def _fold(self, moment: float) -> None:
        self._folded_overlap += self._together(moment)
        self._horizon = moment
        for busy in self._busy.values():
            busy.drop_before(moment)
