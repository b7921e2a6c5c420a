"""What a byte is worth at each instant: the multipliers of "what is held fits the budget".

With prices, every teacher decides alone whether it pays to stay. The sum of those decisions bounds what any schedule
reaches (weak duality), and tells a search which of its states are promising.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDS = 300
PATIENCE = 15
"""Rounds without a better bound before the step is halved."""
GAP = 0.1
"""The bound is assumed to be this far from the optimum: it sets the first step, which patience then corrects."""


def ascend(dual: Callable[[Floats], tuple[float, Floats]], instants: int, rounds: int = ROUNDS) -> Floats:
    """(instants,): prices that make the bound of `dual` large, by subgradient ascent with Polyak's step.

    `dual(prices)` returns the bound and, for each instant, the bytes wanted at these prices less the bytes there are.
    A bound of 0 is taken for the optimum. Costs `rounds` calls of `dual`.
    """
    best = prices = np.zeros(instants)
    highest, scale, stale = -np.inf, 1.0, 0
    for _ in range(rounds):
        bound, excess = dual(prices)
        if bound > highest:
            highest, best, stale = bound, prices, 0
        else:
            stale += 1
            if stale == PATIENCE:
                scale, stale, prices = scale / 2, 0, best
                continue
        slope = np.where((excess < 0) & (prices <= 0), 0.0, excess)
        steepness = float(slope @ slope)
        if steepness == 0:
            break
        prices = np.maximum(0.0, prices + scale * GAP * abs(bound) / steepness * slope)
    return best
