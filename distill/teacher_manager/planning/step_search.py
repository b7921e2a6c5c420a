"""The order inside a step is free: who is served in which step, and who stays over its end?

Inside a step those who are there are served first and leave unless they stay. Then the ones that do not stay pass
through the bytes that are left, one after another, and at last come those that stay. So a step needs two things:
what stays over its end fits the budget, and what is there all through it leaves room for each one that passes.
With all teachers equal this is the elevator: what was loaded last is served first in the next step.

The search decides teacher by teacher, step by step. The priced cost of each teacher alone (`ages`) bounds what a state
can still reach: it orders the states, and those that cannot beat the best plan so far are given up. A narrow search
finds a plan; wider ones improve it until one gives up nothing for lack of width, which proves the plan the best.

Suffixes: S states, N teachers, B boundaries between steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from distill.teacher_manager.planning.ages import Alone, Flags, Whole, Work
from distill.teacher_manager.planning.prices import Floats, ascend
from distill.teacher_manager.planning.room import Room

Rows = npt.NDArray[np.intp]

WIDTHS = (64, 1024, 16_384, 131_072)
"""States kept at a time, search after search."""
LIMIT = 16_000_000
"""No wider search than this many states times teachers times steps: seconds of one core."""


@dataclass(frozen=True, slots=True)
class StepStays:
    stays_N: Flags
    """Who is there at the end of the step."""
    loaded_N: Flags
    """Who is brought in it."""


@dataclass(frozen=True, slots=True)
class Found:
    steps: list[StepStays]
    cost: int | None
    """Of the loads, less the worth of those who are there at the end. None: nothing cheaper than was asked for."""
    exact: bool
    """No plan costs less."""


def search(
    room: Room,
    residents: Collection[int],
    steps: Sequence[Mapping[int, int]],
    worth: Sequence[int] | None = None,
    limit: int = LIMIT,
) -> Found:
    """Plans `steps`: for each, the teachers whose work opens and how many steps it may wait.

    `worth`: by teacher, what it saves to be there after the last step. Work that may wait longer may be left.
    """
    order = sorted(range(len(room.size)), key=lambda teacher: -room.size[teacher])  # what fits is decided early
    place = {teacher: index for index, teacher in enumerate(order)}
    problem = _Problem.of(
        room.reordered(order),
        {place[teacher] for teacher in residents},
        [{place[teacher]: wait for teacher, wait in step.items()} for step in steps],
        [worth[teacher] if worth else 0 for teacher in order],
    )
    unit = math.gcd(*room.cost, *(worth or ()))
    best = Found([], None, False)
    for width in WIDTHS:
        if best.cost is not None and width * len(room.size) * len(steps) > limit:
            break
        upper = math.inf if best.cost is None else best.cost - unit / 2
        again = _Search(problem, width, upper).run()
        best = again if again.cost is not None else replace(best, exact=again.exact)
        if best.exact:
            break
    back = [place[teacher] for teacher in range(len(order))]
    return replace(best, steps=[StepStays(step.stays_N[back], step.loaded_N[back]) for step in best.steps])


@dataclass(frozen=True, slots=True)
class _Problem:
    room: Room
    size_N: Whole
    passing_N: Whole
    worth_N: Whole
    resident_N: Flags
    work: Work
    prices_B: Floats
    alone: Alone
    alike: Sequence[Sequence[Whole]]
    """By step: groups of teachers of which one is as good as another from its end on."""

    @classmethod
    def of(
        cls, room: Room, residents: Collection[int], steps: Sequence[Mapping[int, int]], worth: Sequence[int]
    ) -> _Problem:
        work = Work.of(steps, len(room.size))
        resident_N = np.isin(np.arange(len(room.size)), list(residents))
        worth_N = np.array(worth, dtype=np.int64)
        size_N = np.array(room.size, dtype=np.int64)

        def dual(prices_B: Floats) -> tuple[float, Floats]:
            alone = Alone.of(room, work, worth_N, prices_B)
            excess_B = (alone.stays(resident_N, work) @ size_N - room.budget).astype(np.float64)
            return alone.total(resident_N, work) - float(prices_B.sum()) * room.budget, excess_B

        prices_B = ascend(dual, len(steps))
        alone = Alone.of(room, work, worth_N, prices_B)
        alike = [_alike(room, work, worth_N, step) for step in range(len(steps))]
        passing_N = np.array(room.passing, dtype=np.int64)
        return cls(room, size_N, passing_N, worth_N, resident_N, work, prices_B, alone, alike)


def _alike(room: Room, work: Work, worth_N: Whole, step: int) -> list[Whole]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for teacher, worth in enumerate(worth_N.tolist()):
        later = work.opens_PN[step + 1 :, teacher].tobytes()
        key = (room.size[teacher], room.passing[teacher], room.cost[teacher], worth, later)
        groups.setdefault(key, []).append(teacher)
    return [np.array(group) for group in groups.values() if len(group) > 1]


@dataclass(frozen=True, slots=True)
class _States:
    origin_S: Rows
    """Row in the states after the step before."""
    resident_SN: Flags
    age_SN: Whole
    loaded_SN: Flags
    """Who was brought in this step."""
    through_S: Whole
    """Bytes of those that are there all through this step, as far as decided."""
    held_S: Whole
    """Bytes of those that stay over its end, as far as decided."""
    cost_S: Whole
    bound_S: Floats
    """No plan that goes on from here costs less."""

    def __len__(self) -> int:
        return len(self.cost_S)

    def at(self, rows: Rows | Flags) -> _States:
        """Copies."""
        return _States(*(getattr(self, field.name)[rows] for field in fields(self)))

    @staticmethod
    def join(parts: Sequence[_States]) -> _States:
        return _States(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(_States)))

    def cheapest(self, alike: Sequence[Whole], decided: int) -> _States:
        """Of states with the same future, the one that cost least.

        The future depends on who is there and what is open, up to an exchange of teachers that are alike; those up to
        `decided` had their turn in this step and are not exchanged for later ones.
        """
        code_SN = (self.age_SN * 2 + self.resident_SN).astype(np.uint16)
        for group in alike:
            for part in (group[group <= decided], group[group > decided]):
                code_SN[:, part] = np.sort(code_SN[:, part], axis=1)
        order = np.argsort(self.cost_S, kind="stable")
        key = np.ascontiguousarray(np.hstack([self.through_S[:, None].view(np.uint16), code_SN])[order])
        _, first = np.unique(key.view(np.dtype((np.void, key.itemsize * key.shape[1]))).ravel(), return_index=True)
        return self.at(order[first])

    def undominated(self) -> _States:
        """Without those beaten by one that costs no more and has the same open work and more residents."""
        order = np.lexsort((-self.resident_SN.sum(axis=1), self.cost_S, *self.age_SN.T))
        age_SN, resident_SN = self.age_SN[order], self.resident_SN[order].astype(np.float32)
        changes = (age_SN[1:] != age_SN[:-1]).any(axis=1)
        begins = [0, *(np.flatnonzero(changes) + 1).tolist(), len(order)]
        beaten_S = np.zeros(len(order), dtype=bool)
        for first, last in itertools.pairwise(begins):
            inside_SN = resident_SN[first:last]
            lacks_SS = inside_SN @ (1 - inside_SN).T  # [i, j]: how many residents of i are missing in j
            beaten_S[first:last] = np.tril(lacks_SS == 0, -1).any(axis=1)
        return self.at(order[~beaten_S])


class _Search:
    """One pass over the steps with at most `width` states, for a plan that costs less than `upper`."""

    def __init__(self, problem: _Problem, width: int, upper: float) -> None:
        self._is = problem
        self._width = width
        self._upper = upper
        self._cut = False

    def run(self) -> Found:
        layers: list[_States] = []
        states = self._start()
        for step in range(len(self._is.prices_B)):
            states = self._step(states, step)
            layers.append(states)
        final_S = states.cost_S - states.resident_SN @ self._is.worth_N
        if len(states) == 0 or final_S.min() > self._upper:
            return Found([], None, not self._cut)
        best = int(np.argmin(final_S))
        return Found(_path(layers, best), int(final_S[best]), not self._cut)

    def _start(self) -> _States:
        none_S, resident_SN = np.zeros(1, dtype=np.int64), self._is.resident_N[None]
        total = self._is.alone.total(self._is.resident_N, self._is.work)
        return _States(
            origin_S=none_S,
            resident_SN=resident_SN,
            age_SN=np.full(resident_SN.shape, self._is.work.idle),
            loaded_SN=np.zeros_like(resident_SN),
            through_S=none_S,
            held_S=none_S,
            cost_S=none_S,
            bound_S=np.array([total - float(self._is.prices_B.sum()) * self._is.room.budget]),
        )

    def _step(self, states: _States, step: int) -> _States:
        work, alike, column_N = self._is.work, self._is.alike[step], np.arange(len(self._is.size_N))
        states = replace(
            states,
            origin_S=np.arange(len(states)),
            age_SN=np.where(states.resident_SN, work.idle, work.older(states.age_SN, step)),
            loaded_SN=np.zeros_like(states.loaded_SN),
            through_S=np.zeros_like(states.through_S),
            held_S=np.zeros_like(states.held_S),
        )
        for teacher in np.flatnonzero(states.resident_SN.any(axis=0)).tolist():
            states = self._stay_or_leave(states, teacher, step)
            states = states.cheapest(alike, teacher) if alike else states
            undecided_SN = states.resident_SN & (column_N > teacher) | (states.age_SN < work.idle)
            states = self._best(states, step, undecided_SN)
        states = states.cheapest(alike, len(column_N))
        for teacher in np.flatnonzero((states.age_SN < work.idle).any(axis=0)).tolist():
            states = self._bring_or_wait(states, teacher, step)
            states = states.cheapest(alike, teacher) if alike else states
            states = self._best(states, step, (states.age_SN < work.idle) & (column_N > teacher))
        states = replace(states, through_S=np.zeros_like(states.through_S)).cheapest(alike, len(column_N))
        states = states.undominated()
        states = self._best(states, step, np.zeros_like(states.resident_SN))
        unused_S = self._is.room.budget - states.held_S
        return replace(states, bound_S=states.bound_S + self._is.prices_B[step] * unused_S)

    def _stay_or_leave(self, states: _States, teacher: int, step: int) -> _States:
        """A resident whose work is done. If it stays, all that has to be done in this step must fit beside it."""
        alone, size, idle = self._is.alone, self._is.size_N[teacher], self._is.work.idle
        before = alone.before_PRAN[step, 1, idle, teacher]
        there_S = states.resident_SN[:, teacher]
        due_S = ((states.age_SN == 0) * self._is.passing_N).max(axis=1)
        staying = states.at(there_S & (states.through_S + size + due_S <= self._is.room.budget))
        staying.through_S[:] += size
        staying.held_S[:] += size
        staying.bound_S[:] += alone.held_PN[step, teacher] + alone.after_PRAN[step, 1, idle, teacher] - before
        leaving = states.at(there_S)
        leaving.resident_SN[:, teacher] = False
        leaving.bound_S[:] += alone.after_PRAN[step, 0, idle, teacher] - before
        return _States.join([staying, leaving, states.at(~there_S)])

    def _bring_or_wait(self, states: _States, teacher: int, step: int) -> _States:
        """One with open work that is not there: it comes and stays, passes, or waits if it may."""
        alone, size, idle = self._is.alone, self._is.size_N[teacher], self._is.work.idle
        age_S = states.age_SN[:, teacher]
        open_S = age_S < idle
        after_RA = alone.after_PRAN[step, :, :, teacher]
        before_S = alone.before_PRAN[step, 0, age_S, teacher]

        fits_S = open_S & (states.held_S + size <= self._is.room.budget)
        staying = self._brought(states, teacher, fits_S)
        staying.resident_SN[:, teacher] = True
        staying.held_S[:] += size
        staying.bound_S[:] += alone.held_PN[step, teacher] + after_RA[1, idle] - before_S[fits_S]

        passes_S = open_S & (states.through_S + self._is.passing_N[teacher] <= self._is.room.budget)
        passing = self._brought(states, teacher, passes_S)
        passing.bound_S[:] += after_RA[0, idle] - before_S[passes_S]

        waits_S = open_S & (age_S > 0)
        waiting = states.at(waits_S)
        waiting.bound_S[:] += after_RA[0, age_S[waits_S]] - before_S[waits_S]
        return _States.join([staying, passing, waiting, states.at(~open_S)])

    def _brought(self, states: _States, teacher: int, which_S: Flags) -> _States:
        brought = states.at(which_S)
        brought.age_SN[:, teacher] = self._is.work.idle
        brought.loaded_SN[:, teacher] = True
        brought.cost_S[:] += self._is.room.cost[teacher]
        brought.bound_S[:] += self._is.room.cost[teacher]
        return brought

    def _best(self, states: _States, step: int, undecided_SN: Flags) -> _States:
        """Those that may still cost less than `upper`, at most `width`. Bytes that stay unused are paid for."""
        unused_S = self._is.room.budget - states.held_S - undecided_SN @ self._is.size_N
        bound_S = states.bound_S + self._is.prices_B[step] * np.maximum(0, unused_S)
        rows = np.flatnonzero(bound_S <= self._upper)
        if len(rows) > self._width:
            self._cut = True
            rows = rows[np.argpartition(bound_S[rows], self._width)[: self._width]]
        return states.at(rows)


def _path(layers: Sequence[_States], state: int) -> list[StepStays]:
    path: list[StepStays] = []
    for layer in reversed(layers):
        path.append(StepStays(layer.resident_SN[state], layer.loaded_SN[state]))
        state = int(layer.origin_S[state])
    return path[::-1]
