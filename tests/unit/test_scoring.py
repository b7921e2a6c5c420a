"""Scores at tokens of the student's choice: the pieces that SGLang is asked for, unions, and replies that contradict.

R response tokens, k ids of the student's choice, V vocabulary.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import ServerError, TeacherError
from distill.packing import CONTENT_TYPE, pack, unpack
from distill.serving import scoring
from distill.serving.client import ServerClient
from distill.serving.packed import parse_packed, request_digest
from distill.serving.replies import Asked, union
from distill.serving.scoring import PIECE_ROWS, calls_of_pieces
from distill.serving.wire import BrokenReply
from distill.types import ScoreRequest, Signal, SignalSpec, Support

V, K = 23, 4
STUDENT, UNION = SignalSpec(Signal.TOPK, K, Support.STUDENT), SignalSpec(Signal.TOPK, K, Support.UNION)
Body = dict[str, Any]
Spoil = Callable[[Body, list[Body]], None]


def table(seed: int = 0) -> np.ndarray:
    """(V, V) float32: row i is log q(next | token i)."""
    logits = 2 * np.random.default_rng(seed).normal(size=(V, V))
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


TABLE = table()


def choices(rows: int, seed: int = 1) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.permuted(np.tile(np.arange(V, dtype=np.int32), (rows, 1)), axis=1)[:, :K]


def request(name: str, prompt_len: int, rows: int) -> ScoreRequest:
    ids = np.random.default_rng(rows).integers(0, V, prompt_len + rows).astype(np.int32)
    return ScoreRequest(name, ids, rows, choices(rows))


def rows_of(asked: ScoreRequest) -> np.ndarray:
    """(R, V): each token is predicted by the row of the token before it."""
    return TABLE[asked.input_ids[len(asked.input_ids) - asked.response_len - 1 : -1]]


def triples(values: np.ndarray, ids: Any) -> list[list[Any]]:
    return [[float(value), int(token), None] for value, token in zip(values, ids, strict=True)]


def as_sglang(body: Body) -> list[Body]:
    """What a server whose model is the table answers, in SGLang's nested form."""
    items: list[Body] = []
    lists = body.get("token_ids_logprob") or [None] * len(body["input_ids"])
    for ids, start, names in zip(body["input_ids"], body["logprob_start_len"], lists, strict=True):
        rows = TABLE[ids[start:-1]]
        meta: Body = {"prompt_tokens": len(ids), "weight_version": "v1", "finish_reason": {"type": "length"}}
        sampled = rows[np.arange(len(rows)), ids[start + 1 :]]
        meta["input_token_logprobs"] = [[None, ids[start], None], *triples(sampled, ids[start + 1 :])]
        if names is not None:
            meta["input_token_ids_logprobs"] = [None, *(triples(row[names], names) for row in rows)]
        if k := body["top_logprobs_num"]:
            best = np.argsort(-rows, axis=1)[:, :k]
            tops = [triples(row[ids], ids) for row, ids in zip(rows, best, strict=True)]
            meta["input_top_logprobs"] = [None, *tops]
        items.append({"meta_info": meta, "output_ids": []})
    return items


class Sglang:
    """A server that answers as SGLang does. `spoil` may change what it answers."""

    def __init__(self) -> None:
        self.seen: list[Body] = []
        self.spoil: Spoil = lambda _body, _items: None

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(body)
        items = as_sglang(body)
        self.spoil(body, items)
        return web.json_response(items)


Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]], Body], Awaitable[ServerClient]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    opened: list[Any] = []

    async def start(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], info: Body) -> ServerClient:
        async def get(request: web.Request) -> web.Response:
            about = {"version": "0.5.23", "vocab_size": V, "context_length": 200, **info}
            return web.json_response(about if request.path == "/server_info" else {"weight_version": "v1"})

        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.get("/{path}", get), web.post("/{path}", answer)])
        server = TestServer(app)
        await server.start_server()
        client = ServerClient(str(server.make_url("/")), name="algebra-0", timeout_s=30)
        opened.extend([client, server])
        return client

    yield start
    for thing in opened:
        await thing.close()


@pytest.fixture
async def sglang() -> Sglang:
    return Sglang()


@pytest.fixture
async def client(serve: Serve, sglang: Sglang) -> ServerClient:
    return await serve(sglang.answer, {})


REQUESTS = [request("long", 3, 2 * PIECE_ROWS + 5), request("short", 7, 1), request("even", 1, PIECE_ROWS)]


