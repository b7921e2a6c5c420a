"""Where Ray keeps its files: in a folder that goes with the run, also with one that was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill import ray_folder
from distill.errors import EnvironmentFault
from distill.ray_folder import RayFolder


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with a short path, as sockets need it."""
    folder = Path(tempfile.mkdtemp(prefix="", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def age(folder: Path) -> None:
    long_ago = time.time() - 3600
    os.utime(folder, (long_ago, long_ago))


def test_the_folder_is_the_users_own_and_goes_with_the_run(root: Path) -> None:
    folder = RayFolder()
    outer = folder.path.parent
    assert outer.parent == root and outer.stat().st_mode & 0o777 == 0o700
    folder.path.mkdir()
    (folder.path / "session").touch()
    folder.close()
    assert list(root.iterdir()) == []


def test_what_a_killed_run_left_goes_with_the_next_and_what_is_in_use_stays(root: Path) -> None:
    left, fresh = root / "distill-ray-left", root / "distill-ray-fresh"
    for folder in (left, fresh):
        (folder / "r").mkdir(parents=True)
    age(left)
    others = root / "something-else"
    others.mkdir()
    age(others)
    running = RayFolder()
    age(running.path.parent)
    second = RayFolder()
    assert not left.exists() and fresh.exists() and others.exists() and running.path.parent.exists()
    second.close()
    running.close()


def test_a_temporary_folder_with_too_long_a_path_is_passed_over(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = root / ("x" * 30)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(root))
    folder = RayFolder()
    assert folder.path.parent.parent == root
    folder.close()
    monkeypatch.setattr(ray_folder, "_LONGEST_ROOT", 0)
    with pytest.raises(EnvironmentFault, match="no folder for Ray") as caught:
        RayFolder()
    assert "RAY_TMPDIR" in caught.value.fix
