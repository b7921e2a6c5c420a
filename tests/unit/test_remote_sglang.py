"""A teacher behind a URL that speaks SGLang's API: the embedded server as a process of its own, and SGLang itself where
DISTILL_SGLANG_PYTHON names an interpreter that has it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from distill.config.models import TeacherConfig, TeacherManagerConfig
from distill.errors import ConfigError, ServerError, TeacherError
from distill.serving.client import ServerClient
from distill.teacher_manager.remote import RemoteTeacher, State
from distill.teacher_manager.remote_apis import open_remote
from distill.types import GenerateRequest, ScoreRequest, Signal, SignalSpec, Support
from tests.builders_serving import (
    CONTEXT,
    VOCAB,
    launcher,
    reference_greedy,
    reference_logprobs,
    save_tiny_llama,
)

SGLANG_PYTHON = os.environ.get("DISTILL_SGLANG_PYTHON")
PROGRAMS = [
    "embedded",
    pytest.param(
        "sglang",
        marks=[
            pytest.mark.sglang,
            pytest.mark.skipif(
                SGLANG_PYTHON is None, reason="DISTILL_SGLANG_PYTHON names no interpreter that has SGLang"
            ),
        ],
    ),
]
SAMPLED = SignalSpec(Signal.SAMPLED)
SPECS = [
    SAMPLED,
    SignalSpec(Signal.TOPK, 4),
    SignalSpec(Signal.TOPK, 4, Support.STUDENT),
    SignalSpec(Signal.TOPK, 4, Support.UNION),
    SignalSpec(Signal.FULL),
]


@dataclass(frozen=True)
class Served:
    url: str
    host: Any
    model: Path
    other: Path

    async def load(self, folder: Path, version: str) -> None:
        """As its owner may do at any time."""
        client = ServerClient(self.url, timeout_s=60)
        await client.load_weights(folder, version)
        await client.close()


@contextmanager
def serving(program: str, folder: Path) -> Generator[Served]:
    model, other = save_tiny_llama(folder / "model", seed=1), save_tiny_llama(folder / "other", seed=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = Path(SGLANG_PYTHON) if program == "sglang" and SGLANG_PYTHON else None
    host = launcher(program, model, folder / "logs", port=port, python=python)
    try:
        yield Served(host.start().url, host, model, other)
    finally:
        host.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("embedded", tmp_path_factory.mktemp("sglang")) as found:
        yield found


@pytest.fixture(scope="module", params=PROGRAMS)
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded server, or SGLang itself."""
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@asynccontextmanager
async def teacher(
    served: Served, spec: SignalSpec = SAMPLED, *, vocab_size: int = VOCAB, **changes: Any
) -> AsyncIterator[RemoteTeacher]:
    remote = open_remote(
        "math",
        TeacherConfig.model_validate({"url": served.url, "tokenizer": "/t"}),
        TeacherManagerConfig(),
        spec,
        vocab_size=vocab_size,
        canaries=None,
        on_event=changes.pop("on_event", lambda level, message: None),
        timeout_s=120,
    )
    try:
        yield remote
    finally:
        await remote.close()


def asked(spec: SignalSpec) -> list[ScoreRequest]:
    random = np.random.default_rng(0)
    return [
        ScoreRequest(
            f"sample-{at}",
            random.integers(3, VOCAB, 9 + at).astype(np.int32),
            5,
            np.stack([random.permutation(VOCAB)[:4] for _ in range(5)]).astype(np.int32) if spec.student_k else None,
        )
        for at in range(3)
    ]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.signal}-{spec.support}")
