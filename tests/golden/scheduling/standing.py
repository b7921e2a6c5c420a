"""How far from the bounds each policy is, over the traces of a family, and what is asked of the online scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distill.teacher_manager.timeline.bounds import Bounds
from distill.teacher_manager.timeline.case import Case
from tests.golden.scheduling.planned import Planned
from tests.golden.scheduling.timed import Result

ONLINE = "online"
FAMILIES = ("B_timed", "C_", "E_64x64", "E_256x512")
"""Traces by the beginning of their names. The hand-worked ones stand in none."""


@dataclass
class Standing:
    """One policy on the traces of one family: a value for each trace."""

    makespan: list[float] = field(default_factory=list[float])
    """Over its bound, or the optimum where the data has it."""
    stall: list[float] = field(default_factory=list[float])
    """Exposed stall over devices and makespan."""
    missed: list[float] = field(default_factory=list[float])
    """Fraction of the jobs."""
    latency: list[float] = field(default_factory=list[float])
    """Mean over its bound."""
    moved: list[float] = field(default_factory=list[float])
    """Bytes over the bound for schedules that miss no deadline."""
    p99_s: list[float] = field(default_factory=list[float])
    jain: list[float] = field(default_factory=list[float])

    def add(self, case: Case, result: Result, found: Bounds, optimum_ns: int | None) -> None:
        got = result.metrics
        self.makespan.append(got.makespan_ns / (optimum_ns or found.makespan_lb_ns))
        self.stall.append(got.exposed_stall_ns / (len(case.system.devices) * got.makespan_ns))
        self.missed.append(got.missed_deadlines / len(case.jobs))
        self.latency.append(got.latency_mean_ns / found.latency_mean_lb_ns)
        self.moved.append(got.bytes_moved / found.bytes_lb_all_deadlines_met)
        self.p99_s.append(got.latency_p99_ns / 1e9)
        self.jain.append(got.jain_mean_latency)

    def figures(self) -> dict[str, float]:
        """Geometric means of ratios and latencies, plain means of fractions."""
        return {
            "makespan": _geometric(self.makespan),
            "worst": max(self.makespan),
            "stall": _mean(self.stall),
            "missed": _mean(self.missed),
            "latency": _geometric(self.latency),
            "bytes": _geometric(self.moved),
            "p99 s": _geometric(self.p99_s),
            "Jain": _mean(self.jain),
        }


MUST: Mapping[str, Mapping[str, float]] = {
    "B_timed": {"makespan": 1.08},
    "C_": {"makespan": 1.02, "worst": 1.20, "stall": 0.08, "missed": 0.003, "latency": 2.6, "bytes": 4.4},
    "E_64x64": {"makespan": 1.03, "missed": 0.0},
    "E_256x512": {"makespan": 1.10, "missed": 0.0},
}
"""Each figure of the online scheduler is at most this."""


class Table:
    """All policies of all families."""

    def __init__(self) -> None:
        self._standings: dict[str, dict[str, Standing]] = {}
        self.slowest_ms = 0.0
        """The slowest decision of the online scheduler."""
        self.planned = Planned()
        """The cases without a clock."""

    def add(self, case: Case, results: Sequence[Result], found: Bounds, optimum_ns: int | None) -> None:
        for family in FAMILIES:
            if case.name.startswith(family):
                of_family = self._standings.setdefault(family, {})
                for result in results:
                    of_family.setdefault(result.policy, Standing()).add(case, result, found, optimum_ns)

    def missed_targets(self) -> list[str]:
        return [
            f"{family}: {figure} {value:.4g}, target {MUST[family][figure]:g}"
            for family, of_family in self._standings.items()
            for figure, value in of_family[ONLINE].figures().items()
            if value > MUST[family].get(figure, math.inf)
        ]

    def lines(self) -> Iterator[str]:
        for family, of_family in self._standings.items():
            names = list(of_family[ONLINE].figures())
            yield f"\n{family + '*':<32}" + "".join(f"{name:>10}" for name in names)
            for policy, standing in of_family.items():
                yield f"  {policy:<30}" + "".join(_cell(value) for value in standing.figures().values())
            targets = MUST[family]
            yield f"  {'target, at most':<30}" + "".join(
                _cell(targets[name]) if name in targets else f"{'':>10}" for name in names
            )


def _cell(value: float) -> str:
    return f"{value:>10.4f}" if value < 100 else f"{value:>10.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _geometric(values: Sequence[float]) -> float:
    return math.exp(_mean([math.log(value) for value in values]))
