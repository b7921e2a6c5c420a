"""The Transport seam: how the bytes of a bucket get from a publisher to its receivers.

Headers always travel on the link, so a transport knows nothing of keys, versions or commits. It has two halves, one a
process. To add a transport: one file with a class like `Transport`, one line in `distill.registry`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Protocol

from distill.transfermesh.buckets import Bucket
from distill.transfermesh.digest import Octets
from distill.transfermesh.link import Link
from distill.transfermesh.wire import Chunk


@dataclass
class TransportStats:
    """What a sender did since it was made. For k receivers on shared memory, `bytes_carried` = k * `bytes_written`."""

    buckets: int = 0
    bytes_carried: int = 0
    """Summed over receivers."""
    bytes_written: int = 0
    """Copied or given to a socket by this process."""


class Sender(Protocol):
    """The publisher's half, shared by all receivers that use this transport. Its methods are safe between threads."""

    stats: TransportStats

    def begin(self, receivers: Collection[str], largest: int) -> None:
        """Prepare one publish to `receivers` whose largest bucket has `largest` bytes. Raises EnvironmentFault."""
        ...

    def send(self, link: Link, receiver: str, bucket: Bucket) -> None:
        """Send one CHUNK. Called for every bucket in order, by a thread of that receiver. Raises MeshError."""
        ...

    def acked(self, receiver: str, seq: int) -> None:
        """`receiver` is done with bucket `seq`: its room may be used again."""
        ...

    def leave(self, receiver: str) -> None:
        """`receiver` has failed or is done; nobody waits for it any more."""
        ...

    def close(self) -> None:
        """Free what `begin` took. The end of the stream is the END frame, never a close."""
        ...


class Inbox(Protocol):
    """The receiver's half, for one session and one thread."""

    def take(self, link: Link, chunk: Chunk) -> Octets:
        """The `chunk.nbytes` bytes of a bucket, valid until the next call. Raises MeshError when they are not there."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Makes both halves. `run` names the run that the key belongs to (`auth.run_id`) and `timeout_s` bounds waits."""

    name: ClassVar[str]

    @staticmethod
    def sender(run: str, timeout_s: float) -> Sender: ...

    @staticmethod
    def inbox(run: str, bucket_bytes: int) -> Inbox: ...
