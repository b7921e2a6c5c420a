"""Whose is the run's folder: chosen, kept from other runs, and gone on from only where the wish fits what is there."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from distill.checkpoint import Checkpoint, Checkpoints, newest_finished, newest_unfinished
from distill.config import RunConfig
from distill.config.resume import Change, changes, settings_of
from distill.errors import ConfigError

_LOCK = ".lock"
RESUME = "resume=auto goes on from the newest checkpoint"

# Everything that a run writes into its folder (docs/operations.md says what each is).
WRITTEN = (
    *("config.yaml", "metrics.jsonl", "events.log", "result.json", "report.html", "canaries.json", "quarantine.jsonl"),
    *("tensorboard", "logs", "weights", "checkpoints", "student"),
)


@dataclass(frozen=True)
class Start:
    """How a run would begin. `folder` is None for one that is yet to be named."""

    folder: Path | None
    checkpoint: Checkpoint | None
    leftovers: bool
    """What an earlier try left in the folder would be moved aside."""
    note: str = ""
    """What a user who asked for a resume may not expect."""


def foresee(config: RunConfig) -> Start:
    """How a run of `config` would begin now. Makes and changes nothing.

    Raises ConfigError where the run itself would: it may not use the folder, or not go on from what is there.
    """
    if config.resume not in (None, "auto") and not Path(config.resume).is_dir():
        raise ConfigError(
            f"resume: there is no run folder {config.resume}",
            fix="give the folder of a run (the one with checkpoints/ in it), or resume=auto for the newest one",
        )
    folder = _wanted_folder(config)
    if folder is None or not folder.is_dir():
        return Start(folder, None, leftovers=False, note=_why_anew(config))
    _check_idle(folder)
    checkpoint = find_checkpoint(folder, config)
    return Start(folder, checkpoint, leftovers=checkpoint is None and holds_run(folder))


def _wanted_folder(config: RunConfig) -> Path | None:
    """The folder that the configuration names or finds; None when a new one is to be made."""
    if config.resume is None:
        return config.run.dir
    if config.resume != "auto":
        return Path(config.resume)
    return config.run.dir or newest_unfinished(_runs(config))


def _why_anew(config: RunConfig) -> str:
    finished = None if config.resume is None or config.run.dir else newest_finished(_runs(config))
    return f"resume=auto: run {finished} is finished; this is a new run" if finished else ""


def _runs(config: RunConfig) -> Path:
    return Path("outputs") / config.run.name


def choose_folder(config: RunConfig) -> Path:
    """The run's folder, made if it is new. Nothing in it is read before `owned` holds it."""
    folder = _wanted_folder(config) or new_folder(_runs(config))
    folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute()


def find_checkpoint(folder: Path, config: RunConfig) -> Checkpoint | None:
    """The checkpoint to go on from, None for a new run. Raises ConfigError when folder and wish do not fit together."""
    if config.resume is None:
        if holds_run(folder):
            raise ConfigError(f"{folder} already holds a run", fix=f"choose another run.dir; or {RESUME}")
        return None
    found = Checkpoints(folder / "checkpoints", keep=1).latest()
    if found is None and config.resume != "auto":
        raise ConfigError(f"resume: {folder} holds no checkpoint", fix="give a run's folder, or auto")
    if found is not None and found.step >= config.trainer.steps:
        raise ConfigError(
            f"resume: {folder} has already trained {found.step} of {config.trainer.steps} steps",
            why="going on would train nothing",
            fix="raise trainer.steps, or start a new run without resume",
        )
    if found is not None:
        _check_whole(found)
        check_settings(found, config)
    return found


def _check_whole(checkpoint: Checkpoint) -> None:
    parts = (checkpoint.student, checkpoint.folder / "samples.dpk")
    missing = [part.name for part in parts if not part.exists()]
    if "settings" not in checkpoint.state:
        missing.append("`settings` in state.json")
    if missing:
        raise ConfigError(
            f"resume: {checkpoint.folder} is not a whole checkpoint: it has no {missing[0]}",
            fix="copy it again, or remove that folder: the one before it is used then",
        )


def set_aside(folder: Path) -> Path | None:
    """Move what a run left that never reached a checkpoint into a folder beside, so that a new one loses nothing of it.

    Returns that folder, None when there was nothing. Only what a run writes is moved: the folder may be the user's own.
    """
    if not holds_run(folder):
        return None
    aside = next(place for n in itertools.count(1) if not (place := folder / f"earlier-{n}").exists())
    aside.mkdir()
    for name in WRITTEN:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    return aside


def new_folder(runs: Path) -> Path:
    """A folder of its own for a run, named by the second in which it began; two runs never get the same."""
    runs.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for name in itertools.chain([stamp], (f"{stamp}-{count}" for count in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            (runs / name).mkdir()
            return runs / name
    raise AssertionError("unreachable: the names have no end")


def holds_run(folder: Path) -> bool:
    """There is work in the folder. What a run leaves that failed while it started is none."""
    metrics = folder / "metrics.jsonl"
    return (folder / "checkpoints").exists() or (metrics.exists() and metrics.stat().st_size > 0)


@contextlib.contextmanager
def owned(folder: Path) -> Generator[None]:
    """Keep every other run out of `folder`; the kernel lets go of it when this process ends, however it ends."""
    with (folder / _LOCK).open("w") as lock:
        _take(lock, folder)
        yield


def _check_idle(folder: Path) -> None:
    """No run is at work in `folder`, at this moment."""
    with contextlib.suppress(FileNotFoundError), (folder / _LOCK).open() as lock:
        _take(lock, folder)


def _take(lock: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another run is at work in {folder}",
            why="two runs would write over each other's checkpoints and results",
            fix="wait for it, or choose another run.dir",
        ) from error


def check_settings(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raises ConfigError with every setting that is not what the checkpoint was made with, and must be."""
    wrong = [str(change) for change in _changes(checkpoint, config) if not change.allowed]
    if wrong:
        several = f"{len(wrong)} settings are others than those of {checkpoint.folder}:\n- " if len(wrong) > 1 else ""
        raise ConfigError(
            "resume: " + several + "\n- ".join(wrong) + ("" if several else f" when {checkpoint.folder} was made"),
            why="what is trained would not be what the first run promised",
            fix="resume with the same, or start a new run; its student.model may be a checkpoint's folder student/",
        )


def allowed_changes(checkpoint: Checkpoint, config: RunConfig) -> list[Change]:
    """What differs from the settings of the checkpoint, and may."""
    return [change for change in _changes(checkpoint, config) if change.allowed]


def _changes(checkpoint: Checkpoint, config: RunConfig) -> Iterator[Change]:
    return changes(settings_of(config), checkpoint.state["settings"])


def without_folder(config: RunConfig) -> RunConfig:
    """For whoever uses the configuration of a run and writes nothing into its folder: a finished one is no obstacle."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": None}), "resume": None})
