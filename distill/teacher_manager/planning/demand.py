"""What is queued and what is announced, by teacher, kept up to date job by job."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from distill.teacher_manager.timeline.case import NS, Job, System
from distill.teacher_manager.timeline.decisions import Announced, Arrived

_STALE = 64
"""Entries of jobs that are gone that a heap may hold beside as many as there are jobs."""


class Queue:
    """The jobs of one teacher that wait, and the rollouts that are under way for it. Work is in FLOPs."""

    __slots__ = ("_arrivals_ns", "_deadlines", "_latest_ns", "_lengths", "announced", "announced_work", "jobs", "work")

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        """By id, in the order in which they came here: one that waits again after its visit failed comes last."""
        self.work = 0
        self.announced = 0
        self.announced_work = 0
        """Expected."""
        self._arrivals_ns = 0
        """Their sum."""
        self._lengths: list[tuple[int, int]] = []
        """Heap of (tokens, id). Jobs that are gone leave it when they come to its top, or when they are too many; the
        same for deadlines."""
        self._deadlines: list[tuple[int, int]] = []
        self._latest_ns: float | None = None

    def add(self, job: Job, work: int) -> None:
        self.jobs[job.id] = job
        self.work += work
        self._arrivals_ns += job.arrival_ns
        self._latest_ns = None
        heappush(self._lengths, (job.tokens, job.id))
        heappush(self._deadlines, (job.deadline_ns, job.id))
        if len(self._lengths) > 2 * len(self.jobs) + _STALE:
            self._lengths = [(each.tokens, each.id) for each in self.jobs.values()]
            heapify(self._lengths)
        if len(self._deadlines) > 2 * len(self.jobs) + _STALE:
            self._deadlines = [(each.deadline_ns, each.id) for each in self.jobs.values()]
            heapify(self._deadlines)

    def remove(self, id: int, work: int) -> None:
        self._arrivals_ns -= self.jobs.pop(id).arrival_ns
        self.work -= work
        self._latest_ns = None

    def shortest(self) -> Job:
        return self._top(self._lengths)

    def first_due(self) -> Job:
        return self._top(self._deadlines)

    def first_deadline_ns(self) -> int:
        return self.first_due().deadline_ns

    def retimed(self) -> None:
        """Speeds changed."""
        self._latest_ns = None

    def waited_s(self, now_ns: int) -> float:
        """Summed over the jobs."""
        return (len(self.jobs) * now_ns - self._arrivals_ns) / NS

    def latest_start_ns(self, now_ns: int, ns_per_token: float) -> float:
        """When its jobs must start, one after another by deadline, to meet every deadline that can still be met;
        infinite where none can. Remembered until the queue changes or that time is over."""
        if self._latest_ns is None or self._latest_ns < now_ns:
            self._latest_ns, work_ns = math.inf, 0.0
            for deadline_ns, tokens in sorted((job.deadline_ns, job.tokens) for job in self.jobs.values()):
                if deadline_ns - tokens * ns_per_token >= now_ns:
                    work_ns += tokens * ns_per_token
                    self._latest_ns = min(self._latest_ns, deadline_ns - work_ns)
        return self._latest_ns

    def _top(self, heap: list[tuple[int, int]]) -> Job:
        while heap[0][1] not in self.jobs:
            heappop(heap)
        return self.jobs[heap[0][1]]


class Demand:
    """The queues of all teachers."""

    def __init__(self, system: System) -> None:
        self._per_token = [2 * teacher.active_params for teacher in system.teachers]
        self._rollouts: dict[int, tuple[int, int]] = {}
        """Under way: teacher and expected work."""
        self.waiting: dict[int, Job] = {}
        """The jobs of all queues, by id."""
        self.groups: dict[int, int] = {}
        """By job, waiting or on a visit: its group, where it has one."""
        self.queues = [Queue() for _ in system.teachers]
        self.resident_jobs = [0] * len(system.teachers)
        """By teacher: waiting jobs that cannot be streamed."""
        self._resident: set[int] = set()
        """Jobs that cannot be streamed, waiting or on a visit."""

    def work(self, job: Job) -> int:
        return job.tokens * self._per_token[job.teacher]

    def announce(self, event: Announced) -> None:
        queue, work = self.queues[event.teacher], event.expected_tokens * self._per_token[event.teacher]
        self._rollouts[event.rollout] = (event.teacher, work)
        queue.announced += 1
        queue.announced_work += work

    def arrive(self, event: Arrived) -> None:
        self.withdraw(event.rollout)
        if event.group >= 0:
            self.groups[event.job.id] = event.group
        if event.resident:
            self._resident.add(event.job.id)
        self.wait(event.job)

    def withdraw(self, rollout: int) -> int | None:
        """It is under way no longer. Its teacher; None: it was not under way."""
        if rollout not in self._rollouts:
            return None
        teacher, expected = self._rollouts.pop(rollout)
        queue = self.queues[teacher]
        queue.announced -= 1
        queue.announced_work -= expected
        return teacher

    def wait(self, job: Job) -> None:
        """It waits, for the first time or again."""
        self.waiting[job.id] = job
        self.queues[job.teacher].add(job, self.work(job))
        self.resident_jobs[job.teacher] += job.id in self._resident

    def take(self, jobs: Iterable[Job]) -> None:
        """They go on a visit."""
        for job in jobs:
            del self.waiting[job.id]
            self.queues[job.teacher].remove(job.id, self.work(job))
            self.resident_jobs[job.teacher] -= job.id in self._resident

    def drop(self, id: int) -> int | None:
        """Forgets a waiting job. Its teacher; None: it does not wait."""
        job = self.waiting.get(id)
        if job is None:
            return None
        self.take([job])
        self.forget([id])
        return job.teacher

    def forget(self, jobs: Iterable[int]) -> None:
        """They are done."""
        for id in jobs:
            self.groups.pop(id, None)
            self._resident.discard(id)
