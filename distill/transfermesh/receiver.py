"""The receiving end: listens, lets in only publishers of its run, and takes one update at a time."""

from __future__ import annotations

import logging
import socket
import threading
import time

from distill.errors import ConfigError, DistillError, EnvironmentFault
from distill.transfermesh.auth import check_key, run_id, welcome
from distill.transfermesh.endpoint import Endpoint, host_id
from distill.transfermesh.link import Link, hang_up, interrupt
from distill.transfermesh.loader import Loader
from distill.transfermesh.session import Held, serve_update
from distill.transfermesh.wire import MAX_RECEIVER_NAME

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 16
"""Connections served at a time, strangers who do not finish the handshake included."""
_JOIN_S = 5.0
_ACCEPT_AGAIN_S = 0.1


class Receiver:
    """Gives each new version of the weights to `loader`.

    `key` is the run's; `host` is where to listen, on a free port: a name, IPv4 or IPv6; loopback unless told otherwise.
    `name` must be unique among the receivers of a publish; it defaults to the address. A publisher that is silent for
    `timeout_s`, or hangs up before the end, has its update aborted, and the old version stays live.
    """

    def __init__(
        self, key: bytes, loader: Loader, *, host: str = "127.0.0.1", name: str = "", timeout_s: float = 120.0
    ) -> None:
        self._key = check_key(key)
        if len(name) > MAX_RECEIVER_NAME:
            raise ConfigError(f"a receiver's name has {len(name)} characters", fix=f"at most {MAX_RECEIVER_NAME}")
        self._held = Held(loader, run_id(self._key), timeout_s)
        self._host = host.strip("[]")
        self._name = name
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None
        self._endpoint: Endpoint | None = None
        self._threads: set[threading.Thread] = set()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> Receiver:
        """Listen, on threads of its own. Raises EnvironmentFault if `host` is not an address of this machine."""
        listener = _listen(self._host)
        port = int(listener.getsockname()[1])
        # A wildcard address tells nobody where to connect to.
        host = socket.gethostname() if self._host in ("", "0.0.0.0", "::") else self._host
        self._endpoint = Endpoint(self._name or f"{host}:{port}", host, port, host_id())
        self._listener = listener
        thread = threading.Thread(target=self._accept, args=(listener, self._endpoint.name), daemon=True)
        thread.name = f"mesh-accept-{self._endpoint.name}"
        thread.start()
        self._threads.add(thread)
        return self

    @property
    def endpoint(self) -> Endpoint:
        """Where publishers reach it, once it has started."""
        assert self._endpoint is not None, "start the receiver first"
        return self._endpoint

    @property
    def version(self) -> int:
        """The version that was last committed; -1 before the first."""
        return self._held.version

    def close(self) -> None:
        """Stop listening and abort an update that is under way. Waits a few seconds for a loader that is at work."""
        with self._lock:
            self._closed = True
            sockets, threads = list(self._sockets), list(self._threads)
            if self._listener is not None:
                interrupt(self._listener)
            for sock in sockets:
                interrupt(sock)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _accept(self, listener: socket.socket, name: str) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if self._closed:
                    listener.close()
                    return
                log.warning("%s: cannot accept a connection: %s", name, error)
                time.sleep(_ACCEPT_AGAIN_S)  # too many open files, for one, may pass
                continue
            thread = threading.Thread(target=self._serve, args=(sock, name, str(address[0])), daemon=True)
            thread.name = f"mesh-session-{name}"
            with self._lock:
                if self._closed or len(self._sockets) >= _MAX_CONNECTIONS:
                    sock.close()
                    continue
                self._sockets.add(sock)
                self._threads.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket, name: str, peer: str) -> None:
        link: Link | None = None
        try:
            link = welcome(sock, name, self._key, self._timeout_s)
            serve_update(link, self._held)
        except (DistillError, OSError) as error:
            if not self._closed:
                log.warning("%s: update from %s not taken: %s", name, peer, error)
        finally:
            with self._lock:
                self._sockets.discard(sock)
            if link is not None:
                link.close(drain=not self._closed)
            else:
                hang_up(sock)
            with self._lock:
                self._threads.discard(threading.current_thread())


def _listen(host: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(_MAX_CONNECTIONS)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise EnvironmentFault(
            f"cannot listen for weights on {host!r}: {error}", fix="set mesh.host to an address of this machine"
        ) from error
