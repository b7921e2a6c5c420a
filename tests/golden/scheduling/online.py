"""The scheduler under test, on the traces, beside the simple policies.

`scheduler` is the one place where it is named. It is made from the `System` alone: what it learns of the jobs, it
learns from events.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distill.teacher_manager.planning.policy import IndexPolicy
from distill.teacher_manager.timeline.case import Case, System
from distill.teacher_manager.timeline.decisions import Decision, Event, Policy
from distill.teacher_manager.timeline.fleet import Fleet
from distill.teacher_manager.timeline.metrics import measure
from distill.teacher_manager.timeline.simulator import simulate
from tests.golden.scheduling.timed import Result


def scheduler(system: System) -> Policy:
    return IndexPolicy(system)


@dataclass(frozen=True)
class Timed:
    result: Result
    slowest_ms: float
    """CPU time of the slowest single decision, on this machine."""


def run_online(case: Case) -> Timed:
    watched = _Watched(scheduler(case.system))
    gc.disable()  # a collection of all that the runner holds would count as somebody's decision
    try:
        schedule = simulate(case, watched)
    finally:
        gc.enable()
    return Timed(Result("online", schedule, measure(case, schedule)), watched.slowest_s * 1e3)


class _Watched:
    """Passes decisions on and takes the CPU time of each, without what the driver does in between."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.slowest_s = 0.0

    def decide(self, now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        started = time.thread_time()
        decisions = iter(self._policy.decide(now_ns, events, fleet))
        for decision in decisions:
            self.slowest_s = max(self.slowest_s, time.thread_time() - started)
            yield decision
            started = time.thread_time()
        self.slowest_s = max(self.slowest_s, time.thread_time() - started)
