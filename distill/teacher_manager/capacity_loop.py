"""A run's demand for scores as jobs on a virtual clock, in a closed loop: who waits for teachers asks for no more.

The rollouts of a step start when those of the step before are written, and not before the newest step is scored that
they may not lag behind. So a run that its teachers slow down is simulated as slow as it will be.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from distill.teacher_manager.planning.policy import IndexPolicy
from distill.teacher_manager.planning.settings import Settings
from distill.teacher_manager.timeline.case import NS, Case, Job, System
from distill.teacher_manager.timeline.schedule import Schedule
from distill.teacher_manager.timeline.simulator import simulate

UNITS = 32
"""A step's samples are bundled into so many, or one for each route: the time that a simulation takes rises faster than
their number."""
_SHORTEST, _LONGEST = 0.5, 1.5
"""Lengths are drawn evenly from between so many times the mean."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the run asks of its teachers in each step."""

    routes: tuple[tuple[tuple[int, ...], float], ...]
    """(items that score one sample, share of the samples)."""
    batch_size: int
    """Samples a step."""
    prompts: int
    """Different prompts a step: the samples of one prompt have the same teachers."""
    tokens_per_sample: int
    """Prompt and response, on average."""
    max_staleness: int
    """0: a teacher's samples of a step are scored when all of them are written, as runs of that kind do it."""
    visit_tokens: int
    deadline_s: float
    step_s: float | None
    """Seconds of a step in which nobody waits for a teacher. None: as long as the slots compute for it."""

    @property
    def units(self) -> int:
        """Bundles of samples that a step is simulated with."""
        return min(self.batch_size, max(UNITS, len(self.routes)))

    def shares(self) -> dict[int, float]:
        """Item -> share of the samples that it scores."""
        shares: dict[int, float] = {}
        for items, share in self.routes:
            for item in items:
                shares[item] = shares.get(item, 0.0) + share
        return shares

    def work_s(self, system: System) -> float:
        """Device seconds that the scores of a step take."""
        flops = sum(2 * share * system.teachers[item].active_params for item, share in self.shares().items())
        return self.batch_size * self.tokens_per_sample * flops / system.devices[0].flops_per_s

    def write_s(self, system: System) -> float:
        """From the start of a step's first rollout to the end of its last."""
        return self.work_s(system) / len(system.devices) if self.step_s is None else self.step_s


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples of a step that are scored together: one job for each of `items`."""

    items: tuple[int, ...]
    tokens: int
    written: float
    """When its rollouts end, as a share of the time in which those of the step are written."""


def draw(demand: Demand, seed: int, step: int) -> list[Unit]:
    """The samples of a step. Their routes are drawn evenly, as a run goes through its prompts."""
    rng = random.Random(f"{seed} {step}")
    units = demand.units
    prompts = min(demand.prompts, units)
    cumulative = list(accumulate(share for _, share in demand.routes))
    places = [(prompt + rng.random()) / prompts * cumulative[-1] for prompt in range(prompts)]
    rng.shuffle(places)
    tokens = demand.batch_size / units * demand.tokens_per_sample
    found: list[Unit] = []
    for index in range(units):
        route = bisect_right(cumulative, places[index * prompts // units])
        length = rng.uniform(_SHORTEST, _LONGEST)
        found.append(Unit(demand.routes[route][0], max(1, round(length * tokens)), length / _LONGEST))
    return found


def run(system: System, demand: Demand, steps: Sequence[Sequence[Unit]]) -> tuple[Case, Schedule]:
    """The jobs of the steps with the times at which they come, and how the scheduler serves them.

    When a step starts depends on earlier steps alone, so each round settles at least one more of the starts.
    """
    write_ns = round(demand.write_s(system) * NS)
    settings = Settings.for_runs(demand.visit_tokens)
    starts = [step * write_ns for step in range(len(steps))]
    case = _case(system, demand, steps, starts, write_ns)
    schedule = simulate(case, IndexPolicy(system, settings))
    for _ in steps:
        again = _starts(_ends(case, schedule, len(steps)), write_ns, demand.max_staleness)
        if again == starts:
            break
        starts = again
        case = _case(system, demand, steps, starts, write_ns)
        schedule = simulate(case, IndexPolicy(system, settings))
    return case, schedule


def _case(
    system: System, demand: Demand, steps: Sequence[Sequence[Unit]], starts: Sequence[int], write_ns: int
) -> Case:
    deadline_ns = round(demand.deadline_s * NS)
    rows: list[tuple[int, int, int, int]] = []  # arrival, step, item, tokens
    for step, units in enumerate(steps):
        ends = [(item, unit, starts[step] + round(unit.written * write_ns)) for unit in units for item in unit.items]
        last = {item: max(end for other, _, end in ends if other == item) for item, _, _ in ends}
        rows += [(end if demand.max_staleness else last[item], step, item, unit.tokens) for item, unit, end in ends]
    rows.sort()
    mean = max(1, round(demand.batch_size / demand.units * demand.tokens_per_sample))
    jobs = tuple(
        Job(id, item, step, starts[step], arrival_ns, mean, tokens, arrival_ns + deadline_ns)
        for id, (arrival_ns, step, item, tokens) in enumerate(rows)
    )
    return Case("run", system, jobs)


def _ends(case: Case, schedule: Schedule, steps: int) -> list[int]:
    """By step: when its last job is scored."""
    ends = [0] * steps
    for visit in schedule.visits:
        for id in visit.jobs:
            ends[case.jobs[id].step] = max(ends[case.jobs[id].step], visit.end_ns)
    return ends


def _starts(ends: Sequence[int], write_ns: int, max_staleness: int) -> list[int]:
    starts = [0]
    for step in range(1, len(ends)):
        awaited = step - 1 - max_staleness
        starts.append(max(starts[-1] + write_ns, ends[awaited] if awaited >= 0 else 0))
    return starts
