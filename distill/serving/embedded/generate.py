"""The way of a `/generate` call through the engines: submitted, awaited or streamed, aborted with its client."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from distill import packing
from distill.serving import reply_files
from distill.serving.embedded import replies
from distill.serving.embedded.http import error_fields, json_reply
from distill.serving.embedded.jobs import Job, Refusal, Result
from distill.serving.embedded.requests import GenerateCall


class Engines(Protocol):
    """Where jobs are run."""

    @property
    def in_flight(self) -> set[str]:
        """rids that are being served."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None: ...
    def abort(self, rids: set[str]) -> None: ...


async def answer(engines: Engines, call: GenerateCall, began: float, request: Request) -> Response:
    """Run the jobs of a call and give the reply in the form that it asks for."""
    taken = engines.in_flight.intersection(job.rid for job in call.jobs)
    if taken:
        raise Refusal(400, f"rid {min(taken)!r} is being served already")
    if call.stream:
        return StreamingResponse(_stream(engines, call, began), media_type="text/event-stream")
    results = await _finish_all(engines, call, request)
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


async def _finish_all(engines: Engines, call: GenerateCall, request: Request) -> list[Result]:
    """Run the jobs of a call to their end. A client that goes away takes its jobs with it."""
    rids = {job.rid for job in call.jobs}
    engines.in_flight.update(rids)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        engines.submit(call.jobs)
        work = asyncio.gather(*(asyncio.wrap_future(job.done) for job in call.jobs), return_exceptions=True)
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            engines.abort(rids)
        results = await work
    finally:
        gone.cancel()
        engines.in_flight.difference_update(rids)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Result)]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(engines: Engines, call: GenerateCall, began: float) -> AsyncIterator[bytes]:
    """Server-sent events: each holds everything written so far by one job, the last of a job its finish reason."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[int, Result | BaseException]] = asyncio.Queue()
    rids = {job.rid for job in call.jobs}
    for index, job in enumerate(call.jobs):
        tell = functools.partial(_tell, loop, events, index)
        job.on_progress = tell
        job.done.add_done_callback(lambda future, tell=tell: tell(future.exception() or future.result()))
    engines.in_flight.update(rids)
    left = len(call.jobs)
    try:
        engines.submit(call.jobs)
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
        engines.in_flight.difference_update(rids)
        if left:
            engines.abort(rids)


def _tell(
    loop: asyncio.AbstractEventLoop,
    events: asyncio.Queue[tuple[int, Result | BaseException]],
    index: int,
    result: Result | BaseException,
) -> None:
    """From the engine thread to the loop. At the end of the server the loop may be gone; then nobody listens."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, (index, result))