async def test_each_row_gets_the_scores_of_its_own_ids_from_a_server_that_knows_one_list(client: ServerClient) -> None:
    found = await client.score(REQUESTS, STUDENT, "algebra", "v1")
    for asked, scores in zip(REQUESTS, found, strict=True):
        rows, own = rows_of(asked), asked.student_ids
        assert own is not None and scores.topk_logprobs is not None and scores.log_tail is not None
        np.testing.assert_array_equal(scores.topk_ids, own)
        np.testing.assert_array_equal(scores.topk_logprobs, np.take_along_axis(rows, own.astype(int), 1))
        np.testing.assert_array_equal(scores.logprobs, rows[np.arange(len(rows)), asked.input_ids[-len(rows) :]])
        mass = np.exp(scores.topk_logprobs.astype(np.float64)).sum(1)
        np.testing.assert_allclose(mass + np.exp(scores.log_tail.astype(np.float64)), 1, atol=1e-6)


async def test_a_union_holds_both_models_ids_once_with_the_full_rows_values(client: ServerClient) -> None:
    found = await client.score(REQUESTS, UNION, "algebra", "v1")
    for asked, scores in zip(REQUESTS, found, strict=True):
        assert scores.topk_ids is not None and scores.topk_logprobs is not None and scores.log_tail is not None
        assert asked.student_ids is not None and scores.topk_ids.shape == (asked.response_len, 2 * K)
        for row, names, values, tail, own in zip(
            rows_of(asked), scores.topk_ids, scores.topk_logprobs, scores.log_tail, asked.student_ids, strict=True
        ):
            used = names[names >= 0]
            assert sorted(used.tolist()) == sorted({*own.tolist(), *np.argsort(-row)[:K].tolist()})
            np.testing.assert_array_equal(values[names >= 0], row[used])
            assert (values[names < 0] == -np.inf).all()
            rest = np.delete(row.astype(np.float64), used)
            np.testing.assert_allclose(np.exp(float(tail)), np.exp(rest).sum(), atol=1e-6)


async def test_the_piece_that_carries_the_whole_sequence_goes_before_the_others(
    client: ServerClient, sglang: Sglang
) -> None:
    await client.score(REQUESTS, STUDENT, "algebra", "v1")
    first, second = sglang.seen
    assert first["rid"] == [f"long#{2 * PIECE_ROWS}", "short#0", "even#0"]
    assert first["input_ids"] == [asked.input_ids.tolist() for asked in REQUESTS]
    assert second["rid"] == ["long#0", f"long#{PIECE_ROWS}"]
    assert second["logprob_start_len"] == [2, 2 + PIECE_ROWS]
    assert [len(ids) for ids in second["input_ids"]] == [3 + PIECE_ROWS, 3 + 2 * PIECE_ROWS]
    own = REQUESTS[0].student_ids
    assert own is not None
    assert second["token_ids_logprob"][1] == np.unique(own[PIECE_ROWS : 2 * PIECE_ROWS]).tolist()


