"""Replies of SGLang's /generate, parsed: the known scores bit for bit, or a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np

from distill.errors import TeacherError
from distill.serving.replies import Asked, Scores, parse_scores
from tests.golden.objectives.data import Case
from tests.golden.objectives.runner import Evaluate, Mismatch

TEACHER = "algebra"
EXACT = ("logq", "top_ids", "top_logp", "ids_logp")


def request_of(case: Case) -> dict[str, Any]:
    """A batch case may say in words that its request is that of another."""
    request = case.inputs["request"]
    if not isinstance(request, str):
        return request
    return next(
        other.inputs["request"]
        for other in case.siblings.values()
        if other.kind == case.kind and not isinstance(other.inputs["request"], str)
    )


def asked_by(case: Case) -> list[Asked]:
    """What the case's request asked for, one entry an item."""
    params, request = case.params, request_of(case)
    one = case.kind == "sglang_reply"
    many_ids = [request["input_ids"]] if one else request["input_ids"]
    starts = [request["logprob_start_len"]] if one else request["logprob_start_len"]
    lengths = [params["R"]] if one else params["R"]
    token_ids = request.get("token_ids_logprob")
    return [
        Asked(
            id=f"{case.id}#{index}",
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


def reply(case: Case, precision: str) -> dict[str, Any]:
    asked = asked_by(case)
    try:
        found = parse_scores(case.inputs["reply_text"], asked, TEACHER)
    except TeacherError as error:
        if TEACHER not in error.what or asked[0].id not in error.what:
            raise Mismatch(f"the refusal does not name teacher and request: {error.what}") from error
        raise
    got: dict[str, Any] = {}
    for index, (scores, one) in enumerate(zip(found, asked, strict=True)):
        prefix = f"{index}_" if len(found) > 1 else ""
        members = members_of(scores, one)
        claim_exact(case, members, prefix)
        got |= {prefix + name: value for name, value in members.items()}
    return got


def members_of(scores: Scores, asked: Asked) -> dict[str, Any]:
    return {
        "logq": scores.logprobs,
        "top_ids": scores.topk_ids,
        "top_logp": scores.topk_logprobs,
        "log_tail_from_topk": scores.log_tail,
        "ids": asked.token_ids,
        "ids_logp": scores.ids_logprobs,
    }


def claim_exact(case: Case, members: dict[str, Any], prefix: str) -> None:
    """Same dtype, shape and bits, and nothing beside what the reply holds."""
    for name in EXACT:
        got, want = members[name], case.expect.get(prefix + name)
        if (got is None) != (want is None):
            raise Mismatch(f"{prefix}{name}: {'not given' if got is None else 'given, and not expected'}")
        if got is not None and (got.dtype != want.dtype or got.shape != want.shape or got.tobytes() != want.tobytes()):
            raise Mismatch(f"{prefix}{name} is not the same bit for bit")


KINDS: dict[str, Evaluate] = {"sglang_reply": reply, "sglang_reply_batch": reply}
COMPUTED = ("f32",)
"""Scores are float32 wherever they travel."""
