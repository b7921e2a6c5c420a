"""Safetensors folders without torch: sizes from the headers, digests from mapped bytes, copies by plain reads.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, a JSON header, then the tensors).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from distill.errors import ConfigError, TeacherError
from distill.transfermesh.digest import bucket_digest, tensor_digest

FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes that a server may hold instead of a file's own, with the bytes of one element."""
SPELLING = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtypes as a configuration names them -> as safetensors does."""
_CHUNK_BYTES = 1 << 24
_READ_BYTES = 1 << 30
"""Linux reads at most 2 GiB at a time."""
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_FIX = "copy the folder again; a download or a save was probably cut short"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: bytes [begin, end) of `file`."""

    name: str
    dtype: str
    """As safetensors spells it: F32, BF16, ..."""
    file: Path
    begin: int
    end: int
    shape: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def nbytes_as(self, dtype: str | None) -> int:
        """Its size in a process that holds floats as `dtype`, or as they are stored when that is None."""
        if dtype is None or self.dtype not in FLOATS:
            return self.nbytes
        return self.nbytes // FLOATS[self.dtype] * FLOATS[dtype]

    def bytes(self) -> NDArray[np.uint8]:
        """Its bytes, mapped and not copied."""
        if not self.nbytes:
            return np.empty(0, np.uint8)
        return np.memmap(self.file, np.uint8, mode="r", offset=self.begin, shape=(self.nbytes,))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a Hugging Face folder, by name, from the headers alone.

    Raises ConfigError when the folder holds no weights, TeacherError when a file is broken or shorter than it says.
    """
    found: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        for tensor in _read_header(file):
            if tensor.name in found:
                raise TeacherError(
                    f"{file}: tensor {tensor.name!r} is also in {found[tensor.name].file.name}", fix=_FIX
                )
            found[tensor.name] = tensor
    return found


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The safetensors files of a folder as they were when it was opened. Its bytes are read, never mapped: a mapped
    file that is cut short kills the process."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    """In the order in which they lie in the files."""
    signature: str
    """xxh3-128 over path, size, time and inode of each file, 32 hex digits: it changes when a file is replaced."""

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises as `stored_tensors`."""
        tensors = stored_tensors(folder)
        ordered = sorted(tensors.values(), key=lambda tensor: (str(tensor.file), tensor.begin))
        return cls(folder, {tensor.name: tensor for tensor in ordered}, _signature(ordered))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def layout(self) -> str:
        """xxh3-128 over names, dtypes and shapes: equal for checkpoints of one architecture."""
        entries = sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors.values())
        return xxhash.xxh3_128_hexdigest(json.dumps(entries).encode())

    def check_unchanged(self) -> None:
        """Raises TeacherError when a file was changed, replaced or cut short since the folder was opened."""
        again = Checkpoint.open(self.folder)
        if again.signature != self.signature:
            raise TeacherError(
                f"{self.folder}: its files changed since it was registered ({self.nbytes} bytes then, "
                f"{again.nbytes} bytes now)",
                why="scores before and after the change would come from two different teachers",
                fix="put the files back and register it again, under another version if its weights are others",
            )


def read_into(tensor: StoredTensor, room: NDArray[np.uint8], *, file: int | None = None) -> None:
    """Read the bytes of a tensor into `room`, of its size. `file`: a descriptor of its file that is open already.

    Raises TeacherError, with the numbers, for a file that ends before the tensor does.
    """
    if file is None:
        try:
            file = os.open(tensor.file, os.O_RDONLY)
        except OSError as error:
            raise TeacherError(f"{tensor.file}: cannot be read: {error.strerror}", fix=_FIX) from error
        try:
            read_into(tensor, room, file=file)
        finally:
            os.close(file)
        return
    done = 0
    while done < tensor.nbytes:
        try:
            count = os.preadv(file, [room[done : done + _READ_BYTES].data], tensor.begin + done)
        except OSError as error:
            raise TeacherError(f"{tensor.file}: cannot be read: {error.strerror}", fix=_FIX) from error
        if not count:
            raise TeacherError(
                f"{tensor.file}: tensor {tensor.name!r} has {tensor.nbytes} bytes, the file ends after {done}", fix=_FIX
            )
        done += count


