"""The order of visits is fixed: how few loads can it do with?

Optima are computed here by dynamic programming over the sets of residents, where there are few enough teachers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.golden.scheduling.tally import Tally

MAX_TEACHERS = 16
"""2 to the power of it are the states of the exact search."""
NEVER = 1 << 62
"""More than any cost, and twice it is no overflow of what is added."""

Costs = npt.NDArray[np.int64]


def uniform(case: Mapping[str, Any], tally: Tally) -> None:
    sequence, slots, want = case["sequence"], case["slots"], case["expected"]
    tally.equal("min_loads", belady_loads(sequence, slots), want["min_loads"])
    tally.equal("lru_loads", oldest_out_loads(sequence, slots, touch=True), want["lru_loads"])
    tally.equal("fifo_loads", oldest_out_loads(sequence, slots, touch=False), want["fifo_loads"])
    tally.equal("distinct", len(set(sequence)), want["distinct"])


def weighted(case: Mapping[str, Any], tally: Tally) -> None:
    want = case["expected"]
    size, cost, budget, sequence = case["size"], case["cost"], case["budget"], case["sequence"]
    lru, landlord = lru_cost(size, cost, budget, sequence), landlord_cost(size, cost, budget, sequence)
    tally.equal("lru_cost", lru, want["lru_cost"])
    tally.equal("landlord_cost", landlord, want["landlord_cost"])
    if "min_cost" in want:
        want = _as_large(want)
    streamed = want["with_stream"]
    if len(size) <= MAX_TEACHERS:
        tally.equal("best_known", least_cost(size, cost, budget, sequence), want["best_known"])
        tally.equal(
            "with_stream.best_known",
            least_cost(size, cost, budget, sequence, case["stream_size"]),
            streamed["best_known"],
        )
    tally.at_least("lru_cost", lru, want["lower_bound"])
    tally.at_least("landlord_cost", landlord, want["lower_bound"])
    for name, each in (("expected", want), ("with_stream", streamed)):
        tally.at_least(f"{name}.best_known", each["best_known"], each["lower_bound"])
        tally.at_least(f"{name}.lower_bound", each["lower_bound"], each.get("lp_lower_bound", 0))
        tally.equal(f"{name}.exact", each["best_known"] == each["lower_bound"], each["exact"])


def _as_large(want: Mapping[str, Any]) -> dict[str, Any]:
    """Small cases name one optimum, which is both bound and best."""
    least, streamed = want["min_cost"], want["min_cost_with_stream"]
    with_stream = {"exact": True, "lower_bound": streamed, "best_known": streamed}
    return {**want, "lower_bound": least, "best_known": least, "with_stream": with_stream}


def belady_loads(sequence: Sequence[int], slots: int) -> int:
    """Evicts the farthest next use."""
    following: list[int] = [0] * len(sequence)
    seen: dict[int, int] = {}
    for index in reversed(range(len(sequence))):
        following[index] = seen.get(sequence[index], len(sequence))
        seen[sequence[index]] = index
    resident: dict[int, int] = {}
    loads = 0
    for index, teacher in enumerate(sequence):
        if teacher not in resident:
            loads += 1
            if len(resident) == slots:
                del resident[max(resident, key=lambda other: resident[other])]
        resident[teacher] = following[index]
    return loads


def oldest_out_loads(sequence: Sequence[int], slots: int, *, touch: bool) -> int:
    """LRU where a use makes a teacher young again, FIFO where only its load does."""
    resident: dict[int, None] = {}
    loads = 0
    for teacher in sequence:
        if teacher in resident:
            if touch:
                resident[teacher] = resident.pop(teacher)
            continue
        loads += 1
        if len(resident) == slots:
            del resident[next(iter(resident))]
        resident[teacher] = None
    return loads


def lru_cost(size: Sequence[int], cost: Sequence[int], budget: int, sequence: Sequence[int]) -> int:
    resident: dict[int, None] = {}
    used = total = 0
    for teacher in sequence:
        if teacher in resident:
            resident[teacher] = resident.pop(teacher)
            continue
        total += cost[teacher]
        while used + size[teacher] > budget:
            oldest = next(iter(resident))
            del resident[oldest]
            used -= size[oldest]
        resident[teacher] = None
        used += size[teacher]
    return total


def landlord_cost(size: Sequence[int], cost: Sequence[int], budget: int, sequence: Sequence[int]) -> int:
    """A credit of level + cost/size, renewed at each hit; the smallest goes and lifts the level to its credit."""
    credit: dict[int, Fraction] = {}
    level = Fraction(0)
    used = total = 0
    for teacher in sequence:
        if teacher not in credit:
            total += cost[teacher]
            while used + size[teacher] > budget:
                poorest = min(credit, key=lambda other: (credit[other], other))
                level = credit.pop(poorest)
                used -= size[poorest]
            used += size[teacher]
        credit[teacher] = level + Fraction(cost[teacher], size[teacher])
    return total


def least_cost(
    size: Sequence[int],
    cost: Sequence[int],
    budget: int,
    sequence: Sequence[int],
    stream_size: Sequence[int] | None = None,
) -> int:
    """The optimum. States are sets of residents as bits; with `stream_size` a request may be streamed instead."""
    bytes_S = set_sizes(size)
    masks_S = np.arange(len(bytes_S))
    best_S = np.where(masks_S == 0, 0, NEVER)
    for teacher in sequence:
        drop_any(best_S)
        bit = 1 << teacher
        after_S = np.full_like(best_S, NEVER)
        with_S = masks_S[(masks_S & bit > 0) & (bytes_S <= budget)]
        after_S[with_S] = np.minimum(best_S[with_S], best_S[with_S ^ bit] + cost[teacher])
        if stream_size is not None:
            room_S = masks_S[(masks_S & bit == 0) & (bytes_S + stream_size[teacher] <= budget)]
            after_S[room_S] = best_S[room_S] + cost[teacher]
        best_S = np.minimum(after_S, NEVER)
    return int(best_S.min())


def set_sizes(size: Sequence[int]) -> Costs:
    """(2^N,): the bytes of each set."""
    sizes = np.zeros(1, dtype=np.int64)
    for each in size:
        sizes = np.concatenate([sizes, sizes + each])
    return sizes


def drop_any(best_S: Costs) -> None:
    """In place: a set costs no more than any set that holds it, since dropping is free. `best_S` is contiguous."""
    for bit in range(len(best_S).bit_length() - 1):
        pairs = best_S.reshape(-1, 2, 1 << bit)
        np.minimum(pairs[:, 0], pairs[:, 1], out=pairs[:, 0])
