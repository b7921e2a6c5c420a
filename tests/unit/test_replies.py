"""Rules of scoring and generation replies that the golden data do not reach: packed buffers, spans, tails."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import ServerError, TeacherError
from distill.packing import pack
from distill.serving.generations import parse_generations
from distill.serving.packed import parse_packed, request_digest
from distill.serving.replies import TAIL_RESOLUTION, Asked, log_tail, parse_scores
from distill.types import GenerateRequest

V, K = 11, 3
Meta = dict[str, Any]
Arrays = dict[str, np.ndarray]
FIRST_TWO = np.array([[0, 1], [0, 1]], np.int32)


def two_asked() -> list[Asked]:
    first = Asked("a", np.array([1, 2, 3, 4, 5], np.int32), 3, 1, V, "v1", K)
    return [first, Asked("b", np.array([10, 0], np.int32), 1, 0, V, "v1", K)]


def packed_parts() -> tuple[Meta, Arrays]:
    """A correct packed reply to `two_asked`, with full rows."""
    full = np.random.default_rng(0).normal(size=(4, V))
    full = (full - np.log(np.exp(full).sum(1, keepdims=True))).astype(np.float32)
    token_ids = np.array([3, 4, 5, 0], np.int32)
    topk_ids = np.argsort(-full, axis=1)[:, :K].astype(np.int32)
    topk = np.take_along_axis(full, topk_ids, 1)
    meta = {
        "items": [
            {
                "id": one.id,
                "prompt_tokens": len(one.input_ids),
                "rows": one.response_len,
                "weight_version": "v1",
                "digest": request_digest(one.input_ids, None),
            }
            for one in two_asked()
        ]
    }
    return meta, {
        "logprobs": full[np.arange(4), token_ids],
        "topk_ids": topk_ids,
        "topk_logprobs": topk,
        "log_tail": log_tail(topk_ids, topk, V),
        "full_logprobs": full,
    }


def test_a_packed_reply_is_split_into_its_requests() -> None:
    meta, arrays = packed_parts()
    first, second = parse_packed(pack(meta, arrays), two_asked(), "t", full=True)
    assert first.logprobs.tolist() == arrays["logprobs"][:3].tolist()
    assert second.logprobs.tolist() == arrays["logprobs"][3:].tolist()
    assert second.full_logprobs is not None and second.full_logprobs.shape == (1, V)
    assert second.topk_ids is not None and second.topk_ids.tolist() == arrays["topk_ids"][3:].tolist()


def test_a_fault_of_one_request_names_its_sample_and_one_of_the_server_names_none() -> None:
    asked = [dataclasses.replace(one, sample_id=f"sample-{one.id}") for one in two_asked()]
    meta, arrays = packed_parts()
    spoiled = arrays | {"logprobs": np.where(np.arange(4) == 3, np.nan, arrays["logprobs"]).astype(np.float32)}
    other_weights = {"items": [item | {"weight_version": "v0"} for item in meta["items"]]}
    for parts, sample in (((meta, spoiled), "sample-b"), ((other_weights, arrays), ""), ((meta, {}), "")):
        with pytest.raises(TeacherError) as caught:
            parse_packed(pack(*parts), asked, "t", full=True)
        assert (caught.value.sample_id, caught.value.teacher) == (sample, "t")
    with pytest.raises(TeacherError) as alone:
        parse_packed(pack(meta, {}), asked[:1], "t", full=True)
    assert alone.value.sample_id == "sample-a", "a call with one request can only be about that one"


def change_item(**changes: Any) -> Callable[[Meta, Arrays], None]:
    return lambda meta, _arrays: meta["items"][0].update(changes)


def drop_item(meta: Meta, _arrays: Arrays) -> None:
    meta["items"].pop()


def change(name: str, index: Any, value: float) -> Callable[[Meta, Arrays], None]:
    def spoil(_meta: Meta, arrays: Arrays) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][index] = value

    return spoil


def drop(name: str) -> Callable[[Meta, Arrays], None]:
    def spoil(_meta: Meta, arrays: Arrays) -> None:
        del arrays[name]

    return spoil


def cast_to(name: str, dtype: str) -> Callable[[Meta, Arrays], None]:
    return lambda _meta, arrays: arrays.update({name: arrays[name].astype(dtype)})


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (change_item(weight_version="v2"), "weight version 'v2'"),
        (change_item(id="z"), "request z"),
        (change_item(prompt_tokens=6), "6 tokens"),
        (change_item(rows=2), "2 rows"),
        (drop_item, "1 replies came back for 2"),
        (change_item(digest=request_digest(np.array([1, 2, 3, 4, 6], np.int32), None)), "other tokens"),
        (change("logprobs", 1, np.nan), "not a number"),
        (change("logprobs", 1, -np.inf), "response token 1 is -inf"),
        (change("logprobs", 1, 0.5), "above 0"),
        (change("topk_logprobs", (2, 1), np.nan), "not a number"),
        (change("topk_logprobs", (2, 1), np.inf), "above 0"),
        (change("topk_ids", (2, 1), V), f"vocabulary of {V}"),
        (change("topk_ids", (2, 1), -1), f"vocabulary of {V}"),
        (change("topk_logprobs", 2, -0.1), "mass"),
        (change("log_tail", 2, np.nan), "not a number"),
        (change("full_logprobs", (0, 0), np.nan), "not a number"),
        (change("full_logprobs", (0, 0), np.inf), "above 0"),
        (change("full_logprobs", (0, 3), -9.0), "do not agree"),
        (drop("logprobs"), "no logprobs"),
        (drop("log_tail"), "no log_tail"),
        (cast_to("logprobs", "<f8"), "logprobs is <f8"),
        (cast_to("topk_ids", "<i8"), "topk_ids is <i8"),
    ],
)
def test_a_packed_reply_that_breaks_a_rule_names_the_teacher_and_the_rule(
    spoil: Callable[[Meta, Arrays], None], complaint: str
) -> None:
    meta, arrays = packed_parts()
    spoil(meta, arrays)
    with pytest.raises(TeacherError, match="teacher algebra: request a") as caught:
        parse_packed(pack(meta, arrays), two_asked(), "algebra", full=True)
    assert complaint in caught.value.what


def test_a_packed_row_that_names_an_id_twice_is_refused() -> None:
    meta, arrays = packed_parts()
    arrays["topk_ids"][0, 1] = arrays["topk_ids"][0, 0]
    with pytest.raises(TeacherError, match="twice"):
        parse_packed(pack(meta, arrays), two_asked(), "t", full=True)


def test_a_token_of_probability_zero_may_stand_in_a_full_row_and_in_a_top_k_row() -> None:
    meta, arrays = packed_parts()
    arrays["full_logprobs"][0, 8] = -np.inf
    arrays["topk_logprobs"][0, 2] = -np.inf
    first, _ = parse_packed(pack(meta, arrays), two_asked(), "t", full=True)
    assert first.full_logprobs is not None and first.full_logprobs[0, 8] == -np.inf


@given(st.data())
def test_a_packed_reply_cut_anywhere_is_a_teacher_error(data: st.DataObject) -> None:
    whole = pack(*packed_parts())
    end = data.draw(st.integers(0, len(whole) - 40))  # the last array is longer than 40 bytes
    with pytest.raises(TeacherError):
        parse_packed(whole[:end], two_asked(), "t", full=True)


@given(st.binary(max_size=200))
def test_no_body_makes_the_json_parser_raise_anything_but_a_teacher_error(body: bytes) -> None:
    with pytest.raises(TeacherError):
        parse_scores(body, two_asked(), "t")


def test_the_tail_is_the_log_of_what_the_row_leaves() -> None:
    rows = np.log(np.array([[0.5, 0.25], [0.9, 0.05]])).astype(np.float32)
    np.testing.assert_allclose(log_tail(FIRST_TWO, rows, V), np.log([0.25, 0.05]), rtol=1e-6)


def test_a_slot_that_is_not_used_adds_nothing_to_the_mass_and_names_nothing() -> None:
    rows = np.log(np.array([[0.5, 0.25, 1.0]])).astype(np.float32)
    rows[0, 2] = -np.inf
    ids = np.array([[4, 0, -1]], np.int32)
    np.testing.assert_allclose(log_tail(ids, rows, 3), np.log([0.25]), rtol=1e-6)
    assert log_tail(ids, rows, 2).tolist() == [-math.inf]


def test_the_tail_of_the_whole_vocabulary_is_empty() -> None:
    rows = np.log(np.array([[0.75, 0.25]])).astype(np.float32)
    assert log_tail(FIRST_TWO[:1], rows, 2).tolist() == [-math.inf]


@pytest.mark.parametrize("top", [0.0, 1e-4, -1e-12])
def test_the_tail_beside_a_mass_that_rounds_to_one_is_tiny_but_there(top: float) -> None:
    rows = np.array([[top, -40.0]], np.float32)
    assert log_tail(FIRST_TWO[:1], rows, V)[0] == np.float32(math.log(TAIL_RESOLUTION))


def written(**changes: Any) -> bytes:
    meta: Meta = {
        "id": "g",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 2,
        "weight_version": "v2",
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 10, None], [-0.25, 3, None]],
        "weight_versions": [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3}],
    }
    item: Meta = {"text": "", "output_ids": changes.pop("output_ids", [7, 10, 3]), "meta_info": meta | changes}
    return msgspec.json.encode([item])


def request() -> list[GenerateRequest]:
    return [GenerateRequest("g", np.array([4, 5], np.int32), 3)]


def test_every_written_token_carries_the_version_that_wrote_it() -> None:
    (answer,) = parse_generations(written(), request(), "s")
    assert answer.output_ids.tolist() == [7, 10, 3]
    assert answer.logprobs.tolist() == [-0.5, -1.5, -0.25]
    assert answer.versions == ("v1", "v1", "v2")
    assert answer.finish_reason == "length"


def test_without_spans_the_version_at_the_end_is_that_of_all_tokens() -> None:
    (answer,) = parse_generations(written(weight_versions=None), request(), "s")
    assert answer.versions == ("v2", "v2", "v2")


def test_an_aborted_answer_is_an_answer() -> None:
    body = written(
        output_ids=[], output_token_logprobs=[], weight_versions=[], finish_reason={"type": "abort", "message": "x"}
    )
    (answer,) = parse_generations(body, request(), "s")
    assert answer.finish_reason == "abort" and len(answer.output_ids) == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"weight_versions": [{"version": "v1", "start": 0, "end": 2}]}, "covers 2 of 3"),
        ({"weight_versions": [{"version": "v1", "start": 1, "end": 3}]}, "without gaps"),
        ({"weight_versions": [{"version": "v1", "start": 0, "end": 4}]}, "without gaps"),
        ({"weight_versions": None, "weight_version": None}, "which weight version"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "3 tokens came with 1"),
        ({"output_token_logprobs": [[-0.5, 7, None], [None, 10, None], [-1, 3, None]]}, "token 1 is null"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-1, 3, None], [-1, 10, None]]}, "other ids"),
        ({"output_token_logprobs": [[0.5, 7, None], [-1, 10, None], [-1, 3, None]]}, "above 0"),
        ({"finish_reason": {"type": "matched"}}, "finish reason"),
        ({"prompt_tokens": 3}, "3 tokens, 2 were sent"),
    ],
)
def test_an_answer_that_breaks_a_rule_names_the_server_and_the_rule(changes: Meta, complaint: str) -> None:
    with pytest.raises(ServerError, match="server s0: request g") as caught:
        parse_generations(written(**changes), request(), "s0")
    assert complaint in caught.value.what


TOP_IDS = [[7, 1], [2, 10], [4, 5]]
TOP_VALUES = [[-0.5, -1.0], [-0.25, -1.5], [-1.0, -1.25]]


def forms() -> dict[str, Meta]:
    """The same top-2 rows of three written tokens, in SGLang's three forms."""

    def base64_of(values: Any, dtype: str) -> str:
        return base64.b64encode(np.array(values, dtype).tobytes()).decode()

    rows = zip(TOP_VALUES, TOP_IDS, strict=True)
    flat = {"output_top_logprobs_shape": [3, 2], "output_top_logprobs_null_prefix": 0}
    return {
        "nested": {"output_top_logprobs": [[[value, i, None] for value, i in zip(*row, strict=True)] for row in rows]},
        "flat": flat
        | {
            "output_top_logprobs_val_flat": np.ravel(TOP_VALUES).tolist(),
            "output_top_logprobs_idx_flat": np.ravel(TOP_IDS).tolist(),
        },
        "base64": flat
        | {
            "output_top_logprobs_val_flat_b64": base64_of(TOP_VALUES, "<f4"),
            "output_top_logprobs_idx_flat_b64": base64_of(TOP_IDS, "<i4"),
            "output_top_logprobs_val_flat_b64_dtype": "float32",
            "output_top_logprobs_idx_flat_b64_dtype": "int32",
        },
    }


