"""Work that comes in steps: which teachers a step serves, in which order, and who stays for the next one."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from distill.errors import ConfigError
from distill.teacher_manager.planning.room import Room
from distill.teacher_manager.planning.step_search import LIMIT, StepStays, search


@dataclass(frozen=True, slots=True)
class StepTurn:
    """One step, in this order. `hits`, `passing` and `loaded` are served; other open work waits for a later step."""

    hits: tuple[int, ...]
    """Served first: they are there."""
    leaving: tuple[int, ...]
    """Then these residents go."""
    passing: tuple[int, ...]
    """Each is loaded (or streamed, where the room allows that), served and dropped before the next."""
    loaded: tuple[int, ...]
    """Loaded last; they stay."""


class StepPlanner:
    """Decides step after step. It knows all work of this step, and of later steps what was announced.

    `steps`: how many there are in the whole run, None if that is not known: no work waits beyond the last one, and
    nobody is kept for after it. Otherwise a teacher is expected to be needed after the last announced step as often as
    it was until then. `limit` bounds the search (`step_search.LIMIT`); `proven` says whether the last one was enough.
    """

    def __init__(self, room: Room, steps: int | None = None, limit: int = LIMIT) -> None:
        self._room = room
        self._steps = steps
        self._limit = limit
        self._now = 0
        self._announced: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By step and teacher: how many steps its strictest work may wait."""
        self._waiting: dict[int, int] = {}
        """Work of earlier steps: how many steps it may still wait."""
        self._needed: Counter[int] = Counter()
        """By teacher: announced steps that need it."""
        self._plan: deque[StepStays] = deque()
        """Empty: something was announced since."""
        self.residents: frozenset[int] = frozenset()
        self.proven = False
        """Whether the last plan was shown to be the cheapest for what was announced."""

    def announce(self, step: int, work: Mapping[int, int]) -> None:
        """By teacher: how many steps after `step` its work may wait. Raises ConfigError for a step that is over."""
        if step < self._now:
            raise ConfigError(
                f"work for step {step} was announced in step {self._now}",
                why="a step that is over serves nobody any more",
                fix="announce it for the present step",
            )
        of_step = self._announced[step]
        for teacher, wait in work.items():
            self._needed[teacher] += teacher not in of_step
            last = wait if self._steps is None else min(wait, self._steps - 1 - step)
            of_step[teacher] = min(last, of_step.get(teacher, last))
        self._plan.clear()

    def next(self) -> StepTurn:
        """What to do in this step; the next call is about the next one."""
        work = self._work(self._now)
        if not self._plan:
            self._search()
        decided = self._plan.popleft()
        stays = {teacher for teacher in range(len(self._room.size)) if decided.stays_N[teacher]}
        brought = [teacher for teacher in range(len(self._room.size)) if decided.loaded_N[teacher]]
        turn = StepTurn(
            hits=tuple(sorted(self.residents & work.keys())),
            leaving=tuple(sorted(self.residents - stays)),
            passing=tuple(teacher for teacher in brought if teacher not in stays),
            loaded=tuple(teacher for teacher in brought if teacher in stays),
        )
        done = self.residents.union(brought)
        self._waiting = {teacher: wait - 1 for teacher, wait in work.items() if teacher not in done}
        self.residents = frozenset(stays)
        self._announced.pop(self._now, None)
        self._now += 1
        return turn

    def _work(self, step: int) -> dict[int, int]:
        """Open in `step`, with what waits from before if it is the present one."""
        work = dict(self._announced.get(step, {}))
        if step == self._now:
            for teacher, wait in self._waiting.items():
                work[teacher] = min(wait, work.get(teacher, wait))
        return work

    def _search(self) -> None:
        end = 1 + max(self._announced, default=self._now)
        steps = [self._work(step) for step in range(self._now, end)]
        worth = None
        if end != self._steps:
            worth = [cost * self._needed[teacher] // end for teacher, cost in enumerate(self._room.cost)]
        found = search(self._room, self.residents, steps, worth, self._limit)
        self._plan.extend(found.steps)
        self.proven = found.exact