async def test_scores_of_every_signal_are_those_of_the_model(either: Served, spec: SignalSpec) -> None:
    requests = asked(spec)
    async with teacher(either, spec) as remote:
        found = await remote.score(requests, spec)
        assert (remote.context_length, remote.caps.max_k) == (CONTEXT, VOCAB)
    for request, scores in zip(requests, found, strict=True):
        rows_RV = reference_logprobs(either.model, request.input_ids)[-6:-1]
        np.testing.assert_allclose(scores.logprobs, rows_RV[np.arange(5), request.input_ids[-5:]], atol=1e-4)
        if scores.full_logprobs is not None:
            np.testing.assert_allclose(scores.full_logprobs, rows_RV, atol=1e-4)
        if scores.topk_ids is not None and scores.topk_logprobs is not None:
            used = scores.topk_ids >= 0
            expected = np.take_along_axis(rows_RV, np.maximum(scores.topk_ids, 0), 1)
            np.testing.assert_allclose(scores.topk_logprobs[used], expected[used], atol=1e-4)


async def test_a_teacher_writes_with_the_weights_of_the_first_look(either: Served) -> None:
    prompt = np.array([5, 9, 4], np.int32)
    async with teacher(either) as remote:
        await remote.start()
        (written,) = await remote.generate([GenerateRequest("g", prompt, 5, temperature=0.0)])
    np.testing.assert_array_equal(written.output_ids, reference_greedy(either.model, prompt, 5))


async def test_weights_that_change_during_a_run_are_an_error(either: Served) -> None:
    async with teacher(either) as remote:
        await remote.score(asked(SAMPLED), SAMPLED)
        try:
            await either.load(either.model, "v1")
            with pytest.raises(TeacherError, match="the reply comes from weight version 'v1', 'v0' was expected"):
                await remote.score(asked(SAMPLED), SAMPLED)
            with pytest.raises(TeacherError, match="holds the weights 'v1', and held 'v0' when the run first asked"):
                await remote.health()
        finally:
            await either.load(either.model, "v0")


async def test_another_model_under_the_same_version_is_noticed(either: Served) -> None:
    async with teacher(either) as remote:
        await remote.score(asked(SAMPLED), SAMPLED)
        try:
            await either.load(either.other, "v0")
            with pytest.raises(TeacherError, match=r"its canary moved by [\d.]+ nat"):
                await remote.score(asked(SAMPLED), SAMPLED)
        finally:
            await either.load(either.model, "v0")


async def test_a_vocabulary_that_does_not_fit_is_refused(either: Served) -> None:
    async with teacher(either, vocab_size=VOCAB + 1) as remote:
        with pytest.raises(ConfigError, match=rf"a vocabulary of {VOCAB} ids, and .*tokenizer one of {VOCAB + 1}"):
            await remote.start()


@pytest.mark.faults
async def test_a_server_that_is_killed_is_waited_for(served: Served) -> None:
    events: list[str] = []
    async with teacher(served, on_event=lambda level, message: events.append(message)) as remote:
        before = await remote.score(asked(SAMPLED), SAMPLED)
        port = int(served.url.rpartition(":")[2])
        listening = [
            each.pid for each in psutil.Process().children(recursive=True) for used in each.net_connections()
            if used.laddr and used.laddr.port == port
        ]  # fmt: skip
        os.kill(listening[0], signal.SIGKILL)
        after = await asyncio.wait_for(remote.score(asked(SAMPLED), SAMPLED), 120)
        assert remote.state is State.UP
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)
    assert len(events) == 2 and "it is looked at again until it is back" in events[0] and "is back" in events[1]


async def test_nobody_at_the_address_is_an_error_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    remote = open_remote(
        "math",
        TeacherConfig.model_validate({"url": f"http://127.0.0.1:{port}", "tokenizer": "/t"}),
        TeacherManagerConfig(),
        SAMPLED,
        vocab_size=VOCAB,
        canaries=None,
        on_event=lambda level, message: None,
        timeout_s=0.5,
    )
    with pytest.raises(ServerError, match=rf"teacher math \(http://127.0.0.1:{port}\) gave no answer within 0.5 s"):
        await remote.start()
    await remote.close()
