"""Where Ray keeps its files: in a folder that goes with the run, also with one that was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
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


def killed_run(root: Path) -> Path:
    """The folder of a run that died by SIGKILL a moment ago."""
    script = "import os, signal; from distill.ray_folder import RayFolder; folder = RayFolder(); "
    script += "folder.path.mkdir(); print(folder.path.parent, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == -signal.SIGKILL, found.stderr
    folder = Path(found.stdout.strip())
    assert folder.parent == root and folder.exists()
    return folder


def test_the_folder_of_a_run_killed_a_moment_ago_goes_when_the_next_begins(root: Path) -> None:
    killed = killed_run(root)
    running = RayFolder()
    second = RayFolder()
    assert not killed.exists() and running.path.parent.exists(), "the one in use is as young"
    second.close()
    running.close()
    assert list(root.iterdir()) == []


def test_what_an_agent_of_a_killed_run_wrote_while_it_was_swept_goes_when_the_next_ends(
    root: Path,
) -> None:
    killed = killed_run(root)
    real = shutil.rmtree

    def overtaken(path: Path, *, ignore_errors: bool) -> None:
        real(path, ignore_errors=ignore_errors)
        (killed / "r").mkdir(exist_ok=True)
        (killed / "r" / "agent.log").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", overtaken)
        running = RayFolder()
    assert (killed / "r" / "agent.log").exists()
    running.close()
    assert list(root.iterdir()) == []


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
