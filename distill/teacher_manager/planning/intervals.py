"""Which teachers stay between two of their visits, when the order of the visits is known.

A teacher that stays from one visit to its next saves a load and holds its bytes at every visit in between. Wanted is
the set of such intervals that saves most and fits at each instant (paging with sizes and costs, NP-hard). Prices of
bytes (`prices`) rank the states of a search that goes through the visits once and keeps the `width` best states.
Where there are no more than that, as with few teachers, nothing is given up and the plan is the best there is.

Suffixes: S states of the search, T visits and the instant after the last, I intervals, W words of 64 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from distill.teacher_manager.planning.prices import Floats, ascend
from distill.teacher_manager.planning.room import Room

Whole = npt.NDArray[np.int64]

WIDTH = 256
"""States kept from visit to visit. The cost of a plan is proportional to it."""


@dataclass(frozen=True, slots=True)
class Stays:
    """Who stays, for as long as the plan reaches."""

    residents: frozenset[int]
    """Of those resident before the first visit: who stays until its next visit."""
    after: tuple[bool, ...]
    """(T,): whether the visited teacher stays until its next visit."""
    exact: bool
    """The search gave nothing up: no other choice saves more."""


def plan_stays(
    room: Room, residents: Collection[int], visits: Sequence[int], worth: Mapping[int, int], width: int = WIDTH
) -> Stays:
    """Plan from before `visits[0]` to after the last. Takes O(T * (rounds + width * length of an interval)) time.

    `worth`: by teacher, what it saves to be there after the last visit; no other teacher is kept so long.
    """
    gaps = _Gaps.between(room, sorted(residents), visits, worth)
    prices_T = ascend(gaps.bound, len(visits) + 1)
    search = _Search(room, visits, gaps, prices_T, width)
    kept = search.run()
    first = sum(gaps.start_I < 0)
    after = np.zeros(len(visits), dtype=bool)
    after[gaps.start_I[first:]] = kept[first:]
    stay = frozenset(int(teacher) for teacher in gaps.teacher_I[:first][kept[:first]])
    return Stays(stay, tuple(after.tolist()), not search.cut)


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The intervals in order of their start: from -1 (resident before) or a visit to the next visit, end included."""

    teacher_I: Whole
    start_I: Whole
    end_I: Whole
    size_I: Whole
    cost_I: Whole
    more_I: Whole
    """Bytes at its end that the visit would not have needed without it."""
    passing_T: Whole
    free_T: Whole
    """Bytes left beside a visit that leaves nothing behind."""

    @classmethod
    def between(cls, room: Room, residents: Sequence[int], visits: Sequence[int], worth: Mapping[int, int]) -> _Gaps:
        last = dict.fromkeys(residents, -1)
        rows: list[tuple[int, int, int, int]] = []
        for index, teacher in enumerate(visits):
            if teacher in last:
                rows.append((last[teacher], index, teacher, room.cost[teacher]))
            last[teacher] = index
        rows += [(start, len(visits), teacher, worth[teacher]) for teacher, start in last.items() if teacher in worth]
        start_I, end_I, teacher_I, cost_I = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4).T
        passing_T = np.array([*(room.passing[teacher] for teacher in visits), 0], dtype=np.int64)
        size_I = np.array(room.size, dtype=np.int64)[teacher_I]
        more_I = size_I - passing_T[end_I]
        return cls(teacher_I, start_I, end_I, size_I, cost_I, more_I, passing_T, room.budget - passing_T)

    def worth(self, prices_T: Floats) -> Floats:
        """(I,): what an interval saves less what its bytes cost."""
        up_to_T = np.concatenate([[0.0], np.cumsum(prices_T)])
        inside = up_to_T[self.end_I] - up_to_T[self.start_I + 1]
        return self.cost_I - self.size_I * inside - self.more_I * prices_T[self.end_I]

    def bound(self, prices_T: Floats) -> tuple[float, Floats]:
        """For `ascend`: minus the most that can be saved, and the bytes wanted beyond the free ones."""
        worth_I = self.worth(prices_T)
        wanted = worth_I > 0
        change = np.zeros(len(prices_T) + 1)
        np.add.at(change, self.start_I[wanted] + 1, self.size_I[wanted])
        np.add.at(change, self.end_I[wanted], -self.size_I[wanted])
        held_T = np.cumsum(change)[:-1]
        np.add.at(held_T, self.end_I[wanted], self.more_I[wanted])
        return -float(worth_I[wanted].sum() + prices_T @ self.free_T), held_T - self.free_T


@dataclass(frozen=True, slots=True)
class _States:
    """The states after some decisions. Two with the same teachers staying have the same future."""

    taken_ST: Whole
    """Bytes spoken for at each visit."""
    stays_SW: npt.NDArray[np.uint64]
    """A bit for each teacher that stays."""
    saved_S: Whole
    rank_S: Floats
    """Saved so far less the price of the bytes spoken for: what is left of the bound, up to a constant."""

    def at(self, rows: npt.NDArray[np.intp]) -> _States:
        return _States(self.taken_ST[rows], self.stays_SW[rows], self.saved_S[rows], self.rank_S[rows])


