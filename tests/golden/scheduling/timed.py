"""Traces: the simple policies to the nanosecond, the bounds, and schedules worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from distill.teacher_manager.timeline.bounds import Bounds, bounds
from distill.teacher_manager.timeline.case import Case
from distill.teacher_manager.timeline.checker import check
from distill.teacher_manager.timeline.generated import digest
from distill.teacher_manager.timeline.metrics import Metrics, measure
from distill.teacher_manager.timeline.schedule import Schedule
from distill.teacher_manager.timeline.simple import SIMPLE, prefetched
from distill.teacher_manager.timeline.simulator import simulate
from tests.golden.scheduling.tally import Tally

LATENCY_MARGIN, LATENESS_MARGIN_NS = 1e-6, 1000
"""By how much the data weakens these two bounds, so that they hold for schedules in float seconds too."""
BYTES_MARGIN = 1000
"""The same, in bytes, where the data's solver had to search."""


@dataclass(frozen=True)
class Result:
    """One policy on one trace."""

    policy: str
    schedule: Schedule
    metrics: Metrics


def simple_policies(case: Case, expected: Mapping[str, Any], tally: Tally) -> Iterator[Result]:
    for policy, modes in expected.items():
        on_demand = simulate(case, SIMPLE[policy](case))
        for mode, want in modes.items():
            name = f"{policy}, {mode}"
            schedule = on_demand if mode == "on_demand" else prefetched(case, policy, on_demand)
            tally.equal(f"{name}: faults", [str(fault) for fault in check(case, schedule)], [])
            metrics = measure(case, schedule)
            got = asdict(metrics)
            got["max_age_ns"] = {str(teacher): age for teacher, age in metrics.max_age_ns.items()}
            if "max_age_ns" not in want:
                del got["max_age_ns"]
            tally.equal(name, got, want)
            yield Result(name, schedule, metrics)


def compare_bounds(case: Case, want: Mapping[str, Any], tally: Tally) -> Bounds:
    """All that the data has; each is compared, none may be missing."""
    found = bounds(case)
    for name, value in want.items():
        match name:
            case "latency_mean_lb_ns":
                tally.near(name, found.latency_mean_lb_ns * (1 - LATENCY_MARGIN), value)
            case "max_lateness_lb_ns":
                tally.near(name, found.max_lateness_lb_ns - LATENESS_MARGIN_NS, value)
            case "bytes_lb_all_deadlines_met":
                tally.holds(name, found.bytes_lb_all_deadlines_met - value in (0, BYTES_MARGIN))
            case "bytes_lb_all_deadlines_met_is_lp_optimal":
                tally.equal(name, found.bytes_lb_all_deadlines_met_is_optimal, value)
            case _ if isinstance(value, bool) or name in ("windows_disjoint", "missed_deadlines_lb"):
                tally.equal(name, getattr(found, name), value)
            case _:
                tally.near(name, getattr(found, name), value)
    return found


def hold_against(result: Result, found: Bounds, tally: Tally) -> None:
    """No schedule is better than a bound."""
    metrics, name = result.metrics, result.policy
    tally.at_least(f"{name}: makespan", metrics.makespan_ns, found.makespan_lb_ns)
    tally.at_least(f"{name}: mean latency", metrics.latency_mean_ns, found.latency_mean_lb_ns)
    tally.at_least(f"{name}: missed", metrics.missed_deadlines, found.missed_deadlines_lb)
    tally.at_least(f"{name}: bytes", metrics.bytes_moved, found.bytes_lb_each_once)
    if metrics.missed_deadlines == 0:
        tally.at_least(f"{name}: bytes", metrics.bytes_moved, found.bytes_lb_all_deadlines_met)


def hold_against_optimum(case: Case, result: Result, optimum: Mapping[str, int], tally: Tally) -> None:
    """The data's optimum over all clairvoyant schedules, each number by itself."""
    completed = result.metrics.latency_mean_ns * len(case.jobs) + len(case.jobs) // 2
    tally.at_least(f"{result.policy}: makespan", result.metrics.makespan_ns, optimum["min_makespan_ns"])
    tally.at_least(f"{result.policy}: missed", result.metrics.missed_deadlines, optimum["min_missed"])
    tally.at_least(f"{result.policy}: latencies", completed, optimum["min_latency_sum_ns"])
    if result.metrics.missed_deadlines == 0 and "min_bytes_all_deadlines_met" in optimum:
        tally.at_least(f"{result.policy}: bytes", result.metrics.bytes_moved, optimum["min_bytes_all_deadlines_met"])


def optimum_of(result: Result, expected: Mapping[str, Mapping[str, int]]) -> Mapping[str, int]:
    """Of the schedules to which this one belongs."""
    if result.metrics.streams:
        return expected["prefetch_or_stream"]
    return expected["on_demand" if result.policy.endswith("on_demand") else "prefetch"]


def compare_trace(case: Case, want: Mapping[str, Any], tally: Tally) -> None:
    """Of a generated trace: the rows that the data shows, and the digest of all."""
    got = {
        "n_jobs": len(case.jobs),
        "sha256_of_rows": digest(case.jobs),
        "first_rows": [list(msgspec.to_builtins(job)) for job in case.jobs[:3]],
        "last_row": list(msgspec.to_builtins(case.jobs[-1])),
        "total_tokens": sum(job.tokens for job in case.jobs),
        "teacher_bytes_total": sum(teacher.bytes for teacher in case.system.teachers),
        "requested_teachers": len({job.teacher for job in case.jobs}),
    }
    tally.equal("check", got, want)


def compare_log(case: Case, entry: Mapping[str, Any], tally: Tally) -> None:
    """A schedule written down by hand, row by row."""
    on_demand = simulate(case, SIMPLE[entry["policy"]](case))
    schedule = on_demand if entry["mode"] == "on_demand" else prefetched(case, entry["policy"], on_demand)
    name = f"{entry['case']}, {entry['policy']}, {entry['mode']}"
    tally.equal(name, msgspec.json.decode(msgspec.json.encode(schedule)), entry["log"])
    tally.equal(f"{name}: faults", [str(fault) for fault in check(case, schedule)], [])
