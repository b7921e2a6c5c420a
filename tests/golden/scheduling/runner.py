"""Finds the cases of a folder, hands each to what its kind needs, and collects what they said."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.errors import ConfigError
from distill.teacher_manager.timeline.checker import check
from distill.teacher_manager.timeline.reading import FORMAT, read_case
from distill.teacher_manager.timeline.schedule import write_schedule
from tests.golden.scheduling import break_even, paging, steps
from tests.golden.scheduling.online import run_online
from tests.golden.scheduling.standing import Table
from tests.golden.scheduling.tally import Tally
from tests.golden.scheduling.timed import (
    compare_bounds,
    compare_log,
    compare_trace,
    hold_against,
    hold_against_optimum,
    optimum_of,
    simple_policies,
)

INDEX = "INDEX.json"
UNTIMED: Mapping[str, Callable[[Mapping[str, Any], Tally], None]] = {
    "paging_uniform": paging.uniform,
    "paging_weighted": paging.weighted,
    "step_all": steps.needed_in_all,
    "step_sets": steps.needed_sets,
    "step_ages": steps.with_ages,
    "break_even": break_even.table,
}
TRACES = ("timed", "timed_exact", "generated")


class NotGolden(Exception):
    """The folder, or a file in it, is not of the format. The message says which and why."""


@dataclass
class Report:
    """One family: the cases of one folder."""

    family: str
    cases: int = 0
    numbers: int = 0
    failures: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


def find(folder: Path) -> dict[str, list[Path]]:
    """By family: the cases in the folder and below it."""
    if not folder.is_dir():
        raise NotGolden(f"{folder} is not a folder")
    families: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.name != INDEX:
            families.setdefault(path.parent.name, []).append(path)
    if not families:
        raise NotGolden(f"{folder} holds no case (*.json)")
    return families


def run_families(families: Mapping[str, list[Path]], table: Table, logs: Path | None = None) -> Iterator[Report]:
    for family, paths in families.items():
        report, started = Report(family), time.monotonic()
        for path in paths:
            tally = run_case(path, table, logs)
            report.cases += 1
            report.numbers += tally.numbers
            report.failures += tally.failures
        report.seconds = time.monotonic() - started
        yield report


def run_case(path: Path, table: Table, logs: Path | None = None) -> Tally:
    """Raises NotGolden where the file is not of the format."""
    raw, tally = _load(path), Tally(path.stem)
    try:
        if raw["kind"] in TRACES:
            _run_trace(path, raw, tally, table, logs)
        elif raw["kind"] == "sample_logs":
            for entry in raw["logs"]:
                compare_log(read_case(path.with_name(f"{entry['case']}.json")), entry, tally)
        elif raw["kind"] in UNTIMED:
            UNTIMED[raw["kind"]](raw, tally)
            table.planned.add(raw, tally)
        else:
            raise NotGolden(f"{path}: unknown kind {raw['kind']!r}")
    except (KeyError, TypeError, ConfigError) as error:
        raise NotGolden(f"{path}: {type(error).__name__}: {error}") from error
    return tally


def _load(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotGolden(f"{path}: no JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or "kind" not in raw:
        raise NotGolden(f"{path}: a case of format {FORMAT} is expected")
    return raw


def _run_trace(path: Path, raw: Mapping[str, Any], tally: Tally, table: Table, logs: Path | None) -> None:
    case = read_case(path)
    if "check" in raw:
        compare_trace(case, raw["check"], tally)
    found = compare_bounds(case, raw["bounds"], tally)
    results = list(simple_policies(case, raw["policies"], tally))
    online = run_online(case)
    faults = [str(fault) for fault in check(case, online.result.schedule)]
    tally.equal("online: faults", faults, [])
    results.append(online.result)
    for result in results:
        hold_against(result, found, tally)
        if "expected" in raw:
            hold_against_optimum(case, result, optimum_of(result, raw["expected"]), tally)
    best = raw["expected"]["prefetch_or_stream"]["min_makespan_ns"] if "expected" in raw else None
    table.add(case, results, found, best)
    table.slowest_ms = max(table.slowest_ms, online.slowest_ms)
    if logs is not None:
        write_schedule(online.result.schedule, logs / f"{case.name}.json")
