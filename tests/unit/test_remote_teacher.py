"""A teacher behind an OpenAI-compatible server: real HTTP, a real tiny model, and the ways in which servers fail."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.config.models import TeacherConfig, TeacherManagerConfig
from distill.errors import ConfigError, DistillError, ServerError, TeacherError
from distill.serving.openai import proxy_for
from distill.teacher_manager import CanaryStore
from distill.teacher_manager.remote import RemoteTeacher, State
from distill.teacher_manager.remote_apis import open_remote
from distill.types import GenerateRequest, ScoreRequest, Signal, SignalSpec, Support
from tests.builders_openai import NAME, Behaviour, OpenAIServer, openai_server
from tests.builders_serving import CONTEXT, EOS, VOCAB, reference_greedy, reference_logprobs, save_tiny_llama

SAMPLED, TOP4 = SignalSpec(Signal.SAMPLED), SignalSpec(Signal.TOPK, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return save_tiny_llama(root / "one", seed=1), save_tiny_llama(root / "two", seed=2)


@pytest.fixture(scope="module")
def running(models: tuple[Path, Path]) -> Iterator[OpenAIServer]:
    with openai_server(models[0]) as server:
        yield server


@pytest.fixture
def server(running: OpenAIServer, models: tuple[Path, Path]) -> Iterator[OpenAIServer]:
    """As it was started."""
    running.be = Behaviour()
    running.bodies.clear()
    running.most_in_flight = 0
    yield running
    running.serve(models[0])
    running.start()


@asynccontextmanager
async def teacher(
    server: OpenAIServer,
    spec: SignalSpec = TOP4,
    *,
    canaries: CanaryStore | None = None,
    timeout_s: float = 30.0,
    events: list[tuple[str, str]] | None = None,
    max_tries: int = 5,
    **settings: Any,
) -> AsyncIterator[RemoteTeacher]:
    config = TeacherConfig.model_validate({"url": server.url, "tokenizer": "/t", "api": "openai"} | settings)
    heard: list[tuple[str, str]] = [] if events is None else events
    remote = open_remote(
        "math",
        config,
        TeacherManagerConfig(max_tries=max_tries),
        spec,
        vocab_size=VOCAB,
        canaries=canaries,
        on_event=lambda level, message: heard.append((level, message)),
        timeout_s=timeout_s,
    )
    remote._first_pause_s = remote._pause_s = 0.01
    try:
        yield remote
    finally:
        await remote.close()


def requests(count: int = 3) -> list[ScoreRequest]:
    random = np.random.default_rng(0)
    lengths = [(int(random.integers(2, 12)), int(random.integers(1, 12))) for _ in range(count)]
    return [
        ScoreRequest(f"sample-{at}", random.integers(3, VOCAB, prompt + response).astype(np.int32), response)
        for at, (prompt, response) in enumerate(lengths)
    ]


def true_rows(folder: Path, request: ScoreRequest) -> np.ndarray:
    """(R, V): row t is about response token t."""
    return reference_logprobs(folder, request.input_ids)[-request.response_len - 1 : -1]


@pytest.mark.parametrize("style", ["vllm", "echo", "strict"])
@pytest.mark.parametrize("spec", [SAMPLED, TOP4], ids=["sampled", "topk"])
async def test_scores_are_those_of_the_model(
    server: OpenAIServer, models: tuple[Path, Path], style: str, spec: SignalSpec
) -> None:
    server.be.style = style
    async with teacher(server, spec) as remote:
        asked = requests()
        for request, scores in zip(asked, await remote.score(asked, spec), strict=True):
            rows_RV = true_rows(models[0], request)
            response = request.input_ids[-request.response_len :]
            assert scores.teacher == "math"
            np.testing.assert_allclose(scores.logprobs, rows_RV[np.arange(len(response)), response], atol=1e-5)
            if spec is SAMPLED:
                assert scores.topk_ids is None and scores.log_tail is None
                continue
            assert scores.topk_ids is not None and scores.topk_logprobs is not None and scores.log_tail is not None
            top = np.argsort(-rows_RV, axis=1)[:, :4]
            np.testing.assert_array_equal(scores.topk_ids, top)
            np.testing.assert_allclose(scores.topk_logprobs, np.take_along_axis(rows_RV, top, 1), atol=1e-5)
            left = 1 - np.exp(np.take_along_axis(rows_RV, top, 1).astype(np.float64)).sum(1)
            np.testing.assert_allclose(np.exp(scores.log_tail), left, atol=1e-5)


async def test_what_is_sent_is_what_vllm_takes(server: OpenAIServer) -> None:
    async with teacher(server) as remote:
        (request,) = requests(1)
        await remote.score([request], TOP4)
    body = server.bodies[-1]
    assert body.keys() == {"model", "prompt", "max_tokens", "prompt_logprobs", "temperature", "top_p"}
    assert (body["model"], body["max_tokens"], body["prompt_logprobs"], body["temperature"]) == (NAME, 1, 4, 1.0)
    canary, prompt = body["prompt"]
    assert prompt == request.input_ids.tolist() and len(canary) == 16


async def test_a_context_of_the_server_is_known_and_kept(server: OpenAIServer) -> None:
    async with teacher(server) as remote:
        await remote.start()
        assert (remote.context_length, remote.state) == (CONTEXT, State.UP)
        asked = len(server.bodies)
        with pytest.raises(ServerError, match=rf"sample-9 has {CONTEXT} tokens, and 1 come behind them; .* {CONTEXT}"):
            await remote.score([ScoreRequest("sample-9", np.full(CONTEXT, 3, np.int32), 4)], TOP4)
        with pytest.raises(ServerError, match=rf"outside the vocabulary of {VOCAB}"):
            await remote.score([ScoreRequest("sample-9", np.array([3, VOCAB], np.int32), 1)], TOP4)
        assert len(server.bodies) == asked


async def test_a_k_above_the_servers_limit_is_an_error_with_both_numbers(server: OpenAIServer) -> None:
    wide = SignalSpec(Signal.TOPK, 32)
    async with teacher(server, wide) as remote:
        with pytest.raises(
            ConfigError, match=r"http://127.* gives at most 20 ids a row, and 32 are asked for"
        ) as caught:
            await remote.start()
        assert "objective.k=20" in caught.value.fix and "--max-logprobs 32" in caught.value.fix
        with pytest.raises(ConfigError, match="at most 20"):  # and it stays one, without asking again
            await remote.score(requests(1), wide)
        assert remote.state is State.REFUSED


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        (SignalSpec(Signal.FULL), "the whole vocabulary at each token"),
        (SignalSpec(Signal.TOPK, 4, Support.STUDENT), "support=student_topk"),
        (SignalSpec(Signal.TOPK, 4, Support.UNION), "support=union"),
    ],
)
async def test_what_the_api_has_no_words_for_is_refused_before_anything_is_sent(
    server: OpenAIServer, spec: SignalSpec, asked: str
) -> None:
    with pytest.raises(ConfigError, match=rf"teachers.math: the objective asks for .*{asked}.*, and http"):
        async with teacher(server, spec):
            pass
    assert not server.bodies


@pytest.mark.parametrize(
    ("style", "says"),
    [
        ("text", "tells no log-probabilities of the tokens of a prompt with their ids"),
        ("none", "tells no log-probabilities of the tokens of a prompt with their ids"),
    ],
)
async def test_a_server_whose_tokens_are_texts_is_refused(server: OpenAIServer, style: str, says: str) -> None:
    server.be.style = style
    async with teacher(server) as remote:
        with pytest.raises(TeacherError, match=says):
            await remote.start()


async def test_rows_that_are_shifted_by_one_are_found_at_the_start(server: OpenAIServer) -> None:
    """The worst case: each row names its own token and says of it what the next row should."""
    server.be.shifted = True
    async with teacher(server) as remote:
        with pytest.raises(TeacherError, match=r"changed by [\d.]+ nat when that token alone was changed"):
            await remote.start()


@pytest.mark.parametrize(
    ("fault", "amount", "says"),
    [
        ("rows", 1, "prompt_logprobs has 17 rows, 16 tokens were sent"),
        ("rows", -1, "prompt_logprobs has 15 rows, 16 tokens were sent"),
        ("null_row", True, "row of response token 11 is null"),
        ("nan", True, "score of response token 11 is null"),
        ("zero_mass", True, "score of response token 11 is -inf"),
    ],
)
async def test_a_canary_that_cannot_be_right_is_the_teachers_fault(
    server: OpenAIServer, fault: str, amount: Any, says: str
) -> None:
    async with teacher(server) as remote:
        await remote.start()
        setattr(server.be, fault, amount)
        with pytest.raises(TeacherError, match=says) as caught:
            await remote.score(requests(1), TOP4)
        assert caught.value.sample_id == ""


@pytest.mark.parametrize("fault", ["null_row", "nan", "zero_mass"])
async def test_scores_that_cannot_be_right_are_the_fault_of_their_sample(server: OpenAIServer, fault: str) -> None:
    async with teacher(server) as remote:
        await remote.start()
        server.be.spared = 1
        setattr(server.be, fault, True)
        (request,) = requests(1)
        with pytest.raises(TeacherError, match="teacher math: request sample-0: ") as caught:
            await remote.score([request], TOP4)
        assert (caught.value.sample_id, caught.value.teacher, remote.state) == ("sample-0", "math", State.UP)
        setattr(server.be, fault, False)
        assert len(await remote.score([request], TOP4)) == 1


@pytest.mark.parametrize(
    "fault", [(429, {"Retry-After": "0"}), (500, {}), (503, {"Retry-After": "0"}), (502, {})], ids=lambda each: each[0]
)
async def test_a_server_that_is_busy_or_away_is_asked_again(
    server: OpenAIServer, models: tuple[Path, Path], fault: tuple[int, dict[str, str]]
) -> None:
    async with teacher(server) as remote:
        await remote.start()
        server.be.answers.extend([fault, fault])
        (request,) = requests(1)
        (scores,) = await remote.score([request], TOP4)
        response = request.input_ids[-request.response_len :]
        expected = true_rows(models[0], request)[np.arange(len(response)), response]
        np.testing.assert_allclose(scores.logprobs, expected, atol=1e-5)
        assert not server.be.answers and remote.state is State.UP


async def test_a_reply_that_breaks_off_is_asked_for_again(server: OpenAIServer) -> None:
    events: list[tuple[str, str]] = []
    async with teacher(server, events=events) as remote:
        await remote.start()
        server.be.cut = 1
        assert len(await remote.score(requests(1), TOP4)) == 1
    assert [level for level, _ in events] == ["warning", "info"]
    assert "gave no whole answer to /v1/completions" in events[0][1] and "is back after" in events[1][1]


async def test_the_tries_end_and_say_how_many_there_were(server: OpenAIServer) -> None:
    async with teacher(server, max_tries=3) as remote:
        await remote.start()
        server.be.answers.extend([(500, {})] * 9)
        with pytest.raises(ServerError, match=r"teacher math \(http.*HTTP 500: not now \(3 tries\)"):
            await remote.score(requests(1), TOP4)
        assert len(server.be.answers) == 6


async def test_a_pause_that_the_server_asks_for_is_kept(server: OpenAIServer) -> None:
    async with teacher(server, timeout_s=20.0) as remote:
        await remote.start()
        server.be.answers.append((429, {"Retry-After": "1"}))
        start = time.monotonic()
        await remote.score(requests(1), TOP4)
        assert time.monotonic() - start >= 1.0
        server.be.answers.append((429, {"Retry-After": "60"}))
        with pytest.raises(ServerError, match=r"1 try, and the deadline comes before a pause of 60.0 s"):
            await remote.score(requests(1), TOP4)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_what_no_try_can_cure_is_not_tried_again(server: OpenAIServer, status: int) -> None:
    async with teacher(server) as remote:
        await remote.start()
        server.be.answers.extend([(status, {})] * 2)
        with pytest.raises(ServerError, match=f"HTTP {status}: not now"):
            await remote.score(requests(1), TOP4)
        assert len(server.be.answers) == 1


async def test_a_server_that_hangs_meets_the_deadline(server: OpenAIServer) -> None:
    async with teacher(server) as remote:
        await remote.start()
        remote._timeout_s = 0.3
        server.be.delay_s = 3.0
        with pytest.raises(ServerError, match=r"teacher math \(http.*gave no answer within 0.3 s"):
            await remote.score(requests(1), TOP4)
        assert remote.state is State.DOWN


async def test_a_server_that_goes_away_is_waited_for(server: OpenAIServer, models: tuple[Path, Path]) -> None:
    events: list[tuple[str, str]] = []
    async with teacher(server, events=events) as remote:
        asked = requests(4)
        before = await remote.score(asked, TOP4)
        server.stop()
        waiting = asyncio.create_task(remote.score(asked, TOP4))
        while remote.state is not State.DOWN:
            await asyncio.sleep(0.01)
        server.serve(models[0])
        server.start()
        after = await waiting
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert remote.state is State.UP
    assert [level for level, _ in events] == ["warning", "info"]  # once each, though four were under way


async def test_a_server_that_stays_away_is_an_error_that_says_so(server: OpenAIServer) -> None:
    async with teacher(server) as remote:
        await remote.start()
        remote._timeout_s = 0.5
        server.stop()
        with pytest.raises(ServerError, match=r"gave no answer within 0.5 s and is down; last: .*\(http://127"):
            await remote.score(requests(1), TOP4)
        with pytest.raises(ServerError, match=r"gave no whole answer to /v1/"):
            await remote.health()


async def test_a_server_that_comes_back_with_another_model_is_noticed(
    server: OpenAIServer, models: tuple[Path, Path]
) -> None:
    async with teacher(server) as remote:
        await remote.score(requests(1), TOP4)
        server.stop()
        server.serve(models[1])
        server.start()
        with pytest.raises(TeacherError, match=r"its canary moved by [\d.]+ nat .* at most 0.05") as caught:
            await remote.score(requests(1), TOP4)
        assert caught.value.sample_id == "" and remote.state is State.REFUSED


async def test_another_model_is_noticed_though_no_connection_broke(
    server: OpenAIServer, models: tuple[Path, Path]
) -> None:
    """Behind one address may be several servers: the reply itself has to say whose it is."""
    async with teacher(server) as remote:
        await remote.score(requests(1), TOP4)
        server.serve(models[1])
        with pytest.raises(TeacherError, match="its canary moved"):
            await remote.score(requests(2), TOP4)
        server.serve(models[0])
        with pytest.raises(TeacherError, match="its canary moved"):  # once is enough
            await remote.score(requests(1), TOP4)


async def test_a_run_that_goes_on_compares_with_the_run_before(
    server: OpenAIServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    store = tmp_path / "canaries.json"
    async with teacher(server, canaries=CanaryStore(store)) as remote:
        await remote.start()
    assert list(json.loads(store.read_text())) == ["remote-math"]
    async with teacher(server, SAMPLED, canaries=CanaryStore(store)) as remote:
        await remote.start()  # another signal of the same model
    server.serve(models[1])
    async with teacher(server, canaries=CanaryStore(store)) as remote:
        with pytest.raises(TeacherError, match="its canary moved"):
            await remote.start()


async def test_whatever_fails_on_the_way_the_scores_are_the_models(
    server: OpenAIServer, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults drawn at random over overlapping calls: nothing is lost, mixed up or taken from a broken reply."""
    monkeypatch.setattr("distill.teacher_manager.remote.LONGEST_PAUSE_S", 0.1)
    random = np.random.default_rng(7)
    asked = requests(24)
    async with teacher(server, concurrency=6, max_tries=60) as remote:
        await remote.start()
        running = asyncio.create_task(remote.score(asked, TOP4))
        faults = [(429, {"Retry-After": "0"}), (500, {}), (502, {}), (503, {})]
        for _ in range(12):
            server.be.answers.append(faults[int(random.integers(len(faults)))])
            server.be.cut += int(random.integers(2))
            await asyncio.sleep(0.02)
        found = await running
    assert len(server.bodies) > 3 + len(asked), "no fault was met"
    for request, scores in zip(asked, found, strict=True):
        response = request.input_ids[-request.response_len :]
        expected = true_rows(models[0], request)[np.arange(len(response)), response]
        np.testing.assert_allclose(scores.logprobs, expected, atol=1e-5)


