"""The fewest bytes that a schedule without a missed deadline moves: who stays between two windows of need, who returns.

Of each object a largest set of disjoint windows [arrival, deadline] is taken. It must be resident at some time in each.
In the gap between two of them it stays, or it is loaded again. What stays must fit into all budgets together.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from distill.teacher_manager.timeline.case import Case

MAX_STATES = 200_000
"""Sets of staying objects that the exact search may hold at a time."""

Window = tuple[int, int]
"""From the arrival to the deadline (ns)."""


@dataclass(frozen=True, slots=True)
class Gap:
    start_ns: int
    end_ns: int
    item: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LeastBytes:
    total: int
    is_optimal: bool
    """Each object stays whole or not at all. Else parts of objects may stay: a bound too, but a weaker one."""


def disjoint_windows(case: Case) -> dict[int, list[Window]]:
    """By object: a largest set of disjoint windows of the jobs that need it, in order."""
    windows: dict[int, list[Window]] = {}
    for job in case.jobs:
        for item in case.system.needs[job.teacher]:
            windows.setdefault(item, []).append((job.arrival_ns, job.deadline_ns))
    for item, of_object in windows.items():
        chosen: list[Window] = []
        for window in sorted(of_object, key=lambda window: window[1]):
            if not chosen or window[0] > chosen[-1][1]:
                chosen.append(window)
        windows[item] = chosen
    return windows


def least_bytes(case: Case, windows: Mapping[int, Sequence[Window]], max_states: int = MAX_STATES) -> LeastBytes:
    room = sum(device.budget_bytes for device in case.system.devices)
    size = [teacher.bytes for teacher in case.system.teachers]
    gaps = [
        Gap(before[1], after[0], item, size[item])
        for item, of_object in windows.items()
        for before, after in pairwise(of_object)
    ]
    total = sum(size[item] * len(of_object) for item, of_object in windows.items())
    contested = _contested(gaps, room)
    free = sum(gap.bytes for gap in gaps) - sum(gap.bytes for gap in contested)
    whole = _most_whole(contested, room, max_states)
    stays = _most_divided(contested, room) if whole is None else whole
    return LeastBytes(total - free - stays, whole is not None)


def _events(gaps: Sequence[Gap]) -> list[tuple[int, bool, Gap]]:
    """(time, whether it starts, gap): at one instant ends come first."""
    both = [(gap.end_ns, False, gap) for gap in gaps] + [(gap.start_ns, True, gap) for gap in gaps]
    return sorted(both, key=lambda event: event[:2])


def _contested(gaps: Sequence[Gap], room: int) -> list[Gap]:
    """Those during which not everything fits at some instant. The others stay for nothing."""
    open_gaps: dict[int, Gap] = {}
    contested: set[Gap] = set()
    load = 0
    for _, starts, gap in _events(gaps):
        load += gap.bytes if starts else -gap.bytes
        if starts:
            open_gaps[gap.item] = gap
            if load > room:
                contested.update(open_gaps.values())
        else:
            del open_gaps[gap.item]
    return [gap for gap in gaps if gap in contested]


def _most_whole(gaps: Sequence[Gap], room: int, max_states: int) -> int | None:
    """The most bytes that can stay, over all choices; None: there are too many."""
    states = {0: (0, 0)}
    """Set of objects that stay, as bits -> (most bytes saved, bytes of the set)."""
    for _, starts, gap in _events(gaps):
        bit = 1 << gap.item
        after: dict[int, tuple[int, int]] = {}
        for held, (saved, load) in states.items():
            if not starts and held & bit:
                held, load = held ^ bit, load - gap.bytes
            _improve(after, held, saved, load)
            if starts and load + gap.bytes <= room:
                _improve(after, held | bit, saved + gap.bytes, load + gap.bytes)
        if len(after) > max_states:
            return None
        states = after
    return max(saved for saved, _ in states.values())


def _improve(states: dict[int, tuple[int, int]], held: int, saved: int, load: int) -> None:
    if held not in states or states[held][0] < saved:
        states[held] = saved, load


def _most_divided(gaps: Sequence[Gap], room: int) -> int:
    """The most bytes that can stay where any part of an object may.

    Bytes are then intervals of equal worth of which at most `room` may overlap: going by their starts and giving up
    what ends last is optimal (a largest k-colourable set of intervals).
    """
    kept: list[tuple[int, int]] = []
    """(end, bytes), by end."""
    saved = 0
    for gap in sorted(gaps, key=lambda gap: gap.start_ns):
        done = bisect_right(kept, (gap.start_ns, inf))
        saved += sum(size for _, size in kept[:done])
        del kept[:done]
        insort(kept, (gap.end_ns, gap.bytes))
        excess = sum(size for _, size in kept) - room
        while excess > 0:
            end_ns, last = kept.pop()
            if last > excess:
                kept.append((end_ns, last - excess))
            excess -= last
    return saved + sum(size for _, size in kept)
