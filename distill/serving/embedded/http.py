"""What the route handlers share: the state of the server, JSON in and out, refusals as replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from distill import packing
from distill.errors import DistillError
from distill.serving.embedded import replies
from distill.serving.embedded.engine import Engine
from distill.serving.embedded.jobs import Job, Refusal
from distill.serving.embedded.served import Limits


@dataclass(frozen=True, slots=True)
class Source:
    """Weights on disk. `base` is the folder under a LoRA adapter."""

    folder: Path
    version: str
    base: Path | None = None


@dataclass(slots=True)
class State:
    """What the handlers share."""

    engine: Engine
    limits: Limits
    source: Source
    """Where the last weights from disk came from: what a resume reads again."""
    name: str = "embedded"
    mesh: Mapping[str, Any] | None = None
    started: float = field(default_factory=time.monotonic)
    weights_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights are loaded, released or resumed: one such change at a time."""
    released: set[str] = field(default_factory=set[str])
    in_flight: set[str] = field(default_factory=set[str])
    """rids that are being served."""

    def submit(self, jobs: Sequence[Job]) -> None:
        self.engine.submit(jobs)

    def abort(self, rids: set[str]) -> None:
        self.engine.run_between_steps(lambda: self.engine.abort(lambda job: job.rid in rids))


Handler = Callable[[State, Request], Awaitable[Response]]


def json_reply(value: Any, status: int = 200) -> Response:
    return Response(replies.to_json(value), status, media_type="application/json")


def error_reply(status: int, error: BaseException | str) -> Response:
    return json_reply({"error": error_fields(error)}, status)


def error_fields(error: BaseException | str) -> dict[str, str]:
    """What a reply says of an error: "message", and "why" and "fix" beside it where the error has them."""
    if not isinstance(error, DistillError):
        return {"message": str(error)}
    fields = {"message": error.what, "why": error.why, "fix": error.fix}
    return {name: text for name, text in fields.items() if text}


async def read_body(request: Request) -> Any:
    """The decoded JSON body; an empty one is {}. Raises Refusal (400)."""
    return _from_json(await request.body())


async def read_body_and_arrays(request: Request) -> tuple[Any, dict[str, NDArray[Any]]]:
    """A JSON body, or a packed one: what would be the JSON is its header, and arrays come with it. Refusal (400)."""
    raw = await request.body()
    if request.headers.get("content-type") != packing.CONTENT_TYPE:
        return _from_json(raw), {}
    try:
        return packing.unpack(raw)
    except packing.PackingError as error:
        raise Refusal(400, f"the body cannot be unpacked: {error}") from error


def _from_json(raw: bytes) -> Any:
    if not raw:
        return {}
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
