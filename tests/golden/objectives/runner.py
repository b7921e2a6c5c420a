"""Evaluates golden cases and judges the results."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from distill.errors import DistillError
from tests.golden.objectives.data import PRECISIONS, Case, sets

Evaluate = Callable[[Case, str], Mapping[str, Any]]


class Mismatch(Exception):
    """A claim of a case that does not hold."""


@dataclass(frozen=True)
class Verdict:
    """One case in one precision. `ratio` is the largest error over its tolerance, at most 1 where it passes."""

    case: str
    precision: str
    ratio: float = 0.0
    failure: str = ""


@dataclass
class Report:
    """One set."""

    name: str
    cases: int
    seconds: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list[Verdict])

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.failure]

    @property
    def passed(self) -> int:
        return self.cases - len({verdict.case for verdict in self.failures})

    @property
    def worst(self) -> Verdict | None:
        """The numerical result that came nearest to its tolerance, among those that passed."""
        good = [verdict for verdict in self.verdicts if not verdict.failure]
        return max(good, key=lambda verdict: verdict.ratio, default=None)


def run_folder(folder: Path) -> Iterator[Report]:
    for name, cases in sets(folder):
        yield run_set(name, cases)


def run_set(name: str, cases: tuple[Case, ...]) -> Report:
    started = time.monotonic()
    report, kinds, computed = Report(name, len(cases)), kinds_of(name), precisions_of(name)
    for case in cases:
        for precision in [one for one in case.precisions if one in computed] or computed[:1]:
            report.verdicts.append(judge(case, precision, kinds.get(case.kind)))
    report.seconds = time.monotonic() - started
    return report


def kinds_of(name: str) -> Mapping[str, Evaluate]:
    """What the module of the set can evaluate; nothing where there is no such module."""
    return _member(name, "KINDS", {})


def precisions_of(name: str) -> tuple[str, ...]:
    """Those that the product has for the set: its module says so where they are not all."""
    return _member(name, "COMPUTED", tuple(PRECISIONS))


def _member(name: str, member: str, default: Any) -> Any:
    module = f"{__package__}.{name}"
    if not name.isidentifier() or importlib.util.find_spec(module) is None:
        return default
    return getattr(importlib.import_module(module), member, default)


def judge(case: Case, precision: str, evaluate: Evaluate | None) -> Verdict:
    """An unknown kind, another exception than a DistillError and a number that is missing are all failures."""
    if evaluate is None:
        return Verdict(case.id, precision, failure=f"unknown kind {case.kind!r}")
    try:
        got = evaluate(case, precision)
    except DistillError as error:
        refused = case.status == "error" or "accept_raise" in case.tags
        return Verdict(case.id, precision, failure="" if refused else f"refused: {error}")
    except Exception as error:  # noqa: BLE001 - whatever went wrong is this case's verdict
        return Verdict(case.id, precision, failure=f"{type(error).__name__}: {error}")
    if case.status == "error":
        return Verdict(case.id, precision, failure="not refused")
    if case.status != "ok":
        return Verdict(case.id, precision, failure=f"unknown status {case.status!r}")
    try:
        return Verdict(case.id, precision, ratio=compare(case, got, precision))
    except Mismatch as error:
        return Verdict(case.id, precision, failure=str(error))


def compare(case: Case, got: Mapping[str, Any], precision: str) -> float:
    """Largest |got - want| / (atol + rtol |want|) over everything the case expects. Raises Mismatch above 1."""
    worst, mine = 0.0, dict(_leaves(got))
    for name, want in _leaves(case.expect):
        if name.startswith("wrong_"):
            continue
        if name not in mine:
            raise Mismatch(f"{name} was not evaluated")
        ratio = deviation(mine[name], want, *case.tolerance(name, precision))
        if not ratio <= 1.0:
            raise Mismatch(f"{name}: {ratio:.3g} times the tolerance")
        worst = max(worst, ratio)
    return worst


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Nested mappings as (dotted name, value)."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in _leaves(value))
        else:
            yield name, value


def deviation(got: Any, want: Any, rtol: float, atol: float) -> float:
    """The same for one value. Entries that are not finite must be the same; a wrong size or text is infinitely far."""
    if isinstance(want, str) or want is None:
        return 0.0 if got == want else float("inf")
    mine = (got.detach().cpu().numpy() if isinstance(got, Tensor) else np.asarray(got)).astype(np.float64)
    theirs = np.asarray(want).astype(np.float64)
    if mine.size != theirs.size:
        return float("inf")
    mine, theirs = mine.reshape(-1), theirs.reshape(-1)
    same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.abs(mine - theirs) / (atol + rtol * np.abs(theirs))
    ratio = np.where(np.isfinite(mine) & np.isfinite(theirs), ratio, np.inf)
    return float(np.where(same, 0.0, ratio).max(initial=0.0))
