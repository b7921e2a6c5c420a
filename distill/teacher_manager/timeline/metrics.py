"""What a schedule is worth, from its rows alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from distill.teacher_manager.timeline.case import Case
from distill.teacher_manager.timeline.schedule import Mode, Schedule, VisitRow

Span = tuple[int, int]
"""From, to (ns)."""


@dataclass(frozen=True)
class Metrics:
    """Latency is completion - arrival. A job is queued from its arrival until its visit starts."""

    loads: int
    streams: int
    bytes_moved: int
    visits: int
    makespan_ns: int
    """The last completion, from time 0."""
    compute_ns: int
    """The sum of all services."""
    exposed_stall_ns: int
    """Summed over the devices: on no visit while a job is queued anywhere, plus what streams take beyond their work."""
    copy_stall_ns: int
    """The part of it in which the device is being copied to, and that of the streams."""
    busy_fraction: float
    latency_mean_ns: int
    latency_p50_ns: int
    latency_p99_ns: int
    missed_deadlines: int
    max_age_ns: dict[int, int]
    """By teacher: the largest latency."""
    jain_mean_latency: float
    """Jain's index of the teachers' mean latencies: 1 where all wait alike."""


def measure(case: Case, schedule: Schedule) -> Metrics:
    """Of a schedule that serves every job once (see `checker.check`)."""
    system = case.system
    completions, work_ns = _completions(case, schedule.visits)
    makespan_ns = max(completions.values())
    excess_ns = sum(
        visit.end_ns - visit.start_ns - work
        for visit, work in zip(schedule.visits, work_ns, strict=True)
        if visit.mode is Mode.STREAM
    )
    stall_ns, copy_stall_ns = _stalls(case, schedule, makespan_ns)
    latencies = sorted(completions[job.id] - job.arrival_ns for job in case.jobs)
    per_teacher: dict[int, list[int]] = {}
    for job in case.jobs:
        per_teacher.setdefault(job.teacher, []).append(completions[job.id] - job.arrival_ns)
    streams = [visit for visit in schedule.visits if visit.mode is Mode.STREAM]
    moved = [copy.item for copy in schedule.copies] + [visit.teacher for visit in streams]
    return Metrics(
        loads=len(schedule.copies),
        streams=len(streams),
        bytes_moved=sum(system.teachers[item].bytes for item in moved),
        visits=len(schedule.visits),
        makespan_ns=makespan_ns,
        compute_ns=sum(work_ns),
        exposed_stall_ns=stall_ns + excess_ns,
        copy_stall_ns=copy_stall_ns + excess_ns,
        busy_fraction=sum(work_ns) / (len(system.devices) * makespan_ns),
        latency_mean_ns=_half_even(sum(latencies), len(latencies)),
        latency_p50_ns=_quantile(latencies, 50),
        latency_p99_ns=_quantile(latencies, 99),
        missed_deadlines=sum(completions[job.id] > job.deadline_ns for job in case.jobs),
        max_age_ns={teacher: max(per_teacher[teacher]) for teacher in sorted(per_teacher)},
        jain_mean_latency=_jain([sum(ages) / len(ages) for ages in per_teacher.values()]),
    )


def _completions(case: Case, visits: Sequence[VisitRow]) -> tuple[dict[int, int], list[int]]:
    """By job its completion; by visit its work: jobs of a resident visit end one after another, of a stream at once."""
    completions: dict[int, int] = {}
    work_ns: list[int] = []
    for visit in visits:
        t_ns = visit.start_ns
        for id in visit.jobs:
            t_ns += case.system.service_ns(case.jobs[id].tokens, case.jobs[id].teacher, visit.device)
            completions[id] = t_ns if visit.mode is Mode.RESIDENT else visit.end_ns
        work_ns.append(t_ns - visit.start_ns)
    return completions, work_ns


class _Queued:
    """How long anything was queued up to a time: sums over spans are two look-ups."""

    def __init__(self, case: Case, visits: Sequence[VisitRow]) -> None:
        changes = [(job.arrival_ns, 1) for job in case.jobs]
        changes += [(visit.start_ns, -len(visit.jobs)) for visit in visits]
        changes.sort()
        self._times = [0] + [t_ns for t_ns, _ in changes]
        depths = [0, *accumulate(change for _, change in changes)]
        spans = [
            after - before if depth > 0 else 0
            for before, after, depth in zip(self._times, self._times[1:], depths, strict=False)
        ]
        self._queued_ns = [0, *accumulate(spans)]
        self._is_queued = [depth > 0 for depth in depths]

    def until(self, t_ns: int) -> int:
        index = bisect_right(self._times, t_ns) - 1
        return self._queued_ns[index] + (t_ns - self._times[index] if self._is_queued[index] else 0)

    def within(self, spans: Sequence[Span]) -> int:
        return sum(self.until(end) - self.until(start) for start, end in spans)


def _stalls(case: Case, schedule: Schedule, makespan_ns: int) -> tuple[int, int]:
    """(idle while something is queued, the part of it under a copy to that device), without the streams' excess."""
    queued = _Queued(case, schedule.visits)
    visits: list[list[Span]] = [[] for _ in case.system.devices]
    copies: list[list[Span]] = [[] for _ in case.system.devices]
    for visit in sorted(schedule.visits, key=lambda visit: visit.start_ns):
        visits[visit.device].append((visit.start_ns, visit.end_ns))
    for copy in sorted(schedule.copies, key=lambda copy: copy.start_ns):
        if copy.start_ns < makespan_ns:
            copies[copy.device].append((copy.start_ns, min(copy.end_ns, makespan_ns)))
    stall_ns = copy_stall_ns = 0
    for busy, copied in zip(visits, copies, strict=True):
        stall_ns += queued.until(makespan_ns) - queued.within(busy)
        copy_stall_ns += queued.within(copied) - queued.within(_overlap(busy, copied))
    return stall_ns, copy_stall_ns


def _overlap(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Of two sorted lists whose own spans do not overlap."""
    both: list[Span] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def _half_even(total: int, count: int) -> int:
    whole, rest = divmod(total, count)
    return whole + (2 * rest > count or (2 * rest == count and whole % 2 == 1))


def _quantile(ordered: Sequence[int], percent: int) -> int:
    """The value at position ceil(q n), counted from 1."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _jain(means: Sequence[float]) -> float:
    return sum(means) ** 2 / (len(means) * sum(mean * mean for mean in means))
