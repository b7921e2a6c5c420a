"""Counts what was compared and keeps what differed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXACT = 1e-9
"""Of floats that are rounded in the data."""
BOUND = 1e-6
"""Relative, of bounds: the data computes them in float seconds."""


@dataclass
class Tally:
    """One case."""

    case: str
    numbers: int = 0
    failures: list[str] = field(default_factory=list[str])

    def equal(self, name: str, got: Any, want: Any) -> None:
        """Whole numbers, words and lists must be the same, floats to 1e-9; nothing may be there on one side only."""
        if isinstance(want, Mapping) and isinstance(got, Mapping):
            for key in {*want, *got}:
                self.equal(f"{name}.{key}", got.get(key), want.get(key))
        elif isinstance(want, float) and isinstance(got, int | float):
            self._count(abs(got - want) <= EXACT * max(1.0, abs(want)), name, got, want)
        else:
            self._count(type(got) is type(want) and got == want, name, got, want)

    def near(self, name: str, got: float, want: float) -> None:
        """A bound: 1e-6 relative."""
        self._count(abs(got - want) <= BOUND * abs(want), name, got, want)

    def at_least(self, name: str, got: float, floor: float) -> None:
        self._count(got >= floor, f"{name} is below its bound", got, floor)

    def holds(self, name: str, truth: bool) -> None:
        self._count(truth, name, truth, True)

    def _count(self, good: bool, name: str, got: Any, want: Any) -> None:
        self.numbers += 1
        if not good:
            self.failures.append(f"{self.case}: {name}: {got!r}, expected {want!r}")
