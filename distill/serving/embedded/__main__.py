"""`python -m distill.serving.embedded --model-path DIR`: serve one model until told to stop. With `--teachers --slot-gb
G` instead: be a slot that several teachers share, which are registered and loaded later.

Says where it is in `--address-file` once it can serve: {"url", "pid", "mesh"}. Exit codes: 0 stopped, 2 and 3 as in
`distill.errors`, 1 a fault of ours. It does not outlive its parent process.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from distill.errors import DistillError, EnvironmentFault
from distill.serving.embedded.app import build_app
from distill.serving.embedded.engine import Engine
from distill.serving.embedded.http import Source, State
from distill.serving.embedded.jobs import Refusal
from distill.serving.embedded.lifetime import Server, announce, bind, die_with_parent
from distill.serving.embedded.mesh_loader import TorchLoader
from distill.serving.embedded.served import DTYPES, Limits, ServedModel, choose_device
from distill.serving.embedded.teachers import add_slot_arguments, build_slot, teacher_app

log = logging.getLogger("distill.embedded")

KEY_VARIABLE = "DISTILL_RUN_KEY"
"""Hexadecimal key of the run's weight mesh. Without it the server takes weights from disk only."""
_STOP_DEADLINE_S = 0.5
"""A forward pass that takes longer than this when the server is told to stop is not waited for."""


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distill.serving.embedded", description=__doc__)
    parser.add_argument("--model-path", type=Path, help="folder in Hugging Face layout")
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
    add_slot_arguments(parser)
    options = parser.parse_args(arguments)
    if (options.model_path is None) != options.teachers:
        parser.error("give --model-path for one model, or --teachers for a slot that teachers share")
    if options.teachers and options.slot_gb is None:
        parser.error("--teachers needs --slot-gb")
    for flag in ("max_batch_size", "threads", "vocab_size", "context_length"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1, got {value}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.name} %(message)s", stream=sys.stderr)
    die_with_parent()
    try:
        with bind(options.host, options.port) as listener:
            torch.set_num_threads(options.threads)
            return _serve_teachers(options, listener) if options.teachers else _serve(options, listener)
    except DistillError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(
        device=choose_device(options.device),
        dtype=DTYPES[options.dtype],
        vocab_size=options.vocab_size,
        context_length=options.context_length,
        memory_bytes=None if options.memory_limit_gb is None else int(options.memory_limit_gb * 1e9),
    )


def _serve(options: argparse.Namespace, listener: socket.socket) -> int:
    limits = _limits(options)
    served = ServedModel.load(options.model_path.absolute(), limits)
    engine = Engine(
        served,
        max_batch_size=options.max_batch_size,
        version=options.weight_version,
        threads=options.threads,
        reproducible=options.reproducible,
    )
    state = State(engine, limits, Source(served.folder, options.weight_version), name=options.name)

    def ready() -> None:
        url = announce(listener, options.address_file, state.mesh)
        log.info("ready at %s: %s, version %s, %s", url, options.model_path, engine.version, limits.device)

    server = Server(build_app(state), on_ready=ready, on_stop=lambda: _end_requests(engine))
    engine.on_death = server.stop
    engine.start()
    receiver = _start_receiver(engine, options)
    if receiver is not None:
        state.mesh = receiver.endpoint.to_dict()
    try:
        server.run_until_signal(listener)
    finally:
        if receiver is not None:
            receiver.close()
        engine.stop(_STOP_DEADLINE_S)
    return 0 if engine.failure is None else 1


def _serve_teachers(options: argparse.Namespace, listener: socket.socket) -> int:
    slot = build_slot(options, _limits(options))

    def ready() -> None:
        url = announce(listener, options.address_file, None)
        log.info("ready at %s: a slot of %d bytes, %s", url, slot.arena.budget_bytes, slot.limits.device)

    server = Server(teacher_app(slot, options.name), on_ready=ready, on_stop=slot.abort_all)
    slot.on_death = server.stop
    try:
        server.run_until_signal(listener)
    finally:
        slot.stop(_STOP_DEADLINE_S)
    return 0 if slot.failure is None else 1


def _end_requests(engine: Engine) -> None:
    """Whoever waits gets what was written so far, with the finish reason "abort"."""
    with contextlib.suppress(Refusal):  # the engine is down already
        engine.run_between_steps(lambda: engine.abort(lambda job: True))


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


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Everything is closed. Taking torch apart would cost a second, or hang on a thread inside a long forward pass.
    os._exit(code)