async def test_the_answer_to_one_call_has_a_bounded_number_of_entries(
    client: ServerClient, sglang: Sglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CALL_ENTRIES", 2 * (PIECE_ROWS + 1) * (V + K))
    asked = [request(f"s{index}", 2, 3 * PIECE_ROWS) for index in range(4)]
    await client.score(asked, UNION, "algebra", "v1")
    assert [len(body["rid"]) for body in sglang.seen] == [2, 2, 2, 2, 2, 2]


async def test_the_students_ids_are_not_sent_for_other_supports(client: ServerClient, sglang: Sglang) -> None:
    await client.score(REQUESTS, SignalSpec(Signal.TOPK, K), "algebra", "v1")
    await client.score(REQUESTS, SignalSpec(Signal.SAMPLED), "algebra", "v1")
    assert len(sglang.seen) == 2 and not any("token_ids_logprob" in body for body in sglang.seen)


def other_version(_body: Body, items: list[Body]) -> None:
    items[0]["meta_info"]["weight_version"] = "v2"


def fewer_rows(_body: Body, items: list[Body]) -> None:
    items[0]["meta_info"]["input_token_ids_logprobs"].pop()


def other_ids(_body: Body, items: list[Body]) -> None:
    items[0]["meta_info"]["input_token_ids_logprobs"][1][0][1] ^= 1


def no_number(_body: Body, items: list[Body]) -> None:
    items[0]["meta_info"]["input_token_ids_logprobs"][1][0][0] = None


def too_much_mass(_body: Body, items: list[Body]) -> None:
    for entry in items[0]["meta_info"]["input_token_ids_logprobs"][1]:
        if entry[1] not in (6, 7):  # the response: its score is in the reply a second time
            entry[0] = -0.1


def no_scores_at_ids(_body: Body, items: list[Body]) -> None:
    del items[0]["meta_info"]["input_token_ids_logprobs"]


def two_scores_of_a_response_token(body: Body, items: list[Body]) -> None:
    meta, start = items[0]["meta_info"], body["logprob_start_len"][0]
    written = body["input_ids"][0][start + 1]
    for entry in meta["input_token_ids_logprobs"][1]:
        entry[0] -= 0.1 * (entry[1] == written)


@pytest.mark.parametrize(
    ("spoil", "complaint", "sample"),
    [
        (other_version, "weight version 'v2'", ""),
        (fewer_rows, "input_token_ids_logprobs has", "s"),
        (other_ids, "other ids", "s"),
        (no_number, "is null", "s"),
        (too_much_mass, "mass of", "s"),
        (no_scores_at_ids, "no input_token_ids_logprobs", "s"),
        (two_scores_of_a_response_token, "do not agree", "s"),
    ],
)
async def test_a_piece_that_breaks_a_rule_is_a_teacher_error_that_names_the_sample(
    client: ServerClient, sglang: Sglang, spoil: Spoil, complaint: str, sample: str
) -> None:
    ids = np.array([5, 6, 7], np.int32)
    asked = ScoreRequest("s", ids, 2, np.array([[6, 1, 2, 3], [7, 1, 2, 3]], np.int32))
    sglang.spoil = spoil
    with pytest.raises(TeacherError, match=r"teacher algebra: request s") as caught:
        await client.score([asked], STUDENT, "algebra", "v1")
    assert complaint in caught.value.what
    assert caught.value.sample_id == sample


@pytest.mark.parametrize(
    ("student_ids", "complaint"),
    [
        (None, "of shape (2, 4), and has none"),
        (np.zeros((2, 3), np.int32), "has those of shape (2, 3)"),
        (np.array([[0, 1, 2, 3], [0, 1, 2, V]], np.int32), f"outside the vocabulary of {V}"),
        (np.array([[0, 1, 2, 3], [0, 1, 2, -1]], np.int32), f"outside the vocabulary of {V}"),
        (np.array([[0, 1, 2, 3], [0, 1, 2, 2]], np.int32), "twice in a row"),
    ],
)
async def test_ids_that_cannot_be_scored_are_not_sent(
    client: ServerClient, sglang: Sglang, student_ids: np.ndarray | None, complaint: str
) -> None:
    with pytest.raises(ServerError, match="not sent: request s") as caught:
        await client.score([ScoreRequest("s", np.array([5, 6, 7], np.int32), 2, student_ids)], UNION, "t", "v1")
    assert complaint in caught.value.what
    assert sglang.seen == []


async def test_a_server_with_packed_replies_gets_the_ids_of_all_rows_as_one_array(serve: Serve) -> None:
    bodies: list[tuple[Body, dict[str, np.ndarray]]] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.content_type == CONTENT_TYPE
        body, arrays = unpack(await request.read())
        bodies.append((body, arrays))
        rows = np.concatenate([rows_of(asked) for asked in REQUESTS])
        written = np.concatenate([asked.input_ids[-asked.response_len :] for asked in REQUESTS])
        items = [
            {
                "id": asked.id,
                "prompt_tokens": len(asked.input_ids),
                "rows": asked.response_len,
                "weight_version": "v1",
                "digest": request_digest(asked.input_ids, asked.student_ids),
            }
            for asked in REQUESTS
        ]
        named = np.take_along_axis(rows, arrays["row_ids"].astype(int), 1)
        tail = np.log(1 - np.exp(named.astype(np.float64)).sum(1)).astype(np.float32)
        reply = {"logprobs": rows[np.arange(len(rows)), written], "row_logprobs": named, "log_tail": tail}
        return web.Response(body=pack({"items": items}, reply), content_type=CONTENT_TYPE)

    client = await serve(answer, {"program": "distill-embedded", "packed": True})
    found = await client.score(REQUESTS, STUDENT, "algebra", "v1")
    ((body, arrays),) = bodies
    assert body["top_logprobs_num"] == 0 and body["return_packed"] is True
    assert arrays["row_ids"].shape == (sum(asked.response_len for asked in REQUESTS), K)
    for asked, scores in zip(REQUESTS, found, strict=True):
        assert asked.student_ids is not None
        np.testing.assert_array_equal(scores.topk_ids, asked.student_ids)
        expected = np.take_along_axis(rows_of(asked), asked.student_ids.astype(int), 1)
        np.testing.assert_array_equal(scores.topk_logprobs, expected)


def test_a_packed_reply_about_other_ids_of_the_rows_is_refused() -> None:
    asked = Asked("s", np.array([1, 2], np.int32), 1, 0, V, "v1", row_ids=np.array([[3, 4]], np.int32), sample_id="s")
    item = {"id": "s", "prompt_tokens": 2, "rows": 1, "weight_version": "v1"}
    arrays = {name: np.full(shape, -2, np.float32) for name, shape in (("logprobs", 1), ("log_tail", 1))}
    arrays["row_logprobs"] = np.full((1, 2), -2, np.float32)
    good, other = (request_digest(asked.input_ids, np.array([[3, last]], np.int32)) for last in (4, 5))
    (scores,) = parse_packed(pack({"items": [item | {"digest": good}]}, arrays), [asked], "t")
    assert scores.row_logprobs is not None and scores.row_logprobs.shape == (1, 2)
    with pytest.raises(TeacherError, match="other tokens than those that were sent") as caught:
        parse_packed(pack({"items": [item | {"digest": other}]}, arrays), [asked], "t")
    assert (caught.value.sample_id, caught.value.teacher) == ("s", "t")
    arrays["row_logprobs"][:] = -0.1
    with pytest.raises(TeacherError, match="mass of"):
        parse_packed(pack({"items": [item | {"digest": good}]}, arrays), [asked], "t")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5 * PIECE_ROWS), st.integers(1, 5), st.integers(1, 400))
