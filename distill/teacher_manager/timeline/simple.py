"""The simple policies by name: what a scheduler is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distill.teacher_manager.timeline.case import Case
from distill.teacher_manager.timeline.choosers import Barrier, Fifo, LongestDrain, OldestDrain, StepGate
from distill.teacher_manager.timeline.decisions import Policy
from distill.teacher_manager.timeline.on_demand import OnDemand
from distill.teacher_manager.timeline.prefetch import PrefetchReplay
from distill.teacher_manager.timeline.schedule import Schedule
from distill.teacher_manager.timeline.simulator import simulate

SIMPLE: Mapping[str, Callable[[Case], Policy]] = {
    "fifo": lambda case: OnDemand(case.system, Fifo()),
    "oldest_drain": lambda case: OnDemand(case.system, OldestDrain()),
    "longest_drain": lambda case: OnDemand(case.system, LongestDrain(case.system)),
    "barrier": lambda case: OnDemand(case.system, Barrier(case), one_teacher=True),
    "oldest_drain_stream": lambda case: OnDemand(case.system, OldestDrain(), stream=True),
}


def prefetched(case: Case, policy: str, on_demand: Schedule) -> Schedule:
    """The same visits as in the `on_demand` schedule of `policy`, with copies as early as the rules allow."""
    gate = StepGate(case) if policy == "barrier" else None
    return simulate(case, PrefetchReplay(case, on_demand, gate))
