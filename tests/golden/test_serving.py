"""SGLang-shaped replies with right answers (set t2) and a planted-table model with known scores (set t1).

The data are an independent NumPy implementation's; `data/objectives` holds the files as they came.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from distill.errors import TeacherError
from distill.packing import pack
from distill.serving.packed import parse_packed
from distill.serving.replies import Asked, Scores, log_tail, parse_scores

FOLDER = Path(__file__).parent / "data" / "objectives"
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def load(name: str) -> Iterator[Case]:
    manifest = json.loads((FOLDER / f"{name}.json").read_text())
    arrays = np.load(FOLDER / manifest["arrays"])

    def value(entry: Any) -> Any:
        return arrays[entry[1:]] if isinstance(entry, str) and entry.startswith("@") else entry

    for case in manifest["cases"]:
        inputs = {key: value(entry) for key, entry in case["inputs"].items()}
        yield case, inputs, {key: value(entry) for key, entry in case["expect"].items()}


REPLIES = list(load("t2_sglang_replies"))
TABLES = list(load("t1_planted_table"))
BATCH_REQUEST = next(inputs["request"] for case, inputs, _ in REPLIES if case["id"] == "batch/two")


def asked_by(case: dict[str, Any], inputs: dict[str, Any]) -> list[Asked]:
    """What the case's request asked for, one entry an item."""
    params = case["params"]
    request = BATCH_REQUEST if isinstance(inputs["request"], str) else inputs["request"]
    batched = case["kind"] == "sglang_reply_batch"
    many_ids = request["input_ids"] if batched else [request["input_ids"]]
    starts = request["logprob_start_len"] if batched else [request["logprob_start_len"]]
    lengths = params["R"] if batched else [params["R"]]
    token_ids = request.get("token_ids_logprob")
    return [
        Asked(
            id=f"{case['id']}#{index}",
            input_ids=np.array(ids, np.int32),
            response_len=length,
            start=start,
            vocab_size=params["V"],
            weight_version=params["expected_weight_version"],
            k=params["k"],
            token_ids=None if token_ids is None else np.array(token_ids, np.int32),
        )
        for index, (ids, start, length) in enumerate(zip(many_ids, starts, lengths, strict=True))
    ]


def assert_same_bits(got: np.ndarray | None, want: np.ndarray) -> None:
    assert got is not None
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()


def assert_expected(scores: Scores, expect: dict[str, Any], prefix: str) -> None:
    wanted = {key.removeprefix(prefix): array for key, array in expect.items() if key.startswith(prefix)}
    assert_same_bits(scores.logprobs, wanted["logq"])
    if "top_ids" in wanted:
        assert_same_bits(scores.topk_ids, wanted["top_ids"])
        assert_same_bits(scores.topk_logprobs, wanted["top_logp"])
        assert scores.log_tail is not None
        np.testing.assert_allclose(scores.log_tail, wanted["log_tail_from_topk"], rtol=1e-6, atol=1e-6)
    else:
        assert scores.topk_ids is None
    if "ids_logp" in wanted:
        assert_same_bits(scores.ids_logprobs, wanted["ids_logp"])


@pytest.mark.parametrize(("case", "inputs", "expect"), REPLIES, ids=[case["id"] for case, _, _ in REPLIES])
def test_every_reply_gives_the_known_scores_or_a_teacher_error(
    case: dict[str, Any], inputs: dict[str, Any], expect: dict[str, Any]
) -> None:
    asked = asked_by(case, inputs)
    may_refuse = case["status"] == "error" or "accept_raise" in case.get("tags", [])
    try:
        found = parse_scores(inputs["reply_text"], asked, "algebra")
    except TeacherError as error:
        assert may_refuse, error
        assert "algebra" in error.what and asked[0].id in error.what
        return
    assert case["status"] == "ok", "a reply that must be refused was accepted"
    for index, scores in enumerate(found):
        assert_expected(scores, expect, f"{index}_" if len(found) > 1 else "")


def test_half_of_the_reply_set_is_errors_so_that_neither_side_can_be_empty() -> None:
    statuses = [case["status"] for case, _, _ in REPLIES]
    assert (statuses.count("ok"), statuses.count("error")) == (31, 25)