async def test_no_more_calls_are_under_way_than_were_allowed(server: OpenAIServer) -> None:
    async with teacher(server, concurrency=2) as remote:
        await remote.start()
        server.be.delay_s = 0.05
        first, second = await asyncio.gather(remote.score(requests(4), TOP4), remote.score(requests(3), TOP4))
        assert (len(first), len(second), server.most_in_flight) == (4, 3, 2)


async def test_the_first_error_ends_what_is_under_way(server: OpenAIServer) -> None:
    async with teacher(server, concurrency=1) as remote:
        await remote.start()
        asked = len(server.bodies)
        server.be.answers.append((400, {}))
        with pytest.raises(ServerError, match="HTTP 400"):
            await remote.score(requests(5), TOP4)
        assert len(server.bodies) - asked <= 2


async def test_a_key_goes_to_the_server_and_nowhere_else(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.be.key = "sk-right"
    with pytest.raises(ConfigError, match=r"teachers.math.api_key_env: the environment variable SECRET is not set"):
        async with teacher(server, api_key_env="SECRET"):
            pass
    monkeypatch.setenv("SECRET", "sk-wrong-one")
    async with teacher(server, api_key_env="SECRET", remote_model=NAME) as remote:
        with pytest.raises(DistillError, match=r"HTTP 401: wrong key: Bearer \*\*\*") as caught:
            await remote.start()
        assert "sk-wrong-one" not in f"{caught.value}{caught.value.__cause__}{vars(remote)}"
    monkeypatch.setenv("SECRET", "sk-right")
    async with teacher(server, api_key_env="SECRET") as remote:
        assert len(await remote.score(requests(1), TOP4)) == 1


async def test_which_model_is_asked(server: OpenAIServer) -> None:
    async with teacher(server, remote_model="other") as remote:
        with pytest.raises(ConfigError, match=f"serves {NAME}, and not 'other'"):
            await remote.start()
    server.be.lists_models = False
    async with teacher(server, remote_model=NAME) as remote:
        await remote.start()
        assert remote.context_length is None
    async with teacher(server) as remote:
        with pytest.raises(ServerError, match="/v1/models with HTTP 404"):
            await remote.start()


async def test_a_teacher_writes(server: OpenAIServer, models: tuple[Path, Path]) -> None:
    prompt = requests(1)[0].input_ids
    async with teacher(server) as remote:
        (written,) = await remote.generate([GenerateRequest("g", prompt, 6, temperature=0.0, stop_token_ids=(EOS,))])
        expected = reference_greedy(models[0], prompt, 6)
        np.testing.assert_array_equal(written.output_ids, expected[: len(written.output_ids)])
        assert written.finish_reason == "length" and len(written.output_ids) == 6
        with pytest.raises(ConfigError, match="cannot report 4 ids"):
            await remote.generate([GenerateRequest("g", prompt, 6, report_k=4)])


async def test_what_a_run_may_ask_for_is_told(server: OpenAIServer) -> None:
    async with teacher(server) as remote:
        assert remote.caps.signals == {Signal.SAMPLED, Signal.TOPK}
        assert (remote.caps.max_k, remote.caps.vocab_size, remote.caps.supports) == (4, VOCAB, {Support.TEACHER})
        for spec in (SignalSpec(Signal.FULL), SignalSpec(Signal.TOPK, 4, Support.STUDENT)):
            with pytest.raises(ConfigError, match=rf"cannot be asked for the signal {spec.signal.value}"):
                await remote.score(requests(1), spec)
    assert not server.bodies


def test_a_server_on_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert proxy_for("http://127.0.0.1:8000") is proxy_for("http://localhost:1") is proxy_for("http://[::1]:1") is None
    assert proxy_for("http://inside.example/v1") is None
    assert proxy_for("https://outside.example") == proxy_for("http://10.0.0.1") == "http://proxy:3128"


def self_signed(folder: Path) -> Path:
    """A PEM file with a key and a certificate."""
    files = [folder / "key.pem", folder / "cert.pem"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *kind, "-keyout", files[0], "-out", files[1]], check=True)
    (folder / "both.pem").write_text("".join(file.read_text() for file in files))
    return folder / "both.pem"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_a_certificate_that_nobody_vouches_for_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    with openai_server(models[0], self_signed(tmp_path)) as server:
        async with teacher(server) as remote:
            with pytest.raises(
                ServerError, match=r"teacher math \(https://127.*its certificate is not trusted: .*self"
            ):
                await remote.start()
    assert not server.bodies
