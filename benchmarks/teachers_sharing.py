"""Many teachers in the room of a few: a trace through the real Teacher Manager, and the same trace simulated.

Every round each teacher gets `visit` tokens to score. The next round comes a little before the slot could be done, so
that it never idles for want of work: what it idles for is weights. A round of one sample a teacher goes before, which
nobody counts: then as many teachers are resident as fit, all files were read and all canaries are known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.teachers_house import CALL_TOKENS, House, Served, sample_of
from benchmarks.teachers_swaps import Speed
from distill.protocols import WeightCosts
from distill.teacher_manager.catalogue import Catalogue, Rates
from distill.teacher_manager.planning.policy import policy_for_runs
from distill.teacher_manager.timeline.bounds import bounds
from distill.teacher_manager.timeline.case import NS, Case, Device, Job, Link, System
from distill.teacher_manager.timeline.simulator import simulate
from distill.types import Sample

PRESSURE = 0.95
"""Time between two rounds, as a share of the time that scoring one takes."""


@dataclass(frozen=True)
class Trace:
    """Counted samples by arrival, and those of the round before. Seconds from the end of that round's room."""

    warm: tuple[Sample, ...]
    arrivals: tuple[tuple[float, Sample], ...]
    rounds: int
    interval_s: float
    lead_s: float
    """What the simulator gives the uncounted round."""

    @property
    def tokens(self) -> int:
        return sum(_tokens(sample) for _, sample in self.arrivals)


@dataclass(frozen=True)
class Outcome:
    """How one trace went. Seconds from the first counted arrival to the last score."""

    makespan_s: float
    loads: int
    streams: int


def make_trace(house: House, speed: Speed, *, visit: int, length: int, rounds: int, load_s: float) -> Trace:
    """`visit` tokens a teacher and round, in samples of `length`. `load_s`: of one swap, as the simulator has it."""
    length = min(length, visit)
    each = max(1, visit // length)
    work_s = len(house.names) * (2 * each * length * house.costs.active_params / speed.flops_per_s)
    samples = iter(range(10**9))
    warm = tuple(sample_of(house, next(samples), length, name) for name in house.names)
    arrivals = tuple(
        (number * PRESSURE * work_s, sample_of(house, next(samples), length, name))
        for number in range(rounds)
        for name in house.names
        for _ in range(each)
    )
    lead_s = 3 * len(house.names) * (load_s + speed.seconds(length, house.costs.active_params))
    return Trace(warm, arrivals, rounds, PRESSURE * work_s, lead_s)


async def measure(served: Served, trace: Trace, speed: Speed, link_bytes_per_s: float, canaries: Path) -> Outcome:
    """The trace on the wall clock."""
    rates = Rates(round(speed.flops_per_s), round(link_bytes_per_s), round(link_bytes_per_s))
    manager = served.manager(rates, canaries)
    await manager.start()
    try:
        await asyncio.gather(*(manager.score(sample) for sample in trace.warm))
        swaps, streams = sum(manager.swap_counts().values()), manager.figures().streams
        began = time.monotonic()

        async def one(arrival_s: float, sample: Sample) -> None:
            announced_s = max(0.0, arrival_s - trace.interval_s)
            await asyncio.sleep(began + announced_s - time.monotonic())
            manager.announce(sample.id, list(sample.teachers), _tokens(sample))
            await asyncio.sleep(began + arrival_s - time.monotonic())
            await manager.score(sample)

        await asyncio.gather(*(one(*arrival) for arrival in trace.arrivals))
        makespan_s = time.monotonic() - began
        loads = sum(manager.swap_counts().values()) - swaps
        return Outcome(makespan_s, loads, manager.figures().streams - streams)
    finally:
        await manager.close()


def predict(
    house: House, trace: Trace, speed: Speed, *, link_bytes_per_s: float, budget_bytes: int, loads: int
) -> tuple[Outcome, float]:
    """The simulator's outcome of the trace, and the bound of its makespan: all work at full speed from its arrival on,
    or `loads` copies one after the other. Speeds are what was measured before."""
    case = case_of(house, trace, speed, link_bytes_per_s, budget_bytes)
    schedule = simulate(case, policy_for_runs(case.system, visit_tokens=CALL_TOKENS))
    lead_ns = round(trace.lead_s * NS)
    late = [visit.end_ns for visit in schedule.visits if visit.start_ns < lead_ns]
    if max(late, default=0) > lead_ns:
        raise SystemExit("error: the round that is not counted takes longer than it was given")
    outcome = Outcome(
        (max(visit.end_ns for visit in schedule.visits) - lead_ns) / NS,
        sum(copy.start_ns >= lead_ns for copy in schedule.copies),
        sum(visit.mode == 1 and visit.start_ns >= lead_ns for visit in schedule.visits),
    )
    compute_s = (bounds(case).makespan_lb_compute_ns - lead_ns) / NS
    return outcome, max(compute_s, loads * house.costs.bytes / link_bytes_per_s)


def case_of(house: House, trace: Trace, speed: Speed, link_bytes_per_s: float, budget_bytes: int) -> Case:
    lead_ns = round(trace.lead_s * NS)
    index = {name: number for number, name in enumerate(house.names)}
    rows = [(0, 0, sample) for sample in trace.warm]
    for arrival_s, sample in trace.arrivals:
        announced_s = max(0.0, arrival_s - trace.interval_s)
        rows.append((lead_ns + round(announced_s * NS), lead_ns + round(arrival_s * NS), sample))
    jobs = tuple(
        Job(
            id=number,
            teacher=index[next(iter(sample.teachers))],
            step=0,
            announced_ns=announced_ns,
            arrival_ns=arrival_ns,
            expected_tokens=_tokens(sample),
            tokens=_tokens(sample),
            deadline_ns=arrival_ns + 3600 * NS,
        )
        for number, (announced_ns, arrival_ns, sample) in enumerate(rows)
    )
    costs: Sequence[WeightCosts] = [house.costs] * len(house.names)
    plan = Catalogue(house.teachers()).system(
        costs,
        [budget_bytes],
        holds_one=False,
        rates=Rates(round(speed.flops_per_s), 1, 1),
    )
    device = Device(0, budget_bytes, round(speed.flops_per_s), link=0, call_ns=round(speed.call_s * NS))
    system = System((device,), (Link(0, round(link_bytes_per_s)),), None, plan.teachers)
    return Case("time-shared teachers", system, jobs)


def _tokens(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)
