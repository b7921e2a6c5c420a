from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from distill.checkpoint import Checkpoints, newest_unfinished
from distill.errors import ConfigError, EnvironmentFault


async def save(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("w")


async def test_the_newest_is_found_and_only_so_many_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest() is None
    for step in (5, 10, 100):
        await checkpoints.write(step, save, samples=b"s%d" % step, state={"identity": {"a": step}})
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.samples, latest.state["identity"]) == (100, b"s100", {"a": 100})
    assert (latest.student / "weights").read_text() == "w"
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-00000010", "step-00000100"]


async def test_a_full_disk_leaves_the_previous_checkpoint_and_no_partial_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    await checkpoints.write(1, save, samples=b"", state={})

    async def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(EnvironmentFault, match=r"step 2 could not be written.*No space left") as caught:
        await checkpoints.write(2, full, samples=b"", state={})
    assert "resume=auto" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


async def test_writing_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for content in (b"old", b"new"):
        await checkpoints.write(3, save, samples=content, state={})
    latest = checkpoints.latest()
    assert latest is not None and latest.samples == b"new"


async def test_a_checkpoint_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-00000007").mkdir()
    with pytest.raises(ConfigError, match="step-00000007: not a whole checkpoint"):
        Checkpoints(tmp_path, keep=2).latest()


async def test_resume_takes_the_newest_run_that_did_not_finish(tmp_path: Path) -> None:
    assert newest_unfinished(tmp_path / "none") is None
    for name, status in (("first", "stopped"), ("second", "failed"), ("third", "done"), ("fourth", None)):
        folder = tmp_path / name
        if status is not None:
            await Checkpoints(folder / "checkpoints", keep=1).write(1, save, samples=b"", state={})
            (folder / "result.json").write_text(json.dumps({"status": status}))
        else:
            folder.mkdir()
    newest = newest_unfinished(tmp_path)
    assert newest is not None and newest.name in ("first", "second")
