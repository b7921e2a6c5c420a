"""Routes that change the server: pauses, aborts, weights, memory. Each runs its change between two decode steps."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from distill.errors import DistillError
from distill.serving.embedded.http import Handler, Source, State, error_fields, json_reply, read_body
from distill.serving.embedded.jobs import Job, Refusal
from distill.serving.embedded.served import Limits, ServedModel
from distill.serving.embedded.weights import Prepared, checksums, load, prepare

T = TypeVar("T")
PAUSE_MODES = ("abort", "retract", "in_place")
MEMORY_TAGS = ("weights", "kv_cache")


async def _between_steps(state: State, operation: Callable[[], T]) -> T:
    return await asyncio.wrap_future(state.engine.run_between_steps(operation))


async def _object(request: Request) -> dict[str, Any]:
    body = await read_body(request)
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    return cast("dict[str, Any]", body)


def _text(body: dict[str, Any], key: str, *, needed: bool = False) -> str | None:
    value = body.get(key)
    if value is None and not needed:
        return None
    if not isinstance(value, str) or not value:
        raise Refusal(400, f"{key} must be a string, got {value!r}")
    return value


# --- pauses and aborts ---------------------------------------------------------------------------------------------


async def _pause(state: State, request: Request) -> Response:
    mode = (await _object(request)).get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise Refusal(400, f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    await _between_steps(state, lambda: state.engine.pause(mode))
    return json_reply({"message": "Generation paused successfully.", "status": "ok"})


async def _continue(state: State, request: Request) -> Response:
    await _between_steps(state, state.engine.resume)
    return json_reply({"message": "Generation continued successfully.", "status": "ok"})


async def _abort(state: State, request: Request) -> Response:
    """An unknown rid is fine: the request may just have ended. The rid of a batch names all of its requests."""
    body = await _object(request)
    every = bool(body.get("abort_all"))
    rid = None if every else _text(body, "rid", needed=True)

    def chosen(job: Job) -> bool:
        return every or rid in (job.rid, job.batch_rid)

    await _between_steps(state, lambda: state.engine.abort(chosen))
    return Response(status_code=200)


async def _flush_cache(state: State, request: Request) -> Response:
    """Nothing is cached across requests; like SGLang this refuses while requests run."""

    def flush() -> bool:
        if not state.engine.idle:
            return False
        state.engine.drop_cache()
        return True

    if await _between_steps(state, flush):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("Flush cache failed.\n", status_code=400)


# --- memory --------------------------------------------------------------------------------------------------------


async def _tags(request: Request) -> set[str]:
    tags = (await _object(request)).get("tags")
    if tags is None:
        return set(MEMORY_TAGS)
    if not isinstance(tags, list) or not set(cast("list[Any]", tags)) <= {*MEMORY_TAGS, "cuda_graph"}:
        raise Refusal(400, f"tags must be a list of {', '.join(MEMORY_TAGS)}, got {tags!r}")
    return set(cast("list[str]", tags)) & set(MEMORY_TAGS)


async def _release(state: State, request: Request) -> Response:
    tags = await _tags(request)

    def release() -> None:
        if not state.engine.idle:
            raise Refusal(400, "memory is released only when no request runs or waits: pause with mode abort first")
        if twice := tags & state.released:
            raise Refusal(400, f"{', '.join(sorted(twice))} is released already")
        state.engine.drop_cache()
        if "weights" in tags:
            state.engine.served = None
        state.released |= tags

    async with state.weights_lock:
        await _between_steps(state, release)
        _give_back(state)
    return json_reply(None)


async def _resume(state: State, request: Request) -> Response:
    """Weights are read again from the folder that they last came from; what came by the mesh since then is gone."""
    tags = await _tags(request)
    async with state.weights_lock:
        if never := tags - state.released:
            raise Refusal(400, f"{', '.join(sorted(never))} was not released")
        if "weights" in tags:
            source = state.source
            served = await asyncio.to_thread(load, source.folder, source.base, state.limits)

            def put_back() -> None:
                state.engine.served = served
                state.engine.set_version(source.version)

            await _between_steps(state, put_back)
        state.released -= tags
    return json_reply(None)


def _give_back(state: State) -> None:
    gc.collect()
    if state.limits.device.type == "cuda":
        torch.cuda.empty_cache()


# --- weights -------------------------------------------------------------------------------------------------------


async def _update_from_disk(state: State, request: Request) -> Response:
    """Checks and opens the folder beside the running requests, then copies it in between two of their steps."""
    body = await _object(request)
    folder = Path(cast("str", _text(body, "model_path", needed=True)))
    base_text, version = _text(body, "base"), _text(body, "weight_version")
    base = Path(base_text) if base_text else None
    engine = state.engine
    limits = _with_vocabulary(state.limits, body.get("vocab_size"))
    async with state.weights_lock:
        served = engine.require_model()
        try:
            prepared = await asyncio.to_thread(prepare, served, folder, base, limits)
            held = await _between_steps(state, lambda: _go_live(state, served, prepared, body, version))
        except DistillError as error:
            return json_reply({"success": False, **error_fields(error), "num_paused_requests": 0}, 400)
        state.source, state.limits = Source(folder, engine.version, base), limits
        if prepared.replacement is not None:
            del served
            _give_back(state)
    note = f" Weight version updated to {version}." if version else ""
    return json_reply(
        {"success": True, "message": f"Succeeded to update model weights.{note}", "num_paused_requests": held}
    )


def _with_vocabulary(limits: Limits, vocab_size: Any) -> Limits:
    """For a model with another vocabulary than the last; None: as it was."""
    if vocab_size is None:
        return limits
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise Refusal(400, f"vocab_size must be a whole number above 0, got {vocab_size!r}")
    return replace(limits, vocab_size=vocab_size)


def _go_live(state: State, served: ServedModel, prepared: Prepared, body: dict[str, Any], version: str | None) -> int:
    engine = state.engine
    if body.get("abort_all_requests"):
        engine.abort(lambda job: True)
    if prepared.replacement is not None:
        if not engine.idle:
            raise DistillError(
                f"{prepared.folder}: another architecture than the one held, and requests are running",
                fix="pause with mode abort, or wait until none runs",
            )
        engine.drop_cache()
    engine.served = prepared.apply(served)
    if version:
        engine.set_version(version)
    return engine.running + engine.waiting if engine.paused else 0


async def _update_version(state: State, request: Request) -> Response:
    body = await _object(request)
    version = cast("str", _text(body, "new_version", needed=True))

    def update() -> None:
        if body.get("abort_all_requests", True):
            state.engine.abort(lambda job: True)
        state.engine.set_version(version)

    await _between_steps(state, update)
    return json_reply({"success": True, "message": f"Weight version updated to {version}.", "new_version": version})


async def _check_weights(state: State, request: Request) -> Response:
    action = (await _object(request)).get("action")
    if action != "checksum":
        raise Refusal(400, f"action must be 'checksum', got {action!r}")
    sums = await _between_steps(state, lambda: checksums(state.engine.require_model()))
    return json_reply({"success": True, "message": f"{len(sums)} tensors", "ranks": [{"checksums": sums}]})


ROUTES: Sequence[tuple[str, list[str], Handler]] = (
    ("/pause_generation", ["POST"], _pause),
    ("/continue_generation", ["POST"], _continue),
    ("/abort_request", ["POST"], _abort),
    ("/flush_cache", ["POST", "GET"], _flush_cache),
    ("/release_memory_occupation", ["POST"], _release),
    ("/resume_memory_occupation", ["POST"], _resume),
    ("/update_weights_from_disk", ["POST"], _update_from_disk),
    ("/update_weight_version", ["POST"], _update_version),
    ("/weights_checker", ["POST"], _check_weights),
)