def test_pieces_cover_every_row_once_whatever_their_number_and_room(rows: int, prompt: int, room: int) -> None:
    asked = [
        Asked(
            name,
            np.zeros(prompt + length, np.int32),
            length,
            prompt - 1,
            V,
            "v1",
            row_ids=choices(length),
            sample_id=name,
        )
        for name, length in (("a", rows), ("b", 1))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "CALL_ENTRIES", room)
        pieces = [piece for call in calls_of_pieces(asked) for piece in call]
    covered = [(p.asked.sample_id, p.begin + row) for p in pieces for row in range(p.asked.response_len)]
    assert sorted(covered) == [("a", row) for row in range(rows)] + [("b", 0)]
    assert len({p.asked.id for p in pieces}) == len(pieces)
    for piece in pieces:
        # the first row that is asked for is the one that predicts the first token of the piece
        assert piece.asked.start == prompt - 1 + piece.begin
        assert len(piece.asked.input_ids) == piece.asked.start + 1 + piece.asked.response_len


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, V))
def test_a_union_is_the_set_of_both_with_the_values_of_the_row(seed: int, rows: int, k: int) -> None:
    random = np.random.default_rng(seed)
    logp = table(seed)[random.integers(0, V, rows)]
    logp[random.random((rows, V)) < 0.1] = -np.inf
    order = np.argsort(-logp, axis=1, kind="stable").astype(np.int32)
    teacher, student = order[:, :k], random.permuted(order, axis=1)[:, :k]
    values = (np.take_along_axis(logp, ids.astype(int), 1) for ids in (teacher, student))
    ids, found = union(teacher, next(values), student, next(values))
    for row, names, numbers, ours, theirs in zip(logp, ids, found, student, teacher, strict=True):
        used = names[names >= 0].tolist()
        assert len(used) == len(set(used)) and set(used) == {*ours.tolist(), *theirs.tolist()}
        np.testing.assert_array_equal(numbers, np.where(names >= 0, row[names], -np.inf))


def test_halves_of_a_union_that_contradict_one_another_are_refused() -> None:
    teacher, own = np.array([[3, 4]], np.int32), np.array([[4, 9]], np.int32)
    values = np.array([[-1.0, -2.0]], np.float32)
    union(teacher, values, own, np.array([[-2.0, -2.5]], np.float32))
    with pytest.raises(BrokenReply, match="two different scores"):
        union(teacher, values, own, np.array([[-2.1, -2.5]], np.float32))
    with pytest.raises(BrokenReply, match="more probable than the least"):
        union(teacher, values, own, np.array([[-2.0, -1.5]], np.float32))
