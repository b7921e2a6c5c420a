"""HTTP calls to a model server. Whatever aiohttp or the operating system raises becomes a ServerError here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import aiohttp
import msgspec

from distill.errors import ServerError
from distill.packing import CONTENT_TYPE

CONNECTIONS = 512
"""Calls in flight on one server; more wait for their turn. Above what a server decodes together."""
IDLE_S = 2.0
"""Idle connections are dropped before the server (uvicorn: after 5 s) drops them: no call meets a closed one."""
QUICK_S = 30.0
"""Longest wait for a call that computes nothing."""


class Reply(NamedTuple):
    status: int
    kind: str
    """Content type."""
    body: bytes
    headers: Mapping[str, str]
    """Names in any case."""


class Calls:
    """One HTTP session with one server; use and close it in one event loop.

    `name` is what errors call the server; `timeout_s` is the deadline of each call that computes or loads.
    """

    def __init__(self, url: str, *, name: str = "", timeout_s: float = 600.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self.label = f"{name} ({self._url})" if name else self._url
        self._open_session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._open_session is not None:
            await self._open_session.close()
            self._open_session = None

    async def wait_ready(self, deadline_s: float) -> None:
        """Return when the server answers /ready, or raise ServerError after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                status, _, _ = await self.call("GET", "/ready", None, min(QUICK_S, deadline_s))
                if status == 200:
                    return
                reason = f"/ready answers {status}"
            except ServerError as error:
                reason = error.what
            if time.monotonic() >= end:
                raise ServerError(f"{self.label} was not ready after {deadline_s:g} s", why=reason)
            await asyncio.sleep(0.1)

    async def json(self, method: str, path: str, body: Any, deadline_s: float | None = None) -> dict[str, Any]:
        """The JSON object that a call is answered with. Raises ServerError for any status but 200."""
        status, _, reply = await self.call(method, path, body, deadline_s)
        if status != 200:
            self.raise_status(path, status, reply)
        return as_object(reply)

    async def post(self, path: str, body: dict[str, Any] | bytes, awaited: str) -> tuple[str, bytes]:
        """(content type, body) of the reply to a JSON or a packed body. Raises ServerError for any status but 200."""
        status, kind, reply = await self.call("POST", path, body, awaited=awaited)
        if status != 200:
            self.raise_status(path, status, reply)
        return kind, reply

    def raise_status(self, path: str, status: int, reply: bytes) -> NoReturn:
        said = said_in(reply)
        raise ServerError(
            f"{self.label} answered {path} with HTTP {status}: {said.message or 'no message'}",
            why=said.why,
            fix=said.fix or ("the server's log says more" if status >= 500 else ""),
        )

    async def call(
        self, method: str, path: str, body: Any, deadline_s: float | None = None, awaited: str = "an answer"
    ) -> tuple[int, str, bytes]:
        """(status, content type, body) of one HTTP call, as `exchange`."""
        return (await self.exchange(method, path, body, deadline_s, awaited))[:3]

    async def exchange(
        self,
        method: str,
        path: str,
        body: Any,
        deadline_s: float | None = None,
        awaited: str = "an answer",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Reply:
        """What one HTTP call brings, or ServerError: no answer, or none within `deadline_s`.

        A body of bytes is a packed one. Without a deadline it is that of calls that compute.
        """
        deadline_s = self._timeout_s if deadline_s is None else deadline_s
        packed = isinstance(body, bytes)
        data = None if body is None else body if packed else msgspec.json.encode(body)
        kind = CONTENT_TYPE if packed else "application/json"
        try:
            async with asyncio.timeout(deadline_s):
                async with self._session().request(
                    method, self._url + path, data=data, headers={"Content-Type": kind, **headers}
                ) as response:
                    return Reply(response.status, response.content_type, await response.read(), response.headers)
        except TimeoutError as error:
            raise ServerError(
                f"waited {deadline_s:g} s for {awaited} to {path} from {self.label}",
                why="the server is overloaded, stuck or paused",
                fix="raise the timeout if it is only slow; its log says what it does",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(
                f"{self.label} gave no answer to {path}: {str(error) or type(error).__name__}",
                why="the server died, is restarting or cannot be reached from here",
                fix="its log says why it ended",
            ) from error

    def _session(self) -> aiohttp.ClientSession:
        if self._open_session is None:
            self._open_session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None),  # each call has its own deadline
            )
        return self._open_session


def as_object(reply: bytes) -> dict[str, Any]:
    """The JSON object in `reply`; an empty one for anything else, which no caller takes for an answer."""
    try:
        decoded = msgspec.json.decode(reply)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


class Said(NamedTuple):
    """What a server says of an error. Only the embedded one has reasons, remedies and kinds."""

    message: str
    why: str
    fix: str
    kind: str
    """Name of the error's class, from a teacher server."""


def said_in(reply: bytes) -> Said:
    """Read {"error": {"message"}}, {"error"}, {"message"}, {"detail"}, or the text itself; "why" and "fix" beside."""
    answer = as_object(reply)
    error = answer.get("error")
    told: dict[str, Any] = error if isinstance(error, dict) else answer
    text = error if isinstance(error, str) else ""
    message = told.get("message") or text or answer.get("message") or answer.get("detail")
    return Said(
        str(message or reply[:500].decode("utf-8", "replace")).strip(),
        str(told.get("why") or ""),
        str(told.get("fix") or ""),
        str(told.get("kind") or ""),
    )
