"""What no schedule of a trace can beat, whether it knows the future or not.

Times are exact: work is counted in FLOPs and time in units in which one machine with the speed of all devices together
does one FLOP, so nothing is rounded before the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from distill.teacher_manager.timeline.case import NS, Case, Job, ceil_div
from distill.teacher_manager.timeline.residency_bound import disjoint_windows, least_bytes


@dataclass(frozen=True)
class Bounds:
    """`_lb`: no schedule is below; `_ub`: none is above. Times in ns, rounded to the side on which the bound holds."""

    makespan_lb_compute_ns: int
    """Some suffix of the arrivals keeps all devices busy."""
    makespan_lb_job_ns: int
    """Some job, on the fastest device from its arrival."""
    makespan_lb_copy_ns: int
    """Each requested object once over all links together."""
    makespan_lb_disk_ns: int
    """Each requested object that is not in host memory at the start, once from disk."""
    compute_total_ns_at_full_speed: int
    bytes_lb_each_once: int
    bytes_lb_all_deadlines_met: int
    """For schedules that miss no deadline (see `residency_bound`)."""
    bytes_lb_all_deadlines_met_is_optimal: bool
    windows_disjoint: int
    """Windows [arrival, deadline], disjoint for each object, summed over the objects."""
    latency_mean_lb_ns: int
    max_lateness_lb_ns: int
    """No schedule has a smaller maximum of completion - deadline."""
    missed_deadlines_lb: int
    """Jobs that are late even alone."""

    @property
    def makespan_lb_ns(self) -> int:
        return max(
            self.makespan_lb_compute_ns, self.makespan_lb_job_ns, self.makespan_lb_copy_ns, self.makespan_lb_disk_ns
        )

    @property
    def busy_fraction_ub(self) -> float:
        return self.compute_total_ns_at_full_speed / self.makespan_lb_ns

    @property
    def all_deadlines_feasible_for_compute_alone(self) -> bool:
        return self.max_lateness_lb_ns <= 0


def bounds(case: Case) -> Bounds:
    system = case.system
    speed = sum(device.flops_per_s for device in system.devices)
    flops = [2 * job.tokens * system.teachers[job.teacher].active_params for job in case.jobs]
    fastest = max(system.devices, key=lambda device: device.flops_per_s).id
    alone_ns = [system.service_ns(job.tokens, job.teacher, fastest) for job in case.jobs]
    windows = disjoint_windows(case)
    least = least_bytes(case, windows)
    requested = {item for job in case.jobs for item in system.needs[job.teacher]}
    once = sum(system.teachers[item].bytes for item in requested)
    compute_ns, left = 0, 0
    for job, work in zip(reversed(case.jobs), reversed(flops), strict=True):
        left += work
        compute_ns = max(compute_ns, job.arrival_ns + ceil_div(left * NS, speed))
    return Bounds(
        makespan_lb_compute_ns=compute_ns,
        makespan_lb_job_ns=max(job.arrival_ns + ns for job, ns in zip(case.jobs, alone_ns, strict=True)),
        makespan_lb_copy_ns=ceil_div(once * NS, sum(link.bytes_per_s for link in system.links)),
        makespan_lb_disk_ns=_disk_ns(case, requested),
        compute_total_ns_at_full_speed=ceil_div(left * NS, speed),
        bytes_lb_each_once=once,
        bytes_lb_all_deadlines_met=least.total,
        bytes_lb_all_deadlines_met_is_optimal=least.is_optimal,
        windows_disjoint=sum(map(len, windows.values())),
        latency_mean_lb_ns=max(
            _least_latency(case.jobs, flops, speed) // (speed * len(case.jobs)), sum(alone_ns) // len(alone_ns)
        ),
        max_lateness_lb_ns=ceil_div(_least_lateness(case.jobs, flops, speed), speed),
        missed_deadlines_lb=sum(
            job.arrival_ns + ns > job.deadline_ns for job, ns in zip(case.jobs, alone_ns, strict=True)
        ),
    )


def _disk_ns(case: Case, requested: set[int]) -> int:
    host = case.system.host
    if host is None:
        return 0
    cold = sum(case.system.teachers[item].bytes for item in requested.difference(host.initial))
    return ceil_div(cold * NS, host.disk_bytes_per_s)


def _least_latency(jobs: Sequence[Job], flops: Sequence[int], speed: int) -> int:
    """Sum over the jobs, in ns * speed: shortest remaining work first is the best that one machine can do."""
    ends = _one_machine(jobs, flops, speed, by_deadline=False)
    return sum(end - job.arrival_ns * speed for job, end in ends)


def _least_lateness(jobs: Sequence[Job], flops: Sequence[int], speed: int) -> int:
    """The largest over the jobs, in ns * speed: earliest deadline first is the best that one machine can do."""
    return max(end - job.deadline_ns * speed for job, end in _one_machine(jobs, flops, speed, by_deadline=True))


def _one_machine(
    jobs: Sequence[Job], flops: Sequence[int], speed: int, *, by_deadline: bool
) -> Iterator[tuple[Job, int]]:
    """(job, completion in ns * speed) on one machine that is pre-empted at every arrival, without copies."""
    queue: list[tuple[int, int, int]] = []
    """Heap of (priority, job id, work left in ns * FLOP/s)."""
    now = 0
    for index, job in enumerate(jobs):
        now = max(now, job.arrival_ns * speed)
        work = flops[index] * NS
        heappush(queue, (job.deadline_ns if by_deadline else work, job.id, work))
        until = jobs[index + 1].arrival_ns * speed if index + 1 < len(jobs) else None
        while queue and (until is None or now < until):
            priority, id, left = heappop(queue)
            if until is None or now + left <= until:
                now += left
                yield jobs[id], now
            else:
                left -= until - now
                now = until
                heappush(queue, (priority if by_deadline else left, id, left))
