"""In which order a run takes its prompts: groups by turns, each in an order of its own that the seed decides.

A batch is a stretch of the order, so the order decides how much of each group a step meets, however the file was
sorted. Turns are those of a just-in-time schedule: each turn of a group has the window of places in which its count
stays within one of its share of all places so far, and whoever has the earliest end of its window is next. Such a
schedule always exists (Baruah et al. 1996, "Proportionate progress"; Steiner and Yeomans 1993), and earliest deadline
first finds it. So in any stretch of places the count of a group is less than 2 away from its share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
_RESOLUTION = 10_000
"""Places in which shares that are asked for are met exactly."""


class Order(Protocol):
    """An endless order of rows."""

    def row_at(self, place: int) -> int:
        """The row at this place, which counts from 0. Places may be asked for in any order."""
        ...


class Shuffled:
    """All rows of one group again and again, each time in another order. `index` tells groups of one run apart."""

    def __init__(self, rows: Rows, seed: int, index: int) -> None:
        self._rows = rows
        self._seed = (seed, index)
        self._epoch = lru_cache(maxsize=4)(self._shuffled)

    def __len__(self) -> int:
        return len(self._rows)

    def row_at(self, place: int) -> int:
        epoch, within = divmod(place, len(self._rows))
        return int(self._epoch(epoch)[within])

    def _shuffled(self, epoch: int) -> Rows:
        seed, index = self._seed
        return self._rows[np.random.default_rng((seed, epoch, index)).permutation(len(self._rows))]


class ByTurns:
    """Several orders by turns. In every `sum(quotas)` places, order g has exactly `quotas[g]`."""

    def __init__(self, orders: Sequence[Order], quotas: Sequence[int]) -> None:
        self._orders = list(orders)
        self._quotas = list(quotas)
        self._turns, self._earlier = turns(quotas)

    def row_at(self, place: int) -> int:
        cycle, within = divmod(place, len(self._turns))
        group = int(self._turns[within])
        return self._orders[group].row_at(cycle * self._quotas[group] + int(self._earlier[within]))


def turns(quotas: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Whose turn it is at each of `sum(quotas)` places, and how many turns it has had before. Quotas are at least 1.

    At every place the count of a group so far is less than 1 away from its share of the places so far.
    """
    total = sum(quotas)
    order, earlier = np.empty(total, np.int32), np.empty(total, np.int64)
    waiting: list[tuple[int, int, int]] = [(0, group, 0) for group in range(len(quotas))]
    """(first place of its window, group, number of its turn)"""
    ready: list[tuple[int, int, int]] = []
    """(end of its window, group, number of its turn)"""
    for place in range(total):
        while waiting and waiting[0][0] <= place:
            _, group, turn = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(turn + 1) * total // quotas[group]), group, turn))
        _, group, turn = heapq.heappop(ready)
        order[place], earlier[place] = group, turn
        if turn + 1 < quotas[group]:
            heapq.heappush(waiting, ((turn + 1) * total // quotas[group], group, turn + 1))
    return order, earlier


def apportioned(shares: Sequence[float]) -> list[int]:
    """Whole quotas, at least 1 each, in the ratio of the shares to four digits (largest remainders, Hamilton)."""
    exact = [share / math.fsum(shares) * _RESOLUTION for share in shares]
    quotas = [max(int(value), 1) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda group: quotas[group] - exact[group])
    for group in by_remainder[: max(_RESOLUTION - sum(quotas), 0)]:
        quotas[group] += 1
    common = math.gcd(*quotas)
    return [quota // common for quota in quotas]


def balanced(groups: Sequence[Sequence[str]], seed: int, mix: Mapping[str, float] | None = None) -> Order:
    """The order of rows of which `groups` has one entry each: its path of names, such as (teachers, domain).

    Without `mix` every row comes once in as many places as there are rows, and each group is spread evenly over them.
    `mix` has a share of all places for each first name; below it the groups are spread evenly.
    """
    paths = sorted(set(map(tuple, groups)))
    members: dict[tuple[str, ...], list[int]] = {path: [] for path in paths}
    for row, path in enumerate(groups):
        members[tuple(path)].append(row)
    leaves = {path: Shuffled(np.asarray(members[path], np.int64), seed, index) for index, path in enumerate(paths)}
    if mix is None:
        return _together(list(leaves.values()))
    inner = {
        name: _together([leaf for path, leaf in leaves.items() if path[0] == name])
        for name in dict.fromkeys(path[0] for path in paths)
    }
    return ByTurns(list(inner.values()), apportioned([mix[name] for name in inner]))


def _together(leaves: Sequence[Shuffled]) -> Order:
    return leaves[0] if len(leaves) == 1 else ByTurns(leaves, [len(leaf) for leaf in leaves])
