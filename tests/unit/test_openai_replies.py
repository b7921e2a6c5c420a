"""What an OpenAI-compatible server says of a prompt, against values worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import TeacherError
from distill.serving.openai_replies import NoLogprobs, decode, has_logprobs, parse_generation, parse_scores
from distill.serving.replies import Asked
from distill.serving.wire import BrokenReply
from distill.types import GenerateRequest

IDS = [3, 5, 7, 5]
"""A prompt of two tokens, and a response of two: 7 after 3 5, and 5 after 3 5 7."""
HALF, QUARTER, TENTH = math.log(0.5), math.log(0.25), math.log(0.1)


def value(logprob: float | None, rank: int | None = None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": "same for all"}


def good_rows() -> list[Any]:
    """k = 2. Row 2: 7 is the most probable. Row 3: 5 is third, so it stands beside the two."""
    return [
        None,
        {"5": value(TENTH, 4), "9": value(HALF, 1), "1": value(QUARTER, 2)},
        {"7": value(HALF, 1), "2": value(QUARTER, 2)},
        {"5": value(TENTH, 3), "4": value(QUARTER, 2), "8": value(HALF, 1)},
    ]


def asked(response_len: int = 2, k: int = 2, ids: list[int] = IDS, vocab: int = 10) -> Asked:
    array = np.array(ids, np.int32)
    return Asked("r", array, response_len, 0, vocab, "", k, sample_id="sample-1")


def reply(rows: Any, **other: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "prompt_logprobs": rows, **other}]}).encode()


def parsed(rows: Any, **changes: Any) -> Any:
    one = asked(**changes)
    (scores,) = parse_scores(decode(reply(rows), [len(one.input_ids)]), [one], "prompt_logprobs", "math")
    return scores


def test_row_t_of_the_scores_is_about_response_token_t() -> None:
    scores = parsed(good_rows())
    np.testing.assert_allclose(scores.logprobs, [HALF, TENTH], rtol=1e-6)
    np.testing.assert_array_equal(scores.topk_ids, [[7, 2], [8, 4]])
    np.testing.assert_allclose(scores.topk_logprobs, [[HALF, QUARTER], [HALF, QUARTER]], rtol=1e-6)
    np.testing.assert_allclose(scores.log_tail, [QUARTER, QUARTER], rtol=1e-5)  # 1 - 0.5 - 0.25
    assert scores.topk_ids.dtype == np.int32 and scores.log_tail.dtype == np.float32


def test_a_response_of_one_token_has_one_row() -> None:
    np.testing.assert_allclose(parsed(good_rows(), response_len=1).logprobs, [TENTH], rtol=1e-6)


def test_the_tail_is_summed_in_float64() -> None:
    rows = [None, {"5": value(math.log(1e-6), 2), "1": value(math.log1p(-3e-6), 1)}]
    scores = parsed(rows, ids=[3, 5], response_len=1, k=2)
    assert scores.log_tail[0] == pytest.approx(math.log(2e-6), abs=0.05)  # float32 sums would be off by 3 %


def test_a_row_of_tied_ids_is_taken_as_the_server_gives_it() -> None:
    """7 and 2 tie for the second place: the server lists 2, and ranks 7 behind both."""
    rows = [None, {"7": value(QUARTER, 3), "1": value(HALF, 1), "2": value(QUARTER, 2)}]
    scores = parsed(rows, ids=[3, 7], response_len=1)
    np.testing.assert_array_equal(scores.topk_ids, [[1, 2]])
    assert scores.logprobs[0] == pytest.approx(QUARTER)


def test_minus_infinity_beside_the_token_is_a_probability_of_zero() -> None:
    rows = [None, {"7": value(0.0, 1), "2": value(-9999.0, 2)}]
    scores = parsed(rows, ids=[3, 7], response_len=1)
    assert scores.topk_logprobs[0, 1] == -np.inf and scores.topk_ids[0, 1] == 2


def shifted(rows: list[Any]) -> list[Any]:
    return [None, *rows[2:], rows[1]]


def change(at: int, row: Any) -> list[Any]:
    return [*good_rows()[:at], row, *good_rows()[at + 1 :]]


BROKEN = {
    "a row too few": (good_rows()[:3], "prompt_logprobs has 3 rows, 4 tokens were sent"),
    "a row too many": ([*good_rows(), good_rows()[1]], "prompt_logprobs has 5 rows, 4 tokens were sent"),
    "shifted by one": (shifted(good_rows()), r"row of response token 0 does not hold its id 7, but \[4, 5, 8\]"),
    "no first null": ([good_rows()[1], *good_rows()[1:]], "the first token has a row"),
    "a null row": (change(2, None), "the row of response token 0 is null"),
    "a null score": (change(2, {"7": value(None, 1), "2": value(-2.0, 2)}), "score of response token 0 is null"),
    "zero probability": (change(3, {"5": value(-9999.0, 3), **dict(list(good_rows()[3].items())[1:])}), "1 is -inf"),
    "above 0": (change(2, {"7": value(0.5, 1), "2": value(-2.0, 2)}), "is 0.5, above 0"),
    "mass above 1": (change(2, {"7": value(-0.1, 1), "2": value(-0.1, 2)}), "mass of 1.8097, more than 1"),
    "too few ids": (change(2, {"7": value(-1.0, 1)}), "has 1 ids, 2 and its own"),
    "too many ids": (change(2, {str(i): value(-2.0 - i) for i in range(4, 8)}), "has 4 ids, 2 and its own"),
    "a rank missing": (change(2, {"7": value(-1.0, 3), "2": value(-2.0, 1)}), r"the ranks \[3, 1\], 1 to 2"),
    "better than its betters": (
        change(3, {"5": value(-0.2, 3), "4": value(-2.0, 2), "8": value(-1.9, 1)}),
        "response token 1 is not among the 2 most probable ids of its row, but more",
    ),
    "an id outside": (change(2, {"7": value(-1.0, 1), "12": value(-2.0, 2)}), "12, outside the vocabulary of 10"),
    "an id that does not fit": (change(2, {"7": value(-1.0, 1), "9999999999": value(-2.0, 2)}), "9999999999, outside"),
    "a text for an id": (change(2, {"7": value(-1.0, 1), "the": value(-2.0, 2)}), "'the' stands where a token id"),
    "an id written twice": (change(2, {"7": value(-1.0, 1), "07": value(-2.0, 2)}), "'07' stands where a token id"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_reply_that_cannot_be_right_is_refused_by_its_sample(name: str) -> None:
    rows, says = BROKEN[name]
    with pytest.raises(TeacherError, match=says) as caught:
        parsed(rows)
    assert "teacher math: request r" in caught.value.what
    assert caught.value.sample_id == ("" if "stands where" in says else "sample-1")


def test_what_is_no_number_is_no_json_and_still_the_samples_fault() -> None:
    body = reply(good_rows()).replace(str(HALF).encode(), b"NaN")
    assert b"NaN" in body
    with pytest.raises(TeacherError, match="score of response token 0 is null") as caught:
        parse_scores(decode(body, [4]), [asked()], "prompt_logprobs", "math")
    assert caught.value.sample_id == "sample-1"


def test_choices_belong_to_prompts_by_their_index() -> None:
    body = json.dumps({"choices": [{"index": 1, "finish_reason": "b"}, {"index": 0, "finish_reason": "a"}]}).encode()
    assert [choice.finish_reason for choice in decode(body, [4, 4])] == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"choices": [{"index": 0}, {"index": 0}]}', r"the choices \[0, 0\] came back for 2 prompts"),
        (b'{"choices": [{"index": 0}]}', r"the choices \[0\] came back for 2 prompts"),
        (b'{"choices": [{"index": 0}, {"index": 1}], "usage": {"prompt_tokens": 9}}', "9 prompt tokens, 8 were sent"),
        (b"<html>a proxy</html>", "is not the JSON of /v1/completions"),
        (b'{"choices": [{"ind', "is not the JSON of /v1/completions"),
    ],
)
def test_a_reply_to_something_else_is_refused_whole(body: bytes, says: str) -> None:
    with pytest.raises(BrokenReply, match=says):
        decode(body, [4, 4])


def echo(**changes: Any) -> dict[str, Any]:
    listed = {
        "tokens": [f"token_id:{token}" for token in IDS],
        "token_logprobs": [None, TENTH, HALF, TENTH],
        "top_logprobs": [
            None,
            {"token_id:9": HALF, "token_id:1": QUARTER},
            {"token_id:7": HALF, "token_id:2": QUARTER},
            {"token_id:8": HALF, "token_id:4": QUARTER},
        ],
    }
    return listed | changes


def from_echo(**changes: Any) -> Any:
    body = json.dumps({"choices": [{"logprobs": echo(**changes)}]}).encode()
    return parse_scores(decode(body, [4]), [asked()], "echo", "math")[0]


def test_the_older_form_says_the_same() -> None:
    one, other = from_echo(), parsed(good_rows())
    np.testing.assert_array_equal(one.topk_ids, other.topk_ids)
    for name in ("logprobs", "topk_logprobs", "log_tail"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": ["a", "b", "c", "d"]}, "'a' stands where a token id should, and no text tells an id"),
        ({"tokens": [f"token_id:{token}" for token in (3, 7, 5, 5)]}, "token 1 comes back as token_id:7, 5 was sent"),
        ({"tokens": [f"token_id:{token}" for token in [*IDS, 1]]}, "tokens has 5 rows, 4 tokens were sent"),
        ({"token_logprobs": [None, TENTH, TENTH, TENTH]}, "token 2 has two scores"),
        ({"top_logprobs": None}, "top_logprobs has 0 rows, 4 tokens were sent"),
    ],
)
def test_an_older_form_without_exact_ids_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TeacherError, match=says):
        from_echo(**changes)


def test_which_form_a_reply_has_is_seen_from_it() -> None:
    (new,), (old,) = decode(reply(good_rows()), [4]), decode(b'{"choices": [{"logprobs": {"tokens": ["a"]}}]}', [4])
    assert has_logprobs(new, "prompt_logprobs") and not has_logprobs(new, "echo")
    assert not has_logprobs(old, "prompt_logprobs") and not has_logprobs(old, "echo")
    with pytest.raises(TeacherError, match="the reply has no prompt_logprobs"):
        parse_scores([old], [asked()], "prompt_logprobs", "math")
    assert issubclass(NoLogprobs, BrokenReply)


def test_what_a_teacher_writes_is_read_by_its_ids() -> None:
    listed = {"tokens": ["token_id:4", "token_id:2"], "token_logprobs": [HALF, QUARTER]}
    body = json.dumps({"choices": [{"finish_reason": "stop", "logprobs": listed}]}).encode()
    request = GenerateRequest("g", np.array([3], np.int32), 8)
    found = parse_generation(decode(body, [1])[0], request, "remote", "s")
    assert (found.output_ids.tolist(), found.finish_reason, found.versions) == ([4, 2], "stop", ("remote", "remote"))
    np.testing.assert_allclose(found.logprobs, [HALF, QUARTER], rtol=1e-6)
    with pytest.raises(TeacherError, match="2 tokens came with 2 log-probabilities, at most 1"):
        parse_generation(decode(body, [1])[0], GenerateRequest("g", np.array([3], np.int32), 1), "remote", "s")
    with pytest.raises(TeacherError, match="'a' stands where a token id should"):
        parse_generation(decode(body.replace(b"token_id:4", b"a"), [1])[0], request, "remote", "s")


@given(st.data())
def test_whatever_the_model_the_scores_are_its_own(data: st.DataObject) -> None:
    """Any distributions, any k, ties included: what was put into the rows comes out of them."""
    vocab = data.draw(st.integers(2, 9))
    k = data.draw(st.integers(1, vocab))
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=2, max_size=8))
    response = data.draw(st.integers(1, len(ids) - 1))
    weights = data.draw(
        st.lists(st.lists(st.integers(1, 4), min_size=vocab, max_size=vocab), min_size=len(ids), max_size=len(ids))
    )
    log_NV = np.log(np.array(weights) / np.sum(weights, 1, keepdims=True))
    rows: list[Any] = [None]
    for token, logs in zip(ids[1:], log_NV[1:], strict=True):
        top = np.argsort(-logs, kind="stable")[:k]
        row = {str(token): value(float(logs[token]), int((logs >= logs[token]).sum()))}
        rows.append(row | {str(each): value(float(logs[each]), rank) for rank, each in enumerate(top.tolist(), 1)})
    scores = parsed(rows, ids=ids, response_len=response, k=k, vocab=vocab)
    for row, at in enumerate(range(len(ids) - response, len(ids))):
        assert scores.logprobs[row] == pytest.approx(log_NV[at, ids[at]], rel=1e-6)
        top = np.argsort(-log_NV[at], kind="stable")[:k]
        np.testing.assert_array_equal(np.sort(scores.topk_ids[row]), np.sort(top))
        np.testing.assert_allclose(scores.topk_logprobs[row], np.sort(log_NV[at])[::-1][:k], rtol=1e-6)
        left = 1 - np.exp(np.sort(log_NV[at])[::-1][:k]).sum()
        assert np.exp(scores.log_tail[row]) == pytest.approx(max(left, 0), abs=2e-7)
