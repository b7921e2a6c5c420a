"""What the process of a model server needs whichever way it serves: a socket, an end, and somebody to die with."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from distill.errors import EnvironmentFault

_PARENT_CHECK_S = 0.2


class Server(uvicorn.Server):
    """uvicorn, which tells when it can serve and when it is about to end."""

    def __init__(self, app: Starlette, *, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
            )
        )
        self._on_ready = on_ready
        self._on_stop = on_stop

    def stop(self) -> None:
        """End soon. From any thread."""
        self.should_exit = True

    def run_until_signal(self, listener: socket.socket) -> None:
        """Serve until SIGTERM, SIGINT or `stop`."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)  # uvicorn raises the signal again when it is done: no failure here
        self.run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises EnvironmentFault when the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the socket names its protocol. Otherwise the second part of each
    # reply, its body, waits 40 ms for the client's delayed acknowledgement of the first.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise EnvironmentFault(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(listener: socket.socket, file: Path | None, mesh: Mapping[str, Any] | None) -> str:
    """Tell, in the address file if there is one, where the server is now that it can serve. Returns its URL."""
    url = url_of(listener)
    if file is not None:
        _write_atomically(file, {"url": url, "pid": os.getpid(), "mesh": mesh})
    return url


def _write_atomically(file: Path, value: dict[str, Any]) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_text(json.dumps(value))
    draft.replace(file)


def die_with_parent() -> None:
    """End this process soon after its parent ends, so that no model outlives its run.

    Linux could do this by itself (PR_SET_PDEATHSIG), but counts the end of the *thread* that started us as our parent's
    end: a launcher that starts servers from a pool of threads would lose them.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
