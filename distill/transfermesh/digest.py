"""Digests of weights: xxh3-64 for one tensor or one bucket, xxh3-128 for a whole model.

They find mistakes (a lost bucket, a wrong layout, a stale tensor) at memory speed. They are not cryptographic: who may
speak at all is decided by the run's key (`auth`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Octets = NDArray[np.uint8]
"""A tensor's bytes, 1-D."""

Bytes = bytes | bytearray | memoryview | NDArray[Any]
"""Any contiguous buffer."""


def tensor_digest(data: Bytes) -> str:
    """xxh3-64 of a tensor's bytes, row-major and little-endian: 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(_buffer(data))


def bucket_digest(pieces: Iterable[Bytes]) -> str:
    """xxh3-64 over the pieces one after the other, without what lies between them: 16 hex digits."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(_buffer(piece))
    return state.hexdigest()


def model_digest(tensors: Mapping[str, str]) -> str:
    """xxh3-128 over the sorted names and digests of `tensors` (name -> `tensor_digest`): 32 hex digits.

    Order and bucket size do not matter; a missing, added or renamed tensor does.
    """
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        encoded = name.encode()
        state.update(len(encoded).to_bytes(4, "little") + encoded + tensors[name].encode())
    return state.hexdigest()


def _buffer(data: Bytes) -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)
