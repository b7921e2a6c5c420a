"""The embedded server's packed form carries the planted scores of set t1. Sets t1 and t2 over JSON: `objectives`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distill.packing import pack
from distill.serving.packed import parse_packed, request_digest
from distill.serving.replies import Asked, log_tail
from tests.golden.objectives.data import Case, load

PLANTED = [
    case
    for case in load(Path(__file__).parent / "data" / "objectives", "t1_planted_table")
    if case.kind == "planted_scores"
]


def assert_same_bits(got: np.ndarray | None, want: np.ndarray) -> None:
    assert got is not None
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("case", PLANTED, ids=[case.id for case in PLANTED])
def test_the_packed_form_gives_the_planted_scores_bit_for_bit(case: Case) -> None:
    prompt_len, response_len, vocab_size = case.params["P"], case.params["R"], case.params["V"]
    ids = case.inputs["ids"].astype(np.int32)
    full = case.inputs["table_logp"].astype(np.float32)[ids[prompt_len - 1 : -1]]
    topk_ids = np.argsort(-full, axis=1)[:, :4].astype(np.int32)
    topk = np.take_along_axis(full, topk_ids, 1)
    item = {
        "id": "s",
        "prompt_tokens": len(ids),
        "rows": response_len,
        "weight_version": "v1",
        "digest": request_digest(ids, None),
    }
    body = pack(
        {"items": [item]},
        {
            "logprobs": full[np.arange(response_len), ids[prompt_len:]],
            "topk_ids": topk_ids,
            "topk_logprobs": topk,
            "log_tail": log_tail(topk_ids, topk, vocab_size),
            "full_logprobs": full,
        },
    )
    asked = Asked("s", ids, response_len, prompt_len - 1, vocab_size, "v1", 4)
    (scores,) = parse_packed(body, [asked], "t", full=True)
    assert_same_bits(scores.logprobs, case.expect["logq"].astype(np.float32))
    assert_same_bits(scores.full_logprobs, full)
    assert_same_bits(scores.topk_ids, case.expect["top4_ids"].astype(np.int32))
    assert scores.log_tail is not None
    np.testing.assert_allclose(scores.log_tail, case.expect["top4_log_tail"], rtol=1e-5, atol=1e-5)


def test_there_are_planted_scores() -> None:
    assert len(PLANTED) == 9
