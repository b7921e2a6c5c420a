"""The planners on the cases without a clock: what their loads cost, over the optimum, beside the simple policies.

Each decision is carried out here on plain sets, without trusting the planner's own books.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distill.teacher_manager.planning.paging import Mode, Pager
from distill.teacher_manager.planning.room import Room
from distill.teacher_manager.planning.steps import StepPlanner
from tests.golden.scheduling.tally import Tally

ALL = 1 << 30
"""Visits or steps announced ahead: more than there are."""
MUST: Mapping[str, float] = {
    "equal size, all announced": 1.00,
    "equal size, 32 announced": 1.02,
    "weighted small, all announced": 1.05,
    "weighted small, all announced, streams": 1.05,
    "weighted large, all announced": 1.10,
    "weighted large, all announced, streams": 1.10,
    "steps: all needed": 1.00,
    "steps: sets": 1.00,
    "steps: ages": 1.00,
}
"""Geometric mean of the cost over the optimum, at most. No plan costs less than an optimum: 1.00 means each one."""


@dataclass
class Row:
    """One way to run the cases of one family: a ratio to the optimum for each case."""

    ours: list[float] = field(default_factory=list[float])
    simple: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    proven: int = 0
    """Cases in which the planner says itself that no plan is better for what was announced."""
    slowest_s: float = 0.0
    """Wall time of the slowest decision."""


@dataclass
class Played:
    cost: int = 0
    faults: list[str] = field(default_factory=list[str])
    slowest_s: float = 0.0
    proven: bool = True


class Planned:
    """All families."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def add(self, case: Mapping[str, Any], tally: Tally) -> None:
        if case["kind"] == "paging_uniform":
            self._uniform(case, tally)
        elif case["kind"] == "paging_weighted":
            self._weighted(case, tally)
        elif case["kind"] == "step_all":
            self._step_all(case, tally)
        elif case["kind"] == "step_sets":
            self._step_sets(case, tally)
        elif case["kind"] == "step_ages":
            self._step_ages(case, tally)

    def missed_targets(self) -> list[str]:
        return [
            f"{name}: {_geometric(row.ours):.6g} of the optimum, target {MUST[name]:g}"
            for name, row in self._rows.items()
            if _geometric(row.ours) > MUST.get(name, math.inf)
        ]

    def lines(self) -> Iterator[str]:
        if self._rows:
            heads = f"{'mean':>8}{'worst':>8}{'target':>8}{'proven':>8}{'slowest':>11}"
            yield f"\n{'cost over the optimum or the best known':<46}{heads}"
        for name, row in self._rows.items():
            target = f"{MUST[name]:.2f}" if name in MUST else ""
            proven, slowest = f"{row.proven}/{len(row.ours)}", f"{row.slowest_s * 1e3:.0f} ms"
            yield f"  {name:<44}{_geometric(row.ours):>8.4f}{max(row.ours):>8.4f}{target:>8}{proven:>8}{slowest:>11}"
            for simple, ratios in row.simple.items():
                yield f"      {simple:<40}{_geometric(ratios):>8.4f}{max(ratios):>8.4f}"

    def _note(self, name: str, played: Played, best: int, floor: int, tally: Tally, **simple: int) -> None:
        """`best`: the least known cost; `floor`: the proven bound."""
        tally.equal(f"{name}: faults", played.faults, [])
        tally.at_least(f"{name}: cost", played.cost, floor)
        row = self._rows.setdefault(name, Row())
        row.ours.append(played.cost / best)
        row.proven += played.proven
        row.slowest_s = max(row.slowest_s, played.slowest_s)
        for policy, cost in simple.items():
            row.simple.setdefault(policy, []).append(cost / best)

    def _uniform(self, case: Mapping[str, Any], tally: Tally) -> None:
        ones, want = (1,) * case["n_teachers"], case["expected"]
        room, least = Room(ones, ones, case["slots"]), want["min_loads"]
        simple = {"LRU": want["lru_loads"], "FIFO": want["fifo_loads"]}
        for name, ahead in (("all", ALL), ("32", 32)):
            played = play_visits(room, case["sequence"], ahead)
            self._note(f"equal size, {name} announced", played, least, least, tally, **simple)

    def _weighted(self, case: Mapping[str, Any], tally: Tally) -> None:
        want, size, cost = case["expected"], tuple(case["size"]), tuple(case["cost"])
        family = "small" if "min_cost" in want else "large"
        if family == "small":
            best = floor = want["min_cost"]
            best_streamed = floor_streamed = want["min_cost_with_stream"]
        else:
            best, floor = want["best_known"], want["lower_bound"]
            best_streamed, floor_streamed = want["with_stream"]["best_known"], want["with_stream"]["lower_bound"]
        simple = {"LRU": want["lru_cost"], "Landlord": want["landlord_cost"]}
        loading = Room(size, cost, case["budget"])
        streaming = Room(size, cost, case["budget"], tuple(case["stream_size"]))
        for name, ahead in (("all", ALL), ("32", 32)):
            way = f"weighted {family}, {name} announced"
            played, streamed = (play_visits(each, case["sequence"], ahead) for each in (loading, streaming))
            self._note(way, played, best, floor, tally, **simple)
            self._note(f"{way}, streams", streamed, best_streamed, floor_streamed, tally)

    def _step_all(self, case: Mapping[str, Any], tally: Tally) -> None:
        for row in case["rows"]:
            ones, least = (1,) * row["n_teachers"], row["min_loads_total"]
            steps = [dict.fromkeys(range(row["n_teachers"]), 0)] * row["steps"]
            simple = {"LRU, same order": row["lru_same_order_total"]}
            self._steps("steps: all needed", Room(ones, ones, row["slots"]), steps, least, tally, simple)

    def _step_sets(self, case: Mapping[str, Any], tally: Tally) -> None:
        steps = [dict.fromkeys(needed, 0) for needed in case["steps"]]
        simple = {"LRU, ascending": case["expected"]["ascending_lru_cost"]}
        self._steps("steps: sets", _room(case), steps, case["expected"]["min_cost"], tally, simple)

    def _step_ages(self, case: Mapping[str, Any], tally: Tally) -> None:
        steps: list[dict[int, int]] = [{} for _ in range(case["n_steps"])]
        for teacher, step, age in case["jobs"]:
            steps[step][teacher] = min(age, steps[step].get(teacher, age))
        simple = {"optimum if served at once": case["expected"]["min_cost_if_served_at_once"]}
        self._steps("steps: ages", _room(case), steps, case["expected"]["min_cost"], tally, simple)

    def _steps(
        self,
        name: str,
        room: Room,
        steps: Sequence[Mapping[int, int]],
        least: int,
        tally: Tally,
        simple: dict[str, int],
    ) -> None:
        self._note(name, play_steps(room, steps, ALL), least, least, tally, **simple)
        for ahead in (0, 2):
            self._note(f"{name}, {ahead} steps ahead", play_steps(room, steps, ahead), least, least, tally)


