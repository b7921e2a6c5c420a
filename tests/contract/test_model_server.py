"""What every model server does, over every server program that starts on this machine.

SGLang lives in an environment of its own: set DISTILL_SGLANG_PYTHON to an interpreter that has it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from distill.errors import ServerError, TeacherError
from distill.serving.client import ServerClient
from distill.types import GenerateRequest, ScoreRequest, Signal, SignalSpec, Support
from tests.builders_serving import (
    CONTEXT,
    EOS,
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
RESTART_S = 120.0


@dataclass(frozen=True)
class Served:
    """A running server and the two checkpoints that it may be given."""

    program: str
    host: Any
    model: Path
    other: Path


@pytest.fixture(scope="module", params=PROGRAMS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(f"server-{request.param}")
    model, other = save_tiny_llama(folder / "model", seed=1), save_tiny_llama(folder / "other", seed=2)
    python = Path(SGLANG_PYTHON) if request.param == "sglang" and SGLANG_PYTHON else None
    host = launcher(request.param, model, folder / "logs", python=python)
    try:
        host.start()
        yield Served(request.param, host, model, other)
    finally:
        host.stop()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[ServerClient]:
    """A client of the server, which holds `served.model` as version v0."""
    address = served.host.address(RESTART_S)
    client = ServerClient(address.url, name=address.name, timeout_s=60)
    await client.load_weights(served.model, "v0")
    yield client
    await client.close()


def sequences() -> list[ScoreRequest]:
    """Three responses of different lengths, one of a single token; the largest id of the vocabulary is in one."""
    random = np.random.default_rng(5)
    requests = [
        ScoreRequest(f"s{i}", random.integers(3, VOCAB, length).astype(np.int32), response_len)
        for i, (length, response_len) in enumerate([(20, 12), (9, 1), (2, 1)])
    ]
    requests[0].input_ids[-2] = VOCAB - 1
    return requests


def rows_of(reference_NV: np.ndarray, request: ScoreRequest) -> tuple[np.ndarray, np.ndarray]:
    """(R, V) rows that predict the response, and the response's ids."""
    start = len(request.input_ids) - request.response_len
    return reference_NV[start - 1 : -1], request.input_ids[start:]


async def test_it_says_what_it_is(served: Served, client: ServerClient) -> None:
    info = await client.info()
    assert info.vocab_size == VOCAB
    assert info.context_length == CONTEXT
    assert info.weight_version == "v0"
    assert info.packed == (served.program == "embedded")


def test_only_a_server_of_ours_takes_weights_over_the_mesh(served: Served) -> None:
    mesh = served.host.address(RESTART_S).mesh
    assert (mesh is not None) == (served.program == "embedded")


def test_an_attached_server_is_found_with_its_mesh_and_left_running(served: Served, tmp_path: Path) -> None:
    address = served.host.address(RESTART_S)
    attached = launcher("attach", served.model, tmp_path, attach_url=address.url)
    assert (attached.start().url, attached.address(5).mesh) == (address.url, address.mesh)
    attached.stop()
    assert served.host.address(5) == address


async def test_a_seeded_sample_has_the_same_tokens_alone_and_in_company(served: Served, client: ServerClient) -> None:
    if served.program == "sglang":
        pytest.skip("SGLang ignores sampling_seed on a CPU: its deterministic mode has no backend there")
    requests = [GenerateRequest(f"g{i}", np.array([5], np.int32), 20, seed=i) for i in range(6)]
    together = [answer.output_ids.tolist() for answer in await client.generate(requests)]
    alone = [(await client.generate([request]))[0].output_ids.tolist() for request in requests]
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


