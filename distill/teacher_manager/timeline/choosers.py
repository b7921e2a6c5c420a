"""Whom a free device serves next, for the policies that load on demand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from distill.teacher_manager.timeline.case import Case, Job, System
from distill.teacher_manager.timeline.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Choice:
    device: int
    teacher: int
    jobs: tuple[Job, ...]


class Chooser(Protocol):
    """Holds the jobs that wait. A job that `next` gave out never comes back."""

    def arrive(self, job: Job) -> None: ...
    def finish(self, jobs: Sequence[int]) -> None: ...
    def next(self, free: Set[int], fleet: Fleet) -> Choice | None:
        """A visit for one of the free devices, of which there is at least one; None: nobody to serve now."""
        ...


def place(teacher: int, free: Set[int], fleet: Fleet) -> int:
    """The lowest free device that holds the teacher, else the lowest."""
    holders = free
    for item in fleet.system.needs[teacher]:
        holders = holders & fleet.holders[item]
    return min(holders or free)


class Fifo:
    """The oldest job's teacher, with the jobs that follow it in the queue without another teacher's between them."""

    def __init__(self) -> None:
        self._queue = deque[Job]()

    def arrive(self, job: Job) -> None:
        self._queue.append(job)

    def finish(self, jobs: Sequence[int]) -> None:
        pass

    def next(self, free: Set[int], fleet: Fleet) -> Choice | None:
        if not self._queue:
            return None
        teacher = self._queue[0].teacher
        jobs: list[Job] = []
        while self._queue and self._queue[0].teacher == teacher:
            jobs.append(self._queue.popleft())
        return Choice(place(teacher, free, fleet), teacher, tuple(jobs))


class OldestDrain:
    """The oldest job's teacher, with all its jobs."""

    def __init__(self) -> None:
        self._queues: dict[int, list[Job]] = {}
        self._oldest: list[tuple[int, int]] = []
        """Heap of (first job's id, teacher), one for each queue; ids follow the arrivals."""

    def arrive(self, job: Job) -> None:
        if job.teacher not in self._queues:
            self._queues[job.teacher] = []
            heappush(self._oldest, (job.id, job.teacher))
        self._queues[job.teacher].append(job)

    def finish(self, jobs: Sequence[int]) -> None:
        pass

    def next(self, free: Set[int], fleet: Fleet) -> Choice | None:
        if not self._oldest:
            return None
        teacher = heappop(self._oldest)[1]
        return Choice(place(teacher, free, fleet), teacher, tuple(self._queues.pop(teacher)))


class LongestDrain:
    """The teacher with the most work in its queue, with all its jobs."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._queues: dict[int, list[Job]] = {}
        self._work: dict[int, int] = {}
        """Tokens times active parameters."""

    def arrive(self, job: Job) -> None:
        self._queues.setdefault(job.teacher, []).append(job)
        work = job.tokens * self._system.teachers[job.teacher].active_params
        self._work[job.teacher] = self._work.get(job.teacher, 0) + work

    def finish(self, jobs: Sequence[int]) -> None:
        pass

    def next(self, free: Set[int], fleet: Fleet) -> Choice | None:
        if not self._queues:
            return None
        teacher = min(self._work, key=lambda teacher: (-self._work[teacher], teacher))
        del self._work[teacher]
        return Choice(place(teacher, free, fleet), teacher, tuple(self._queues.pop(teacher)))


class StepGate:
    """Which step may be scored: a step opens when all its jobs arrived and all jobs of the steps before it are done."""

    def __init__(self, case: Case) -> None:
        self._step_of = [job.step for job in case.jobs]
        self._steps = sorted(set(self._step_of))
        self._to_arrive = dict.fromkeys(self._steps, 0)
        for step in self._step_of:
            self._to_arrive[step] += 1
        self._to_finish = dict(self._to_arrive)
        self._current = 0

    def arrive(self, job: Job) -> None:
        self._to_arrive[job.step] -= 1

    def finish(self, jobs: Sequence[int]) -> None:
        for id in jobs:
            self._to_finish[self._step_of[id]] -= 1
        while self._current < len(self._steps) and not self._to_finish[self._steps[self._current]]:
            self._current += 1

    def open_step(self) -> int | None:
        if self._current == len(self._steps) or self._to_arrive[self._steps[self._current]]:
            return None
        return self._steps[self._current]


class Barrier:
    """Teacher i is served by device i mod G alone, step by step: what systems with a scoring phase do.

    How many jobs a step has is known from the start, as it is to a system with such a phase.
    """

    def __init__(self, case: Case) -> None:
        self._devices = len(case.system.devices)
        self._gate = StepGate(case)
        self._queues: dict[int, dict[int, dict[int, list[Job]]]] = {job.step: {} for job in case.jobs}
        """By step, device and teacher."""
        self._previous: dict[int, int] = {}
        """By device: the teacher of its last visit."""

    def arrive(self, job: Job) -> None:
        self._gate.arrive(job)
        of_device = self._queues[job.step].setdefault(job.teacher % self._devices, {})
        of_device.setdefault(job.teacher, []).append(job)

    def finish(self, jobs: Sequence[int]) -> None:
        self._gate.finish(jobs)

    def next(self, free: Set[int], fleet: Fleet) -> Choice | None:
        step = self._gate.open_step()
        if step is None:
            return None
        queues = self._queues[step]
        device = min(free & queues.keys(), default=None)
        if device is None:
            return None
        of_device = queues[device]
        previous = self._previous.get(device)
        teacher = previous if previous in of_device else min(of_device)
        self._previous[device] = teacher
        jobs = of_device.pop(teacher)
        if not of_device:
            del queues[device]
        return Choice(device, teacher, tuple(jobs))
