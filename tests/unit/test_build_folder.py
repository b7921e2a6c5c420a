"""Whose folder is it: no run writes over another, and none goes on from something else than it began with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.build import choose_folder, find_checkpoint, identity, new_folder, owned
from distill.config import RunConfig
from distill.errors import ConfigError


def config(folder: Path | None, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"name": "r", "dir": folder},
        "student": {"model": "base"},
        "teachers": {"math": {"model": "experts/math"}},
        "data": [{"path": "math.jsonl"}],
    }
    return RunConfig.model_validate(values | changes)


def write_checkpoint(folder: Path, step: int, made_by: RunConfig) -> None:
    place = folder / "checkpoints" / f"step-{step:08d}"
    place.mkdir(parents=True)
    (place / "state.json").write_text(json.dumps({"step": step, "identity": identity(made_by)}))


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = {new_folder(tmp_path) for _ in range(20)}
    assert len(folders) == 20 and all(folder.is_dir() for folder in folders)


def test_a_folder_at_work_is_refused_to_a_second_run_and_free_afterwards(tmp_path: Path) -> None:
    with owned(tmp_path):
        with pytest.raises(ConfigError, match="another run is at work"), owned(tmp_path):
            pass
    with owned(tmp_path):
        pass


def test_a_resume_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    asked = config(tmp_path, resume="auto")
    write_checkpoint(tmp_path, 4, asked)
    found = find_checkpoint(choose_folder(asked), asked)
    assert found is not None and found.step == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"teachers": {"math": {"model": "experts/other"}}}, "teachers is"),
        ({"objective": {"name": "forward_kl"}}, "objective is"),
        ({"trainer": {"batch_size": 3}}, "trainer.batch_size is 3"),
        ({"student": {"model": "other"}}, "student.model is"),
        ({"trainer": {"steps": 4}}, "already trained 4 of 4"),
    ],
)
def test_a_resume_with_something_else_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    write_checkpoint(tmp_path, 4, config(tmp_path))
    with pytest.raises(ConfigError, match=says):
        find_checkpoint(tmp_path, config(tmp_path, resume="auto", **change))


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_run_whose_checkpoints_are_gone_is_not_written_over(tmp_path: Path, resume: str | None) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"already holds a run|holds a run without a checkpoint"):
        find_checkpoint(tmp_path, config(tmp_path, resume=resume))


def test_what_a_failed_start_leaves_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "result.json").write_text('{"status": "failed"}')
    assert find_checkpoint(tmp_path, config(tmp_path)) is None
