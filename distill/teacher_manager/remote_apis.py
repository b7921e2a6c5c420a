"""The two kinds of servers that a teacher elsewhere may be, and what of the configuration they need."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import aiohttp

from distill.config import TeacherConfig, TeacherManagerConfig
from distill.errors import ConfigError, ServerError, TeacherError
from distill.protocols import ServerInfo, TeacherCaps
from distill.serving.calls import Reply
from distill.serving.client import ServerClient
from distill.serving.describe import describe_server
from distill.serving.openai import BUSY, GONE, OpenAIClient, TryAgain, proxy_for
from distill.teacher_manager.gate import CanaryStore
from distill.teacher_manager.remote import EventSink, RemoteApi, RemoteTeacher
from distill.types import (
    GenerateRequest,
    Generation,
    Ids,
    ScoreRequest,
    Signal,
    SignalSpec,
    Support,
    TeacherScores,
)

_QUICK_S = 30.0
"""Longest wait for a call that computes nothing."""


def open_remote(
    name: str,
    teacher: TeacherConfig,
    manager: TeacherManagerConfig,
    spec: SignalSpec,
    *,
    vocab_size: int,
    canaries: CanaryStore | None,
    on_event: EventSink,
    timeout_s: float | None = None,
) -> RemoteTeacher:
    """The teacher `name`, whose configuration has a `url`. Nothing is sent yet.

    `vocab_size`: ids of its tokenizer. `timeout_s`: default teacher_manager.timeout_s. Raises ConfigError for a signal
    that this kind of server cannot give and for a key that is not in the environment.
    """
    assert teacher.url is not None, f"teachers.{name} has no url"
    check_remote_signal(name, teacher, spec)
    key = read_key(name, teacher)
    longest = timeout_s or manager.timeout_s
    api: RemoteApi
    if teacher.api == "openai":
        api = OpenAIApi(
            OpenAIClient(teacher.url, teacher=name, vocab_size=vocab_size, model=teacher.remote_model, key=key),
            vocab_size,
        )
    else:
        api = SglangApi(teacher.url, name, vocab_size, key=key, timeout_s=longest)
    return RemoteTeacher(
        name,
        api,
        spec,
        vocab_size=vocab_size,
        concurrency=teacher.concurrency,
        timeout_s=longest,
        max_tries=manager.max_tries,
        atol=manager.remote_canary_atol,
        canaries=canaries,
        on_event=on_event,
    )


def check_remote_signal(name: str, teacher: TeacherConfig, spec: SignalSpec) -> None:
    """Raises ConfigError where the objective needs of a server what its API has no words for."""
    if teacher.api == "sglang":
        return
    asked = ""
    if spec.signal is Signal.FULL:
        asked = "the whole vocabulary at each token"
    elif spec.signal is Signal.TOPK and spec.support is not Support.TEACHER:
        asked = f"ids of the student's choice (objective.support={spec.support.value})"
    if asked:
        raise ConfigError(
            f"teachers.{name}: the objective asks for {asked}, and {teacher.url} cannot be asked for that",
            why="the OpenAI API tells of a prompt's tokens: each one's own log-probability, and those of the server's "
            "most probable ids",
            fix="set objective.support=teacher_topk with a small objective.k, or an objective on sampled tokens; or "
            f"serve the teacher with SGLang and set teachers.{name}.api=sglang",
        )


def read_key(name: str, teacher: TeacherConfig) -> str:
    """The server's key; empty where none is named. It is told to nobody but the server."""
    variable = teacher.api_key_env
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        found = "is not set or empty" if not key else "holds characters that no key has"
        raise ConfigError(
            f"teachers.{name}.api_key_env: the environment variable {variable} {found}",
            fix=f"export {variable}=... before the run starts",
        )
    return key


