"""Whose folder is it: no run writes over another, and none goes on from something else than it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distill.config import RunConfig
from distill.errors import ConfigError
from distill.run_folder import (
    allowed_changes,
    choose_folder,
    find_checkpoint,
    foresee,
    new_folder,
    owned,
    set_aside,
)
from tests.builders_config import write_checkpoint


def config(folder: Path | None, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"name": "r", "dir": folder},
        "student": {"model": "base"},
        "teachers": {"math": {"model": "experts/math"}},
        "data": [{"path": "math.jsonl"}],
    }
    return RunConfig.model_validate(values | changes)


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
        ({"teachers": {"math": {"model": "experts/other"}}}, "teachers.math.model is 'experts/other'"),
        ({"objective": {"name": "forward_kl"}}, "objective.name is 'forward_kl'"),
        ({"trainer": {"batch_size": 3}}, "trainer.batch_size is 3"),
        ({"student": {"model": "other"}}, "student.model is"),
        ({"student": {"model": "base", "ema_decay": 0.5}}, "student.ema_decay is 0.5"),
        ({"student": {"model": "base", "lora": {"r": 4}}}, "student.lora is"),
        ({"student": {"model": "base", "dtype": "bfloat16"}}, "student.dtype is 'bfloat16'"),
        ({"student": {"model": "base", "optimizer": "adamw_8bit"}}, "student.optimizer is 'adamw_8bit'"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature is 0.5, and was 1.0"),
        ({"rollout": {"max_new_tokens": 3}}, "rollout.max_new_tokens is 3, and was 256"),
        ({"teachers": {"math": {"model": "experts/math", "weight": 2.0}}}, "teachers.math.weight is 2.0, and was 1.0"),
        ({"data": [{"path": "math.jsonl", "domain": "code"}]}, "data.0.domain is 'code', and was null"),
        ({"objective": {"outcome": {}}}, "objective.outcome is {"),
        ({"run": {"name": "r", "seed": 1}}, "run.seed is 1, and was 0"),
        ({"trainer": {"steps": 4}}, "already trained 4 of 4"),
    ],
)
def test_a_resume_with_something_else_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    write_checkpoint(tmp_path, 4, config(tmp_path))
    with pytest.raises(ConfigError, match=says):
        find_checkpoint(tmp_path, config(tmp_path, resume="auto", **change))


def test_a_resume_with_several_other_things_names_all_of_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4, config(tmp_path))
    other = {"run": {"name": "r", "seed": 3}, "rollout": {"temperature": 0.5, "servers": 2}}
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(tmp_path, config(tmp_path, resume="auto", **other))
    assert caught.value.what == (
        f"resume: 2 settings are others than those of {tmp_path}/checkpoints/step-00000004:\n"
        "- run.seed is 3, and was 0\n- rollout.temperature is 0.5, and was 1.0"
    )


def test_a_resume_may_change_how_the_work_is_done_and_tells_what(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4, config(tmp_path))
    other = {
        "student": {"model": "base", "lr": 1e-6},
        "trainer": {"steps": 200, "max_staleness": 0},
        "rollout": {"servers": 2},
    }
    asked = config(None, resume=str(tmp_path), **other)
    found = find_checkpoint(tmp_path, asked)
    assert found is not None and [str(change) for change in allowed_changes(found, asked)] == [
        "student.lr is 1e-06, and was 1e-05",
        "rollout.servers is 2, and was 1",
        "trainer.steps is 200, and was 100",
        "trainer.max_staleness is 0, and was 1",
    ], "not that resume is given, and run.dir is not"


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


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_how_a_run_would_begin_is_told_without_touching_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert foresee(config(None)).folder is None and everything(tmp_path) == []
    assert foresee(config(tmp_path / "new")).folder == tmp_path / "new" and everything(tmp_path) == []
    asked = config(None, resume="auto")
    assert foresee(asked).checkpoint is None, "nothing to go on with: a new run"
    runs = tmp_path / "outputs" / "r"
    write_checkpoint(runs / "1", 4, asked)
    before = everything(tmp_path)
    start = foresee(asked)
    assert start.checkpoint is not None and (start.folder, start.checkpoint.step) == (Path("outputs/r/1"), 4)
    assert start.note == ""
    (runs / "1" / "result.json").write_text('{"status": "done"}')
    start = foresee(asked)
    assert start.checkpoint is None, "it is finished"
    assert start.note == "resume=auto: run outputs/r/1 is finished; this is a new run"
    assert foresee(config(None)).note == "", "a new run is what was asked for"
    (runs / "1" / "result.json").write_text('{"stat')
    assert foresee(asked).checkpoint is not None, "half a result is that of a run that was killed"
    assert [path for path in everything(tmp_path) if path.name != "result.json"] == before


def test_what_a_try_without_a_checkpoint_left_is_foreseen_to_move(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    start = foresee(config(tmp_path, resume="auto"))
    assert start.leftovers and start.checkpoint is None


@pytest.mark.parametrize(
    ("resume", "changes", "says"),
    [
        ("{0}/nowhere", {}, "there is no run folder"),
        ("{0}", {"teachers": {"math": {"model": "experts/other"}}}, "teachers.math.model is"),
        ("{0}", {"trainer": {"steps": 4}}, "already trained 4 of 4"),
        ("auto", {"run": {"name": "r", "dir": "{0}"}, "trainer": {"steps": 2}}, "already trained 4 of 2"),
        (None, {"run": {"name": "r", "dir": "{0}"}}, "already holds a run"),
    ],
)
def test_a_start_that_the_run_would_refuse_is_refused_in_advance(
    tmp_path: Path, resume: str | None, changes: dict[str, Any], says: str
) -> None:
    write_checkpoint(tmp_path, 4, config(None))
    if "run" in changes:
        changes = changes | {"run": {"name": "r", "dir": str(tmp_path)}}
    asked = config(None, **({"resume": resume.format(tmp_path)} if resume else {}), **changes)
    with pytest.raises(ConfigError, match=says):
        foresee(asked)


def test_a_folder_at_work_is_refused_in_advance(tmp_path: Path) -> None:
    with owned(tmp_path), pytest.raises(ConfigError, match="another run is at work"):
        foresee(config(tmp_path))
    foresee(config(tmp_path))
    with owned(tmp_path):
        pass


@pytest.mark.parametrize("part", ["student", "samples.dpk", "settings"])
def test_a_checkpoint_that_lacks_a_part_is_named(tmp_path: Path, part: str) -> None:
    asked = config(tmp_path, resume="auto")
    write_checkpoint(tmp_path, 4, asked)
    place = tmp_path / "checkpoints" / "step-00000004"
    if part == "settings":
        (place / "state.json").write_text('{"step": 4}')
    else:
        (place / part).rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a whole checkpoint") as caught:
        foresee(asked)
    assert part in caught.value.what