async def test_greedy_answers_are_those_of_transformers(served: Served, client: ServerClient) -> None:
    prompts = [np.array(ids, np.int32) for ids in ([5, 9, 11], [7], [3, 60, 4, 8, 13, 21])]
    requests = [GenerateRequest(f"g{i}", ids, 10, temperature=0.0) for i, ids in enumerate(prompts)]
    for request, answer in zip(requests, await client.generate(requests), strict=True):
        expected = reference_greedy(served.model, request.input_ids, 10)
        stop = np.flatnonzero(expected == 2)
        expected = expected[: stop[0] + 1] if len(stop) else expected
        assert answer.id == request.id
        assert answer.output_ids.tolist() == expected.tolist()
        assert answer.finish_reason == ("stop" if len(stop) else "length")
        assert answer.versions == ("v0",) * len(expected)
        whole = np.concatenate([request.input_ids, answer.output_ids])
        rows = reference_logprobs(served.model, whole)[len(request.input_ids) - 1 : -1]
        np.testing.assert_allclose(answer.logprobs, rows[np.arange(len(expected)), expected], atol=1e-4)


async def test_an_answer_ends_with_the_stop_id_that_ended_it(served: Served, client: ServerClient) -> None:
    prompt = np.array([5, 9, 11], np.int32)
    third = int(reference_greedy(served.model, prompt, 3)[2])
    (answer,) = await client.generate([GenerateRequest("g", prompt, 10, temperature=0.0, stop_token_ids=(third,))])
    assert answer.finish_reason == "stop"
    assert answer.output_ids[-1] == third
    assert third not in answer.output_ids[:-1]


async def test_sampled_scores_are_those_of_transformers(served: Served, client: ServerClient) -> None:
    requests = sequences()
    found = await client.score(requests, SignalSpec(Signal.SAMPLED), "algebra", "v0")
    for request, scores in zip(requests, found, strict=True):
        rows, ids = rows_of(reference_logprobs(served.model, request.input_ids), request)
        assert scores.teacher == "algebra"
        assert scores.logprobs.dtype == np.float32
        np.testing.assert_allclose(scores.logprobs, rows[np.arange(len(ids)), ids], atol=1e-5)
        assert scores.topk_ids is None and scores.full_logprobs is None


async def test_top_k_scores_are_those_of_transformers_with_the_mass_beside_them(
    served: Served, client: ServerClient
) -> None:
    requests = sequences()
    found = await client.score(requests, SignalSpec(Signal.TOPK, 5), "algebra", "v0")
    for request, scores in zip(requests, found, strict=True):
        rows, ids = rows_of(reference_logprobs(served.model, request.input_ids), request)
        order = np.argsort(-rows, axis=1, kind="stable")[:, :5]
        assert scores.topk_ids is not None and scores.topk_logprobs is not None and scores.log_tail is not None
        np.testing.assert_array_equal(scores.topk_ids, order)
        np.testing.assert_allclose(scores.topk_logprobs, np.take_along_axis(rows, order, 1), atol=1e-5)
        tail = 1 - np.exp(np.take_along_axis(rows, order, 1).astype(np.float64)).sum(1)
        np.testing.assert_allclose(np.exp(scores.log_tail), tail, atol=1e-5)
        np.testing.assert_allclose(scores.logprobs, rows[np.arange(len(ids)), ids], atol=1e-5)


def long_sequences(k: int) -> list[ScoreRequest]:
    """Responses longer than a request for one piece of their rows, and one token, with k random ids for each row."""
    random = np.random.default_rng(6)
    return [
        ScoreRequest(
            f"c{length}",
            random.integers(3, VOCAB, length).astype(np.int32),
            rows,
            random.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (rows, 1)), axis=1)[:, :k],
        )
        for length, rows in [(60, 41), (20, 16), (9, 1)]
    ]