def _room(case: Mapping[str, Any]) -> Room:
    return Room(tuple(case["size"]), tuple(case["cost"]), case["budget"])


def play_visits(room: Room, sequence: Sequence[int], ahead: int) -> Played:
    """The pager knows the visit whose turn it is and `ahead` more."""
    pager, played, held = Pager(room), Played(), set[int]()
    known = 0
    for index, teacher in enumerate(sequence):
        until = min(len(sequence), index + 1 + ahead)
        if until > known:
            pager.announce(sequence[known:until], last=until == len(sequence))
            known = until
        started = time.perf_counter()
        turn = pager.serve()
        played.slowest_s = max(played.slowest_s, time.perf_counter() - started)
        where, streamed = f"visit {index}", turn.mode is Mode.STREAM
        played.faults += _unless(turn.teacher == teacher, f"{where}: another teacher's turn")
        played.faults += _unless(held.issuperset(turn.evicted), f"{where}: evicted what was not there")
        held.difference_update(turn.evicted)
        played.faults += _unless((teacher in held) == (turn.mode is Mode.HIT), f"{where}: {turn.mode} is not so")
        if turn.mode is not Mode.HIT:
            played.cost += room.cost[teacher]
        if not streamed:
            held.add(teacher)
        extra = room.passing[teacher] if streamed else 0
        played.faults += _unless(_bytes(room, held) + extra <= room.budget, f"{where}: above the budget")
    return replace(played, proven=pager.proven)


def play_steps(room: Room, steps: Sequence[Mapping[int, int]], ahead: int) -> Played:
    """The planner knows the work of the step that begins and of `ahead` more. By step and teacher: steps to wait."""
    planner, played, held = StepPlanner(room, len(steps)), Played(), set[int]()
    due: dict[int, int] = {}
    """By teacher with open work: the last step in which it may be served."""
    known = 0
    for step, opens in enumerate(steps):
        for later in range(known, min(len(steps), step + 1 + ahead)):
            planner.announce(later, steps[later])
            known = later + 1
        for teacher, wait in opens.items():
            due[teacher] = min(step + wait, due.get(teacher, len(steps) - 1))
        started = time.perf_counter()
        turn = planner.next()
        played.slowest_s = max(played.slowest_s, time.perf_counter() - started)
        played.proven &= planner.proven
        played.faults += _unless(held.issuperset(turn.hits), f"step {step}: a hit that is not there")
        held.difference_update(turn.leaving)
        for teacher in (*turn.passing, *turn.loaded):
            played.cost += room.cost[teacher]
            played.faults += _unless(teacher not in held, f"step {step}: {teacher} is loaded twice")
            played.faults += _unless(
                _bytes(room, held | {teacher}) <= room.budget, f"step {step}: above the budget with {teacher}"
            )
            if teacher in turn.loaded:
                held.add(teacher)
        for teacher in (*turn.hits, *turn.passing, *turn.loaded):
            played.faults += _unless(due.pop(teacher, None) is not None, f"step {step}: {teacher} has nothing to do")
        played.faults += [f"step {step}: {teacher} was not served in time" for teacher in due if due[teacher] <= step]
    return played


def _bytes(room: Room, held: Collection[int]) -> int:
    return sum(room.size[teacher] for teacher in held)


def _unless(truth: bool, fault: str) -> list[str]:
    return [] if truth else [fault]


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
