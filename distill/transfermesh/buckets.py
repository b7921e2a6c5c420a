"""Cutting a version into buckets, and putting it together again.

Inside a bucket the slices lie in order, each from a multiple of 64 bytes: `layout` is the only description of that,
and both ends call it. Slices travel in manifest order without gap or overlap, so coverage is one cursor to check.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from distill.errors import MeshError
from distill.transfermesh.digest import Octets, bucket_digest
from distill.transfermesh.manifest import Manifest
from distill.transfermesh.wire import MAX_SLICES, Slice

ALIGNMENT = 64
"""Enough for every dtype and vector unit; also a cache line."""


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def layout(slices: Sequence[Slice]) -> tuple[list[int], int]:
    """Where each slice begins in its bucket, and how many bytes the bucket has."""
    starts: list[int] = []
    end = 0
    for piece in slices:
        starts.append(aligned(end))
        end = starts[-1] + piece.nbytes
    return starts, end


@dataclass(frozen=True)
class Bucket:
    """Some slices of one version, as views of the publisher's own arrays: nothing is copied to make one."""

    seq: int
    slices: tuple[Slice, ...]
    views: tuple[Octets, ...]
    nbytes: int
    """With the gaps between slices."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _digest: list[str] = field(default_factory=list[str], repr=False, compare=False)

    @property
    def digest(self) -> str:
        """xxh3-64 over the slices; computed once, by the first receiver's thread that needs it."""
        with self._lock:
            if not self._digest:
                self._digest.append(bucket_digest(self.views))
            return self._digest[0]

    def write_to(self, room: Octets) -> None:
        """Copy the slices to their places in `room`."""
        for start, view in zip(layout(self.slices)[0], self.views, strict=True):
            room[start : start + view.nbytes] = view

    def gathered(self) -> Iterator[memoryview]:
        """The bucket's bytes in order, as views, with zeros in the gaps."""
        end = 0
        for start, view in zip(layout(self.slices)[0], self.views, strict=True):
            if start > end:
                yield _ZEROS[: start - end]
            yield view.data
            end = start + view.nbytes


_ZEROS = memoryview(bytes(ALIGNMENT))


def cut(arrays: Sequence[Octets], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes`. A tensor is split only if it is larger than a whole bucket."""
    buckets: list[Bucket] = []
    slices: list[Slice] = []
    views: list[Octets] = []
    end = 0

    def flush() -> None:
        nonlocal end
        if slices:
            buckets.append(Bucket(len(buckets), tuple(slices), tuple(views), end))
            slices.clear()
            views.clear()
            end = 0

    for tensor, array in enumerate(arrays):
        offset = 0
        while True:
            rest = array.nbytes - offset
            room = bucket_bytes - aligned(end)
            if len(slices) == MAX_SLICES or (rest and room <= 0) or room < rest <= bucket_bytes:
                flush()
                room = bucket_bytes
            taken = min(rest, room) if rest else 0
            slices.append(Slice(tensor, offset, taken))
            views.append(array[offset : offset + taken])
            end = aligned(end) + taken
            offset += taken
            if offset == array.nbytes:
                break
    flush()
    return buckets


class Assembly:
    """The receiver's side: which bytes are due next, and the tensor that is only partly here."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = manifest.tensors
        self._tensor = 0
        self._offset = 0
        self._partial: Octets | None = None

    @property
    def complete(self) -> bool:
        return self._tensor == len(self._tensors)

    def expect(self, slices: Sequence[Slice]) -> None:
        """Raises MeshError unless `slices` are exactly the next ones of the manifest. Allocates nothing."""
        tensor, offset = self._tensor, self._offset
        for piece in slices:
            if tensor >= len(self._tensors) or (piece.tensor, piece.offset) != (tensor, offset):
                raise MeshError(
                    f"bytes from {piece.offset} of tensor {piece.tensor} came where {offset} of {tensor} was due",
                    why="tensors travel in the manifest's order, without gap or overlap",
                )
            spec = self._tensors[tensor]
            if piece.nbytes > spec.nbytes - offset or (not piece.nbytes and spec.nbytes):
                raise MeshError(
                    f"tensor {spec.name!r} has {spec.nbytes} bytes, not a slice of {piece.nbytes} at {offset}"
                )
            offset += piece.nbytes
            if offset == spec.nbytes:
                tensor, offset = tensor + 1, 0

    def add(self, slices: Sequence[Slice], payload: Octets) -> Iterator[tuple[str, Octets]]:
        """Each tensor that `slices` complete, as (name, bytes). Call `expect` first.

        A tensor that lies whole in the bucket is a view of `payload`; one in pieces is put together in memory of ours.
        """
        for start, piece in zip(layout(slices)[0], slices, strict=True):
            spec = self._tensors[piece.tensor]
            view = payload[start : start + piece.nbytes]
            if piece.nbytes < spec.nbytes:
                if self._partial is None:
                    self._partial = np.empty(spec.nbytes, np.uint8)
                self._partial[piece.offset : piece.offset + piece.nbytes] = view
                view = self._partial
            self._offset = piece.offset + piece.nbytes
            if self._offset == spec.nbytes:
                self._tensor, self._offset, self._partial = piece.tensor + 1, 0, None
                yield spec.name, view