async def test_scores_at_ids_of_the_students_choice_are_those_of_transformers(
    served: Served, client: ServerClient
) -> None:
    requests = long_sequences(5)
    found = await client.score(requests, SignalSpec(Signal.TOPK, 5, Support.STUDENT), "algebra", "v0")
    for request, scores in zip(requests, found, strict=True):
        rows, ids = rows_of(reference_logprobs(served.model, request.input_ids), request)
        assert request.student_ids is not None
        assert scores.topk_ids is not None and scores.topk_logprobs is not None and scores.log_tail is not None
        np.testing.assert_array_equal(scores.topk_ids, request.student_ids)
        named = np.take_along_axis(rows, request.student_ids.astype(np.intp), 1)
        np.testing.assert_allclose(scores.topk_logprobs, named, atol=1e-5)
        whole = np.exp(scores.topk_logprobs.astype(np.float64)).sum(1) + np.exp(scores.log_tail.astype(np.float64))
        np.testing.assert_allclose(whole, 1, atol=1e-5)
        np.testing.assert_allclose(scores.logprobs, rows[np.arange(len(ids)), ids], atol=1e-5)


async def test_a_union_names_the_ids_of_both_models_once(served: Served, client: ServerClient) -> None:
    requests = long_sequences(5)
    found = await client.score(requests, SignalSpec(Signal.TOPK, 5, Support.UNION), "algebra", "v0")
    shared = 0
    for request, scores in zip(requests, found, strict=True):
        rows, _ = rows_of(reference_logprobs(served.model, request.input_ids), request)
        assert request.student_ids is not None
        assert scores.topk_ids is not None and scores.topk_logprobs is not None and scores.log_tail is not None
        assert scores.topk_ids.shape == scores.topk_logprobs.shape == (request.response_len, 10)
        for row, names, values, tail, students in zip(
            rows, scores.topk_ids, scores.topk_logprobs, scores.log_tail, request.student_ids, strict=True
        ):
            used = names[names >= 0]
            assert sorted(used) == sorted({*students.tolist(), *np.argsort(-row, kind="stable")[:5].tolist()})
            np.testing.assert_allclose(values[names >= 0], row[used], atol=1e-5)
            assert (values[names < 0] == -np.inf).all()
            assert abs(np.exp(row[used].astype(np.float64)).sum() + np.exp(float(tail)) - 1) < 1e-5
            shared += int((names < 0).sum())
    assert shared > 0, "the two never name the same id: nothing was tested"


async def test_written_tokens_come_with_the_most_probable_ids_before_temperature_and_cuts(
    served: Served, client: ServerClient
) -> None:
    prompts = [np.array(ids, np.int32) for ids in ([5, 9, 11], [7], [3, 60, 4, 8, 13, 21])]
    requests = [
        GenerateRequest("hot", prompts[0], 20, temperature=1.3, report_k=4),
        GenerateRequest("cold", prompts[1], 20, temperature=0.6, top_p=0.5, top_k=2, seed=1, report_k=6),
        GenerateRequest("greedy", prompts[2], 20, temperature=0.0, report_k=1),
        GenerateRequest("none", prompts[2], 20),
    ]
    *answers, plain = await client.generate(requests)
    assert plain.topk_ids is None
    for request, answer in zip(requests, answers, strict=False):
        whole = np.concatenate([request.input_ids, answer.output_ids])
        rows = reference_logprobs(served.model, whole)[len(request.input_ids) - 1 : -1]
        assert answer.topk_ids is not None and answer.topk_ids.dtype == np.int32
        np.testing.assert_array_equal(answer.topk_ids, np.argsort(-rows, axis=1, kind="stable")[:, : request.report_k])


async def test_full_scores_are_those_of_transformers_in_vocabulary_order(served: Served, client: ServerClient) -> None:
    requests = sequences()
    found = await client.score(requests, SignalSpec(Signal.FULL), "algebra", "v0")
    for request, scores in zip(requests, found, strict=True):
        rows, _ = rows_of(reference_logprobs(served.model, request.input_ids), request)
        assert scores.full_logprobs is not None
        assert scores.full_logprobs.shape == (request.response_len, VOCAB)
        np.testing.assert_allclose(scores.full_logprobs, rows, atol=1e-5)


