"""The server of a slot that teachers share: its command line, its state and its routes.

`POST /teachers/register`, `/teachers/load`, `/teachers/release`, `GET /teachers`, and `/generate` and
`/weights_checker` with the name of a teacher. An error says its kind, as in `distill.errors`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from distill import __version__
from distill.errors import ConfigError, DistillError, EnvironmentFault, TeacherError
from distill.protocols import WeightSource
from distill.serving.describe import EMBEDDED
from distill.serving.embedded.app import application
from distill.serving.embedded.arena import Arena
from distill.serving.embedded.generate import answer
from distill.serving.embedded.http import error_fields, json_reply, read_body, read_body_and_arrays
from distill.serving.embedded.jobs import Job, Refusal
from distill.serving.embedded.objects import WeightObject
from distill.serving.embedded.pinned import pin_for
from distill.serving.embedded.requests import GenerateCall, parse_generate
from distill.serving.embedded.served import Limits
from distill.serving.embedded.slot import EngineSettings, Resident, Slot, same_base
from distill.serving.embedded.streaming import Streamer
from distill.weights.host import HostStore
from distill.weights.link import Link

NO_ROOM = 507
_STATUS = ((EnvironmentFault, NO_ROOM), (ConfigError, 400), (TeacherError, 400))


def add_slot_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a slot that teachers share")
    group.add_argument("--teachers", action="store_true", help="hold several teachers, which come and go")
    group.add_argument("--slot-gb", type=float, help="weight bytes on the device, GB = 1e9")
    group.add_argument("--host-gb", type=float, default=0.0, help="host memory for weights, of all slots together")
    group.add_argument("--host-folder", type=Path, help="where that is; default: a folder in /dev/shm")
    group.add_argument(
        "--host-differences", action="store_true", help="keep like checkpoints there as differences from one another"
    )
    group.add_argument("--link-bytes-per-s", type=float, help="copy weights no faster than this, for measurements")


def build_slot(options: argparse.Namespace, limits: Limits) -> Slot:
    host = None
    if options.host_gb > 0:
        folder = options.host_folder or Path(f"/dev/shm/distill-weights-{os.getuid()}")
        host = HostStore(
            folder, round(options.host_gb * 1e9), differences=options.host_differences, pin=pin_for(limits.device)
        )
    return Slot(
        Arena(round(options.slot_gb * 1e9), limits.device),
        limits,
        EngineSettings(options.max_batch_size, options.threads, options.reproducible),
        host=host,
        link=Link(options.link_bytes_per_s),
    )


@dataclass(slots=True)
class TeacherState:
    """What the handlers share."""

    slot: Slot
    streamer: Streamer
    name: str
    started: float = field(default_factory=time.monotonic)
    in_flight: set[str] = field(default_factory=set[str])
    """rids that are being served."""


Handler = Callable[[TeacherState, Request], Awaitable[Response]]


def teacher_app(slot: Slot, name: str) -> Starlette:
    state = TeacherState(slot, Streamer(slot, slot.engines.threads), name)
    table = [(path, [method], _told(handler)) for path, method, handler in _ROUTES]
    return application(state, table)


def _told(handler: Handler) -> Handler:
    """An error becomes a reply with its kind."""

    async def told(state: TeacherState, request: Request) -> Response:
        try:
            return await handler(state, request)
        except DistillError as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
            return json_reply({"error": error_fields(error) | {"kind": type(error).__name__}}, status)

    return told


# --- objects -------------------------------------------------------------------------------------------------------


async def _register(state: TeacherState, request: Request) -> Response:
    body = await _object(request)
    vocab_size = body.get("vocab_size")
    if vocab_size is not None and (not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1):
        raise Refusal(400, f"vocab_size must be a whole number above 0, got {vocab_size!r}")
    source = WeightSource(
        name=_text(body, "name"),
        folder=Path(_text(body, "folder")),
        version=_text(body, "version"),
        vocab_size=vocab_size,
        base=None if body.get("base") is None else _text(body, "base"),
    )
    found = await state.slot.register(source)
    bounds = {"vocab_size": found.bounds.vocab_size, "context_length": found.bounds.context_length}
    return json_reply(asdict(found.costs) | bounds)


async def _load(state: TeacherState, request: Request) -> Response:
    loaded = await state.slot.load(_text(await _object(request), "name"))
    return json_reply({"seconds": loaded.seconds, "from_disk": loaded.from_disk, "checksums": dict(loaded.checksums)})


async def _release(state: TeacherState, request: Request) -> Response:
    freed = await state.slot.release(_text(await _object(request), "name"))
    return json_reply({"bytes": freed})


async def _ledger(state: TeacherState, request: Request) -> Response:
    slot = state.slot
    arena, held = slot.arena, slot.arena.owners
    host = None if slot.host is None else asdict(await asyncio.to_thread(slot.host.report))
    return json_reply(
        {
            "budget_bytes": arena.budget_bytes,
            "used_bytes": arena.used_bytes,
            "peak_bytes": arena.peak_bytes,
            "residents": {name: held.get(name, 0) for name in slot.residents},
            "under_way": {name: size for name, size in held.items() if name not in slot.residents},
            "objects": {name: _described(slot, thing) for name, thing in slot.objects.items()},
            "host": host,
        }
    )


def _described(slot: Slot, thing: WeightObject) -> dict[str, Any]:
    resident = slot.residents.get(thing.name)
    return {
        "folder": str(thing.source.folder),
        "version": thing.source.version,
        "base": thing.source.base,
        "bytes": thing.costs.bytes,
        "resident": resident is not None,
        "calls": resident.users if resident else 0,
    }


async def _check_weights(state: TeacherState, request: Request) -> Response:
    body = await _object(request)
    if body.get("action") != "checksum":
        raise Refusal(400, f"action must be 'checksum', got {body.get('action')!r}")
    sums = await state.slot.checksums(_text(body, "teacher"))
    return json_reply({"success": True, "message": f"{len(sums)} tensors", "ranks": [{"checksums": sums}]})


# --- generate ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ByResidents:
    """`Engines`: the jobs of one call by one engine, each with its own adapter."""

    in_flight: set[str]
    residents: Sequence[Resident]
    """One a job."""
    slot: Slot

    def submit(self, jobs: Sequence[Job]) -> None:
        loop = asyncio.get_running_loop()
        for job, resident in zip(jobs, self.residents, strict=True):
            job.teacher = resident.object.name
            if resident.adapter is not None:
                job.adapter, job.label = resident.adapter, resident.object.source.version
            used = list({id(one): one for one in (resident, self.slot.base_of(resident))}.values())
            for one in used:
                one.users += 1
            job.done.add_done_callback(lambda _, used=used: _leave_soon(loop, used))
        try:
            self.residents[0].engine.submit(jobs)
        except Refusal as refusal:
            for job in jobs:
                job.fail(refusal)  # which also ends their use of the residents
            raise

    def abort(self, rids: set[str]) -> None:
        engine = self.residents[0].engine
        engine.run_between_steps(lambda: engine.abort(lambda job: job.rid in rids))


def _leave_soon(loop: asyncio.AbstractEventLoop, used: Sequence[Resident]) -> None:
    """A job ended, on whichever thread."""

    def leave() -> None:
        for resident in used:
            resident.users -= 1

    if not loop.is_closed():
        loop.call_soon_threadsafe(leave)


@dataclass(slots=True)
class _ByStream:
    """`Engines`: the jobs of one call in one pass of streamed weights."""

    in_flight: set[str]
    thing: WeightObject
    streamer: Streamer

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.teacher = self.thing.name
        self.streamer.submit(self.thing, jobs)

    def abort(self, rids: set[str]) -> None:
        self.streamer.abort(rids)


async def _generate(state: TeacherState, request: Request) -> Response:
    began = time.monotonic()
    body, arrays = await read_body_and_arrays(request)
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    plain = dict(cast("Mapping[str, Any]", body))
    names, streamed = plain.pop("teacher", None), plain.pop("stream_weights", False)
    teachers = [names] if isinstance(names, str) else names
    if not isinstance(teachers, list) or not teachers or not all(isinstance(one, str) for one in teachers):
        raise Refusal(400, f"teacher must be a name, or a list of names beside a batch, got {names!r}")
    things = [state.slot.known(one) for one in dict.fromkeys(cast("list[str]", teachers))]
    if streamed:
        return await _generate_streamed(state, things, plain, arrays, began, request)
    residents = same_base(state.slot, teachers)
    call = parse_generate(plain, things[0].bounds, arrays)
    if len(residents) == 1:
        residents *= len(call.jobs)
    if len(residents) != len(call.jobs):
        raise Refusal(400, f"teacher holds {len(residents)} names for {len(call.jobs)} requests")
    return await answer(_ByResidents(state.in_flight, residents, state.slot), call, began, request)


async def _generate_streamed(
    state: TeacherState,
    things: list[WeightObject],
    body: Any,
    arrays: Mapping[str, Any],
    began: float,
    request: Request,
) -> Response:
    if len(things) > 1 or things[0].is_adapter:
        raise Refusal(400, "stream_weights is for one whole model a call")
    call: GenerateCall = parse_generate(body, things[0].bounds, arrays)
    if any(job.sampling.max_new_tokens or not job.wants_scores for job in call.jobs):
        raise Refusal(400, "stream_weights is for scoring: set max_new_tokens to 0 and logprob_start_len")
    return await answer(_ByStream(state.in_flight, things[0], state.streamer), call, began, request)


async def _abort(state: TeacherState, request: Request) -> Response:
    """An unknown rid is fine: the request may just have ended."""
    body = await _object(request)
    every = bool(body.get("abort_all"))
    rid = "" if every else _text(body, "rid")
    for engine in state.slot.running:
        await asyncio.wrap_future(
            engine.run_between_steps(
                lambda engine=engine: engine.abort(lambda job: every or rid in (job.rid, job.batch_rid))
            )
        )
    state.streamer.abort(set(state.in_flight) if every else {rid} & state.in_flight)
    return Response(status_code=200)


# --- reading -------------------------------------------------------------------------------------------------------


async def _health(state: TeacherState, request: Request) -> Response:
    return Response(status_code=200 if state.slot.failure is None else 503)


async def _server_info(state: TeacherState, request: Request) -> Response:
    slot = state.slot
    bounds = [thing.bounds for thing in slot.objects.values()]
    return json_reply(
        {
            "version": __version__,
            "program": EMBEDDED,
            "name": state.name,
            "packed": True,
            "teachers": True,
            "weight_version": "",
            "mesh": None,
            "dtype": str(slot.limits.dtype).removeprefix("torch."),
            "device": str(slot.limits.device),
            "vocab_size": max((one.vocab_size for one in bounds), default=0),
            "context_length": max((one.context_length for one in bounds), default=0),
            "uptime_s": time.monotonic() - state.started,
            "tokens_written": sum(engine.tokens_written for engine in slot.running),
            "tokens_scored": sum(engine.tokens_scored for engine in slot.running),
        }
    )


async def _object(request: Request) -> dict[str, Any]:
    body = await read_body(request)
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    return cast("dict[str, Any]", body)


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise Refusal(400, f"{key} must be a string, got {value!r}")
    return value


_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("/teachers/register", "POST", _register),
    ("/teachers/load", "POST", _load),
    ("/teachers/release", "POST", _release),
    ("/teachers", "GET", _ledger),
    ("/weights_checker", "POST", _check_weights),
    ("/generate", "POST", _generate),
    ("/abort_request", "POST", _abort),
    ("/health", "GET", _health),
    ("/ready", "GET", _health),
    ("/server_info", "GET", _server_info),
)
