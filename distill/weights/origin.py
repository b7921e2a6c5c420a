"""Where the bytes of a checkpoint are taken from: its files, or host memory that already holds them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distill.errors import TeacherError
from distill.transfermesh.digest import tensor_digest
from distill.weights.files import Checkpoint, read_into

Octets = NDArray[np.uint8]


class Origin(Protocol):
    """One checkpoint, open for reading. Close it when the copy is done."""

    @property
    def from_disk(self) -> bool:
        """Files had to be read for it."""
        ...

    def read(self, name: str) -> tuple[Octets, str]:
        """(bytes of a tensor, their xxh3-64). The bytes stay valid until the next call. Raises TeacherError."""
        ...

    def rows(self, name: str, row_bytes: int, rows_U: NDArray[np.int64]) -> Octets:
        """(U, row_bytes) some rows of a matrix, without reading all of it and so without its digest."""
        ...

    def close(self) -> None: ...


class FileOrigin:
    """Reads the files themselves; the page cache may have them."""

    from_disk = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[Path, int] = {}
        self._room = np.empty(0, np.uint8)

    def read(self, name: str) -> tuple[Octets, str]:
        tensor = self._checkpoint.tensors[name]
        if self._room.size < tensor.nbytes:
            self._room = np.empty(tensor.nbytes, np.uint8)
        room = self._room[: tensor.nbytes]  # one room for all: fresh memory costs more time than the copy into it
        read_into(tensor, room, file=self._opened(tensor.file))
        return room, tensor_digest(room)

    def rows(self, name: str, row_bytes: int, rows_U: NDArray[np.int64]) -> Octets:
        tensor = self._checkpoint.tensors[name]
        file = self._opened(tensor.file)
        room = np.empty((len(rows_U), row_bytes), np.uint8)
        for place, row in zip(room, rows_U.tolist(), strict=True):
            begin = tensor.begin + row * row_bytes
            read_into(replace(tensor, begin=begin, end=begin + row_bytes), place, file=file)
        return room

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _opened(self, file: Path) -> int:
        if file not in self._files:
            try:
                self._files[file] = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise TeacherError(f"{file}: cannot be read: {error.strerror}", fix="put the file back") from error
        return self._files[file]
