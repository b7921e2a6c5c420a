"""Both ends prove that they hold the run's key, without sending it; then each direction gets a key of its own.

Proof of a side = HMAC-SHA256(key, label of that side | receiver's name | both nonces). The labels differ, so a proof
cannot be sent back as the other side's; the nonces are fresh, so it cannot be used again; the name is inside, so that
another receiver of the same run on a recycled port is noticed. The receiver proves itself first: a stranger therefore
learns one HMAC under the key, which is why keys must be random and long.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import TypeVar

from distill.errors import ConfigError, MeshError
from distill.transfermesh.endpoint import Endpoint
from distill.transfermesh.link import Deadline, Link, hang_up, receive_all, send_all
from distill.transfermesh.wire import (
    MAGIC,
    MAX_HELLO_HEADER,
    NONCE_BYTES,
    PREFIX,
    Challenge,
    Greeting,
    Hello,
    Proof,
    decode_greeting,
    encode,
    header_length,
)

MIN_KEY_BYTES = 16
_HANDSHAKE_S = 10.0
_LABEL = b"distill-mesh 1 "

G = TypeVar("G", bound=Greeting)


def check_key(key: bytes) -> bytes:
    """`key`, or a ConfigError if it is too short to keep anyone out."""
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"the mesh's key has {len(key)} bytes",
            why="whoever guesses it can replace the weights of every server",
            fix=f"give at least {MIN_KEY_BYTES} random bytes, for example secrets.token_bytes(32)",
        )
    return bytes(key)


def run_id(key: bytes) -> str:
    """16 hex digits that name the run without telling its key."""
    return hmac.digest(key, _LABEL + b"run", "sha256").hex()[:16]


def dial(endpoint: Endpoint, key: bytes, timeout_s: float) -> Link:
    """Connect to a receiver as publisher. Raises MeshError if it is not there, or not the one that it should be."""
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=min(_HANDSHAKE_S, timeout_s))
    except OSError as error:
        raise MeshError(f"cannot reach {endpoint}: {error}") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = Deadline(min(_HANDSHAKE_S, timeout_s))
        nonce = secrets.token_bytes(NONCE_BYTES)
        _send(sock, Hello(nonce), deadline)
        challenge = _receive(sock, Challenge, deadline)
        transcript = _transcript(challenge.name, nonce, challenge.nonce)
        if not hmac.compare_digest(_proof(key, b"receiver", transcript), challenge.proof):
            raise MeshError(f"{endpoint} does not hold this run's key", why="weights go to receivers of this run only")
        if challenge.name != endpoint.name:
            raise MeshError(f"{challenge.name!r} answers where {endpoint} was", why="the port was taken over")
        _send(sock, Proof(_proof(key, b"publisher", transcript)), deadline)
    except TimeoutError:
        hang_up(sock)
        raise MeshError(f"{endpoint} did not answer the handshake within {min(_HANDSHAKE_S, timeout_s):g} s") from None
    except OSError as error:
        hang_up(sock)
        raise MeshError(f"{endpoint} hung up during the handshake: {error}") from error
    except BaseException:
        hang_up(sock)
        raise
    return _link(sock, str(endpoint), key, transcript, b"to receiver", b"to publisher", timeout_s)


def welcome(sock: socket.socket, name: str, key: bytes, timeout_s: float) -> Link:
    """Take a publisher's connection as the receiver `name`. Raises MeshError, or OSError, for anyone else."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    deadline = Deadline(min(_HANDSHAKE_S, timeout_s))
    hello = _receive(sock, Hello, deadline)
    nonce = secrets.token_bytes(NONCE_BYTES)
    transcript = _transcript(name, hello.nonce, nonce)
    _send(sock, Challenge(name, nonce, _proof(key, b"receiver", transcript)), deadline)
    proof = _receive(sock, Proof, deadline)
    if not hmac.compare_digest(_proof(key, b"publisher", transcript), proof.proof):
        raise MeshError("the peer does not hold this run's key")
    return _link(sock, "the publisher", key, transcript, b"to publisher", b"to receiver", timeout_s)


def _transcript(name: str, publisher_nonce: bytes, receiver_nonce: bytes) -> bytes:
    encoded = name.encode()
    return len(encoded).to_bytes(4, "little") + encoded + publisher_nonce + receiver_nonce


def _proof(key: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, _LABEL + b"proof of the " + side + b"\0" + transcript, "sha256")


def _link(
    sock: socket.socket, peer: str, key: bytes, transcript: bytes, out: bytes, into: bytes, timeout_s: float
) -> Link:
    def derive(direction: bytes) -> bytes:
        return hmac.digest(key, _LABEL + b"frames " + direction + b"\0" + transcript, "sha256")

    return Link(sock, peer, derive(out), derive(into), timeout_s)


def _send(sock: socket.socket, greeting: Greeting, deadline: Deadline) -> None:
    header = encode(greeting)
    send_all(sock, [memoryview(PREFIX.pack(MAGIC, len(header)) + header)], deadline)


def _receive(sock: socket.socket, kind: type[G], deadline: Deadline) -> G:
    prefix = bytearray(PREFIX.size)
    receive_all(sock, memoryview(prefix), deadline, "the handshake")
    header = bytearray(header_length(prefix, MAX_HELLO_HEADER))
    receive_all(sock, memoryview(header), deadline, "the handshake")
    greeting = decode_greeting(header)
    if not isinstance(greeting, kind):
        raise MeshError(f"{type(greeting).__name__.upper()} came where {kind.__name__.upper()} was due")
    return greeting