def reply_of_table(table_logp: np.ndarray, ids: np.ndarray, start: int, k: int) -> bytes:
    """What a server whose model is the table answers: the row of a token is that of the token before it."""
    rows = table_logp.astype(np.float32)[ids[start:-1]]
    order = np.argsort(-rows, axis=1)[:, :k]
    sampled = [[None, int(ids[start]), None]]
    sampled += [[float(row[token]), int(token), None] for row, token in zip(rows, ids[start + 1 :], strict=True)]
    tops: list[Any] = [None]
    tops += [[[float(row[i]), int(i), None] for i in best] for row, best in zip(rows, order, strict=True)]
    meta = {
        "id": "r",
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(ids),
        "weight_version": "v1",
        "input_token_logprobs": sampled,
        "input_top_logprobs": tops,
    }
    return msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta})


def planted(kind: str) -> list[Case]:
    return [case for case in TABLES if case[0]["kind"] == kind]


@pytest.mark.parametrize("start_at_zero", [False, True])
@pytest.mark.parametrize(
    ("case", "inputs", "expect"),
    planted("planted_scores"),
    ids=[case["id"] for case, _, _ in planted("planted_scores")],
)
def test_a_planted_table_scores_each_token_by_the_row_before_it(
    case: dict[str, Any], inputs: dict[str, Any], expect: dict[str, Any], start_at_zero: bool
) -> None:
    prompt_len, response_len, vocab_size = case["params"]["P"], case["params"]["R"], case["params"]["V"]
    ids = inputs["ids"].astype(np.int32)
    start = 0 if start_at_zero else prompt_len - 1
    for k in (1, 4, 8):
        asked = Asked("s", ids, response_len, start, vocab_size, "v1", k)
        (scores,) = parse_scores(reply_of_table(inputs["table_logp"], ids, start, k), [asked], "t")
        assert scores.log_tail is not None and scores.topk_logprobs is not None
        np.testing.assert_allclose(scores.logprobs, expect["logq"], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(scores.topk_ids, expect[f"top{k}_ids"])
        np.testing.assert_allclose(scores.topk_logprobs, expect[f"top{k}_logp"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(scores.log_tail, expect[f"top{k}_log_tail"], rtol=1e-5, atol=1e-5)
        for mistake in ("wrong_row_of_same_token", "wrong_label_shifted"):
            assert not np.allclose(scores.logprobs, expect[mistake], atol=1e-3), mistake


def test_a_token_after_an_observation_is_scored_by_the_observations_last_row() -> None:
    ((case, inputs, expect),) = planted("planted_scores_masked")
    ids = inputs["ids"].astype(np.int32)
    first = case["params"]["first_scored"]
    asked = Asked("s", ids, len(ids) - first, first - 1, case["params"]["V"], "v1", 1)
    (scores,) = parse_scores(reply_of_table(inputs["table_logp"], ids, first - 1, 1), [asked], "t")
    np.testing.assert_allclose(scores.logprobs[expect["positions"] - first], expect["logq"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "inputs", "expect"),
    planted("planted_scores"),
    ids=[case["id"] for case, _, _ in planted("planted_scores")],
)
def test_the_packed_form_gives_the_planted_scores_bit_for_bit(
    case: dict[str, Any], inputs: dict[str, Any], expect: dict[str, Any]
) -> None:
    prompt_len, response_len, vocab_size = case["params"]["P"], case["params"]["R"], case["params"]["V"]
    ids = inputs["ids"].astype(np.int32)
    full = inputs["table_logp"].astype(np.float32)[ids[prompt_len - 1 : -1]]
    topk_ids = np.argsort(-full, axis=1)[:, :4].astype(np.int32)
    topk = np.take_along_axis(full, topk_ids, 1)
    body = pack(
        {"items": [{"id": "s", "prompt_tokens": len(ids), "rows": response_len, "weight_version": "v1"}]},
        {
            "logprobs": full[np.arange(response_len), ids[prompt_len:]],
            "token_ids": ids[prompt_len:],
            "topk_ids": topk_ids,
            "topk_logprobs": topk,
            "log_tail": log_tail(topk, vocab_size),
            "full_logprobs": full,
        },
    )
    asked = Asked("s", ids, response_len, prompt_len - 1, vocab_size, "v1", 4)
    (scores,) = parse_packed(body, [asked], "t", full=True)
    assert_same_bits(scores.logprobs, expect["logq"].astype(np.float32))
    assert_same_bits(scores.full_logprobs, full)
    assert_same_bits(scores.topk_ids, expect["top4_ids"].astype(np.int32))
    assert scores.log_tail is not None
    np.testing.assert_allclose(scores.log_tail, expect["top4_log_tail"], rtol=1e-5, atol=1e-5)
