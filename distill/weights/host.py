"""Host memory for weights, shared by all model servers of a machine: one file per object in a folder of a memory file
system.

Objects are named by the digest of their tensors: equal checkpoints are stored once. Every change happens under one
lock of the folder; a process may be killed at any moment. What does not fit is read from disk, and the report says why.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from distill.errors import EnvironmentFault, TeacherError
from distill.transfermesh.digest import model_digest, tensor_digest
from distill.weights.delta import Part, decode, encode
from distill.weights.files import Checkpoint, StoredTensor, read_into
from distill.weights.host_files import (
    Entry,
    Index,
    bin_file,
    data_bytes,
    index_file,
    join,
    leave,
    locked,
    objects,
    read_index,
    reclaim,
    remove,
    unused,
    write_small,
)

Octets = NDArray[np.uint8]
Pin = Callable[[Octets], Callable[[], None]]
"""Make memory fit for direct copies to a device; what it returns undoes that."""
_WORTH = 0.9
"""A difference larger than this share of the weights is not stored: reading it would cost time for little."""
_REASONS = 8
"""Newest reasons for reading from disk that the report keeps."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """What the host memory of a machine holds."""

    budget_bytes: int
    stored_bytes: int
    """Of all objects, those being written included."""
    weight_bytes: int
    """Of the finished objects when they are decoded: more than is stored where differences are."""
    objects: int
    differences: int
    """Objects that are stored as a difference from another."""
    from_disk: tuple[str, ...]
    """Newest reasons why this process read weights from disk instead."""


class NoRoom(Exception):
    """An object cannot be stored, and why."""


class HostStore:
    """Holds the objects of `folder` within `budget_bytes`. Used by any threads, and by other processes beside them.

    `differences`: checkpoints with the same tensors as one that is there are stored as their difference from it, where
    that saves a tenth of their bytes: less memory for a slower copy.
    """

    def __init__(self, folder: Path, budget_bytes: int, *, differences: bool = False, pin: Pin | None = None) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self._differences = differences
        self._pin = pin
        self._reasons: deque[str] = deque(maxlen=_REASONS)
        self._drafts = 0
        self._counter = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise EnvironmentFault(
                f"{folder}: cannot be made: {error.strerror}", fix="give another --host-folder"
            ) from error
        self._user = join(folder)

    def hold(self, checkpoint: Checkpoint) -> HeldObject | None:
        """The checkpoint in host memory, read from disk first where it is not there; nobody evicts it before it is
        closed. None: there is no room for it, `report` says why. Raises TeacherError for files that are not right."""
        try:
            with locked(self.folder):
                reclaim(self.folder)
                if held := self._find(checkpoint):
                    return held
            return self._admit(checkpoint)
        except NoRoom as refusal:
            self._reasons.append(f"{checkpoint.folder}: {refusal}")
        except OSError as error:
            self._reasons.append(f"{checkpoint.folder}: {self.folder}: {error.strerror}")
        return None

    def drop(self, digest: str) -> None:
        """Forget an object whose bytes are damaged. Whoever copies from it notices by itself."""
        with locked(self.folder):
            remove(self.folder, digest)

    def close(self) -> None:
        """Leave. The last process to leave frees the memory; what killed ones left is there for the next."""
        if self._user >= 0:
            leave(self.folder, self._user)
            self._user = -1

    def report(self) -> HostReport:
        there = [index for index, _ in objects(self.folder).values()]
        return HostReport(
            budget_bytes=self.budget_bytes,
            stored_bytes=data_bytes(self.folder),
            weight_bytes=sum(index.nbytes for index in there),
            objects=len(there),
            differences=sum(index.base is not None for index in there),
            from_disk=tuple(self._reasons),
        )

    # --- finding; under the lock of the folder ------------------------------------------------------------------------

    def _find(self, checkpoint: Checkpoint) -> HeldObject | None:
        try:
            digest = (self.folder / f"{checkpoint.signature}.known").read_text()
        except OSError:
            return None
        return self._open(digest, from_disk=False)

    def _open(self, digest: str, *, from_disk: bool) -> HeldObject | None:
        index = read_index(index_file(self.folder, digest))
        if index is None or not bin_file(self.folder, digest).is_file():
            return None
        base = None
        if index.base is not None:
            base = self._open(index.base, from_disk=False)
            if base is None:  # it was damaged and dropped
                remove(self.folder, digest)
                return None
        os.utime(index_file(self.folder, digest), ns=(time.time_ns(), time.time_ns()))
        return HeldObject(self, index, base, from_disk=from_disk, pin=self._pin)

    # --- storing ------------------------------------------------------------------------------------------------------

    def _admit(self, checkpoint: Checkpoint) -> HeldObject | None:
        if self._differences and (base := self._base_of(checkpoint)):
            try:
                if parts := _differences_from(base, checkpoint):
                    return self._store_parts(checkpoint, parts, base.digest)
            finally:
                base.close()
        draft = self._reserve(checkpoint.nbytes)
        try:
            entries = draft.fill(checkpoint)
            checkpoint.check_unchanged()
            return self._publish(draft, checkpoint, entries, None)
        finally:
            draft.close()

    def _base_of(self, checkpoint: Checkpoint) -> HeldObject | None:
        """A whole object with the same tensors. It stays what later ones differ from for as long as it is there."""
        with locked(self.folder):
            there = sorted(objects(self.folder).values(), key=lambda found: found[0].digest)
            for index, _ in there:
                if index.layout == checkpoint.layout and index.base is None:
                    return self._open(index.digest, from_disk=False)
        return None

    def _store_parts(
        self, checkpoint: Checkpoint, parts: list[tuple[StoredTensor, str, Part]], base: str
    ) -> HeldObject | None:
        draft = self._reserve(sum(len(part.data) for *_, part in parts))
        try:
            entries = draft.put(parts)
            checkpoint.check_unchanged()
            return self._publish(draft, checkpoint, entries, base)
        finally:
            draft.close()

    def _reserve(self, nbytes: int) -> _Draft:
        """A file of this size that only we write to, after evicting what has to go. Raises NoRoom, or OSError."""
        with locked(self.folder):
            self._make_room(nbytes)
            with self._counter:
                self._drafts += 1
                name = f"{os.getpid()}-{threading.get_native_id()}-{self._drafts}.part"
            return _Draft(self.folder / name, nbytes)

    def _make_room(self, nbytes: int) -> None:
        missing = data_bytes(self.folder) + nbytes - self.budget_bytes
        if missing <= 0:
            return
        there = objects(self.folder)
        needed: dict[str, int] = {}
        for index, _ in there.values():
            if index.base is not None:
                needed[index.base] = needed.get(index.base, 0) + 1
        victims: list[Index] = []
        left = sorted(there.values(), key=lambda found: found[1])
        while missing > 0:
            chosen = next(
                (i for i, _ in left if i not in victims and not needed.get(i.digest) and self._idle(i.digest)), None
            )
            if chosen is None:
                raise NoRoom(
                    f"{nbytes} bytes do not fit into host memory: {self.budget_bytes} bytes, of which "
                    f"{data_bytes(self.folder)} are taken, and all that could be evicted leaves {missing} too few"
                )
            victims.append(chosen)
            missing -= chosen.stored
            if chosen.base is not None:
                needed[chosen.base] -= 1
        for victim in victims:
            remove(self.folder, victim.digest)

    def _idle(self, digest: str) -> bool:
        return unused(bin_file(self.folder, digest))

    def _publish(
        self, draft: _Draft, checkpoint: Checkpoint, entries: list[Entry], base: str | None
    ) -> HeldObject | None:
        """Give the object its name, unless an equal one is there already."""
        digest = model_digest({entry.name: entry.digest for entry in entries})
        stored = sum(entry.stored for entry in entries)
        index = Index(digest, checkpoint.layout, checkpoint.nbytes, stored, entries, base)
        with locked(self.folder):
            held = self._open(digest, from_disk=True)
            if held is None:
                draft.settle(bin_file(self.folder, digest))
                write_small(index_file(self.folder, digest), msgspec.json.encode(index))
                held = self._open(digest, from_disk=True)
            write_small(self.folder / f"{checkpoint.signature}.known", digest.encode())
        return held


class HeldObject:
    """An object of the store, open for copying: an `Origin`. Its file is mapped, and locked against eviction."""

    def __init__(
        self, store: HostStore, index: Index, base: HeldObject | None, *, from_disk: bool, pin: Pin | None
    ) -> None:
        self.from_disk = from_disk
        self.digest = index.digest
        self.stored_bytes = index.stored
        self._store = store
        self._base = base
        self._entries = {entry.name: entry for entry in index.tensors}
        self._unpin: Callable[[], None] | None = None
        self._file = os.open(bin_file(store.folder, index.digest), os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            self._octets = _map(self._file, index.stored)
            if pin is not None and index.stored:
                self._unpin = pin(self._octets)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> tuple[Octets, str]:
        """As `Origin.read`. Raises TeacherError, and drops the object, where its bytes are not those that were put."""
        entry = self._entries[name]
        stored = self._octets[entry.begin : entry.begin + entry.stored]
        try:
            octets = stored if self._base is None else self._decoded(entry, stored, self._base)
        except ValueError as error:
            raise self._damaged(name, str(error)) from error
        digest = tensor_digest(octets)
        if digest != entry.digest:
            raise self._damaged(name, f"digest {digest}, {entry.digest} was stored")
        return octets, digest

    def rows(self, name: str, row_bytes: int, rows_U: NDArray[np.int64]) -> Octets:
        """As `Origin.rows`; a difference is decoded whole."""
        entry = self._entries[name]
        stored = self._octets[entry.begin : entry.begin + entry.stored]
        octets = stored if self._base is None else self.read(name)[0]
        return octets.reshape(-1, row_bytes)[rows_U]

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._octets = np.empty(0, np.uint8)
        if self._base is not None:
            self._base.close()

    def _decoded(self, entry: Entry, stored: Octets, base: HeldObject) -> Octets:
        return decode(entry.form, stored, base.read(entry.name)[0], entry.item_bytes)

    def _damaged(self, name: str, what: str) -> TeacherError:
        self._store.drop(self.digest)
        return TeacherError(
            f"host memory: tensor {name!r} of object {self.digest} is damaged: {what}",
            why="its bytes changed after they were stored",
            fix="load it again: it is then read from disk; if that comes back, test the machine's memory",
        )


class _Draft:
    """A file being written, with all of its memory reserved. Made under the lock of its folder."""

    def __init__(self, file: Path, nbytes: int) -> None:
        self.file = file
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if nbytes:
                os.posix_fallocate(self._descriptor, 0, nbytes)
            self._room = _map(self._descriptor, nbytes)
        except OSError as error:
            self.close()
            if error.errno == errno.ENOSPC:
                raise NoRoom(f"{file.parent} has no room for {nbytes} bytes: {error.strerror}") from error
            raise

    def fill(self, checkpoint: Checkpoint) -> list[Entry]:
        """Copy the whole checkpoint from its files."""
        entries: list[Entry] = []
        begin = 0
        for name, tensor in checkpoint.tensors.items():
            room = self._room[begin : begin + tensor.nbytes]
            read_into(tensor, room)
            entries.append(Entry(name, tensor.nbytes, _item_bytes(tensor), tensor_digest(room), begin, tensor.nbytes))
            begin += tensor.nbytes
        return entries

    def put(self, parts: list[tuple[StoredTensor, str, Part]]) -> list[Entry]:
        """Write differences."""
        entries: list[Entry] = []
        begin = 0
        for tensor, digest, part in parts:
            size = len(part.data)
            if size:
                self._room[begin : begin + size] = np.frombuffer(part.data, np.uint8)
            entries.append(Entry(tensor.name, tensor.nbytes, _item_bytes(tensor), digest, begin, size, part.form))
            begin += size
        return entries

    def settle(self, file: Path) -> None:
        """Give it its name. Under the lock of the folder: from here on it may be evicted."""
        self.file.replace(file)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Remove the file, unless it got its name."""
        self.file.unlink(missing_ok=True)
        os.close(self._descriptor)


def _differences_from(base: HeldObject, checkpoint: Checkpoint) -> list[tuple[StoredTensor, str, Part]] | None:
    """Each tensor as its difference from the base's; None where that saves too little."""
    parts: list[tuple[StoredTensor, str, Part]] = []
    room = int(checkpoint.nbytes * _WORTH)
    for name, tensor in checkpoint.tensors.items():
        octets = np.empty(tensor.nbytes, np.uint8)
        read_into(tensor, octets)
        part = encode(octets, base.read(name)[0], _item_bytes(tensor))
        room -= len(part.data)
        if room < 0:
            return None
        parts.append((tensor, tensor_digest(octets), part))
    return parts


def _item_bytes(tensor: StoredTensor) -> int:
    return tensor.nbytes // tensor.elements if tensor.elements else 1


def _map(descriptor: int, nbytes: int) -> Octets:
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
