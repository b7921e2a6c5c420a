"""Safetensors folders read without torch: sizes from the headers, digests from memory-mapped bytes.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, a JSON header, then the tensors).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.errors import ConfigError, TeacherError
from distill.transfermesh.digest import bucket_digest, tensor_digest

FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes that a server may hold instead of a file's own, with the bytes of one element."""
_CHUNK_BYTES = 1 << 24
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
        entries = [(name, entry["dtype"], *map(int, entry["data_offsets"])) for name, entry in header.items()]
    except OSError as error:
        raise TeacherError(f"{file}: cannot be read: {error.strerror}", fix=_FIX) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TeacherError(f"{file}: its safetensors header is broken: {error}", fix=_FIX) from error
    start = 8 + length
    expected = start + max((end for _, _, _, end in entries), default=0)
    if size != expected:
        raise TeacherError(
            f"{file}: expected {expected} bytes, found {size}", why="its header says how long the file is", fix=_FIX
        )
    for name, dtype, begin, end in entries:
        yield StoredTensor(name, dtype, file, start + begin, start + end)


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
