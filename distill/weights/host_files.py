"""The files of a host store: what lies in its folder, and who may touch it.

lock                 flock: held for every change of the folder
<digest>.bin         the bytes of one object; flock shared: somebody copies from it, exclusive: it is being evicted
<digest>.json        its index; its time says when the object was last used. An object is there when both files are
<signature>.known    digest of the checkpoint whose files have this signature
<name>.part          an object being written; flock exclusive by its writer. Without that lock its writer is dead
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

import msgspec

from distill.errors import EnvironmentFault
from distill.weights.delta import Form

LOCK_DEADLINE_S = 60.0
"""Changes of the folder take milliseconds; a dead holder's lock is gone with it."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor of an object: `stored` bytes from `begin` of the file, `nbytes` when they are decoded."""

    name: str
    nbytes: int
    item_bytes: int
    digest: str
    begin: int
    stored: int
    form: Form = "raw"


class Index(msgspec.Struct, frozen=True):
    """One object. `base`: digest of the object that its differences are from."""

    digest: str
    layout: str
    nbytes: int
    stored: int
    tensors: list[Entry]
    base: str | None = None


def bin_file(folder: Path, digest: str) -> Path:
    return folder / f"{digest}.bin"


def index_file(folder: Path, digest: str) -> Path:
    return folder / f"{digest}.json"


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the lock of the folder. Raises EnvironmentFault past the deadline."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + LOCK_DEADLINE_S
        while not try_lock(file, fcntl.LOCK_EX):
            if time.monotonic() > end:
                raise EnvironmentFault(
                    f"waited {LOCK_DEADLINE_S:g} s for {folder / 'lock'}",
                    why="another process of this machine holds it",
                    fix="end that process, or give the servers another host folder",
                )
            time.sleep(0.005)
        yield
    finally:
        os.close(file)


def join(folder: Path) -> int:
    """Count as a user of the folder until `leave`, or until the process ends. Returns what `leave` takes."""
    file = os.open(folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with locked(folder):
        fcntl.flock(file, fcntl.LOCK_SH)  # only ever held otherwise under the lock of the folder
    return file


def leave(folder: Path, user: int) -> None:
    """Stop being a user. The last one removes all objects."""
    with locked(folder):
        if try_lock(user, fcntl.LOCK_EX):
            for digest in objects(folder):
                remove(folder, digest)
            reclaim(folder)
            for file in folder.glob("*.known"):
                file.unlink(missing_ok=True)
        os.close(user)


def try_lock(file: int, kind: int) -> bool:
    """Take a flock (fcntl.LOCK_SH or LOCK_EX) now, or say that it is taken."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unused(file: Path) -> bool:
    """Nobody holds a lock of this file. Only under the lock of the folder does the answer stay true."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def read_index(file: Path) -> Index | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Index)
    except (OSError, msgspec.MsgspecError):
        return None


def objects(folder: Path) -> dict[str, tuple[Index, int]]:
    """Digest -> (index, when it was last used in ns) of every object that is there."""
    found: dict[str, tuple[Index, int]] = {}
    for file in folder.glob("*.json"):
        index = read_index(file)
        with contextlib.suppress(OSError):
            if index is not None and bin_file(folder, index.digest).stat().st_size == index.stored:
                found[index.digest] = index, file.stat().st_mtime_ns
    return found


def data_bytes(folder: Path) -> int:
    """Bytes of all objects, those being written included."""
    total = 0
    for pattern in ("*.bin", "*.part"):
        for file in folder.glob(pattern):
            with contextlib.suppress(OSError):
                total += file.stat().st_size
    return total


def write_small(file: Path, data: bytes) -> None:
    """Write a file in one step, under the lock of its folder."""
    draft = file.with_name(f"{file.name}.tmp")
    draft.write_bytes(data)
    draft.replace(file)


def reclaim(folder: Path) -> None:
    """Remove what dead processes left half done. Under the lock of the folder."""
    there = objects(folder)
    for file in folder.iterdir():
        stale = (
            (file.suffix == ".part" and unused(file))
            or (file.suffix in (".bin", ".json") and file.stem not in there and unused(file))
            or file.suffix == ".tmp"
        )
        if stale:
            file.unlink(missing_ok=True)


def remove(folder: Path, digest: str) -> None:
    """Remove an object and what pointed at it. Under the lock of the folder."""
    index_file(folder, digest).unlink(missing_ok=True)
    bin_file(folder, digest).unlink(missing_ok=True)
    for file in folder.glob("*.known"):
        with contextlib.suppress(OSError):
            if file.read_text() == digest:
                file.unlink(missing_ok=True)
