"""Drives a policy through a trace on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from distill.teacher_manager.timeline.case import Case, Job
from distill.teacher_manager.timeline.decisions import (
    Announced,
    Arrived,
    Copy,
    CopyEnded,
    Decision,
    Event,
    Evict,
    LinkReleased,
    Policy,
    Stream,
    Visit,
    VisitEnded,
)
from distill.teacher_manager.timeline.fleet import Fleet, IllegalDecision
from distill.teacher_manager.timeline.schedule import CopyRow, Schedule, VisitRow

_STRIDE = 2_654_435_761
"""Knuth's multiplicative hash, odd: a permutation of the 32-bit numbers."""


def simulate(case: Case, policy: Policy) -> Schedule:
    """The schedule, up to the end of the last job. The policy is woken by events alone, never polled.

    Raises IllegalDecision for a decision that breaks a rule, and when the policy waits for ever.
    """
    return _Simulation(case, policy).run()


class _Simulation:
    def __init__(self, case: Case, policy: Policy) -> None:
        self._policy = policy
        self._fleet = Fleet(case.system)
        self._schedule = Schedule()
        self._left = len(case.jobs)
        self._arrivals = case.jobs
        self._arrived = 0
        """Of `_arrivals`; jobs are sorted by arrival."""
        self._rollouts = rollout_keys(case.jobs)
        self._announcements = sorted(case.jobs, key=lambda job: self._rollouts[job.id])
        self._announced = 0
        self._ends: list[tuple[int, int, CopyRow | VisitRow | LinkReleased]] = []
        """Heap of (time in ns, running number, what ends)."""
        self._started = 0
        self._wake_ns: int | None = None

    def run(self) -> Schedule:
        self._instant(0)
        while self._left:
            self._instant(self._next_ns())
        return self._schedule

    def _next_ns(self) -> int:
        times = [self._ends[0][0]] if self._ends else []
        if self._arrived < len(self._arrivals):
            times.append(self._arrivals[self._arrived].arrival_ns)
        if self._announced < len(self._announcements):
            times.append(self._announcements[self._announced].announced_ns)
        if self._wake_ns is not None:
            times.append(self._wake_ns)
        if not times:
            raise IllegalDecision(f"the policy waits for ever: {self._left} jobs are not done and nothing is under way")
        return min(times)

    def _instant(self, now_ns: int) -> None:
        events: list[Event] = []
        self._end(now_ns, events)
        self._announce(now_ns, events)
        self._arrive(now_ns, events)
        self._wake_ns = None
        for decision in self._policy.decide(now_ns, events, self._fleet):
            self._carry_out(decision, now_ns)

    def _end(self, now_ns: int, events: list[Event]) -> None:
        while self._ends and self._ends[0][0] == now_ns:
            ended = heappop(self._ends)[2]
            match ended:
                case CopyRow():
                    self._fleet.end_copy(ended, now_ns)
                    events.append(CopyEnded(ended.link, ended.device, ended.item))
                case VisitRow():
                    self._fleet.end_visit(ended.device, now_ns)
                    self._left -= len(ended.jobs)
                    events.append(VisitEnded(ended.device, ended.teacher, ended.jobs))
                case LinkReleased():
                    self._fleet.end_transfer(ended.link, now_ns)
                    events.append(ended)

    def _announce(self, now_ns: int, events: list[Event]) -> None:
        jobs = self._announcements
        while self._announced < len(jobs) and jobs[self._announced].announced_ns <= now_ns:
            job = jobs[self._announced]
            events.append(Announced(self._announced, job.teacher, job.expected_tokens))
            self._announced += 1

    def _arrive(self, now_ns: int, events: list[Event]) -> None:
        jobs = self._arrivals
        while self._arrived < len(jobs) and jobs[self._arrived].arrival_ns <= now_ns:
            job = jobs[self._arrived]
            self._fleet.arrive(job)
            events.append(Arrived(self._rollouts[job.id], job))
            self._arrived += 1

    def _carry_out(self, decision: Decision, now_ns: int) -> None:
        match decision:
            case Copy():
                copy = self._fleet.start_copy(decision.device, decision.item, now_ns)
                self._schedule.copies.append(copy)
                self._ends_at(copy.end_ns, copy)
            case Evict():
                self._schedule.evictions.append(self._fleet.evict(decision.device, decision.item, now_ns))
            case Visit():
                visit = self._fleet.start_visit(decision.device, decision.teacher, decision.jobs, now_ns)
                self._schedule.visits.append(visit)
                self._ends_at(visit.end_ns, visit)
            case Stream():
                visit = self._fleet.start_stream(decision.device, decision.teacher, decision.jobs, now_ns)
                self._schedule.visits.append(visit)
                self._ends_at(visit.end_ns, visit)
                transfer = self._fleet.transfers[self._fleet.devices[decision.device].link]
                assert transfer is not None
                self._ends_at(transfer.end_ns, LinkReleased(transfer.link))
            case _:
                if decision.at_ns <= now_ns:
                    raise IllegalDecision(f"wake at {decision.at_ns} ns: it is {now_ns} ns already")
                self._wake_ns = decision.at_ns

    def _ends_at(self, t_ns: int, what: CopyRow | VisitRow | LinkReleased) -> None:
        heappush(self._ends, (t_ns, self._started, what))
        self._started += 1


def rollout_keys(jobs: Sequence[Job]) -> list[int]:
    """By job id: its place among the announcements. Rollouts that start together are shuffled, lest their order tell
    the order of their arrivals."""
    order = sorted(jobs, key=lambda job: (job.announced_ns, job.id * _STRIDE % 2**32))
    keys = [0] * len(jobs)
    for key, job in enumerate(order):
        keys[job.id] = key
    return keys