def reporting() -> list[GenerateRequest]:
    return [GenerateRequest("g", np.array([4, 5], np.int32), 3, report_k=2)]


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
def test_the_most_probable_ids_are_read_from_every_form(form: str) -> None:
    (answer,) = parse_generations(written(**forms()[form]), reporting(), "s")
    assert answer.topk_ids is not None
    assert (answer.topk_ids.tolist(), answer.topk_ids.dtype) == (TOP_IDS, np.int32)


def test_an_answer_without_a_token_has_no_rows_of_most_probable_ids() -> None:
    nothing = {"output_ids": [], "output_token_logprobs": [], "weight_versions": [], "finish_reason": {"type": "abort"}}
    (answer,) = parse_generations(written(**nothing, output_top_logprobs=[]), reporting(), "s")
    assert answer.topk_ids is not None and answer.topk_ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("form", "changes", "complaint"),
    [
        ("nested", {"output_top_logprobs": None}, "no output_top_logprobs"),
        ("nested", {"output_top_logprobs": forms()["nested"]["output_top_logprobs"][:2]}, "has 2 rows, 3"),
        ("nested", {"output_top_logprobs": [[[-0.5, 7, None]]] * 3}, "of 1 entries, 2"),
        ("flat", {"output_top_logprobs_shape": [2, 2]}, "shape 2 x 2"),
        ("flat", {"output_top_logprobs_shape": None}, "without output_top_logprobs_shape"),
        ("flat", {"output_top_logprobs_idx_flat": [7, 1, 2, 10, 4]}, "5 ids"),
        ("flat", {"output_top_logprobs_idx_flat": [7, 1, 2, 10, 4, 4]}, "same id twice"),
        ("flat", {"output_top_logprobs_idx_flat": [1, 7, 2, 10, 4, 5]}, "do not agree on a written token"),
        ("flat", {"output_top_logprobs_val_flat": [-0.5, -1, 0.5, -1.5, -1, -1]}, "above 0"),
        ("base64", {"output_top_logprobs_idx_flat_b64": None}, "without their ids"),
    ],
)
def test_most_probable_ids_that_cannot_be_right_are_refused(form: str, changes: Meta, complaint: str) -> None:
    with pytest.raises(ServerError, match="server s0: request g") as caught:
        parse_generations(written(**(forms()[form] | changes)), reporting(), "s0")
    assert complaint in caught.value.what
