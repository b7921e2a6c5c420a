"""Lossless differences of weights from those of another checkpoint with the same tensors.

Fine-tuned weights differ from their base in the low bits mostly: the exclusive or of both is full of zero bytes. Its
byte planes (all first bytes of the elements, then all second ones, ...) are compressed apart from one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

Octets = NDArray[np.uint8]
Form = Literal["equal", "xor", "raw"]
"""equal: nothing is stored; xor: compressed planes of the difference; raw: the bytes themselves."""

_LEVEL = 1
"""Of zstandard. Higher ones gain little on what is nearly random, and cost much time."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor as it is stored."""

    form: Form
    data: bytes | Octets


def encode(octets: Octets, base: Octets, item_bytes: int) -> Part:
    """How to store `octets` beside `base`, of the same size; `item_bytes` is the size of one element."""
    if np.array_equal(octets, base):
        return Part("equal", b"")
    planes = _planes(octets ^ base, item_bytes)
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)
    return Part("xor", packed) if len(packed) < octets.size else Part("raw", octets)


def decode(form: Form, stored: Octets, base: Octets, item_bytes: int) -> Octets:
    """The bytes that were encoded. Raises ValueError where `stored` is not what `encode` gave."""
    if form == "equal":
        return base
    if form == "raw":
        return stored
    try:
        planes = zstandard.ZstdDecompressor().decompress(stored.data, max_output_size=base.size)
    except zstandard.ZstdError as error:
        raise ValueError(f"a difference cannot be decompressed: {error}") from error
    if len(planes) != base.size:
        raise ValueError(f"a difference of {len(planes)} bytes, from a base of {base.size}")
    octets = _unplaned(np.frombuffer(planes, np.uint8), item_bytes)
    octets ^= base
    return octets


def _planes(octets: Octets, item_bytes: int) -> Octets:
    if item_bytes <= 1 or octets.size % item_bytes:
        return np.ascontiguousarray(octets)
    return np.ascontiguousarray(octets.reshape(-1, item_bytes).T).reshape(-1)


def _unplaned(planes: Octets, item_bytes: int) -> Octets:
    """A writable array of the elements' bytes."""
    if item_bytes <= 1 or planes.size % item_bytes:
        return planes.copy()
    return np.ascontiguousarray(planes.reshape(item_bytes, -1).T).reshape(-1)
