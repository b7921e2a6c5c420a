"""Visits in a fixed order: which residents give way to the teacher whose turn it is?"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distill.teacher_manager.planning.intervals import WIDTH, Stays, plan_stays
from distill.teacher_manager.planning.room import Room

HORIZON = 4
"""The later a use that is not announced is expected, the less it counts: half at this many times what is announced.
From 3 to 10 it hardly matters."""


class Mode(enum.Enum):
    HIT = "hit"
    LOAD = "load"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Turn:
    """First `evicted` go, then the teacher is served: as a resident, after a load, or streamed."""

    teacher: int
    mode: Mode
    evicted: tuple[int, ...] = ()


class Pager:
    """Serves announced visits one after another and knows of later ones only what was announced.

    Equal teachers: the farthest announced use goes (Belady 1966, optimal where all is announced), a use that is not
    announced counts as the farthest. Other teachers: what `plan_stays` wants to stay is not touched. It is asked at a
    miss for which something must go, if something was announced since it was last asked.
    """

    def __init__(self, room: Room, width: int = WIDTH) -> None:
        self._room = room
        self._width = width
        self._residents: set[int] = set()
        self._free = room.budget
        self._queue: deque[int] = deque()
        self._uses: dict[int, deque[int]] = {}
        """By teacher: the positions of its announced visits."""
        self._served: Counter[int] = Counter()
        self._position = 0
        self._plan: Stays | None = None
        """None: something was announced since."""
        self._planned_at = 0
        self._reserved: frozenset[int] = frozenset()
        self.proven = True
        """Whether each plan so far was the best for what was announced: none was cut to `width` states."""
        self._complete = False
        """Nothing comes after what was announced."""

    @property
    def residents(self) -> frozenset[int]:
        return frozenset(self._residents)

    def announce(self, teachers: Iterable[int], *, last: bool = False) -> None:
        """These visits follow those announced before; after the `last` there is nothing to stay for."""
        if last != self._complete:
            self._complete, self._plan = last, None
        for teacher in teachers:
            self._uses.setdefault(teacher, deque()).append(self._position + len(self._queue))
            self._queue.append(teacher)
            self._plan = None

    def serve(self) -> Turn:
        """The next announced visit. Raises IndexError when there is none."""
        turn = self._decide(self._queue[0])
        self._queue.popleft()
        self._uses[turn.teacher].popleft()
        self._served[turn.teacher] += 1
        self._reserved -= {turn.teacher}
        if self._stays_after(self._position):
            self._reserved |= {turn.teacher}
        self._position += 1
        return turn

    def _decide(self, teacher: int) -> Turn:
        if teacher in self._residents:
            return Turn(teacher, Mode.HIT)
        size = self._room.size[teacher]
        if size <= self._free:
            victims, mode = list[int](), Mode.LOAD
        else:
            self._replan()
            victims, mode = self._make_room(teacher)
        for victim in victims:
            self._residents.remove(victim)
            self._free += self._room.size[victim]
        if mode is Mode.LOAD:
            self._residents.add(teacher)
            self._free -= size
        return Turn(teacher, mode, tuple(victims))

    def _replan(self) -> None:
        if self._plan is None and not self._room.uniform:
            self._plan = plan_stays(self._room, self._residents, self._queue, self._worth(), self._width)
            self._planned_at = self._position
            self._reserved = self._plan.residents
            self.proven = self.proven and self._plan.exact

    def _make_room(self, teacher: int) -> tuple[list[int], Mode]:
        """Who goes for it. It is streamed unless it stays, or those that go before it does make room for it."""
        size = self._room.size[teacher]
        spare = sorted(self._residents - self._reserved, key=self._staying_power)
        if self._room.stream_size is not None and not self._stays_after(self._position):
            power = self._staying_power(teacher)
            weaker = sum(self._room.size[other] for other in spare if self._staying_power(other) < power)
            if self._free + weaker < size:
                return self._enough(spare, self._room.stream_size[teacher]), Mode.STREAM
        return self._enough(spare, size), Mode.LOAD

    def _enough(self, spare: Sequence[int], size: int) -> list[int]:
        """The first of `spare` that make `size` bytes free. The plan leaves room for each visit: there are enough."""
        free, victims = self._free, list[int]()
        for victim in spare:
            if free >= size:
                break
            victims.append(victim)
            free += self._room.size[victim]
        return victims

    def _stays_after(self, position: int) -> bool:
        return self._plan is not None and self._plan.after[position - self._planned_at]

    def _staying_power(self, teacher: int) -> tuple[float, float, int]:
        """The lowest goes first: the farthest use, and of those without one, the least expected saving a byte."""
        following = next((use for use in self._uses.get(teacher, ()) if use > self._position), None)
        density = self._served[teacher] * self._room.cost[teacher] / self._room.size[teacher]
        return (-math.inf if following is None else -following, density, teacher)

    def _worth(self) -> dict[int, int]:
        """By teacher: what it is expected to save after the last announced visit, by how often it was visited."""
        if self._complete:
            return {}
        soon = HORIZON * len(self._queue)
        known = self._position + len(self._queue)
        worth: dict[int, int] = {}
        for teacher in self._residents.union(self._queue):
            pause = known / (self._served[teacher] + len(self._uses.get(teacher, ())) or 1)
            worth[teacher] = int(self._room.cost[teacher] * soon / (soon + pause))
        return worth
