"""The messages between a publisher and a receiver, and their encoding. Pure functions; no socket, no pickle.

    publisher                                receiver
    HELLO  nonce                     ->
                                     <-      CHALLENGE  name, nonce, proof of the key
    PROOF  proof of the key          ->
    ---- from here every frame carries a MAC bound to its direction and its place in the stream ----
    OFFER  manifest, transport       ->
                                     <-      READY | REFUSE reason
    CHUNK  slices, digest (payload)  ->                                    at most CREDIT without their ACK
                                     <-      ACK seq
    END    digest of the model       ->
                                     <-      STAGED  digest recomputed from the staged memory
    COMMIT version | ABORT reason    ->                                    COMMIT once every live receiver agrees
                                     <-      ACTIVE  digest of the live tensors
    ALIVE: the publisher waits for others. FAILED reason: the receiver gave up. An end of stream anywhere else is an
    error, and the old version stays live.

A frame is: magic "DMF1" | uint32 header length | msgpack header | 32 bytes HMAC-SHA256 (none before the handshake is
over) | payload. The payload's length and digest are in the header. Integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from distill.errors import MeshError
from distill.transfermesh.manifest import MAX_MODEL_BYTES, MAX_TENSORS, Manifest

MAGIC = b"DMF1"
PREFIX = struct.Struct("<4sI")
MAC_BYTES = 32
NONCE_BYTES = 32
MAX_HELLO_HEADER = 2048
"""Longest header of a peer that has not yet proved that it holds the key."""
MAX_HEADER = 64 << 20
MAX_RECEIVER_NAME = 256
MAX_REASON = 4000
MAX_SLICES = 65_536
MAX_BUCKET_BYTES = 4 << 30
MIN_BUCKET_BYTES = 64
CREDIT = 2
"""Buckets in flight to one receiver: one travels while the other is loaded."""

Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, msgspec.Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]
Digest64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Digest128 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_MODEL_BYTES)]


class Hello(msgspec.Struct, tag="hello", frozen=True):
    nonce: Nonce


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    name: Annotated[str, msgspec.Meta(max_length=MAX_RECEIVER_NAME)]
    nonce: Nonce
    proof: Mac


class Proof(msgspec.Struct, tag="proof", frozen=True):
    proof: Mac


class Offer(msgspec.Struct, tag="offer", frozen=True):
    transport: Annotated[str, msgspec.Meta(max_length=32)]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=MIN_BUCKET_BYTES, le=MAX_BUCKET_BYTES)]
    manifest: Manifest


class Ready(msgspec.Struct, tag="ready", frozen=True):
    patience_s: Annotated[float, msgspec.Meta(gt=0)]
    """How long the receiver bears silence of the publisher."""


class Refuse(msgspec.Struct, tag="refuse", frozen=True):
    reason: Reason


class Slice(msgspec.Struct, array_like=True, frozen=True):
    """`nbytes` bytes of the manifest's tensor number `tensor`, from byte `offset` of that tensor."""

    tensor: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TENSORS)]
    offset: Offset
    nbytes: Offset


class Chunk(msgspec.Struct, tag="chunk", frozen=True):
    """One bucket. Its payload follows inline, or lies in shared memory `segment` from byte `at`."""

    seq: Count
    slices: Annotated[list[Slice], msgspec.Meta(min_length=1, max_length=MAX_SLICES)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BUCKET_BYTES)]
    digest: Digest64
    segment: Annotated[str, msgspec.Meta(max_length=200)] = ""
    at: Annotated[int, msgspec.Meta(ge=0, le=CREDIT * MAX_BUCKET_BYTES)] = 0


class Ack(msgspec.Struct, tag="ack", frozen=True):
    seq: Count


class End(msgspec.Struct, tag="end", frozen=True):
    digest: Digest128
    chunks: Count


class Staged(msgspec.Struct, tag="staged", frozen=True):
    digest: Digest128


class Commit(msgspec.Struct, tag="commit", frozen=True):
    version: Count


class Active(msgspec.Struct, tag="active", frozen=True):
    version: Count
    digest: Digest128


class Abort(msgspec.Struct, tag="abort", frozen=True):
    reason: Reason


class Failed(msgspec.Struct, tag="failed", frozen=True):
    reason: Reason


class Alive(msgspec.Struct, tag="alive", frozen=True):
    pass


Greeting = Hello | Challenge | Proof
ToReceiver = Offer | Chunk | End | Commit | Abort | Alive
ToPublisher = Ready | Refuse | Ack | Staged | Active | Failed
Message = Greeting | ToReceiver | ToPublisher

_encoder = msgspec.msgpack.Encoder()
_greeting = msgspec.msgpack.Decoder(Greeting)
_message = msgspec.msgpack.Decoder(ToReceiver | ToPublisher)


def encode(message: Message) -> bytes:
    """The header of a frame. An overlong reason is cut."""
    if isinstance(message, (Refuse, Abort, Failed)) and len(message.reason) > MAX_REASON:
        message = type(message)(message.reason[:MAX_REASON])
    return _encoder.encode(message)


def header_length(prefix: bytes | bytearray | memoryview, limit: int) -> int:
    """How many bytes of header follow. Raises MeshError for foreign bytes, or for more than `limit`."""
    magic, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise MeshError(f"the peer does not speak the mesh protocol: it sent {bytes(prefix)!r}")
    if length > limit:
        raise MeshError(f"a header of {length} bytes is longer than the {limit} allowed")
    return length


def decode_greeting(header: bytes | bytearray | memoryview) -> Greeting:
    """A message of the handshake. Raises MeshError for anything else. Holds fixed-size fields only."""
    try:
        return _greeting.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MeshError(f"broken greeting: {error}") from error


def decode(header: bytes | bytearray | memoryview) -> ToReceiver | ToPublisher:
    """A message after the handshake. Raises MeshError for anything that is not one, or is out of bounds."""
    try:
        return _message.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MeshError(f"broken frame: {error}") from error
