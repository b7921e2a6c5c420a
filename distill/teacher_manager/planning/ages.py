"""What a teacher costs from some step on, if it pays for its bytes and shares nothing else with the others.

A teacher's work opens at a step and may wait for some steps; one visit does all that is open. To stay over a boundary
between two steps holds its bytes there. With prices of bytes at the boundaries (`prices`), each teacher's least cost is
a small dynamic programme over "resident or not" and "how long its open work may still wait".

Suffixes: P steps (B boundaries, one behind each step), R resident (0 no, 1 yes), A ages, N teachers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distill.teacher_manager.planning.prices import Floats
from distill.teacher_manager.planning.room import Room

Whole = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Work:
    """`opens_PN[step, teacher]`: steps that what opens there may wait, or `idle` where nothing opens.

    An age is the number of steps that open work may still wait, 0 in the step in which it has to be done; `idle`, more
    than any of them, is the age of no work.
    """

    opens_PN: Whole
    idle: int

    @classmethod
    def of(cls, steps: Sequence[Mapping[int, int]], teachers: int) -> Work:
        """`steps`: by step and teacher, how long the strictest work that opens there may wait."""
        idle = 1 + max((wait for step in steps for wait in step.values()), default=0)
        opens_PN = np.full((len(steps), teachers), idle, dtype=np.int64)
        for index, step in enumerate(steps):
            for teacher, wait in step.items():
                opens_PN[index, teacher] = wait
        return cls(opens_PN, idle)

    def older(self, ages: Whole, step: int) -> Whole:
        """(..., N) -> (..., N): ages as they are after what opens at `step`, from those of the step before."""
        waited = np.where(ages == self.idle, self.idle, ages - 1)
        return np.minimum(waited, self.opens_PN[step]) if step < len(self.opens_PN) else waited


@dataclass(frozen=True, slots=True)
class Alone:
    """Least priced cost of each teacher."""

    before_PRAN: Floats
    """From a step on, after its work opened."""
    after_PRAN: Floats
    """From a step's boundary on: resident or not over it, and with the age that was left in the step. Not the bytes."""
    held_PN: Floats
    """Price of a teacher's bytes over the boundary."""

    @classmethod
    def of(cls, room: Room, work: Work, worth_N: Whole, prices_B: Floats) -> Alone:
        """`worth_N`: what it is worth to be resident after the last step. Takes O(P * A * N) time."""
        steps, teachers = work.opens_PN.shape
        idle = work.idle
        cost_N = np.array(room.cost, dtype=np.float64)
        held_PN = prices_B[:, None] * np.array(room.size, dtype=np.float64)
        before_PRAN = np.zeros((steps, 2, idle + 1, teachers))
        after_PRAN = np.zeros_like(before_PRAN)
        ages_AN = np.repeat(np.arange(idle + 1)[:, None], teachers, axis=1)
        for step in reversed(range(steps)):
            if step + 1 < steps:
                aged_AN = np.maximum(0, work.older(ages_AN, step + 1))
                after_PRAN[step] = np.take_along_axis(before_PRAN[step + 1], aged_AN[None], axis=1)
            else:
                after_PRAN[step, 1] -= worth_N
            after_PRAN[step, :, 0] = np.inf  # what has to be done in this step is not left
            done_N = np.minimum(held_PN[step] + after_PRAN[step, 1, idle], after_PRAN[step, 0, idle])
            before_PRAN[step, 1] = done_N
            before_PRAN[step, 0] = np.minimum(cost_N + done_N, after_PRAN[step, 0])
            before_PRAN[step, 0, idle] = after_PRAN[step, 0, idle]
        return cls(before_PRAN, after_PRAN, held_PN)

    def total(self, resident_N: Flags, work: Work) -> float:
        """Of all teachers from the first step on, with nothing left open from before it."""
        age_N = work.opens_PN[0]
        return float(self.before_PRAN[0, resident_N.astype(int), age_N, np.arange(len(age_N))].sum())

    def stays(self, resident_N: Flags, work: Work) -> Flags:
        """(B, N): who stays over each boundary where every teacher does what is cheapest for it alone."""
        steps, _, ages, teachers = self.before_PRAN.shape
        idle, column_N = ages - 1, np.arange(teachers)
        stays_BN = np.zeros((steps, teachers), dtype=bool)
        age_N = np.full(teachers, idle)
        for step in range(steps):
            age_N = work.older(age_N, step)
            brought_N = self.before_PRAN[step, 0, age_N, column_N] < self.after_PRAN[step, 0, age_N, column_N]
            there_N = resident_N | brought_N
            staying_pays_N = self.held_PN[step] + self.after_PRAN[step, 1, idle] < self.after_PRAN[step, 0, idle]
            stays_BN[step] = resident_N = there_N & staying_pays_N
            age_N = np.where(there_N, idle, age_N)
        return stays_BN
