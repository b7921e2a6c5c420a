"""Arrays in one buffer: a small msgspec header, then raw little-endian bytes. No pickle.

Layout: magic "DPK1" | uint32 header length | msgpack header | padding to 8 | the arrays, each aligned to 8 bytes.
Used for scores in HTTP bodies and for samples on disk.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

MAGIC = b"DPK1"
CONTENT_TYPE = "application/x-distill-packed"
DTYPES = {name: np.dtype(name) for name in ("<f2", "<f4", "<f8", "<i2", "<i4", "<i8", "|u1", "|i1", "|b1")}
_PREFIX = struct.Struct("<4sI")


class ArrayEntry(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Header(msgspec.Struct):
    meta: Any
    arrays: list[ArrayEntry]


class PackingError(ValueError):
    """The buffer is not one of ours, or was cut short."""


def _align(offset: int) -> int:
    return (offset + 7) & ~7


def pack(meta: Any, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """One buffer holding `meta` (plain msgpack values) and the arrays."""
    entries: list[ArrayEntry] = []
    blobs: list[tuple[int, NDArray[Any]]] = []
    offset = 0
    for name, array in arrays.items():
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)
        if little.dtype.str not in DTYPES:
            raise PackingError(f"{name}: dtype {array.dtype} cannot be packed")
        entries.append(ArrayEntry(name, little.dtype.str, little.shape, offset))
        blobs.append((offset, little))
        offset = _align(offset + little.nbytes)
    header = msgspec.msgpack.encode(_Header(meta, entries))
    start = _align(_PREFIX.size + len(header))
    buffer = bytearray(start + offset)
    _PREFIX.pack_into(buffer, 0, MAGIC, len(header))
    buffer[_PREFIX.size : _PREFIX.size + len(header)] = header
    for at, array in blobs:
        buffer[start + at : start + at + array.nbytes] = array.tobytes()
    return bytes(buffer)


def unpack(buffer: bytes | memoryview) -> tuple[Any, dict[str, NDArray[Any]]]:
    """The inverse of `pack`. The arrays are read-only views of `buffer`. Raises PackingError for anything else."""
    view = memoryview(buffer)
    if len(view) < _PREFIX.size:
        raise PackingError(f"{len(view)} bytes are too few for a packed buffer")
    magic, length = _PREFIX.unpack_from(view)
    if magic != MAGIC or _PREFIX.size + length > len(view):
        raise PackingError("not a packed buffer, or its header is cut short")
    try:
        header = msgspec.msgpack.decode(view[_PREFIX.size : _PREFIX.size + length], type=_Header)
    except msgspec.MsgspecError as error:
        raise PackingError(f"broken header: {error}") from error
    start = _align(_PREFIX.size + length)
    arrays: dict[str, NDArray[Any]] = {}
    for entry in header.arrays:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or entry.offset < 0 or any(side < 0 for side in entry.shape):
            raise PackingError(f"{entry.name}: bad dtype, shape or offset")
        count = math.prod(entry.shape)
        begin = start + entry.offset
        if begin + count * dtype.itemsize > len(view):
            raise PackingError(f"{entry.name}: {count} elements of {entry.dtype} do not fit in the buffer")
        arrays[entry.name] = np.frombuffer(view, dtype, count, begin).reshape(entry.shape)
    return header.meta, arrays
