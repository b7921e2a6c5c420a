"""One authenticated connection: frames in order, each with a MAC and a deadline."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Sequence
from typing import TypeVar

from distill.errors import MeshError
from distill.transfermesh.wire import (
    MAC_BYTES,
    MAGIC,
    MAX_HEADER,
    PREFIX,
    Abort,
    Alive,
    Failed,
    Refuse,
    ToPublisher,
    ToReceiver,
    decode,
    encode,
    header_length,
)

M = TypeVar("M", bound=ToReceiver | ToPublisher)

_IOV_MAX = 1024  # buffers that one sendmsg may gather (limits.h, Linux)
_LINGER_S = 2.0


class Deadline:
    """A point in time by which something must have happened."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        return self._at - time.monotonic()

    def arm(self, sock: socket.socket) -> None:
        """Let the next call on `sock` wait no longer than what is left. Raises TimeoutError when nothing is."""
        left = self.left()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)


class Link:
    """The frames of one session, for one thread. Built by `auth.dial` and `auth.welcome`.

    Every failure is a MeshError that names the peer. A frame that does not go or come within `timeout_s` is one.
    """

    def __init__(self, sock: socket.socket, peer: str, send_key: bytes, receive_key: bytes, timeout_s: float) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self.keep_alive_s = timeout_s / 4
        """Longest silence that `keep_alive` lets pass; the publisher sets it from the receiver's patience."""
        self._sock = sock
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._last_sent = time.monotonic()

    def send(self, message: ToReceiver | ToPublisher, payload: Sequence[memoryview] = ()) -> None:
        """Send one frame; `payload` is gathered from its parts without a copy."""
        header = encode(message)
        if len(header) > MAX_HEADER:
            raise MeshError(f"a header of {len(header)} bytes is longer than the {MAX_HEADER} allowed")
        frame = PREFIX.pack(MAGIC, len(header)) + header + self._mac(self._send_key, self._sent, header)
        try:
            send_all(self._sock, [memoryview(frame), *payload], Deadline(self.timeout_s))
        except TimeoutError:
            raise self._silence("did not take a frame") from None
        except OSError as error:
            raise MeshError(self._last_words() or f"{self.peer} went away: {error}") from error
        self._sent += 1
        self._last_sent = time.monotonic()

    def keep_alive(self) -> None:
        """Tell the peer that we wait for someone else, if nothing was sent for a while."""
        if time.monotonic() - self._last_sent > self.keep_alive_s:
            self.send(Alive())

    def receive(self, *kinds: type[M]) -> M:
        """The next frame, which must be one of `kinds`.

        Raises MeshError for a wrong MAC or frame, for silence, for an end of stream, and with the peer's own reason
        when it refuses, fails or aborts.
        """
        while True:
            message = self._next()
            if isinstance(message, kinds):
                return message
            if isinstance(message, (Refuse, Failed, Abort)):
                raise MeshError(message.reason)
            if not isinstance(message, Alive):
                expected = " or ".join(kind.__name__.upper() for kind in kinds)
                raise MeshError(f"{self.peer} sent {type(message).__name__.upper()} where {expected} was due")

    def receive_into(self, payload: memoryview) -> None:
        """Fill `payload` with the bytes that follow the last frame."""
        self._read(payload, "the payload of a bucket")

    def close(self, *, drain: bool = False) -> None:
        """Close the connection. `drain` first lets the peer read our last frame though it is still sending."""
        if drain:
            self._drain()
        hang_up(self._sock)

    def interrupt(self) -> None:
        """Make the thread that uses this link fail soon. The only method that another thread may call."""
        interrupt(self._sock)

    def _next(self) -> ToReceiver | ToPublisher:
        prefix = bytearray(PREFIX.size)
        self._read(memoryview(prefix), "a frame")
        length = header_length(prefix, MAX_HEADER)
        body = memoryview(bytearray(length + MAC_BYTES))
        self._read(body, "the rest of a frame")
        header, mac = body[:length], body[length:]
        if not hmac.compare_digest(self._mac(self._receive_key, self._received, header), mac):
            raise MeshError(
                f"a frame from {self.peer} is not authentic", why="its MAC does not fit the key and its place"
            )
        self._received += 1
        return decode(header)

    def _read(self, view: memoryview, what: str) -> None:
        try:
            receive_all(self._sock, view, Deadline(self.timeout_s), what)
        except TimeoutError:
            raise self._silence(f"did not send {what}") from None
        except OSError as error:
            raise MeshError(f"{self.peer} went away before {what}: {error}") from error

    def _silence(self, what: str) -> MeshError:
        return MeshError(f"{self.peer} {what} within {self.timeout_s:g} s")

    def _last_words(self) -> str:
        """Why the peer hung up on us, if it said so before it did."""
        try:
            while True:
                message = self._next()
                if isinstance(message, (Refuse, Failed, Abort)):
                    return message.reason
        except MeshError:
            return ""

    def _drain(self) -> None:
        # Closing with unread input resets the connection, and the reset may overtake our last frame.
        deadline = Deadline(min(_LINGER_S, self.timeout_s))
        scrap = bytearray(1 << 16)
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while True:
                deadline.arm(self._sock)
                if not self._sock.recv_into(scrap):
                    return
        except OSError:
            return

    @staticmethod
    def _mac(key: bytes, place: int, header: bytes | memoryview) -> bytes:
        return hmac.digest(key, place.to_bytes(8, "little") + header, "sha256")


def send_all(sock: socket.socket, parts: Sequence[memoryview], deadline: Deadline) -> None:
    """Send all bytes of `parts`. Raises OSError; TimeoutError past the deadline."""
    pending = [part.cast("B") for part in parts if part.nbytes]  # an empty view cannot be cast
    first = 0
    while first < len(pending):
        deadline.arm(sock)
        sent = sock.sendmsg(pending[first : first + _IOV_MAX])
        while first < len(pending) and sent >= pending[first].nbytes:
            sent -= pending[first].nbytes
            first += 1
        if sent:
            pending[first] = pending[first][sent:]


def receive_all(sock: socket.socket, view: memoryview, deadline: Deadline, what: str) -> None:
    """Fill `view`. Raises OSError; TimeoutError past the deadline; MeshError when the stream ends first."""
    done = 0
    while done < view.nbytes:
        deadline.arm(sock)
        count = sock.recv_into(view[done:])
        if not count:
            raise MeshError(f"the stream ended before {what} was complete ({done} of {view.nbytes} bytes)")
        done += count


def interrupt(sock: socket.socket) -> None:
    """End the connection under a thread that waits on it. That thread closes the socket: its number may be reused."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was not connected any more


def hang_up(sock: socket.socket) -> None:
    """End the connection and close the socket, which no other thread uses."""
    interrupt(sock)
    sock.close()
