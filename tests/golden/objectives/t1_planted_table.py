"""A language model that is a table of its next-token distributions, scored through the product's parser.

Legend: N tokens of a sequence, R of them scored, V vocabulary, k top-k entries.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from distill.serving.replies import Asked, Scores, parse_scores
from tests.golden.objectives.data import Case
from tests.golden.objectives.runner import Evaluate, Mismatch, deviation

MISTAKE_TOLERANCE = (1e-3, 1e-3)
"""Scores this near to a well-known mistake's would be the mistake."""


def reply_of_table(table_logp: np.ndarray, ids: np.ndarray, start: int, k: int) -> bytes:
    """What a server whose model is the table answers: the row of a token is that of the token before it."""
    rows = table_logp.astype(np.float32)[ids[start:-1]]
    order = np.argsort(-rows, axis=1)[:, :k]
    sampled: list[Any] = [[None, int(ids[start]), None]]
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


def scored(case: Case, *, response_len: int, start: int, k: int) -> Scores:
    ids = np.asarray(case.inputs["ids"]).astype(np.int32)
    reply = reply_of_table(np.asarray(case.inputs["table_logp"]), ids, start, k)
    return parse_scores(reply, [Asked("s", ids, response_len, start, case.params["V"], "v1", k)], "t")[0]


def planted_scores(case: Case, precision: str) -> dict[str, Any]:
    prompt_len, response_len = case.params["P"], case.params["R"]
    got: dict[str, Any] = {}
    for k in (int(name[3:-4]) for name in case.expect if re.fullmatch(r"top\d+_ids", name)):
        scores = scored(case, response_len=response_len, start=prompt_len - 1, k=k)
        whole = scored(case, response_len=response_len, start=0, k=k)
        if scores.logprobs.tobytes() != whole.logprobs.tobytes():
            raise Mismatch("the scores depend on where the reply begins")
        got |= {
            "logq": scores.logprobs,
            f"top{k}_ids": scores.topk_ids,
            f"top{k}_logp": scores.topk_logprobs,
            f"top{k}_log_tail": scores.log_tail,
        }
    for mistake in (name for name in case.expect if name.startswith("wrong_")):
        if deviation(got["logq"], case.expect[mistake], *MISTAKE_TOLERANCE) <= 1.0:
            raise Mismatch(f"the scores are those of {mistake}")
    return got


def planted_scores_masked(case: Case, precision: str) -> dict[str, Any]:
    """Several turns: all is scored from the first response token on, and the mask says what is trained."""
    first, ids = case.params["first_scored"], np.asarray(case.inputs["ids"])
    scores = scored(case, response_len=len(ids) - first, start=first - 1, k=1)
    mask = np.asarray(case.inputs["loss_mask"])
    positions = np.flatnonzero(mask)[np.flatnonzero(mask) >= first]
    return {"positions": positions, "logq": scores.logprobs[positions - first]}


KINDS: dict[str, Evaluate] = {
    "planted_scores": planted_scores,
    "planted_scores_masked": planted_scores_masked,
}
COMPUTED = ("f32",)
"""Scores are float32 wherever they travel."""
