"""Shared memory: the publisher writes a bucket once, and every receiver on the host maps it.

The segment is a ring of CREDIT slots in one file of /dev/shm. A slot is written again when every live receiver has
acknowledged what was in it. A receiver that was given up on may still look: the bucket's digest in its authenticated
header then does not fit, and the model's digest before commit would not either.

Files are opened by hand rather than with `multiprocessing.shared_memory`, whose resource tracker (Python 3.11) unlinks
a segment when any process that merely attached to it ends.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import re
import shutil
import stat
import threading
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import numpy as np

from distill.errors import EnvironmentFault, MeshError
from distill.transfermesh.buckets import Bucket, aligned
from distill.transfermesh.digest import Octets
from distill.transfermesh.endpoint import SHM_DIR
from distill.transfermesh.link import Deadline, Link
from distill.transfermesh.transports.base import TransportStats
from distill.transfermesh.wire import CREDIT, Chunk

PREFIX = "distill-mesh-"
_NAME = re.compile(r"distill-mesh-([0-9a-f]{16})-\d+-\d+")
_count = itertools.count()


class ShmTransport:
    name: ClassVar[str] = "shm"

    @staticmethod
    def sender(run: str, timeout_s: float) -> ShmSender:
        reclaim()
        return ShmSender(run, timeout_s)

    @staticmethod
    def inbox(run: str, bucket_bytes: int) -> ShmInbox:
        return ShmInbox(run)


class Segment:
    """A file in /dev/shm that this process owns and keeps locked while it lives: that is how a leak is told."""

    def __init__(self, run: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self.name, self._fd = _create(run)
        try:
            # Reserves the memory: a sparse file would let a full /dev/shm kill us with SIGBUS at the first write.
            os.posix_fallocate(self._fd, 0, nbytes)
            self.bytes = np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8)
        except OSError as error:
            self._unlink()
            raise _full(nbytes, error) from error

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)  # the mapping ends with its last view
        self._unlink()

    def _unlink(self) -> None:
        (SHM_DIR / self.name).unlink(missing_ok=True)
        os.close(self._fd)


def _create(run: str) -> tuple[str, int]:
    """A new, empty, locked file: (name, descriptor). The name carries the run and the process."""
    while True:
        name = f"{PREFIX}{run}-{os.getpid()}-{next(_count)}"
        try:
            fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue  # left by an earlier process with our number
        except OSError as error:
            raise EnvironmentFault(f"cannot make a file in {SHM_DIR}: {error}", fix="mesh.transport=tcp") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)  # a `reclaim` was quicker; it unlinks the name
            continue
        if os.fstat(fd).st_nlink:
            return name, fd
        os.close(fd)


def _full(nbytes: int, error: OSError) -> EnvironmentFault:
    if error.errno != errno.ENOSPC:
        return EnvironmentFault(f"cannot reserve {nbytes} bytes in {SHM_DIR}: {error}", fix="mesh.transport=tcp")
    usage = shutil.disk_usage(SHM_DIR)
    return EnvironmentFault(
        f"{SHM_DIR} is full: {nbytes} bytes are needed for weight buckets, {usage.free} of {usage.total} are free",
        why=f"{CREDIT} buckets are in flight at a time",
        fix="give the container more (docker --shm-size), lower mesh.bucket_mb, or set mesh.transport=tcp",
    )


def leaked() -> list[Path]:
    """Segments whose owner is dead."""
    return [
        path for path in sorted(SHM_DIR.glob(PREFIX + "*")) if _NAME.fullmatch(path.name) and _is_orphan(path, False)
    ]


def reclaim() -> list[Path]:
    """Remove the segments whose owner is dead, of any run of this user; returns them."""
    paths = sorted(SHM_DIR.glob(PREFIX + "*"))
    return [path for path in paths if _NAME.fullmatch(path.name) and _is_orphan(path, True)]


def _is_orphan(path: Path, unlink: bool) -> bool:
    # The kernel drops a process's locks when it dies. Unlike a process id, a lock means the same in every container.
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone by now, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if unlink:
            path.unlink(missing_ok=True)
        return True
    except OSError:
        return False  # its owner lives
    finally:
        os.close(fd)


class ShmSender:
    """The ring. Every receiver's thread asks for every bucket; the first one that may writes it for all."""

    def __init__(self, run: str, timeout_s: float) -> None:
        self.stats = TransportStats()
        self._run, self._timeout_s = run, timeout_s
        self._segment: Segment | None = None
        self._slot_bytes = 0
        self._changed = threading.Condition()
        self._written = -1
        self._acked: dict[str, int] = {}

    def begin(self, receivers: Collection[str], largest: int) -> None:
        with self._changed:
            self._written = -1
            self._acked = dict.fromkeys(receivers, -1)
            needed = max(aligned(largest), mmap.PAGESIZE)
            if self._segment is None or self._slot_bytes < needed:
                self._release()
                self._segment = Segment(self._run, CREDIT * needed)
                self._slot_bytes = needed

    def send(self, link: Link, receiver: str, bucket: Bucket) -> None:
        # Others leave the ring within a timeout each when they do not move, so this bound is never met in practice.
        deadline = Deadline(self._timeout_s * (len(self._acked) + 1))
        while not self._place(bucket, min(1.0, link.keep_alive_s)):
            link.keep_alive()
            if deadline.left() <= 0:
                with self._changed:
                    laggards = ", ".join(self._laggards(bucket))
                raise MeshError(
                    f"no room for bucket {bucket.seq} within {deadline.seconds:g} s; still read by {laggards}"
                )
        segment = self._segment
        assert segment is not None
        at = bucket.seq % CREDIT * self._slot_bytes
        link.send(Chunk(bucket.seq, list(bucket.slices), bucket.nbytes, bucket.digest, segment.name, at))
        with self._changed:
            self.stats.bytes_carried += bucket.nbytes

    def acked(self, receiver: str, seq: int) -> None:
        with self._changed:
            self._acked[receiver] = seq
            self._changed.notify_all()

    def leave(self, receiver: str) -> None:
        with self._changed:
            self._acked.pop(receiver, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._release()

    def _place(self, bucket: Bucket, patience_s: float) -> bool:
        """Whether the bucket is in its slot now; waits up to `patience_s` for room."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._written >= bucket.seq or not self._laggards(bucket), patience_s
            ):
                return False
            if self._written < bucket.seq:
                assert self._segment is not None and bucket.seq == self._written + 1
                start = bucket.seq % CREDIT * self._slot_bytes
                bucket.write_to(self._segment.bytes[start : start + bucket.nbytes])
                self._written = bucket.seq
                self.stats.buckets += 1
                self.stats.bytes_written += bucket.nbytes
                self._changed.notify_all()
            return True

    def _laggards(self, bucket: Bucket) -> list[str]:
        """Receivers that may still read what is in the bucket's slot."""
        return [name for name, seq in self._acked.items() if seq < bucket.seq - CREDIT]

    def _release(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class ShmInbox:
    """Maps the publisher's segment read-only, once a session."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._name: str | None = None
        self._bytes = np.empty(0, np.uint8)

    def take(self, link: Link, chunk: Chunk) -> Octets:
        if chunk.segment != self._name:
            self._bytes = _attach(self._run, chunk.segment)
            self._name = chunk.segment
        if chunk.at + chunk.nbytes > self._bytes.nbytes:
            raise MeshError(f"a bucket of {chunk.nbytes} bytes at {chunk.at} is outside of segment {chunk.segment}")
        return self._bytes[chunk.at : chunk.at + chunk.nbytes]

    def close(self) -> None:
        self._bytes = np.empty(0, np.uint8)  # the mapping ends with its last view


def _attach(run: str, name: str) -> Octets:
    match = _NAME.fullmatch(name)
    if match is None or match[1] != run:
        raise MeshError(f"{name!r} is not a segment of this run")
    try:
        fd = os.open(SHM_DIR / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or not info.st_size:
                raise MeshError(f"{SHM_DIR / name} is not a segment")
            return np.frombuffer(mmap.mmap(fd, info.st_size, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(fd)
    except OSError as error:
        raise MeshError(
            f"cannot map the publisher's segment: {error}; both sides need one {SHM_DIR}, or mesh.transport=tcp"
        ) from error
