"""The client against servers that are silent, refuse, or answer as SGLang does but the embedded server does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from distill.errors import ServerError, TeacherError
from distill.serving.client import ServerClient
from distill.serving.describe import describe_server
from distill.types import GenerateRequest, ScoreRequest, Signal, SignalSpec

SGLANG = {"version": "0.5.23", "vocab_size": 4, "context_length": 16}
PACKED = SGLANG | {"program": "distill-embedded", "packed": True}
Handler = Callable[[dict[str, Any]], Awaitable[web.Response]]
Serve = Callable[..., Awaitable[ServerClient]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server whose POST routes all answer by one handler; gives a client of it."""
    opened: list[Any] = []

    async def start(handler: Handler, *, info: dict[str, Any] = SGLANG, timeout_s: float = 30.0) -> ServerClient:
        async def post(request: web.Request) -> web.Response:
            return await handler(await request.json())

        async def get(request: web.Request) -> web.Response:
            return web.json_response(info if request.path == "/server_info" else {"weight_version": "v1"})

        app = web.Application()
        app.add_routes([web.get("/{path}", get), web.post("/{path}", post)])
        server = TestServer(app)
        await server.start_server()
        client = ServerClient(str(server.make_url("/")), name="algebra-0", timeout_s=timeout_s)
        opened.extend([client, server])
        return client

    yield start
    for thing in opened:
        await thing.close()


def answering(status: int, body: Any) -> Handler:
    async def handler(_request: dict[str, Any]) -> web.Response:
        return web.json_response(body, status=status)

    return handler


REQUEST = GenerateRequest("g", np.array([1, 2], np.int32), 3)
SCORE = ScoreRequest("s", np.array([1, 2, 3], np.int32), 2)


async def test_a_silent_server_is_named_with_what_was_awaited_and_for_how_long(serve: Serve) -> None:
    async def silent(_request: dict[str, Any]) -> web.Response:
        await asyncio.sleep(20)
        return web.Response()

    client = await serve(silent, timeout_s=0.2)
    with pytest.raises(ServerError, match=r"waited 0.2 s for 1 answers to /generate from algebra-0 \(http://"):
        await client.generate([REQUEST])


async def test_a_server_that_is_not_there_is_named(serve: Serve) -> None:
    client = ServerClient("http://127.0.0.1:9", name="algebra-0")
    with pytest.raises(ServerError, match=r"algebra-0 \(http://127.0.0.1:9\) gave no answer to /server_info"):
        await client.info()
    with pytest.raises(ServerError, match=r"not ready after 0.2 s"):
        await client.wait_ready(0.2)
    await client.close()


@pytest.mark.parametrize(
    "body", [{"error": {"message": "too long"}}, {"message": "too long"}, {"detail": "too long"}, {"error": "too long"}]
)
async def test_a_refusal_is_passed_on_in_the_servers_words(serve: Serve, body: Any) -> None:
    client = await serve(answering(400, body))
    with pytest.raises(ServerError, match="HTTP 400: too long"):
        await client.generate([REQUEST])


@pytest.mark.parametrize(
    "body",
    [{"error": {"message": "too long", "why": "w", "fix": "f"}}, {"message": "too long", "why": "w", "fix": "f"}],
)
async def test_a_servers_reason_and_remedy_become_those_of_the_error(serve: Serve, body: Any) -> None:
    client = await serve(answering(500, body))
    with pytest.raises(ServerError) as caught:
        await client.generate([REQUEST])
    assert caught.value.what.endswith("HTTP 500: too long")
    assert (caught.value.why, caught.value.fix) == ("w", "f")
    with pytest.raises(TeacherError) as refused:
        await client.load_weights(Path("/models/x"), "v2")
    assert (refused.value.why, refused.value.fix) == ("w", "f")


@pytest.mark.parametrize("status", [200, 400])
async def test_weights_that_were_not_loaded_are_a_teacher_error(serve: Serve, status: int) -> None:
    client = await serve(answering(status, {"success": False, "message": "no such file"}))
    with pytest.raises(TeacherError, match=r"did not load /models/x: no such file"):
        await client.load_weights(Path("/models/x"), "v2")


async def test_a_batch_travels_as_one_request_with_the_seed_of_each_sample(serve: Serve) -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: dict[str, Any]) -> web.Response:
        seen.append(request)
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "v1", "output_token_logprobs": [[-1.0, 3, None]]}
        return web.json_response([{"output_ids": [3], "meta_info": meta}] * 2)

    client = await serve(handler)
    answers = await client.generate([REQUEST, GenerateRequest("h", np.array([3], np.int32), 1, 0.5, 0.9, 2, (3,), 7)])
    assert [answer.id for answer in answers] == ["g", "h"]
    (request,) = seen
    assert request["input_ids"] == [[1, 2], [3]]
    assert request["rid"] == ["g", "h"]
    assert request["return_logprob"] is True
    assert "sampling_seed" not in request["sampling_params"][0]
    assert request["sampling_params"][1] == {
        "max_new_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 2,
        "stop_token_ids": [3],
        "sampling_seed": 7,
    }


