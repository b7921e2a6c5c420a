"""Ray's sockets, logs and spilled objects: in a folder that goes when the run ends, and not in /tmp/ray for ever.

A run that is killed leaves its folder behind. The next one removes it, when it begins and, because two of Ray's agents
outlive a killed run for a while and go on writing, again when it ends. A lock tells that a run is at work in there: the
system gives it up with the run's process, whoever has its number then, also after a reboot or in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TextIO

from distill.errors import EnvironmentFault

_PREFIX = "distill-ray-"
_LOCK = "in-use"
_INSIDE = "r"
"""Ray makes what it is given writable for everybody; nobody else gets through the folder around it."""
_LONGEST_ROOT = 18
"""Bytes. A Unix socket's path has at most 107 (unix(7)): Ray takes 64 of them, the names of our folders 23."""
_YOUNG_S = 60.0
"""A folder without any lock's file is another run's that is just beginning, for so long at most."""


class RayFolder:
    """Made at once, and removed by `close`. Raises EnvironmentFault when there is no place for it."""

    def __init__(self) -> None:
        self._root = _root()
        _sweep(self._root)
        self._outer = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._root))
        self.path = self._outer / _INSIDE
        self._lock = _take_lock(self._outer)

    def close(self) -> None:
        """After Ray's shutdown. What is still being written there goes with the next run."""
        _remove(self._outer)
        self._lock.close()
        _sweep(self._root)


def _root() -> Path:
    """RAY_TMPDIR, TMPDIR or /tmp: the first that is short enough for sockets and can be written."""
    tried = [os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), "/tmp"]
    for name in tried:
        if name and len(os.fsencode(name)) <= _LONGEST_ROOT and os.access(name, os.W_OK | os.X_OK):
            return Path(name).absolute()
    raise EnvironmentFault(
        f"no folder for Ray: tried {', '.join(name for name in tried if name)}",
        why=f"it must be writable, and its path no longer than {_LONGEST_ROOT} characters: sockets lie below it",
        fix="set RAY_TMPDIR to such a folder",
    )


def _take_lock(folder: Path) -> TextIO:
    """The file appears under its name when it is locked already: no other run ever sees it free."""
    begun = folder / f"{_LOCK}.begun"
    lock = begun.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    begun.rename(folder / _LOCK)
    return lock


def _sweep(root: Path) -> None:
    """Remove what runs left that were killed."""
    for folder in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, in use, or swept by another run at this moment
            state = folder.stat()
            beginning = not (folder / _LOCK).exists() and time.time() - state.st_mtime < _YOUNG_S
            if state.st_uid != os.getuid() or beginning:
                continue
            with (folder / _LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)


def _remove(folder: Path) -> None:
    """All but the lock first: while anything is left that somebody wrote meanwhile, the lock's file says what it is."""
    shutil.rmtree(folder / _INSIDE, ignore_errors=True)
    if not (folder / _INSIDE).exists():
        shutil.rmtree(folder, ignore_errors=True)
