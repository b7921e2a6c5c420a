"""TCP: the payload follows its header on the link, gathered from the publisher's arrays without a copy."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import ClassVar

import numpy as np

from distill.transfermesh.buckets import Bucket
from distill.transfermesh.digest import Octets
from distill.transfermesh.link import Link
from distill.transfermesh.transports.base import TransportStats
from distill.transfermesh.wire import Chunk


class TcpTransport:
    name: ClassVar[str] = "tcp"

    @staticmethod
    def sender(run: str, timeout_s: float) -> TcpSender:
        return TcpSender()

    @staticmethod
    def inbox(run: str, bucket_bytes: int) -> TcpInbox:
        return TcpInbox(bucket_bytes)


class TcpSender:
    """Each receiver has a connection of its own, so the kernel's socket buffers are all the shared state there is."""

    def __init__(self) -> None:
        self.stats = TransportStats()
        self._lock = threading.Lock()

    def begin(self, receivers: Collection[str], largest: int) -> None:
        """Nothing to prepare."""

    def send(self, link: Link, receiver: str, bucket: Bucket) -> None:
        chunk = Chunk(bucket.seq, list(bucket.slices), bucket.nbytes, bucket.digest)
        link.send(chunk, list(bucket.gathered()))
        with self._lock:
            self.stats.buckets += 1
            self.stats.bytes_carried += bucket.nbytes
            self.stats.bytes_written += bucket.nbytes

    def acked(self, receiver: str, seq: int) -> None:
        """Nothing to free."""

    def leave(self, receiver: str) -> None:
        """Nobody else waits for it."""

    def close(self) -> None:
        """Nothing to free."""


class TcpInbox:
    """Receives into one buffer that grows to the largest bucket seen and is used again for each."""

    def __init__(self, bucket_bytes: int) -> None:
        self._limit = bucket_bytes
        self._buffer = np.empty(0, np.uint8)

    def take(self, link: Link, chunk: Chunk) -> Octets:
        if chunk.nbytes > self._buffer.nbytes:
            self._buffer = aligned_empty(min(self._limit, max(chunk.nbytes, 2 * self._buffer.nbytes)))
        payload = self._buffer[: chunk.nbytes]
        link.receive_into(payload.data)
        return payload

    def close(self) -> None:
        self._buffer = np.empty(0, np.uint8)


def aligned_empty(nbytes: int, alignment: int = 64) -> Octets:
    """Uninitialised bytes that begin at a multiple of `alignment`; numpy promises 16 only."""
    raw = np.empty(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]