async def test_new_weights_from_disk_change_the_version_and_the_scores(served: Served, client: ServerClient) -> None:
    request = sequences()[0]
    rows, ids = rows_of(reference_logprobs(served.other, request.input_ids), request)
    await client.load_weights(served.other, "v1")
    (scores,) = await client.score([request], SignalSpec(Signal.SAMPLED), "t", "v1")
    assert (await client.info()).weight_version == "v1"
    np.testing.assert_allclose(scores.logprobs, rows[np.arange(len(ids)), ids], atol=1e-5)
    (answer,) = await client.generate([GenerateRequest("g", np.array([5], np.int32), 2, temperature=0.0)])
    assert set(answer.versions) == {"v1"}


async def test_a_model_with_another_vocabulary_is_scored_over_its_own(served: Served, client: ServerClient) -> None:
    if served.program != "embedded":
        pytest.skip("SGLang counts all rows of the head")
    request = ScoreRequest("s", np.array([5, 6, 7, 8], np.int32), 2)
    await client.load_weights(served.other, "v1", VOCAB - 4)
    assert (await client.info()).vocab_size == VOCAB - 4
    (fewer,) = await client.score([request], SignalSpec(Signal.FULL), "t", "v1")
    await client.load_weights(served.other, "v2", VOCAB)
    assert (await client.info()).vocab_size == VOCAB
    (all_of_them,) = await client.score([request], SignalSpec(Signal.FULL), "t", "v2")
    assert fewer.full_logprobs is not None and all_of_them.full_logprobs is not None
    kept = all_of_them.full_logprobs[:, : VOCAB - 4]
    normalised = kept - np.log(np.exp(kept.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(fewer.full_logprobs, normalised, atol=1e-5)
    with pytest.raises(TeacherError, match=rf"head has \d+ rows, but the vocabulary is said to have {VOCAB + 900}"):
        await client.load_weights(served.other, "v3", VOCAB + 900)
    assert (await client.info()).vocab_size == VOCAB, "what cannot be served changes nothing"


async def test_scores_of_another_version_than_the_expected_one_are_refused(client: ServerClient) -> None:
    with pytest.raises(TeacherError, match=r"algebra.*s0.*version 'v0'.*'v7'"):
        await client.score(sequences()[:1], SignalSpec(Signal.SAMPLED), "algebra", "v7")


async def test_a_folder_without_weights_is_refused_by_name(client: ServerClient, tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="nothing-here"):
        await client.load_weights(tmp_path / "nothing-here", "v1")


async def test_checksums_follow_the_weights(served: Served, client: ServerClient) -> None:
    first = await client.checksums()
    await client.load_weights(served.other, "v1")
    second = await client.checksums()
    await client.load_weights(served.model, "v2")
    assert first.keys() == second.keys() and len(first) > 5
    assert any(first[name] != second[name] for name in first)
    assert await client.checksums() == first


@pytest.mark.parametrize(
    ("ids", "new_tokens", "complaint"),
    [
        ([], 1, "no tokens"),
        ([5, VOCAB], 1, f"token id {VOCAB}"),
        ([-1, 5], 1, "token id -1"),
        ([5] * CONTEXT, 1, "context length"),
    ],
)
async def test_a_bad_request_is_refused_before_it_is_sent_and_hurts_nobody(
    client: ServerClient, ids: list[int], new_tokens: int, complaint: str
) -> None:
    good = GenerateRequest("good", np.array([5], np.int32), 1)
    with pytest.raises(ServerError, match=f"not sent: request bad.*{complaint}"):
        await client.generate([good, GenerateRequest("bad", np.array(ids, np.int32), new_tokens)])
    assert len(await client.generate([good])) == 1


async def test_a_paused_server_keeps_its_requests_and_goes_on_with_them(client: ServerClient) -> None:
    await client.pause("in_place")
    waiting = asyncio.create_task(client.generate([GenerateRequest("g", np.array([5], np.int32), 4, temperature=0.0)]))
    finished, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not finished
    await client.resume()
    (answer,) = await waiting
    assert answer.finish_reason in ("length", "stop") and len(answer.output_ids) > 0


def _prompt_without_end(model: Path) -> np.ndarray:
    """A prompt whose greedy answer is still going at 100 tokens: only an abort can cut it shorter."""
    prompts = (np.array([first], np.int32) for first in range(3, VOCAB))
    return next(ids for ids in prompts if EOS not in reference_greedy(model, ids, 100))


async def test_an_aborted_request_answers_with_what_it_has_and_the_others_go_on(
    served: Served, client: ServerClient
) -> None:
    prompt = _prompt_without_end(served.model)
    requests = [GenerateRequest(f"long{i}", prompt, 100, temperature=0.0) for i in range(8)]
    for delay in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):  # it has to be running when the abort arrives
        waiting = asyncio.create_task(client.generate(requests))
        await asyncio.sleep(delay)
        await client.abort("long3")
        answers = await waiting
        if answers[3].finish_reason == "abort":
            break
    assert answers[3].finish_reason == "abort"
    assert len(answers[3].output_ids) == len(answers[3].logprobs) < 100
    assert [len(answer.output_ids) for answer in answers if answer.id != "long3"] == [100] * 7


async def test_pausing_with_abort_ends_what_runs(served: Served, client: ServerClient) -> None:
    prompt = _prompt_without_end(served.model)
    requests = [GenerateRequest(f"g{i}", prompt, 100, temperature=0.0) for i in range(32)]
    for delay in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        waiting = asyncio.create_task(client.generate(requests))
        await asyncio.sleep(delay)
        await client.pause("abort")
        await client.resume()  # what arrived during the pause is not aborted, it waits
        answers = await waiting
        if any(answer.finish_reason == "abort" for answer in answers):
            break
    assert {answer.finish_reason for answer in answers} <= {"abort", "length"}
    aborted = [answer for answer in answers if answer.finish_reason == "abort"]
    assert aborted, "no request was aborted"
    assert all(len(answer.output_ids) < 100 for answer in aborted)


@pytest.mark.faults
async def test_a_killed_server_is_an_error_for_its_client_and_comes_back_as_a_new_incarnation(served: Served) -> None:
    before = served.host.address(RESTART_S)
    client = ServerClient(before.url, name=before.name, timeout_s=30)
    await client.wait_ready(30)
    process = _listener(before.url)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(ServerError, match=before.name):
        for _ in range(200):
            await client.generate([GenerateRequest("g", np.array([5], np.int32), 4)])
    await client.close()

    after = await asyncio.to_thread(served.host.address, RESTART_S)
    assert after.incarnation == before.incarnation + 1
    client = ServerClient(after.url, name=after.name, timeout_s=30)
    (answer,) = await client.generate([GenerateRequest("g", np.array([5], np.int32), 4, temperature=0.0)])
    assert set(answer.versions) == {"v0"}
    await client.close()


def _listener(url: str) -> psutil.Process:
    """Our child that listens on the port of `url`."""
    port = int(url.rpartition(":")[2])
    (found,) = [
        child
        for child in psutil.Process().children()
        if any(socket.status == psutil.CONN_LISTEN and socket.laddr.port == port for socket in child.net_connections())
    ]
    return found


@pytest.mark.faults
def test_stop_ends_the_whole_tree(served: Served, tmp_path: Path) -> None:
    python = Path(SGLANG_PYTHON) if served.program == "sglang" and SGLANG_PYTHON else None
    host = launcher(served.program, served.model, tmp_path, python=python, index=1)
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    host.start()
    tree = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
    assert tree
    host.stop()
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert not alive
    with pytest.raises(ServerError, match="was stopped"):
        host.address(1)
