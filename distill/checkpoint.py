"""Checkpoints of a run: one folder a step, written beside and renamed, the newest kept.

checkpoints/step-00000040/
    student/       what the student backend saved, an ordinary Hugging Face folder included
    samples.dpk    scored samples that were not trained yet
    state.json     step, the settings of the run, the observer's state, which samples were set aside
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import ConfigError, EnvironmentFault

_PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    step: int
    state: Mapping[str, Any]

    @property
    def student(self) -> Path:
        return self.folder / "student"

    @property
    def samples(self) -> bytes:
        return (self.folder / "samples.dpk").read_bytes()


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root = root
        self._keep = keep

    async def write(
        self, step: int, save_student: Callable[[Path], Awaitable[None]], *, samples: bytes, state: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint; it exists wholly or not at all. Raises EnvironmentFault when the disk is full."""
        final = self.root / f"{_PREFIX}{step:08d}"
        partial = self.root / f"partial-{step:08d}"
        try:
            for left in self.root.glob("partial-*"):
                shutil.rmtree(left)
            partial.mkdir(parents=True)
            await save_student(partial / "student")
            _write(partial / "samples.dpk", samples)
            _write(partial / "state.json", json.dumps({"step": step, **state}).encode())
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync(self.root)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise EnvironmentFault(
                f"the checkpoint of step {step} could not be written to {self.root}: {error.strerror or error}",
                why="the previous checkpoint is untouched",
                fix="make room, then go on with resume=auto",
            ) from error
        for old in self._folders()[: -self._keep]:
            shutil.rmtree(old)
        return final

    def latest(self) -> Checkpoint | None:
        folders = self._folders()
        return _read(folders[-1]) if folders else None

    def _folders(self) -> list[Path]:
        return sorted(self.root.glob(f"{_PREFIX}*")) if self.root.is_dir() else []


def newest_unfinished(runs: Path) -> Path | None:
    """The newest run under `runs` that has a checkpoint and did not finish."""
    candidates = [folder for folder in runs.glob("*") if Checkpoints(folder / "checkpoints", keep=1).latest()]
    return _newest(folder for folder in candidates if not _finished(folder))


def newest_finished(runs: Path) -> Path | None:
    """The newest run under `runs` that came to its end."""
    return _newest(folder for folder in runs.glob("*") if _finished(folder))


def _newest(folders: Iterable[Path]) -> Path | None:
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def _finished(folder: Path) -> bool:
    result = folder / "result.json"
    try:
        return json.loads(result.read_bytes())["status"] == "done"
    except (OSError, ValueError, KeyError, TypeError):  # a run that was killed has none, or half of one
        return False


def _read(folder: Path) -> Checkpoint:
    try:
        state = json.loads((folder / "state.json").read_text())
        return Checkpoint(folder, int(state["step"]), state)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: not a whole checkpoint ({error})", fix="remove that folder; the one before it is used then"
        ) from error


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