class _Search:
    """One pass over the visits. A state decides about an interval where it starts."""

    def __init__(self, room: Room, visits: Sequence[int], gaps: _Gaps, prices_T: Floats, width: int) -> None:
        self._room = room
        self._visits = visits
        self._gaps = gaps
        self._prices_T = prices_T
        self._worth_I = gaps.worth(prices_T)
        self._width = width
        self._words = 1 + len(room.size) // 64
        self._path: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]] = []
        """For each interval and each state that was left after deciding: its parent and whether the interval stays."""
        self.cut = False
        """Whether states were given up."""

    def run(self) -> npt.NDArray[np.bool_]:
        """(I,): which intervals stay in the best state."""
        states = _States(
            self._gaps.passing_T[None, :],
            np.zeros((1, self._words), dtype=np.uint64),
            np.zeros(1, dtype=np.int64),
            np.zeros(1),
        )
        interval, starts = 0, self._gaps.start_I
        for now in range(-1, len(self._visits)):
            ended_S = np.zeros(len(states.saved_S), dtype=bool)
            if now >= 0:
                states, ended_S = self._arrive(states, now)
            while interval < len(starts) and starts[interval] == now:
                states = self._decide(states, interval, ended_S)
                interval += 1
        return self._backtrack(int(np.argmax(states.saved_S)) if len(states.saved_S) else 0)

    def _arrive(self, states: _States, now: int) -> tuple[_States, npt.NDArray[np.bool_]]:
        """The bytes of this visit are no longer to be paid; the interval that ends here, ends."""
        word, bit = self._bit(self._visits[now])
        ended_S = (states.stays_SW[:, word] & bit) != 0
        stays_SW = states.stays_SW.copy()
        stays_SW[:, word] &= ~bit
        paid_S = states.rank_S + self._prices_T[now] * states.taken_ST[:, now]
        return replace(states, stays_SW=stays_SW, rank_S=paid_S), ended_S

    def _decide(self, states: _States, interval: int, ended_S: npt.NDArray[np.bool_]) -> _States:
        fits = np.flatnonzero(self._fits(states, interval, ended_S))
        both = _joined(states, self._staying(states.at(fits), interval))
        parent = np.concatenate([np.arange(len(states.saved_S)), fits])
        left = self._best(both)
        self._path.append((parent[left], left >= len(states.saved_S)))
        return both.at(left)

    def _fits(self, states: _States, interval: int, ended_S: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """At its end it has no more beside it than at the instant before: that one is enough to look at."""
        start, end, size = (int(row[interval]) for row in (self._gaps.start_I, self._gaps.end_I, self._gaps.size_I))
        fits_S = np.all(states.taken_ST[:, start + 1 : end] + size <= self._room.budget, axis=1)
        if start >= 0:  # the visit at its start is not streamed, then
            more = size - int(self._gaps.passing_T[start])
            fits_S = fits_S & (ended_S | (states.taken_ST[:, start] + more <= self._room.budget))
        return fits_S

    def _staying(self, states: _States, interval: int) -> _States:
        """In place: `states` are copies."""
        gaps = self._gaps
        start, end = int(gaps.start_I[interval]), int(gaps.end_I[interval])
        word, bit = self._bit(int(gaps.teacher_I[interval]))
        states.taken_ST[:, start + 1 : end] += gaps.size_I[interval]
        states.taken_ST[:, end] += gaps.more_I[interval]
        states.stays_SW[:, word] |= bit
        return replace(
            states,
            saved_S=states.saved_S + gaps.cost_I[interval],
            rank_S=states.rank_S + self._worth_I[interval],
        )

    def _best(self, states: _States) -> npt.NDArray[np.intp]:
        """Rows to go on with: one for each set of staying teachers, the one that saved most, and the best `width`."""
        order = np.lexsort((-states.saved_S, *states.stays_SW.T))
        sorted_SW = states.stays_SW[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (sorted_SW[1:] != sorted_SW[:-1]).any(axis=1)
        rows = order[new]
        if len(rows) > self._width:
            self.cut = True
            rows = rows[np.argpartition(-states.rank_S[rows], self._width)[: self._width]]
        return rows

    def _bit(self, teacher: int) -> tuple[int, np.uint64]:
        return teacher // 64, np.uint64(1 << teacher % 64)

    def _backtrack(self, state: int) -> npt.NDArray[np.bool_]:
        kept = np.zeros(len(self._path), dtype=bool)
        for interval in reversed(range(len(self._path))):
            parents, stayed = self._path[interval]
            kept[interval] = stayed[state]
            state = int(parents[state])
        return kept


def _joined(first: _States, second: _States) -> _States:
    return _States(
        np.concatenate([first.taken_ST, second.taken_ST]),
        np.concatenate([first.stays_SW, second.stays_SW]),
        np.concatenate([first.saved_S, second.saved_S]),
        np.concatenate([first.rank_S, second.rank_S]),
    )
