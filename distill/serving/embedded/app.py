"""The ASGI application: SGLang's routes over one engine. Reading and the `/generate` family; `control` has the rest."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from distill import __version__
from distill.errors import DistillError
from distill.serving.describe import EMBEDDED
from distill.serving.embedded import control
from distill.serving.embedded.generate import answer
from distill.serving.embedded.http import Handler, State, error_reply, json_reply, read_body_and_arrays
from distill.serving.embedded.jobs import Refusal
from distill.serving.embedded.requests import Bounds, parse_generate

S = TypeVar("S")


def build_app(state: State) -> Starlette:
    """The application. The engine must have been started."""
    return application(state, (*_READ_ROUTES, ("/generate", ["POST"], _generate), *control.ROUTES))


def application(
    state: S, table: Sequence[tuple[str, list[str], Callable[[S, Request], Awaitable[Response]]]]
) -> Starlette:
    """Routes (path, methods, handler) over a state. What a handler refuses or fails with becomes a reply."""
    routes = [Route(path, _guarded(state, handler), methods=methods) for path, methods, handler in table]
    return Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})


def _guarded(
    state: S, handler: Callable[[S, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
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


async def _generate(state: State, request: Request) -> Response:
    began = time.monotonic()
    served = state.engine.require_model()
    body, arrays = await read_body_and_arrays(request)
    call = parse_generate(body, Bounds(served.vocab_size, served.context_length, served.stop_ids), arrays)
    return await answer(state, call, began, request)


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