def _signature(tensors: Sequence[StoredTensor]) -> str:
    files = sorted({tensor.file for tensor in tensors})
    try:
        stats = [(str(file.resolve()), file.stat()) for file in files]
    except OSError as error:
        raise TeacherError(f"{error.filename}: cannot be read: {error.strerror}", fix=_FIX) from error
    entries = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev) for name, stat in stats]
    return xxhash.xxh3_128_hexdigest(json.dumps(entries).encode())


def tensor_checksums(folder: Path) -> dict[str, str]:
    """Tensor name -> xxh3-64 of its bytes as they lie in the file, 16 hex digits. Reads every byte once."""
    return {name: tensor_digest(tensor.bytes()) for name, tensor in stored_tensors(folder).items()}


def cast_checksum(tensor: StoredTensor, dtype: str) -> str:
    """xxh3-64 of the tensor after a cast to `dtype` (one of FLOATS), rounding to nearest even as torch does."""
    if tensor.dtype not in FLOATS:
        return tensor_digest(tensor.bytes())
    return bucket_digest(_cast_chunks(tensor, dtype))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TeacherError(f"{index}: cannot be read: {error}", fix=_FIX) from error
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder}: no safetensors file there",
            why="teachers are loaded from safetensors only: it can be mapped, checked, and runs no code",
            fix="give a Hugging Face folder; save_pretrained writes one",
        )
    return files


def _read_header(file: Path) -> Iterator[StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = _header_length(file, stream.read(8), size)
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
        for name, entry in header.items():
            begin, end = map(int, entry["data_offsets"])
            entries.append((name, entry["dtype"], tuple(map(int, entry["shape"])), begin, end))
    except OSError as error:
        raise TeacherError(f"{file}: cannot be read: {error.strerror}", fix=_FIX) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TeacherError(f"{file}: its safetensors header is broken: {error}", fix=_FIX) from error
    start = 8 + length
    expected = start + max((entry[4] for entry in entries), default=0)
    if size != expected:
        raise TeacherError(
            f"{file}: expected {expected} bytes, found {size}", why="its header says how long the file is", fix=_FIX
        )
    for name, dtype, shape, begin, end in entries:
        yield StoredTensor(name, dtype, file, start + begin, start + end, shape)


def _header_length(file: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise TeacherError(f"{file}: expected at least 8 bytes, found {size}", fix=_FIX)
    (length,) = struct.unpack("<Q", prefix)
    if length > _MAX_HEADER_BYTES:
        raise TeacherError(f"{file}: is no safetensors file: its header would be {length} bytes long", fix=_FIX)
    if 8 + length > size:
        raise TeacherError(f"{file}: expected at least {8 + length} bytes, found {size}", fix=_FIX)
    return length


def _cast_chunks(tensor: StoredTensor, dtype: str) -> Iterator[NDArray[np.uint8]]:
    data = tensor.bytes()
    for begin in range(0, len(data), _CHUNK_BYTES):
        wide = _TO_F32[tensor.dtype](data[begin : begin + _CHUNK_BYTES])
        yield _FROM_F32[dtype](wide).view(np.uint8)


def _bf16_to_f32(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (data.view("<u2").astype("<u4") << 16).view("<f4")


def _f32_to_bf16(wide: NDArray[np.float32]) -> NDArray[Any]:
    bits = wide.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _f32_to_f16(wide: NDArray[np.float32]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return wide.astype("<f2")


_TO_F32: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": lambda data: data.view("<f4"),
    "BF16": _bf16_to_f32,
    "F16": lambda data: data.view("<f2").astype("<f4"),
}
_FROM_F32: dict[str, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
    "F32": lambda wide: wide,
    "BF16": _f32_to_bf16,
    "F16": _f32_to_f16,
}
