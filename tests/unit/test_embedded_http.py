"""The routes: SGLang's JSON, packed scores, streams, bad requests, weights, memory."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import math
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from distill import packing
from tests.builders_embedded import (
    CONTEXT,
    CPU32,
    EOS,
    VOCAB,
    Server,
    prompt,
    reference,
    reference_rows,
    running_server,
    save_model,
)

GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "b", seed=1)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Server]:
    """For tests that leave the server as they found it."""
    with running_server(folder) as server:
        yield server


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    """For tests that change the server."""
    with running_server(folder) as server:
        yield server


def score_body(ids: Any, **extra: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, **extra}


def packed(server: Server, ids: Any, **extra: Any) -> tuple[Any, dict[str, np.ndarray]]:
    status, raw, kind = server.call("POST", "/generate", score_body(ids, return_packed=True, **extra))
    assert (status, kind) == (200, packing.CONTENT_TYPE), raw
    return packing.unpack(raw)


def greedy(server: Server, ids: list[int], new: int = 8) -> list[int]:
    return server.generate(ids, sampling_params={**GREEDY, "max_new_tokens": new})["output_ids"]


def expected_greedy(folder: Path, ids: list[int], new: int = 8) -> list[int]:
    whole = reference(folder).generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return whole[0, len(ids) :].tolist()


# --- generate ------------------------------------------------------------------------------------------------------


def test_a_scored_prompt_has_the_shape_that_sglang_gives_it(shared: Server, folder: Path) -> None:
    ids = prompt(6)
    body = score_body(ids, logprob_start_len=0, top_logprobs_num=8, token_ids_logprob=[1, 2, 3])
    body["sampling_params"] = {"max_new_tokens": 1, **GREEDY}
    status, reply = shared.post("/generate", body)
    assert status == 200
    meta = reply["meta_info"]
    rows = reference_rows(reference(folder), ids + reply["output_ids"])
    first, *rest = meta["input_token_logprobs"]
    assert first == [None, ids[0], None]
    assert [entry[1:] for entry in rest] == [[i, None] for i in ids[1:]]
    assert np.allclose([entry[0] for entry in rest], rows[np.arange(5), ids[1:]], atol=1e-5)
    assert meta["input_top_logprobs"][0] is None and [len(row) for row in meta["input_top_logprobs"][1:]] == [8] * 5
    assert meta["input_token_ids_logprobs"][0] is None
    for t, row in enumerate(meta["input_token_ids_logprobs"][1:]):
        assert [entry[1] for entry in row] == [1, 2, 3]
        assert np.allclose([entry[0] for entry in row], rows[t, 1:4], atol=1e-5)
    (value, token, text), *none = meta["output_token_logprobs"]
    assert none == [] and text is None and token == reply["output_ids"][0] == int(rows[5].argmax())
    assert abs(value - rows[5, token]) < 1e-5
    assert meta["output_top_logprobs"][0][0][1] == token and len(meta["output_token_ids_logprobs"][0]) == 3
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 1}]
    expected = {"prompt_tokens": 6, "completion_tokens": 1, "cached_tokens": 0, "weight_version": "v0"}
    assert {key: meta[key] for key in expected} == expected
    assert meta["finish_reason"] == {"type": "length", "length": 1} and meta["output_token_logprobs_length"] == 1


def test_logprob_start_len_k_gives_n_minus_k_entries_and_the_first_is_null(shared: Server) -> None:
    ids = prompt(9)
    whole = shared.generate(ids, **{k: v for k, v in score_body(ids, logprob_start_len=0).items() if k != "input_ids"})
    for start in (3, 8):
        reply = shared.post("/generate", score_body(ids, logprob_start_len=start, top_logprobs_num=2))[1]["meta_info"]
        assert reply["input_token_logprobs"][0] == [None, ids[start], None]
        assert len(reply["input_token_logprobs"]) == len(reply["input_top_logprobs"]) == 9 - start
        tail = whole["meta_info"]["input_token_logprobs"][start + 1 :]
        assert np.allclose([e[0] for e in reply["input_token_logprobs"][1:]], [e[0] for e in tail], atol=1e-6)
    assert shared.post("/generate", score_body(ids))[1]["meta_info"]["input_token_logprobs"] == []


def test_a_batch_gives_a_list_in_order_with_its_own_parameters_a_request(shared: Server, folder: Path) -> None:
    batch = [prompt(4, seed=1), prompt(12, seed=2), prompt(7, seed=3)]
    reply = shared.generate(
        batch,
        sampling_params=[{**GREEDY, "max_new_tokens": n} for n in (2, 5, 3)],
        return_logprob=True,
        token_ids_logprob=[[1], None, [4, 5]],
        rid="trio",
    )
    assert [one["output_ids"] for one in reply] == [
        expected_greedy(folder, ids, n) for ids, n in zip(batch, (2, 5, 3), strict=True)
    ]
    assert [one["meta_info"]["id"] for one in reply] == ["trio_0", "trio_1", "trio_2"]
    picked = [one["meta_info"].get("output_token_ids_logprobs") for one in reply]
    assert picked[1] is None and [len(picked[0][0]), len(picked[2][0])] == [1, 2]


def test_seed_and_sampling_seed_are_one_thing_and_without_them_texts_differ(shared: Server) -> None:
    def write(**params: Any) -> list[int]:
        return shared.generate(prompt(5), sampling_params={"max_new_tokens": 20, "ignore_eos": True, **params})[
            "output_ids"
        ]

    assert write(seed=7) == write(sampling_seed=7) != write(seed=8)
    assert write() != write()


def test_requests_that_arrive_together_are_decoded_together(shared: Server) -> None:
    before, steps = shared.engine.tokens_written, []
    genuine = shared.engine._rows.step
    shared.engine._rows.step = lambda served: (steps.append(shared.engine.running), genuine(served))[1]
    try:
        params = {**GREEDY, "max_new_tokens": 30, "ignore_eos": True}
        shared.generate([prompt(5, seed=i) for i in range(8)], sampling_params=params)
    finally:
        del shared.engine._rows.step
    assert shared.engine.tokens_written - before == 240
    assert steps == [8] * 29


def test_a_stream_gives_all_tokens_so_far_in_every_event(shared: Server, folder: Path) -> None:
    ids = prompt(5)
    body = {
        "input_ids": ids,
        "sampling_params": {**GREEDY, "max_new_tokens": 6},
        "stream": True,
        "return_logprob": True,
    }
    status, raw, kind = shared.call("POST", "/generate", body)
    assert status == 200 and kind.startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    expected = expected_greedy(folder, ids, 6)
    assert [chunk["output_ids"] for chunk in chunks] == [expected[: i + 1] for i in range(len(expected))]
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True] * (len(expected) - 1) + [False]
    assert len(chunks[-1]["meta_info"]["output_token_logprobs"]) == len(expected)


def test_a_streamed_batch_says_whose_event_it_is(shared: Server) -> None:
    body = {"input_ids": [prompt(5), prompt(3)], "sampling_params": {**GREEDY, "max_new_tokens": 4}, "stream": True}
    raw = shared.call("POST", "/generate", body)[1]
    chunks = [json.loads(line[6:]) for line in raw.decode().split("\n\n") if line and "[DONE]" not in line]
    assert {chunk["index"] for chunk in chunks} == {0, 1}


def test_a_client_that_goes_away_takes_its_request_with_it(server: Server) -> None:
    for stream in (False, True):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {
            "input_ids": prompt(5),
            "sampling_params": {"max_new_tokens": 100, "ignore_eos": True},
            "stream": stream,
        }
        server.post("/pause_generation", {"mode": "in_place"})
        connection.request("POST", "/generate", json.dumps(body))
        deadline = threading.Event()
        while not server.engine.waiting:
            assert not deadline.wait(0.005)
        connection.close()
        while server.engine.waiting:
            assert not deadline.wait(0.005)
        server.post("/continue_generation")


def test_a_rid_in_use_is_refused(server: Server) -> None:
    server.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.generate, prompt(5), rid="same", sampling_params={"max_new_tokens": 2})
        while not server.engine.waiting:
            threading.Event().wait(0.005)
        status, reply = server.post("/generate", {"input_ids": prompt(5), "rid": "same"})
        server.post("/continue_generation")
        assert first.result(60)["meta_info"]["id"] == "same"
    assert status == 400 and "'same'" in reply["error"]["message"]


# --- packed scores -------------------------------------------------------------------------------------------------


def test_packed_scores_hold_all_rows_of_the_batch_one_after_the_other(shared: Server, folder: Path) -> None:
    batch, starts = [prompt(7, seed=1), prompt(12, seed=2), prompt(3, seed=3)], [2, 0, 2]
    meta, arrays = packed(
        shared, batch, logprob_start_len=starts, top_logprobs_num=4, return_full_logprobs=True, rid=["x", "y", "z"]
    )
    counts = [len(ids) - 1 - start for ids, start in zip(batch, starts, strict=True)]
    assert meta["items"] == [
        {
            "id": rid,
            "prompt_tokens": len(ids),
            "rows": rows,
            "weight_version": "v0",
            "digest": xxhash.xxh3_64_hexdigest(np.array(ids, "<i4").tobytes()),
        }
        for rid, ids, rows in zip("xyz", batch, counts, strict=True)
    ]
    model = reference(folder)
    rows = np.concatenate(
        [reference_rows(model, ids)[start:] for ids, start in zip(batch, starts, strict=True) if len(ids) > start + 1]
    )
    targets = np.concatenate([ids[start + 1 :] for ids, start in zip(batch, starts, strict=True)]).astype(int)
    dtypes = {name: array.dtype.str for name, array in arrays.items()}
    assert dtypes == {
        "logprobs": "<f4",
        "topk_ids": "<i4",
        "topk_logprobs": "<f4",
        "log_tail": "<f4",
        "full_logprobs": "<f4",
    }
    assert np.allclose(arrays["logprobs"], rows[np.arange(len(rows)), targets], atol=1e-5)
    assert np.allclose(arrays["full_logprobs"], rows, atol=1e-5)
    assert np.allclose(arrays["topk_logprobs"], -np.sort(-rows, -1)[:, :4], atol=1e-5)
    assert np.allclose(np.take_along_axis(rows, arrays["topk_ids"].astype(int), 1), arrays["topk_logprobs"], atol=1e-5)
    tail = np.log(np.sort(np.exp(rows.astype(np.float64)), -1)[:, :-4].sum(-1))
    assert np.allclose(arrays["log_tail"], tail, atol=1e-4)


def test_packed_and_json_scores_are_the_same_numbers(shared: Server) -> None:
    ids = prompt(15)
    _, arrays = packed(shared, ids, logprob_start_len=4, top_logprobs_num=3)
    meta = shared.post("/generate", score_body(ids, logprob_start_len=4, top_logprobs_num=3))[1]["meta_info"]
    assert np.allclose([entry[0] for entry in meta["input_token_logprobs"][1:]], arrays["logprobs"], atol=1e-6)
    assert [[entry[1] for entry in row] for row in meta["input_top_logprobs"][1:]] == arrays["topk_ids"].tolist()


def test_a_single_sequence_is_a_list_of_one_and_no_rows_are_an_empty_array(shared: Server) -> None:
    meta, arrays = packed(shared, [5], logprob_start_len=0, top_logprobs_num=3)
    assert [item["rows"] for item in meta["items"]] == [0]
    assert arrays["logprobs"].shape == (0,) and arrays["topk_ids"].shape == (0, 3)


def test_the_whole_vocabulary_leaves_no_tail(shared: Server) -> None:
    _, arrays = packed(shared, prompt(5), logprob_start_len=0, top_logprobs_num=VOCAB)
    assert (arrays["log_tail"] == -math.inf).all()


def with_row_ids(server: Server, ids: Any, row_ids: np.ndarray, **extra: Any) -> tuple[int, bytes]:
    """A scoring request in a packed body, with further ids for each row."""
    body = packing.pack(score_body(ids, return_packed=True, **extra), {"row_ids": row_ids})
    status, raw, _ = server.call("POST", "/generate", body, kind=packing.CONTENT_TYPE)
    return status, raw


@pytest.mark.parametrize("top", [0, 6])
def test_rows_are_scored_at_ids_of_their_own_and_the_tail_is_beside_all_ids(
    shared: Server, folder: Path, top: int
) -> None:
    batch, starts = [prompt(7, seed=1), prompt(12, seed=2), prompt(3, seed=3)], [2, 0, 2]
    model = reference(folder)
    rows = np.concatenate([reference_rows(model, ids)[start:] for ids, start in zip(batch, starts, strict=True)])
    row_ids = np.random.default_rng(0).permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (len(rows), 1)), axis=1)[
        :, :9
    ]
    status, raw = with_row_ids(shared, batch, row_ids, logprob_start_len=starts, top_logprobs_num=top)
    assert status == 200, raw
    meta, arrays = packing.unpack(raw)
    assert set(arrays) == {"logprobs", "row_logprobs", "log_tail"} | ({"topk_ids", "topk_logprobs"} if top else set())
    assert np.allclose(arrays["row_logprobs"], np.take_along_axis(rows, row_ids.astype(int), 1), atol=1e-5)
    for row, own, tail in zip(rows, row_ids, arrays["log_tail"], strict=True):
        named = {*own.tolist(), *np.argsort(-row)[:top].tolist()}
        rest = np.delete(row.astype(np.float64), sorted(named))
        assert abs(tail - np.log(np.exp(rest).sum())) < 1e-4
    first = np.array(batch[0], "<i4").tobytes() + row_ids[:4].tobytes()
    assert meta["items"][0]["digest"] == xxhash.xxh3_64_hexdigest(first)


def test_row_ids_cost_eight_bytes_an_entry_up_and_down_and_eight_a_row(shared: Server) -> None:
    ids, sizes = prompt(100), {}
    for k in (4, 12):
        row_ids = np.tile(np.arange(k, dtype=np.int32), (99, 1))
        _, raw = with_row_ids(shared, ids, row_ids, logprob_start_len=0)
        sizes[k] = row_ids.nbytes + len(raw)
    assert sizes[12] - sizes[4] == 99 * 8 * 8
    assert sizes[4] < 99 * 8 * (4 + 1) + 400  # one header whatever the length


THREE_ROWS = np.array([[1, 2], [3, 4], [5, 6]], np.int32)


@pytest.mark.parametrize(
    ("row_ids", "extra", "complaint"),
    [
        (THREE_ROWS[:2], {}, "int32 (3, at least 1) was expected"),
        (THREE_ROWS.astype(np.int64), {}, "int64 (3, 2)"),
        (THREE_ROWS[:, :0], {}, "int32 (3, 0)"),
        (THREE_ROWS.ravel(), {}, "int32 (6,)"),
        (THREE_ROWS + VOCAB - 6, {}, f"vocabulary of {VOCAB}"),
        (THREE_ROWS - 2, {}, f"vocabulary of {VOCAB}"),
        (THREE_ROWS // 2 * 2 + np.array([[2, 0]], np.int32), {}, "twice"),
        (THREE_ROWS, {"return_packed": False}, "return_packed"),
    ],
)
def test_row_ids_that_do_not_fit_the_request_are_refused(
    shared: Server, row_ids: np.ndarray, extra: dict[str, Any], complaint: str
) -> None:
    body = {**score_body([1, 2, 3, 4], logprob_start_len=0, return_packed=True), **extra}
    raw = packing.pack(body, {"row_ids": row_ids})
    status, reply, _ = shared.call("POST", "/generate", raw, kind=packing.CONTENT_TYPE)
    assert status == 400 and complaint in json.loads(reply)["error"]["message"]


def test_a_packed_body_that_is_none_or_brings_other_arrays_is_refused(shared: Server) -> None:
    body = score_body([1, 2, 3, 4], logprob_start_len=0, return_packed=True)
    for raw, complaint in (
        (b"DPK1 and nothing more", "cannot be unpacked"),
        (packing.pack(body, {"column_ids": THREE_ROWS}), "column_ids"),
        (packing.pack(body, {"row_ids": THREE_ROWS, "more": THREE_ROWS}), "more"),
    ):
        status, reply, _ = shared.call("POST", "/generate", raw, kind=packing.CONTENT_TYPE)
        assert status == 400 and complaint in json.loads(reply)["error"]["message"]


def test_written_tokens_top_rows_are_the_same_in_all_three_forms(shared: Server) -> None:
    def meta(**flags: bool) -> dict[str, Any]:
        params = {"max_new_tokens": 9, "seed": 3, "temperature": 0.7, "ignore_eos": True}
        return shared.generate(prompt(5), sampling_params=params, return_logprob=True, top_logprobs_num=3, **flags)[
            "meta_info"
        ]

    nested = meta()["output_top_logprobs"]
    flag = {"return_flat_raw_output_top_logprobs": True}
    flat, packed_ = meta(**flag), meta(**flag, return_flat_raw_top_logprobs_b64=True)
    assert "output_top_logprobs" not in flat and "output_top_logprobs" not in packed_
    assert flat["output_top_logprobs_shape"] == packed_["output_top_logprobs_shape"] == [9, 3]
    assert flat["output_top_logprobs_idx_flat"] == [entry[1] for row in nested for entry in row]
    assert np.allclose(flat["output_top_logprobs_val_flat"], [entry[0] for row in nested for entry in row], atol=1e-6)
    ids = np.frombuffer(base64.b64decode(packed_["output_top_logprobs_idx_flat_b64"]), "<i4")
    values = np.frombuffer(base64.b64decode(packed_["output_top_logprobs_val_flat_b64"]), "<f4")
    assert ids.tolist() == flat["output_top_logprobs_idx_flat"]
    assert np.allclose(values, flat["output_top_logprobs_val_flat"])


# --- bad requests --------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input_ids"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[]]}, "empty"),
    ({"input_ids": [[1, 2], 3]}, "input_ids[1]"),
    ({"input_ids": "abc"}, "input_ids"),
    ({"text": "hello"}, "input_ids only"),
    ({"input_ids": [1, VOCAB]}, f"token id {VOCAB} is outside of the vocabulary of {VOCAB}"),
    ({"input_ids": [1, -1]}, "token id -1"),
    ({"input_ids": [1, 2.5]}, "integers"),
    ({"input_ids": [1, True]}, "integers"),
    ({"input_ids": [1, 10**30]}, "outside"),
    ({"input_ids": [5] * (CONTEXT + 1)}, f"context length of {CONTEXT}"),
    ({"input_ids": [5] * 100, "sampling_params": {"max_new_tokens": 29}}, "make 129"),
    ({"input_ids": [1], "sampling_params": {"max_new_token": 5}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"temperature": -0.5}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_p": 1.5}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
    ({"input_ids": [1], "sampling_params": {"top_k": 1.5}}, "top_k"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [VOCAB]}}, "stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"stop": ["x"]}}, "stop"),
    ({"input_ids": [1], "sampling_params": {"n": 3}}, "n = 3"),
    ({"input_ids": [1], "sampling_params": {"seed": 1, "sampling_seed": 2}}, "differ"),
    ({"input_ids": [1], "sampling_params": {"seed": "x"}}, "seed"),
    ({"input_ids": [1], "sampling_params": [1]}, "object"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 entries for 2"),
    ({"input_ids": [1], "logprob_start_len": 1, "return_logprob": True}, "logprob_start_len"),
    ({"input_ids": [1], "logprob_start_len": -2, "return_logprob": True}, "logprob_start_len"),
    ({"input_ids": [1], "top_logprobs_num": VOCAB + 1}, "top_logprobs_num"),
    ({"input_ids": [1], "token_ids_logprob": [VOCAB]}, "token_ids_logprob"),
    ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob"),
    ({"input_ids": [1], "streem": True}, "'stream'"),
    ({"input_ids": [1], "rid": ["a", "b"]}, "rid"),
    (score_body([1, 2], logprob_start_len=0, return_packed=True, stream=True), "exclude"),
    (score_body([1, 2], return_packed=True), "logprob_start_len"),
    ({"input_ids": [1], "return_flat_raw_output_top_logprobs": True, "stream": True}, "excludes stream"),
    ({"input_ids": [1], "return_flat_raw_top_logprobs_b64": True}, "one of the two flags"),
    ({"input_ids": [1], "return_packed": True}, "max_new_tokens to 0"),
    (score_body([1, 2], logprob_start_len=0, return_full_logprobs=True), "return_packed"),
    (
        score_body([[1, 2], [3, 4]], logprob_start_len=0, return_packed=True, top_logprobs_num=[1, 2]),
        "one top_logprobs",
    ),
]


@pytest.mark.parametrize(("body", "reason"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_request_gets_a_400_that_says_why(shared: Server, body: dict[str, Any], reason: str) -> None:
    status, reply = shared.post("/generate", body)
    assert status == 400
    assert reason in reply["error"]["message"]


@pytest.mark.parametrize("temperature", [1e-45, 9e-7])
def test_a_temperature_next_to_0_is_greedy_and_reports_at_temperature_one(shared: Server, temperature: float) -> None:
    wanted = {"max_new_tokens": 6, "temperature": temperature, "sampling_seed": 1}
    found = shared.generate(prompt(4), sampling_params=wanted, return_logprob=True)
    exact = shared.generate(prompt(4), sampling_params=wanted | GREEDY, return_logprob=True)
    assert found["output_ids"] == exact["output_ids"]
    assert found["meta_info"]["output_token_logprobs"] == exact["meta_info"]["output_token_logprobs"]
    assert all(value < -1e-3 for value, *_ in found["meta_info"]["output_token_logprobs"])


def test_an_error_of_the_model_says_what_to_do_in_a_field_of_its_own(server: Server) -> None:
    def spoil() -> None:
        with torch.no_grad():
            for tensor in server.engine.require_model().model.parameters():
                tensor.fill_(torch.nan)

    server.engine.run_between_steps(spoil).result(60)
    body = {"input_ids": [1, 2], "rid": "r", "sampling_params": {"max_new_tokens": 3}}
    told = {"message": "request r: the model gave numbers that are not finite", "fix": "check its weights"}
    assert server.post("/generate", body) == (500, {"error": told})
    _, raw, _ = server.call("POST", "/generate", body | {"stream": True})
    assert json.loads(raw.split(b"\n\n")[0].removeprefix(b"data: ")) == {"error": told}


def test_broken_json_and_unknown_routes_get_an_answer(shared: Server) -> None:
    status, raw, _ = shared.call("POST", "/generate", b'{"input_ids": [1,')
    assert status == 400 and b"not JSON" in raw
    assert shared.post("/generate", [1, 2])[0] == 400
    assert shared.get("/nowhere")[0] == 404
    assert shared.get("/generate")[0] == 405


def test_bad_requests_hurt_no_request_that_runs_beside_them(shared: Server, folder: Path) -> None:
    ids = prompt(6)
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(greedy, shared, ids, 40) for _ in range(4)]
        bad = [pool.submit(shared.post, "/generate", body) for body, _ in BAD]
        assert {future.result(60)[0] for future in bad} == {400}
        assert {tuple(future.result(60)) for future in good} == {tuple(expected_greedy(folder, ids, 40))}


# --- pauses, aborts, reading ---------------------------------------------------------------------------------------


def test_abort_by_rid_and_abort_all_answer_200_even_for_unknown_names(server: Server) -> None:
    server.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(2) as pool:
        params = {"max_new_tokens": 50}
        batch = pool.submit(server.generate, [prompt(5), prompt(4)], rid="pair", sampling_params=params)
        single = pool.submit(server.generate, prompt(5), rid="pair_up", sampling_params=params)
        while server.engine.waiting < 3:
            threading.Event().wait(0.005)
        assert server.call("POST", "/abort_request", {"rid": "unknown"})[:2] == (200, b"")
        assert server.engine.waiting == 3
        assert server.call("POST", "/abort_request", {"rid": "pair_1"})[0] == 200
        assert server.engine.waiting == 2
        assert server.call("POST", "/abort_request", {"rid": "pair"})[0] == 200
        assert server.engine.waiting == 1
        assert server.call("POST", "/abort_request", {"abort_all": True})[0] == 200
        replies = [*batch.result(60), single.result(60)]
    expected = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert [reply["meta_info"]["finish_reason"] for reply in replies] == [expected] * 3
    assert server.post("/abort_request", {})[0] == 400


def test_pause_and_continue_answer_as_sglang_does(server: Server) -> None:
    for mode in ("abort", "retract", "in_place"):
        assert server.post("/pause_generation", {"mode": mode}) == (
            200,
            {"message": "Generation paused successfully.", "status": "ok"},
        )
        assert server.get("/server_info")[1]["paused"] is True
        assert server.post("/continue_generation") == (
            200,
            {"message": "Generation continued successfully.", "status": "ok"},
        )
    assert server.post("/pause_generation", {"mode": "later"})[0] == 400


def test_flush_cache_refuses_while_requests_are_held(server: Server) -> None:
    assert server.call("POST", "/flush_cache")[0] == 200
    server.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(greedy, server, prompt(5))
        while not server.engine.waiting:
            threading.Event().wait(0.005)
        assert server.call("POST", "/flush_cache")[:2] == (400, b"Flush cache failed.\n")
        server.post("/continue_generation")
        held.result(60)


def test_the_reading_routes_say_what_the_server_is(shared: Server, folder: Path) -> None:
    assert [shared.call("GET", path)[:2] for path in ("/health", "/ready", "/health_generate")] == [(200, b"")] * 3
    info = shared.get("/server_info")[1]
    expected = {
        "program": "distill-embedded",
        "packed": True,
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "weight_version": "v0",
        "mesh": None,
        "max_batch_size": 16,
        "model_path": str(folder),
        "dtype": "float32",
    }
    assert {key: info[key] for key in expected} == expected and info["version"]
    assert shared.get("/get_server_info")[1].keys() == info.keys()
    model = shared.get("/model_info")[1]
    assert (model["architectures"], model["weight_version"]) == (["LlamaForCausalLM"], "v0")
    assert shared.get("/get_model_info")[1] == model
    (load,) = shared.get("/v1/loads")[1]["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0) and load["memory"]["weight_gb"] > 0


# --- weights from disk ---------------------------------------------------------------------------------------------


def file_sums(folder: Path) -> dict[str, str]:
    sums: dict[str, str] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            sums |= {name: xxhash.xxh3_64_hexdigest(tensors.get_tensor(name).tobytes()) for name in tensors.keys()}  # noqa: SIM118
    return sums


def server_sums(server: Server) -> dict[str, str]:
    status, reply = server.post("/weights_checker", {"action": "checksum"})
    assert status == 200 and reply["success"] is True
    return reply["ranks"][0]["checksums"]


def test_an_update_from_disk_takes_effect_and_the_checksums_are_those_of_the_file(
    server: Server, folder: Path, other: Path
) -> None:
    ids = prompt(6)
    assert server_sums(server) == file_sums(folder)
    assert greedy(server, ids) == expected_greedy(folder, ids)
    status, reply = server.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v-b"})
    assert (status, reply["success"]) == (200, True) and "v-b" in reply["message"]
    assert server_sums(server) == file_sums(other) != file_sums(folder)
    assert greedy(server, ids) == expected_greedy(other, ids) != expected_greedy(folder, ids)
    assert server.get("/model_info")[1]["weight_version"] == "v-b"
    assert server.get("/server_info")[1]["model_path"] == str(other)


def test_sharded_files_and_another_dtype_load_too(server: Server, other: Path, tmp_path: Path) -> None:
    reference(other).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    status, _ = server.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "v1"})
    assert status == 200
    rounded = {
        name: xxhash.xxh3_64_hexdigest(tensor.bfloat16().float().numpy().tobytes())
        for name, tensor in load_file(other / "model.safetensors").items()
    }
    assert server_sums(server) == rounded


def test_an_update_in_the_middle_of_a_text_shows_in_its_spans(server: Server, other: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        params = {"max_new_tokens": 100, "ignore_eos": True}
        server.post("/pause_generation", {"mode": "in_place"})
        text = pool.submit(server.generate, prompt(6), sampling_params=params)
        while not server.engine.waiting:
            threading.Event().wait(0.005)
        server.post("/continue_generation")
        while not server.engine.tokens_written:
            threading.Event().wait(0.0005)
        server.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v1"})
        spans = text.result(60)["meta_info"]["weight_versions"]
    assert spans[0]["start"] == 0 and spans[-1]["end"] == 100
    assert [span["version"] for span in spans] in (["v0", "v1"], ["v0"])
    assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans))


def broken_folder(good: Path, folder: Path, how: str) -> Path:
    shutil.copytree(good, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-64])
    elif how == "missing tensor":
        del tensors["model.norm.weight"]
        save_file(tensors, file, {"format": "pt"})
    elif how == "strange tensor":
        save_file(tensors | {"model.extra.weight": torch.zeros(3)}, file, {"format": "pt"})
    elif how == "other shape":
        save_file(tensors | {"model.norm.weight": torch.zeros(31)}, file, {"format": "pt"})
    elif how == "integers":
        save_file(tensors | {"model.norm.weight": torch.zeros(32, dtype=torch.int32)}, file, {"format": "pt"})
    elif how == "no weights":
        file.unlink()
    elif how == "no config":
        (folder / "config.json").unlink()
    return folder


BROKEN = {
    "truncated": "cannot be read",
    "missing tensor": "model.norm.weight",
    "strange tensor": "model.extra.weight",
    "other shape": "(31,)",
    "integers": "int32",
    "no weights": "no model.safetensors",
    "no config": "config.json",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_refused_and_the_old_weights_go_on(
    shared: Server, folder: Path, other: Path, tmp_path: Path, how: str
) -> None:
    broken = broken_folder(other, tmp_path / "broken", how)
    status, reply = shared.post("/update_weights_from_disk", {"model_path": str(broken), "weight_version": "bad"})
    assert (status, reply["success"]) == (400, False)
    assert BROKEN[how] in reply["message"] and str(broken) in reply["message"]
    assert server_sums(shared) == file_sums(folder)
    assert shared.get("/model_info")[1]["weight_version"] == "v0"
    assert greedy(shared, prompt(6)) == expected_greedy(folder, prompt(6))


def test_a_folder_that_is_not_there_and_an_adapter_without_its_base_are_refused(shared: Server, tmp_path: Path) -> None:
    status, reply = shared.post("/update_weights_from_disk", {"model_path": str(tmp_path / "nothing")})
    assert status == 400 and "no such folder" in reply["message"]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somewhere/base"}))
    status, reply = shared.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert status == 400 and "somewhere/base" in reply["message"]
    assert shared.post("/update_weights_from_disk", {})[0] == 400


def test_an_adapter_without_the_package_that_reads_it_is_refused(
    shared: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    (tmp_path / "adapter_config.json").write_text("{}")
    status, reply = shared.post("/update_weights_from_disk", {"model_path": str(tmp_path), "base": str(folder)})
    assert status == 400 and "pip install peft" in reply["fix"]


def test_an_adapter_is_merged_into_its_base_and_comes_back_after_a_release(server: Server, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save_model(tmp_path / "base", seed=5)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(reference(base), settings)
    model.save_pretrained(tmp_path / "adapter")
    ids = prompt(10)
    rows = reference_rows(model, ids)
    body = {"model_path": str(tmp_path / "adapter"), "base": str(base), "weight_version": "lora"}
    assert server.post("/update_weights_from_disk", body)[0] == 200
    for _ in range(2):
        _, arrays = packed(server, ids, logprob_start_len=0)
        assert np.allclose(arrays["logprobs"], rows[np.arange(9), ids[1:]], atol=1e-4)
        assert server.post("/release_memory_occupation")[0] == 200
        assert server.post("/resume_memory_occupation")[0] == 200


def test_a_folder_with_another_architecture_replaces_the_model_when_nothing_runs(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    bigger = save_model(tmp_path / "qwen", "qwen3", seed=3, num_hidden_layers=3, eos_token_id=5)
    server.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(greedy, server, prompt(6))
        while not server.engine.waiting:
            threading.Event().wait(0.005)
        status, reply = server.post("/update_weights_from_disk", {"model_path": str(bigger), "weight_version": "q"})
        assert status == 400 and "another architecture" in reply["message"]
        server.post("/continue_generation")
        assert held.result(60) == expected_greedy(folder, prompt(6))
    status, reply = server.post("/update_weights_from_disk", {"model_path": str(bigger), "weight_version": "q"})
    assert (status, reply["success"]) == (200, True)
    assert greedy(server, prompt(6)) == expected_greedy(bigger, prompt(6))
    assert server_sums(server) == file_sums(bigger)
    assert server.get("/model_info")[1]["architectures"] == ["Qwen3ForCausalLM"]


def test_the_end_tokens_are_those_of_the_new_folder(server: Server, tmp_path: Path, folder: Path) -> None:
    ids = prompt(6)
    free = expected_greedy(folder, ids, 20)
    stop = next(token for token in free if token != EOS)
    moved = save_model(tmp_path / "moved", eos_token_id=stop)
    server.post("/update_weights_from_disk", {"model_path": str(moved), "weight_version": "v1"})
    reply = server.generate(ids, sampling_params={**GREEDY, "max_new_tokens": 20})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["output_ids"] == free[: free.index(stop) + 1]


def test_the_version_label_can_be_set_alone(server: Server) -> None:
    status, reply = server.post("/update_weight_version", {"new_version": "v9", "abort_all_requests": False})
    assert status == 200 and (reply["success"], reply["new_version"]) == (True, "v9")
    assert server.generate(prompt(4), sampling_params={"max_new_tokens": 1})["meta_info"]["weight_version"] == "v9"
    assert server.post("/weights_checker", {"action": "dance"})[0] == 400


# --- memory --------------------------------------------------------------------------------------------------------


def test_released_weights_refuse_requests_and_come_back_from_the_last_folder(server: Server, other: Path) -> None:
    server.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "v1"})
    assert server.call("POST", "/release_memory_occupation", {})[:2] == (200, b"null")
    status, reply = server.post("/generate", {"input_ids": [5]})
    assert status == 503 and "/resume_memory_occupation" in reply["error"]["message"]
    assert server.get("/v1/loads")[1]["loads"][0]["memory"]["weight_gb"] == 0
    assert server.get("/server_info")[1]["released"] == ["kv_cache", "weights"]
    assert server.post("/release_memory_occupation", {"tags": ["weights"]})[0] == 400
    assert server.post("/update_weights_from_disk", {"model_path": str(other)})[0] == 503
    assert server.call("POST", "/resume_memory_occupation", {"tags": ["weights"]})[:2] == (200, b"null")
    assert server.call("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})[:2] == (200, b"null")
    assert greedy(server, prompt(6)) == expected_greedy(other, prompt(6))
    assert server.get("/model_info")[1]["weight_version"] == "v1"


def test_memory_is_released_only_when_idle_and_resumed_only_after_a_release(server: Server) -> None:
    status, reply = server.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert status == 400 and "not released" in reply["error"]["message"]
    assert server.post("/release_memory_occupation", {"tags": ["everything"]})[0] == 400
    server.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(greedy, server, prompt(5))
        while not server.engine.waiting:
            threading.Event().wait(0.005)
        status, reply = server.post("/release_memory_occupation", {})
        assert status == 400 and "no request" in reply["error"]["message"]
        server.post("/continue_generation")
        held.result(60)


def test_limits_of_the_command_line_hold_for_later_weights_too(folder: Path, tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    limits = type(CPU32)(CPU32.device, CPU32.dtype, vocab_size=50, context_length=40, memory_bytes=size)
    bigger = save_model(tmp_path / "big", num_hidden_layers=4)
    with running_server(folder, limits=limits) as server:
        assert server.post("/generate", {"input_ids": [55]})[0] == 400
        assert server.post("/generate", {"input_ids": [5] * 30, "sampling_params": {"max_new_tokens": 11}})[0] == 400
        status, reply = server.post("/update_weights_from_disk", {"model_path": str(bigger)})
        assert status == 400 and "do not fit" in reply["message"]
        reply = server.generate([5, 6, 7, 8], sampling_params={"max_new_tokens": 36, "ignore_eos": True})
        assert max(reply["output_ids"]) < 50
