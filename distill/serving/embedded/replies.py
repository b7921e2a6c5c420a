"""From results to the bytes of a reply: SGLang's JSON, or one packed buffer of arrays.

In JSON a number that is not finite is null, as in SGLang 0.5.23. R scored rows, K top-k entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from distill import packing
from distill.serving.embedded.jobs import Finish, Floats, Ids, InputScores, Job, Result

_encode = msgspec.json.Encoder().encode


def to_json(value: Any) -> bytes:
    return _encode(value)


def generation(job: Job, result: Result, seconds: float) -> dict[str, Any]:
    """One object of a `/generate` reply. There is no "text": this server holds no tokenizer."""
    meta: dict[str, Any] = {
        "id": result.rid,
        "finish_reason": _finish(result.finish, len(result.output_ids)),
        "prompt_tokens": result.prompt_tokens,
        "weight_version": result.weight_version,
        "num_retractions": result.retractions,
    }
    if job.wanted.output:
        meta |= _input_part(job, result.scores) | _output_part(job, result)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(result.output_ids),
        "cached_tokens": 0,
        "weight_versions": [{"version": name, "start": start, "end": end} for name, start, end in result.spans],
        "e2e_latency": seconds,
    }
    return {"output_ids": result.output_ids.tolist(), "meta_info": meta}


def packed(results: Sequence[Result]) -> bytes:
    """Scores of all results in one buffer: the rows of item i follow those of item i - 1; there is no null row."""
    scores = [result.scores for result in results if result.scores is not None]
    items = [
        {
            "id": result.rid,
            "prompt_tokens": result.prompt_tokens,
            "rows": len(one.logprobs),
            "weight_version": result.weight_version,
        }
        for result, one in zip(results, scores, strict=True)
    ]
    arrays: dict[str, NDArray[Any]] = {
        "logprobs": np.concatenate([one.logprobs for one in scores]),
        "token_ids": np.concatenate([one.token_ids for one in scores]),
    }
    for name, parts in (
        ("topk_ids", [one.top_ids for one in scores]),
        ("topk_logprobs", [one.top_logprobs for one in scores]),
        ("log_tail", [one.log_tail for one in scores]),
        ("full_logprobs", [one.full for one in scores]),
    ):
        there = [part for part in parts if part is not None]
        if there:
            arrays[name] = np.concatenate(there)
    return packing.pack({"items": items}, arrays)


def _finish(finish: Finish | None, tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "abort":
        return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}
    return {"type": "length", "length": tokens}


def _input_part(job: Job, scores: InputScores | None) -> dict[str, Any]:
    """As SGLang: the row of the first token is null whatever the start."""
    wanted = job.wanted
    part: dict[str, Any] = {"input_token_logprobs": []}
    if scores is not None:
        first = int(job.prompt[wanted.start])
        part["input_token_logprobs"] = [(None, first, None), *_triples(scores.logprobs, scores.token_ids)]
    if wanted.top_k:
        part["input_top_logprobs"] = []
        if scores is not None and scores.top_ids is not None and scores.top_logprobs is not None:
            rows = zip(scores.top_logprobs, scores.top_ids, strict=True)
            part["input_top_logprobs"] = [None, *(_triples(values, ids) for values, ids in rows)]
    if wanted.token_ids is not None:
        part["input_token_ids_logprobs"] = []
        if scores is not None and scores.picked is not None:
            ids = wanted.token_ids
            part["input_token_ids_logprobs"] = [None, *(_triples(values, ids) for values in scores.picked)]
    return part


def _output_part(job: Job, result: Result) -> dict[str, Any]:
    part: dict[str, Any] = {
        "output_token_logprobs": _triples(result.output_logprobs, result.output_ids),
        "output_token_logprobs_length": len(result.output_ids),
    }
    if job.wanted.top_k:
        part["output_top_logprobs"] = [_triples(values, ids) for ids, values in result.output_tops]
    if job.wanted.token_ids is not None:
        part["output_token_ids_logprobs"] = [_triples(v, job.wanted.token_ids) for v in result.output_picked]
    return part


def _triples(logprobs: Floats, ids: Ids) -> list[tuple[float, int, None]]:
    return [(value, token, None) for value, token in zip(logprobs.tolist(), ids.tolist(), strict=True)]
