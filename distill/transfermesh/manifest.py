"""What one weight version consists of: names, dtypes, shapes and bytes, checked before anything is allocated."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from distill.errors import MeshError

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by dtype as torch spells it."""

MAX_TENSORS = 200_000
MAX_NAME = 1024
MAX_DIMENSIONS = 32
MAX_MODEL_BYTES = 1 << 46

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_MODEL_BYTES)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. `nbytes` must be what dtype and shape say; a shape of () is a scalar, a side of 0 an empty tensor."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    nbytes: _Size

    def check(self) -> None:
        """Raises MeshError unless dtype, shape and bytes agree."""
        item = ITEM_BYTES.get(self.dtype)
        if item is None:
            raise MeshError(
                f"tensor {self.name!r}: unknown dtype {self.dtype!r}", fix=f"one of {', '.join(ITEM_BYTES)}"
            )
        if math.prod(self.shape) * item != self.nbytes:
            raise MeshError(f"tensor {self.name!r}: {self.nbytes} bytes are not {self.dtype} of shape {self.shape}")


class Manifest(msgspec.Struct, frozen=True):
    """All tensors of one version, in the order in which they travel."""

    version: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    def check(self) -> None:
        """Raises MeshError unless every tensor is sound, names are unique and the whole is of a sane size."""
        if not 0 <= self.version < 1 << 62:
            raise MeshError(f"{self.version} is not a weight version", why="it counts optimiser steps from 0")
        if len(self.tensors) > MAX_TENSORS:
            raise MeshError(f"{len(self.tensors)} tensors are more than the {MAX_TENSORS} that one version may have")
        seen: set[str] = set()
        for spec in self.tensors:
            spec.check()
            if not 1 <= len(spec.name) <= MAX_NAME:
                raise MeshError(f"a tensor's name has {len(spec.name)} characters", fix=f"1 to {MAX_NAME}")
            if len(spec.shape) > MAX_DIMENSIONS:
                raise MeshError(
                    f"tensor {spec.name!r} has {len(spec.shape)} dimensions", fix=f"at most {MAX_DIMENSIONS}"
                )
            if spec.name in seen:
                raise MeshError(f"tensor {spec.name!r} is there twice", why="a receiver could keep only one of them")
            seen.add(spec.name)
        if self.nbytes > MAX_MODEL_BYTES:
            raise MeshError(f"{self.nbytes} bytes are more than the {MAX_MODEL_BYTES} that one version may have")
