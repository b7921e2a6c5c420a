"""The quick start as a user starts it, undisturbed and with processes killed in the middle: it reaches its figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.builders_run import Run, kill

pytestmark = pytest.mark.timeout(900)
DOMAINS = ("sort", "rev", "roman")
DEADLINE_S = 600.0


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One preparation for all tests of a session, on whichever worker they run."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    monkeypatch.setenv("DISTILL_CACHE", str(shared / "cache"))


def check_figures(result: dict[str, Any]) -> None:
    assert result["status"] == "done"
    assert set(result["domains"]) == set(DOMAINS)
    for name in DOMAINS:
        domain, matrix = result["domains"][name], result["teachers"][name]
        assert domain["base"] <= 0.50, f"{name}: there is too little to learn"
        assert domain["teacher"] >= 0.95, f"{name}: the teacher is no expert"
        assert all(matrix[other] <= 0.70 for other in DOMAINS if other != name), f"{name}: there is nothing to merge"
        assert domain["student"] >= 0.95 * domain["teacher"], f"{name}: the student has not learnt it"
    assert result["weight_updates"] >= 30
    assert result["teacher_swaps"] >= 30
    assert result["max_staleness_seen"] == 1
    assert result["overlap"] > 0.1
    assert result["peak_memory_gb"] < 6


def start(folder: Path, *overrides: str) -> Run:
    return Run(folder / "out", f"run.dir={folder / 'out'}", *overrides)


@pytest.mark.slow
def test_three_experts_become_one_student(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert run.wait(DEADLINE_S) == 0, run.output()[-3000:]
    check_figures(run.result())
    assert all(domain in run.output() for domain in DOMAINS)
    assert str(run.folder / "student") in run.output()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("server", ["rollout-0", "slot-0"])
def test_a_killed_server_comes_back_and_the_run_reaches_its_figures(tmp_path: Path, server: str) -> None:
    run = start(tmp_path)
    run.until_step(20, DEADLINE_S)
    kill(run.server(server))
    run.until_step(60, DEADLINE_S)
    kill(run.server(server))
    assert run.wait(DEADLINE_S) == 0, run.output()[-3000:]
    check_figures(run.result())
    assert (run.folder / "logs" / f"{server}.log").exists()


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_student_ends_the_run_clearly_and_a_resume_reaches_the_figures(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.until_step(70, DEADLINE_S)
    kill(run.student())
    assert run.wait(60) == 4, run.output()[-3000:]
    assert "student: its process died" in run.output()
    assert "resume=auto" in run.output()
    assert run.result()["status"] == "failed"
    resumed = start(tmp_path, "resume=auto")
    assert resumed.wait(DEADLINE_S) == 0, resumed.output()[-3000:]
    assert "going on at step 60" in resumed.output()
    result = resumed.result()
    check_figures(result)
    assert resumed.steps() == list(range(1, result["steps"] + 1)), "every step is there once"
    assert result["samples"] == result["steps"] * 192, "every sample of the plan is trained once"


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_controller_leaves_nothing_running_and_a_resume_reaches_the_figures(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.until_step(70, DEADLINE_S)
    left = [run.student(), run.server("rollout-0"), run.server("slot-0")]
    kill_only(run)
    for process in left:
        process.wait(60)
    resumed = start(tmp_path, "resume=auto")
    assert resumed.wait(DEADLINE_S) == 0, resumed.output()[-3000:]
    assert "going on at step 60" in resumed.output()
    check_figures(resumed.result())


def kill_only(run: Run) -> None:
    run.process.kill()
    run.process.wait()
