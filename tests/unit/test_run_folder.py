"""Whose folder is it: no run writes over another, and none goes on from something else than it began with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.config import RunConfig
from distill.errors import ConfigError
from distill.run_folder import choose_folder, find_checkpoint, identity, new_folder, owned, set_aside


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


def test_a_run_that_is_not_to_be_resumed_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        find_checkpoint(tmp_path, config(tmp_path))


def test_a_resume_before_the_first_checkpoint_begins_anew_and_keeps_what_was_there(tmp_path: Path) -> None:
    for name, text in (("teachers.yaml", "mine"), ("metrics.jsonl", '{"step": 1}\n'), ("events.log", "first")):
        (tmp_path / name).write_text(text)
    (tmp_path / "checkpoints" / "partial-00000010").mkdir(parents=True)
    assert find_checkpoint(tmp_path, config(tmp_path, resume="auto")) is None
    assert set_aside(tmp_path) == tmp_path / "earlier-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier-1", "teachers.yaml"]
    assert (tmp_path / "earlier-1" / "events.log").read_text() == "first"
    assert set_aside(tmp_path) is None, "nothing is left to move"
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    assert set_aside(tmp_path) == tmp_path / "earlier-2"


def test_what_a_failed_start_leaves_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "result.json").write_text('{"status": "failed"}')
    assert find_checkpoint(tmp_path, config(tmp_path)) is None
    assert set_aside(tmp_path) is None
