"""The order inside a step is free: which teachers stay from one step to the next?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.golden.scheduling.paging import NEVER, Costs, drop_any, lru_cost, oldest_out_loads, set_sizes
from tests.golden.scheduling.tally import Tally

Pending = tuple[int | None, ...]
"""By teacher: the last step in which its open jobs may be served; None: it has none."""


def needed_in_all(case: Mapping[str, Any], tally: Tally) -> None:
    for index, row in enumerate(case["rows"]):
        teachers, slots, steps = row["n_teachers"], row["slots"], row["steps"]
        elevator = [teacher for step in range(steps) for teacher in _there_and_back(teachers, step)]
        cyclic = list(range(teachers)) * steps
        got = {
            "min_loads_first_step": teachers,
            "min_loads_later_step": teachers - slots,
            "min_loads_total": oldest_out_loads(elevator, slots, touch=True),
            "lru_same_order_total": oldest_out_loads(cyclic, slots, touch=True),
        }
        tally.equal(f"rows[{index}]", got, {name: row[name] for name in got})


def _there_and_back(teachers: int, step: int) -> range:
    """Elevator order: the last of a step are the first of the next, still resident."""
    return range(teachers) if step % 2 == 0 else range(teachers - 1, -1, -1)


def needed_sets(case: Mapping[str, Any], tally: Tally) -> None:
    size, cost, budget, steps = case["size"], case["cost"], case["budget"], case["steps"]
    jobs = [(teacher, step, 0) for step, needed in enumerate(steps) for teacher in needed]
    ascending = [teacher for needed in steps for teacher in sorted(needed)]
    tally.equal("min_cost", least_cost(size, cost, budget, len(steps), jobs), case["expected"]["min_cost"])
    tally.equal("ascending_lru_cost", lru_cost(size, cost, budget, ascending), case["expected"]["ascending_lru_cost"])


def with_ages(case: Mapping[str, Any], tally: Tally) -> None:
    size, cost, budget, steps, want = case["size"], case["cost"], case["budget"], case["n_steps"], case["expected"]
    at_once = [(teacher, step, 0) for teacher, step, _ in case["jobs"]]
    tally.equal("min_cost", least_cost(size, cost, budget, steps, case["jobs"]), want["min_cost"])
    tally.equal(
        "min_cost_if_served_at_once", least_cost(size, cost, budget, steps, at_once), want["min_cost_if_served_at_once"]
    )


def least_cost(size: Sequence[int], cost: Sequence[int], budget: int, steps: int, jobs: Sequence[Sequence[int]]) -> int:
    """The optimum over all orders. For each vector of what is pending: the least cost by set of residents.

    Loading a teacher only when it is served is never worse, and what is resident is served at once for nothing.
    """
    bytes_S = set_sizes(size)
    states: dict[Pending, Costs] = {(None,) * len(size): np.where(np.arange(len(bytes_S)) == 0, 0, NEVER)}
    for step in range(steps):
        states = _open(states, [(job[0], min(step + job[2], steps - 1)) for job in jobs if job[1] == step])
        states = _serve(states, cost, bytes_S <= budget)
        states = {
            pending: best for pending, best in states.items() if all(due is None or due > step for due in pending)
        }
    return min(int(best_S.min()) for best_S in states.values())


def _open(states: Mapping[Pending, Costs], jobs: Sequence[tuple[int, int]]) -> dict[Pending, Costs]:
    opened: dict[Pending, Costs] = {}
    for pending, best_S in states.items():
        due = list(pending)
        for teacher, until in jobs:
            known = due[teacher]
            due[teacher] = until if known is None else min(known, until)
        _merge(opened, tuple(due), best_S)
    return opened


def _serve(states: Mapping[Pending, Costs], cost: Sequence[int], fits_S: np.ndarray) -> dict[Pending, Costs]:
    """Closes the states under visits and drops: a teacher that is served turns to None."""
    served: dict[Pending, Costs] = {}
    masks_S = np.arange(len(fits_S))
    layers: list[dict[Pending, Costs]] = [{} for _ in range(len(cost) + 1)]
    """By the number of teachers with open jobs."""
    for pending, best_S in states.items():
        _merge(layers[len(pending) - pending.count(None)], pending, best_S)
    for layer in reversed(layers):
        for pending, best_S in layer.items():
            drop_any(best_S)
            _merge(served, pending, best_S)
            for teacher, due in enumerate(pending):
                if due is None:
                    continue
                bit = 1 << teacher
                after_S = np.full_like(best_S, NEVER)
                holds_S = masks_S[(masks_S & bit > 0) & fits_S]
                after_S[holds_S] = np.minimum(best_S[holds_S], best_S[holds_S ^ bit] + cost[teacher])
                target = (*pending[:teacher], None, *pending[teacher + 1 :])
                _merge(layers[len(target) - target.count(None)], target, after_S)
    return served


def _merge(states: dict[Pending, Costs], pending: Pending, best_S: Costs) -> None:
    states[pending] = np.minimum(states[pending], best_S) if pending in states else np.minimum(best_S, NEVER)
