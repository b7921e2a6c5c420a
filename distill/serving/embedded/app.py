"""The ASGI application: SGLang's routes over one engine. Reading and the `/generate` family; `control` has the rest."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from distill import __version__, packing
from distill.errors import DistillError
from distill.serving import reply_files
from distill.serving.describe import EMBEDDED
from distill.serving.embedded import control, replies
from distill.serving.embedded.http import Handler, State, error_fields, error_reply, json_reply, read_body_and_arrays
from distill.serving.embedded.jobs import Refusal, Result
from distill.serving.embedded.requests import Bounds, GenerateCall, parse_generate


def build_app(state: State) -> Starlette:
    """The application. The engine must have been started."""
    routes: list[Route] = []
    for path, methods, handler in (*_READ_ROUTES, ("/generate", ["POST"], _generate), *control.ROUTES):
        routes.append(Route(path, _guarded(state, handler), methods=methods))
    return Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})


def _guarded(state: State, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(state, request)
        except Refusal as refusal:
            return error_reply(refusal.status, refusal.message)
        except ClientDisconnect:
            return Response(status_code=499)
        except DistillError as error:
            return error_reply(500, error)

    return endpoint


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return error_reply(status, f"{request.method} {request.url.path}: there is no such route")


# --- generate ------------------------------------------------------------------------------------------------------


async def _generate(state: State, request: Request) -> Response:
    began = time.monotonic()
    served = state.engine.require_model()
    bounds = Bounds(served.vocab_size, served.context_length, served.stop_ids)
    body, arrays = await read_body_and_arrays(request)
    call = parse_generate(body, bounds, arrays)
    taken = state.in_flight.intersection(job.rid for job in call.jobs)
    if taken:
        raise Refusal(400, f"rid {min(taken)!r} is being served already")
    if call.stream:
        return StreamingResponse(_stream(state, call, began), media_type="text/event-stream")
    results = await _finish_all(state, call, request)
    if call.packed:
        return await asyncio.to_thread(_packed, call, results, request.headers.get(reply_files.HEADER))
    seconds = time.monotonic() - began
    items = [
        replies.generation(job, result, seconds, call.flat) for job, result in zip(call.jobs, results, strict=True)
    ]
    return json_reply(items if call.batched else items[0])


def _packed(call: GenerateCall, results: list[Result], file: str | None) -> Response:
    """The packed reply: in the file that the client named, where it is large and can be seen from here."""
    body = replies.packed(call.jobs, results)
    told = None if file is None else reply_files.write_reply(file, body)
    if told is None:
        return Response(body, media_type=packing.CONTENT_TYPE)
    return Response(b"", media_type=packing.CONTENT_TYPE, headers={reply_files.HEADER: told})


async def _finish_all(state: State, call: GenerateCall, request: Request) -> list[Result]:
    """Run the jobs of a call to their end. A client that goes away takes its jobs with it."""
    rids = {job.rid for job in call.jobs}
    state.in_flight |= rids
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        state.engine.submit(call.jobs)
        work = asyncio.gather(*(asyncio.wrap_future(job.done) for job in call.jobs), return_exceptions=True)
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            _abort(state, rids)
        results = await work
    finally:
        gone.cancel()
        state.in_flight -= rids
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Result)]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _abort(state: State, rids: set[str]) -> None:
    state.engine.run_between_steps(lambda: state.engine.abort(lambda job: job.rid in rids))


async def _stream(state: State, call: GenerateCall, began: float) -> AsyncIterator[bytes]:
    """Server-sent events: each holds everything written so far by one job, the last of a job its finish reason."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[int, Result | BaseException]] = asyncio.Queue()
    rids = {job.rid for job in call.jobs}
    for index, job in enumerate(call.jobs):
        tell = functools.partial(_tell, loop, events, index)
        job.on_progress = tell
        job.done.add_done_callback(lambda future, tell=tell: tell(future.exception() or future.result()))
    state.in_flight |= rids
    left = len(call.jobs)
    try:
        state.engine.submit(call.jobs)
        while left:
            index, result = await events.get()
            if isinstance(result, BaseException):
                left -= 1
                chunk: dict[str, Any] = {"error": error_fields(result)}
            else:
                left -= result.finish is not None
                chunk = replies.generation(call.jobs[index], result, time.monotonic() - began, call.flat)
            if call.batched:
                chunk["index"] = index
            yield b"data: " + replies.to_json(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"
    finally:
        state.in_flight -= rids
        if left:
            _abort(state, rids)


def _tell(
    loop: asyncio.AbstractEventLoop,
    events: asyncio.Queue[tuple[int, Result | BaseException]],
    index: int,
    result: Result | BaseException,
) -> None:
    """From the engine thread to the loop. At the end of the server the loop may be gone; then nobody listens."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, (index, result))


# --- reading -------------------------------------------------------------------------------------------------------


async def _health(state: State, request: Request) -> Response:
    return Response(status_code=200 if state.engine.failure is None else 503)


async def _server_info(state: State, request: Request) -> Response:
    engine, served = state.engine, state.engine.served
    info: dict[str, Any] = {
        "version": __version__,
        "program": EMBEDDED,
        "name": state.name,
        "packed": True,
        "model_path": str(state.source.folder),
        "weight_version": engine.version,
        "mesh": state.mesh,
        "max_batch_size": engine.max_batch_size,
        "dtype": str(state.limits.dtype).removeprefix("torch."),
        "device": str(state.limits.device),
        "vocab_size": served.vocab_size if served else state.limits.vocab_size,
        "context_length": served.context_length if served else state.limits.context_length,
        "paused": engine.paused,
        "released": sorted(state.released),
        "uptime_s": time.monotonic() - state.started,
        "tokens_written": engine.tokens_written,
        "tokens_scored": engine.tokens_scored,
        "internal_states": [{"num_running_reqs": engine.running, "num_waiting_reqs": engine.waiting}],
    }
    return json_reply(info)


async def _model_info(state: State, request: Request) -> Response:
    served = state.engine.require_model()
    return json_reply(
        {
            "model_path": str(state.source.folder),
            "tokenizer_path": str(state.source.folder),
            "is_generation": True,
            "weight_version": state.engine.version,
            "architectures": list(getattr(served.config, "architectures", None) or [type(served.model).__name__]),
            "model_type": served.config.model_type,
        }
    )


async def _loads(state: State, request: Request) -> Response:
    engine, served = state.engine, state.engine.served
    weight_bytes = sum(p.nbytes for p in served.model.parameters()) if served else 0
    load = {
        "dp_rank": 0,
        "num_running_reqs": engine.running,
        "num_waiting_reqs": engine.waiting,
        "memory": {"weight_gb": weight_bytes / 1e9, "kv_cache_gb": engine.cache_bytes / 1e9},
    }
    return json_reply({"version": __version__, "num_accelerators": 1, "loads": [load]})


_READ_ROUTES: tuple[tuple[str, list[str], Handler], ...] = (
    ("/health", ["GET"], _health),
    ("/health_generate", ["GET"], _health),
    ("/ready", ["GET"], _health),
    ("/server_info", ["GET"], _server_info),
    ("/get_server_info", ["GET"], _server_info),
    ("/model_info", ["GET"], _model_info),
    ("/get_model_info", ["GET"], _model_info),
    ("/v1/loads", ["GET"], _loads),
)
