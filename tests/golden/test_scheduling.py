"""All scheduling cases on the product's code, through the runner that `python -m tests.golden.scheduling` is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from distill.teacher_manager.timeline.checker import check
from distill.teacher_manager.timeline.reading import read_case
from distill.teacher_manager.timeline.schedule import read_schedule
from tests.golden.scheduling.__main__ import main
from tests.golden.scheduling.runner import find, run_case, run_families
from tests.golden.scheduling.standing import Table

DATA = Path(__file__).parent / "data" / "scheduling"
CASES = {"A": 30, "B": 33, "C": 46, "D": 1, "E": 3}
"""A family that shrinks, or is not there, must not pass."""
QUICK = (
    "H_hand01_one_slot",
    "H_hand05_disk",
    "H_hand07_stream_shared_link",
    "H_sample_logs",
    "C_backlog_multi_b",
    "C_disk_tier_b",
    "C_lora_b",
    "C_mixed_a",
)
"""Of the traces: one of each thing that the model has."""


def test_no_family_and_no_case_is_left_out() -> None:
    assert {family: len(paths) for family, paths in find(DATA).items()} == CASES
    index = json.loads((DATA / "INDEX.json").read_text())["files"]
    names = {entry["file"] for entry in index if entry["file"].endswith(".json")}
    assert names == {f"{family}/{path.name}" for family, paths in find(DATA).items() for path in paths}


@pytest.mark.parametrize(("family", "which"), [("A", slice(4)), ("B", slice(1, None, 6)), ("D", slice(None))])
def test_every_number_of_some_quick_cases_is_reproduced(family: str, which: slice) -> None:
    """`python -m tests.golden.scheduling` takes all of them."""
    paths = find(DATA)[family][which]
    [report] = run_families({family: paths}, Table())
    assert report.cases == len(paths) and report.numbers > report.cases
    assert not report.failures


@pytest.mark.parametrize("name", QUICK)
def test_every_number_of_a_trace_is_reproduced(name: str) -> None:
    tally = run_case(DATA / "C" / f"{name}.json", Table())
    assert tally.numbers >= 9 and not tally.failures


def copied(folder: Path, name: str, **changes: Any) -> Path:
    """A folder with this one case, changed: `a__b=1` sets a key inside."""
    content = json.loads((DATA / name).read_text())
    for way, value in changes.items():
        *outer, last = way.split("__")
        inner = content
        for key in outer:
            inner = inner[key]
        inner[last] = value
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content))
    return folder


HAND = "C/H_hand02_two_slots.json"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (HAND, {"policies__fifo__prefetch__makespan_ns": 8000000001}, "fifo, prefetch.makespan_ns: 8000000000"),
        (HAND, {"policies__fifo__on_demand__jain_mean_latency": 0.5}, "fifo, on_demand.jain_mean_latency"),
        (HAND, {"policies__fifo__on_demand__novelty": 1}, "fifo, on_demand.novelty: None, expected 1"),
        (HAND, {"bounds__makespan_lb_ns": 6000010000}, "makespan_lb_ns: 6000000000"),
        (HAND, {"bounds__bytes_lb_all_deadlines_met": 9}, "bytes_lb_all_deadlines_met"),
        ("A/A_uniform_01_cyclic.json", {"expected__min_loads": 47}, "min_loads: 48, expected 47"),
        ("A/A_weighted_small_01_zipf.json", {"expected__min_cost": 159100}, "best_known: 159200"),
        ("B/B_max_age_01.json", {"expected__min_cost": 50000}, "min_cost: 60000"),
        ("B/B_timed_exact_01.json", {"expected__prefetch__min_makespan_ns": 5895119195}, "is below its bound"),
    ],
)
def test_a_number_that_differs_ends_with_1_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, changes: dict[str, Any], said: str
) -> None:
    assert main([str(copied(tmp_path, name, **changes))]) == 1
    assert said in capsys.readouterr().out


def test_the_online_schedules_are_written_and_stand_beside_the_simple_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DATA / "B", tmp_path / "B", ignore=lambda _, names: [name for name in names if "timed" not in name])
    assert main([str(tmp_path), "--logs", str(tmp_path / "logs")]) == 0
    out = capsys.readouterr().out
    assert "B_timed*" in out and "  online " in out and "  target, at most" in out
    logs = sorted((tmp_path / "logs").iterdir())
    assert len(logs) == 16
    for log in logs:
        assert check(read_case(tmp_path / "B" / log.name), read_schedule(log)) == []


def test_a_target_that_is_missed_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(tmp_path, "B/B_timed_exact_01.json")
    monkeypatch.setattr("tests.golden.scheduling.standing.MUST", {"B_timed": {"makespan": 0.99}})
    assert main([str(tmp_path)]) == 1
    assert "target missed: B_timed: makespan" in capsys.readouterr().out
    monkeypatch.setattr("tests.golden.scheduling.standing.MUST", {"B_timed": {"makespan": 99.0}})
    assert main([str(tmp_path)]) == 0


def test_what_is_not_of_the_format_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(tmp_path)]) == 2
    assert main([str(copied(tmp_path, HAND, kind="poem"))]) == 2
    assert main([str(copied(tmp_path, HAND, format="tm-sched/2"))]) == 2
    assert main([str(copied(tmp_path, HAND, jobs=[]))]) == 2
    (tmp_path / HAND).write_text("{")
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("not golden data") == 6
