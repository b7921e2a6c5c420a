"""Large packed replies in shared memory, where the client and the server share a /dev/shm. No torch, no network.

The client makes an empty file for each call, with a random token in it, and names both in a header of the request. A
server that can open that file and reads that token in it is on the same machine: it writes the body there and answers
with its size and digest in place of the body. Nobody else makes files, so a server that dies leaves none; the client
removes the name as soon as it has mapped the file, and its folder when it closes. The folder of a client that was
killed is removed by the next client that starts: the kernel drops a dead process's lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import re
import secrets
import shutil
from pathlib import Path

import xxhash

SHM_DIR = Path("/dev/shm")
HEADER = "x-distill-reply-file"
"""Of a request: "<path> <token>". Of a reply: "<bytes> <xxh3-64, 16 hex digits>", and then the HTTP body is empty."""
LEAST_BYTES = 256 * 1024
"""Smaller bodies go through HTTP: two system calls more would not pay."""
_PREFIX = "distill-replies-"
_FOLDER = re.compile(_PREFIX + r"[0-9a-f]{16}")
_TOKEN_BYTES = 16


class LostReplyError(Exception):
    """The file is not what the server said that it wrote. The call is made once more, without a file."""


class ReplyFile:
    """The file of one call."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(self._token)

    @property
    def header(self) -> str:
        return f"{self.path} {self._token.hex()}"

    def take(self, told: str) -> memoryview:
        """The body, mapped: its memory is free again when the last view of it is gone. The name goes at once.

        Raises LostReplyError when the file is gone, or has another size or digest than `told`.
        """
        try:
            size, digest = told.split(" ")
            wanted = int(size)
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            raise LostReplyError(f"{self.path}: {error}") from error
        try:
            self.close()
            found = os.fstat(fd).st_size
            if found != wanted or not wanted:
                raise LostReplyError(f"{self.path} has {found} bytes, the server wrote {wanted}")
            view = memoryview(mmap.mmap(fd, wanted, prot=mmap.PROT_READ))
        except OSError as error:
            raise LostReplyError(f"{self.path}: {error}") from error
        finally:
            os.close(fd)
        if xxhash.xxh3_64_hexdigest(view) != digest:
            raise LostReplyError(f"{self.path} has other bytes than the server wrote")
        return view

    def close(self) -> None:
        """Remove the name. A server that has not opened the file by now finds none, and answers with a body."""
        self.path.unlink(missing_ok=True)


class ReplyFolder:
    """The folder of one client's files; made when the first one is wanted, locked while the client lives."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = -1
        self._count = itertools.count()
        self._usable = True

    def file(self) -> ReplyFile | None:
        """A file for one call; None where there is no shared memory, or the server was found not to see it."""
        if not self._usable:
            return None
        try:
            if self._folder is None:
                reclaim()
                self._folder, self._lock = _locked_folder()
            return ReplyFile(self._folder / str(next(self._count)))
        except OSError:
            self._usable = False
            return None

    def give_up(self) -> None:
        """The server does not write into them: it is on another machine, or another user's."""
        self._usable = False

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None


def write_reply(header: str, body: bytes) -> str | None:
    """For the server: put `body` into the client's file, and return the reply's header. None where that cannot be: it
    is small, the file cannot be seen from here, is none of a client's, or does not fit."""
    if len(body) < LEAST_BYTES:
        return None
    name, _, token = header.partition(" ")
    path = Path(name)
    if path.parent.parent != SHM_DIR or not _FOLDER.fullmatch(path.parent.name):
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(fd, "r+b", buffering=0) as file:
        if file.read(_TOKEN_BYTES + 1).hex() != token:
            return None
        try:
            os.posix_fallocate(fd, 0, len(body))  # a sparse file would let a full /dev/shm kill whoever maps it
            file.seek(0)
            view = memoryview(body)
            while view:
                view = view[file.write(view) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(0)  # memory that the body was refused must not be held by half of it
            return None
    return f"{len(body)} {xxhash.xxh3_64_hexdigest(body)}"


def reclaim() -> list[Path]:
    """Remove the folders whose client is dead, of this user; returns them."""
    removed: list[Path] = []
    for folder in sorted(SHM_DIR.glob(_PREFIX + "*")):
        lock = _open_locked(folder) if _FOLDER.fullmatch(folder.name) else None
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            removed.append(folder)
    return removed


def _locked_folder() -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock. Raises OSError."""
    while True:
        folder = SHM_DIR / f"{_PREFIX}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        lock = _open_locked(folder)
        if lock is None:
            continue  # another client's `reclaim` was quicker, and removes it
        if folder.is_dir():
            return folder, lock
        os.close(lock)


def _open_locked(folder: Path) -> int | None:
    """A descriptor with the folder's lock; None when its client lives, or it is gone or another user's."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
