"""`python -m distill.serving.embedded --model-path DIR`: serve one model until told to stop.

Says where it is in `--address-file` once it can serve: {"url", "pid", "mesh"}. Exit codes: 0 stopped, 2 and 3 as in
`distill.errors`, 1 a fault of ours. It does not outlive its parent process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette

from distill.errors import DistillError, EnvironmentFault
from distill.serving.embedded.app import build_app
from distill.serving.embedded.engine import Engine
from distill.serving.embedded.http import Source, State
from distill.serving.embedded.jobs import Refusal
from distill.serving.embedded.mesh_loader import TorchLoader
from distill.serving.embedded.served import DTYPES, Limits, ServedModel, choose_device

log = logging.getLogger("distill.embedded")

KEY_VARIABLE = "DISTILL_RUN_KEY"
"""Hexadecimal key of the run's weight mesh. Without it the server takes weights from disk only."""
_PARENT_CHECK_S = 0.2
_STOP_DEADLINE_S = 0.5
"""A forward pass that takes longer than this when the server is told to stop is not waited for."""


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distill.serving.embedded", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True, help="folder in Hugging Face layout")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--address-file", type=Path, help="written when the server is ready")
    parser.add_argument("--name", default="embedded", help="how this server is called in logs and in the mesh")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--vocab-size", type=int, help="rows of the head that count; the rest is padding")
    parser.add_argument("--context-length", type=int, help="at most what the model was made for")
    parser.add_argument("--max-batch-size", type=int, default=64, help="requests that are decoded together")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help="HTTP requests never share a forward pass: the same request gives the same bits, in smaller batches",
    )
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--mesh-host", default="127.0.0.1", help="where the weight receiver listens")
    parser.add_argument("--memory-limit-gb", type=float, help="larger weights are refused")
    options = parser.parse_args(arguments)
    for flag in ("max_batch_size", "threads", "vocab_size", "context_length"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1, got {value}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.name} %(message)s", stream=sys.stderr)
    _die_with_parent()
    try:
        with _bind(options.host, options.port) as listener:
            return _serve(options, listener)
    except DistillError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _serve(options: argparse.Namespace, listener: socket.socket) -> int:
    torch.set_num_threads(options.threads)
    limits = Limits(
        device=choose_device(options.device),
        dtype=DTYPES[options.dtype],
        vocab_size=options.vocab_size,
        context_length=options.context_length,
        memory_bytes=None if options.memory_limit_gb is None else int(options.memory_limit_gb * 1e9),
    )
    served = ServedModel.load(options.model_path.absolute(), limits)
    engine = Engine(
        served,
        max_batch_size=options.max_batch_size,
        version=options.weight_version,
        threads=options.threads,
        reproducible=options.reproducible,
    )
    state = State(engine, limits, Source(served.folder, options.weight_version), name=options.name)
    server = _Server(
        build_app(state), on_ready=lambda: _announce(listener, state, options), on_stop=lambda: _end_requests(engine)
    )

    def stop() -> None:
        server.should_exit = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop()

    engine.on_death = stop
    engine.start()
    receiver = _start_receiver(engine, options)
    if receiver is not None:
        state.mesh = receiver.endpoint.to_dict()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)  # uvicorn raises the signal again when it is done: no failure here
    try:
        server.run([listener])
    finally:
        if receiver is not None:
            receiver.close()
        engine.stop(_STOP_DEADLINE_S)
    return 0 if engine.failure is None else 1


class _Server(uvicorn.Server):
    """uvicorn, which tells when it can serve and when it is about to end."""

    def __init__(self, app: Starlette, *, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
            )
        )
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def _end_requests(engine: Engine) -> None:
    """Whoever waits gets what was written so far, with the finish reason "abort"."""
    with contextlib.suppress(Refusal):  # the engine is down already
        engine.run_between_steps(lambda: engine.abort(lambda job: True))


def _announce(listener: socket.socket, state: State, options: argparse.Namespace) -> None:
    url = _url(listener)
    if options.address_file is not None:
        _write_atomically(options.address_file, {"url": url, "pid": os.getpid(), "mesh": state.mesh})
    log.info("ready at %s: %s, version %s, %s", url, options.model_path, state.engine.version, state.limits.device)


def _start_receiver(engine: Engine, options: argparse.Namespace) -> Any:
    """The weight receiver of the run's mesh, or None outside of a run."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        return None
    from distill.transfermesh import Receiver

    try:
        receiver = Receiver(bytes.fromhex(key), TorchLoader(engine), host=options.mesh_host, name=options.name)
    except ValueError as error:
        raise EnvironmentFault(f"{KEY_VARIABLE} is not hexadecimal: {error}") from error
    receiver.start()
    return receiver


def _bind(host: str, port: int) -> socket.socket:
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


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_atomically(file: Path, value: dict[str, Any]) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_text(json.dumps(value))
    draft.replace(file)


def _die_with_parent() -> None:
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


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Everything is closed. Taking torch apart would cost a second, or hang on a thread inside a long forward pass.
    os._exit(code)