class OpenAIApi:
    """Implements `RemoteApi` over the OpenAI completions API."""

    def __init__(self, client: OpenAIClient, vocab_size: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self.label = client.label

    def caps(self, spec: SignalSpec) -> TeacherCaps:
        """`max_k` is what this run asks for: a server tells its limit only to those who ask for more."""
        return TeacherCaps(
            signals=frozenset({Signal.SAMPLED, Signal.TOPK}),
            max_k=spec.k,
            vocab_size=self._vocab_size,
            supports=frozenset({Support.TEACHER}),
        )

    async def connect(self, ids: Ids, spec: SignalSpec) -> int | None:
        return (await self._client.connect(ids, max(spec.k, 1))).context_length

    async def score(self, requests: Sequence[ScoreRequest], spec: SignalSpec) -> list[TeacherScores]:
        return await self._client.score(requests, spec)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return await self._client.generate(requests, "remote")

    async def close(self) -> None:
        await self._client.close()


class SglangApi:
    """Implements `RemoteApi` over SGLang's native API: all signals. Its weights are those of the first look."""

    def __init__(self, url: str, teacher: str, vocab_size: int, *, key: str, timeout_s: float) -> None:
        self._client = _Elsewhere(url, f"teacher {teacher}", vocab_size, key, timeout_s)
        self._teacher = teacher
        self._vocab_size = vocab_size
        self._version: str | None = None
        self._calls = itertools.count()
        self._own = secrets.token_hex(4)
        """Tells this run's requests from those of others on the server, which refuses an id that it is serving."""
        self.label = self._client.label

    def caps(self, spec: SignalSpec) -> TeacherCaps:
        return TeacherCaps(frozenset(Signal), max_k=self._vocab_size, vocab_size=self._vocab_size)

    async def connect(self, ids: Ids, spec: SignalSpec) -> int | None:
        info = await self._client.info()
        full = spec.signal is Signal.FULL
        if info.vocab_size < self._vocab_size or (full and info.vocab_size != self._vocab_size):
            raise ConfigError(
                f"{self.label} has a vocabulary of {info.vocab_size} ids, and teachers.{self._teacher}.tokenizer one "
                f"of {self._vocab_size}",
                why="with full signals both must be equal" if full else "it cannot score ids that it does not have",
                fix="check that the tokenizer is that of the model" + (", or use objective.k" if full else ""),
            )
        if self._version is None:
            self._version = info.weight_version
        if info.weight_version != self._version:
            raise TeacherError(
                f"{self.label} holds the weights {info.weight_version!r}, and held {self._version!r} when the run "
                "first asked it",
                why="scores before and after the change would come from two different teachers",
                fix="serve the former weights again and resume the run, or start a new run",
                teacher=self._teacher,
            )
        return info.context_length

    async def score(self, requests: Sequence[ScoreRequest], spec: SignalSpec) -> list[TeacherScores]:
        call = self._call_name()
        named = [replace(request, id=f"{request.id}{call}") for request in requests]
        try:
            return await self._client.score(named, spec, self._teacher, self._pinned)
        except TeacherError as error:
            error.sample_id = error.sample_id.removesuffix(call)
            raise

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        call = self._call_name()
        named = [replace(request, id=f"{request.id}{call}") for request in requests]
        written = await self._client.generate(named)
        written = [replace(item, id=item.id.removesuffix(call)) for item in written]
        for item in written:
            other = set(item.versions) - {self._pinned}
            if other or item.finish_reason == "abort":
                found = f"weights {sorted(other)}" if other else "an aborted answer"
                raise ServerError(f"{self.label}: {item.id} should be written by {self._pinned}, found {found}")
        return written

    async def close(self) -> None:
        await self._client.close()

    def _call_name(self) -> str:
        return f"@{self._own}.{next(self._calls)}"

    @property
    def _pinned(self) -> str:
        assert self._version is not None, f"{self.label} was not connected"
        return self._version


class _Elsewhere(ServerClient):
    """A `ServerClient` of a server whose files are not here, and which may want a key.

    What another try may cure is raised as TryAgain: a failure of the connection, and the statuses that say so.
    """

    def __init__(self, url: str, name: str, vocab_size: int, key: str, timeout_s: float) -> None:
        super().__init__(url, name=name, timeout_s=timeout_s)
        self._ids = vocab_size
        self._key = key

    async def info(self) -> ServerInfo:
        """As `ServerClient.info`; what SGLang leaves to a config.json that cannot be seen here comes from /v1/models
        and the tokenizer."""
        server = await self.json("GET", "/server_info", None, _QUICK_S)
        model = await self.json("GET", "/model_info", None, _QUICK_S)
        if not server.get("context_length"):
            server["context_length"] = await self._longest()
        self._last_info = describe_server(server, model, self.label, assumed_vocab=self._ids)
        return self._last_info

    async def _longest(self) -> int | None:
        answer = await self.json("GET", "/v1/models", None, _QUICK_S)
        entries: list[dict[str, Any]] = answer.get("data") or []
        return next((each["max_model_len"] for each in entries if each.get("max_model_len")), None)

    def raise_status(self, path: str, status: int, reply: bytes) -> NoReturn:
        try:
            super().raise_status(path, status, reply)
        except ServerError as error:
            error.what = self._clean(error.what)
            if status in BUSY or status in GONE:
                raise TryAgain(error, gone=status in GONE) from error
            raise

    async def exchange(self, *args: Any, **named: Any) -> Reply:
        try:
            return await super().exchange(*args, **named)
        except ServerError as error:
            error.what = self._clean(error.what)
            raise TryAgain(error, gone=True) from error

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _session(self) -> aiohttp.ClientSession:
        if self._open_session is None:
            self._open_session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                timeout=aiohttp.ClientTimeout(total=None),
                proxy=proxy_for(self._url),
            )
        return self._open_session