def nested(top_logp: list[list[float]], top_ids: list[list[int]]) -> dict[str, Any]:
    """What SGLang answers to SCORE."""
    rows = [[[p, i, None] for p, i in zip(row, ids, strict=True)] for row, ids in zip(top_logp, top_ids, strict=True)]
    meta = {
        "weight_version": "v1",
        "prompt_tokens": 3,
        "input_token_logprobs": [[None, 1, None], [-1.5, 2, None], [-2.0, 0, None]],  # id 3 = V-1 comes back as 0
        "input_top_logprobs": [None, *rows],
    }
    return {"meta_info": meta, "output_ids": []}


async def test_a_full_row_is_asked_for_as_the_largest_top_k_and_put_in_vocabulary_order(serve: Serve) -> None:
    seen: list[dict[str, Any]] = []
    values = np.log([[0.4, 0.3, 0.2, 0.1], [0.5, 0.25, 0.15, 0.1]]).astype(np.float32)

    async def handler(request: dict[str, Any]) -> web.Response:
        seen.append(request)
        return web.json_response([nested(values.tolist(), [[2, 0, 3, 1], [1, 3, 2, 0]])])

    client = await serve(handler)
    (scores,) = await client.score([SCORE], SignalSpec(Signal.FULL), "algebra", "v1")
    assert (seen[0]["top_logprobs_num"], seen[0]["logprob_start_len"]) == (4, [0])
    assert "return_packed" not in seen[0]
    assert scores.full_logprobs is not None
    np.testing.assert_array_equal(scores.full_logprobs, [values[0, [1, 3, 0, 2]], values[1, [3, 0, 2, 1]]])
    assert scores.topk_ids is None and scores.log_tail is None
    assert scores.logprobs.tolist() == [-1.5, -2.0]


async def test_a_server_that_promised_packed_replies_and_sends_json_is_refused(serve: Serve) -> None:
    client = await serve(answering(200, [nested([[-1.0], [-1.0]], [[0], [0]])]), info=PACKED)
    with pytest.raises(TeacherError, match="application/json, not packed"):
        await client.score([SCORE], SignalSpec(Signal.TOPK, 1), "algebra", "v1")


@pytest.mark.parametrize(
    ("request_", "spec", "complaint"),
    [
        (SCORE, SignalSpec(Signal.TOPK, 5), "top-5 of a vocabulary of 4"),
        (SCORE, SignalSpec(Signal.TOPK, 0), "top-0"),
        (ScoreRequest("s", np.array([1, 2], np.int32), 2), SignalSpec(Signal.SAMPLED), "response of 2 among 2"),
        (ScoreRequest("s", np.array([1, 2], np.int32), 0), SignalSpec(Signal.SAMPLED), "response of 0 among 2"),
        (ScoreRequest("s", np.array([1, 4], np.int32), 1), SignalSpec(Signal.SAMPLED), "token id 4"),
        (ScoreRequest("s", np.zeros(17, np.int32), 1), SignalSpec(Signal.SAMPLED), "context length of 16"),
    ],
)
async def test_a_scoring_request_that_cannot_be_right_is_not_sent(
    serve: Serve, request_: ScoreRequest, spec: SignalSpec, complaint: str
) -> None:
    client = await serve(answering(500, {"message": "it was sent"}))
    with pytest.raises(ServerError, match="not sent") as caught:
        await client.score([request_], spec, "algebra", "v1")
    assert complaint in caught.value.what


@pytest.mark.parametrize(
    ("program", "ranks", "expected"),
    [
        ("distill-embedded", [{"w": "aa"}], {"w": "aa"}),
        ("sglang", [{"w": "aa"}], {"sglang/w": "aa"}),
        ("sglang", [{"w": "aa"}, {"w": "bb"}], {"sglang/rank0/w": "aa", "sglang/rank1/w": "bb"}),
    ],
)
async def test_checksums_keep_ranks_apart_and_other_programs_digests_from_those_of_files(
    serve: Serve, program: str, ranks: list[dict[str, str]], expected: dict[str, str]
) -> None:
    answer = {"success": True, "ranks": [{"checksums": checksums} for checksums in ranks]}
    client = await serve(answering(200, answer), info={**SGLANG, "program": program})
    assert await client.checksums() == expected


def test_sglang_is_described_with_the_help_of_its_models_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "x", "text_config": {"vocab_size": 99, "max_position_embeddings": 40}})
    )
    model = {"model_path": str(tmp_path), "weight_version": "v5"}
    info = describe_server({"version": "0.5.23", "weight_version": "v0", "context_length": None}, model, "s")
    assert (info.program, info.vocab_size, info.context_length, info.packed) == ("sglang", 99, 40, False)
    assert info.weight_version == "v5"
    assert describe_server({"context_length": 20}, model, "s").context_length == 20


def test_a_server_that_does_not_tell_its_vocabulary_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"s does not tell its vocabulary size, and .*config.json"):
        describe_server({}, {"model_path": str(tmp_path)}, "s")
