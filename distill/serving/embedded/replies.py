"""From results to the bytes of a reply: SGLang's JSON, or one packed buffer of arrays.

In JSON a number that is not finite is null, as in SGLang 0.5.23. R scored rows, K top-k entries, V vocabulary.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from distill import packing
from distill.serving.embedded.jobs import Finish, Floats, Ids, InputScores, Job, Result
from distill.serving.packed import request_digest, to_half

Flat = Literal["nested", "flat", "base64"]
"""How the top-k rows of written tokens are laid out."""
_encode = msgspec.json.Encoder().encode


def to_json(value: Any) -> bytes:
    return _encode(value)


def generation(job: Job, result: Result, seconds: float, flat: Flat) -> dict[str, Any]:
    """One object of a `/generate` reply. There is no "text": this server holds no tokenizer."""
    meta: dict[str, Any] = {
        "id": result.rid,
        "finish_reason": _finish(result.finish, len(result.output_ids)),
        "prompt_tokens": result.prompt_tokens,
        "weight_version": result.weight_version,
        "num_retractions": result.retractions,
    }
    if job.wanted.output:
        meta |= _input_part(job, result.scores) | _output_part(job, result, flat)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(result.output_ids),
        "cached_tokens": 0,
        "weight_versions": [{"version": name, "start": start, "end": end} for name, start, end in result.spans],
        "e2e_latency": seconds,
    }
    return {"output_ids": result.output_ids.tolist(), "meta_info": meta}


def packed(jobs: Sequence[Job], results: Sequence[Result]) -> bytes:
    """Scores of all results in one buffer: the rows of item i follow those of item i - 1; there is no null row."""
    scores = [result.scores for result in results if result.scores is not None]
    items = [
        {
            "id": result.rid,
            "prompt_tokens": result.prompt_tokens,
            "rows": len(one.logprobs),
            "weight_version": result.weight_version,
            "digest": request_digest(job.prompt, job.wanted.row_ids),
        }
        | ({} if job.wanted.temperature == 1.0 else {"temperature": job.wanted.temperature})
        for job, result, one in zip(jobs, results, scores, strict=True)
    ]
    arrays: dict[str, NDArray[Any]] = {"logprobs": np.concatenate([one.logprobs for one in scores])}
    for name, parts in (
        ("topk_ids", [one.top_ids for one in scores]),
        ("topk_logprobs", [one.top_logprobs for one in scores]),
        ("row_logprobs", [one.row_logprobs for one in scores]),
        ("log_tail", [one.log_tail for one in scores]),
        ("full_logprobs", [one.full for one in scores]),
        ("hidden", [one.hidden for one in scores]),
    ):
        there = [part for part in parts if part is not None]
        if there:
            arrays[name] = np.concatenate(there)
    if jobs[0].wanted.half:
        arrays |= {name: to_half(arrays[name]) for name in ("topk_logprobs", "row_logprobs") if name in arrays}
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


def _output_part(job: Job, result: Result, flat: Flat) -> dict[str, Any]:
    part: dict[str, Any] = {
        "output_token_logprobs": _triples(result.output_logprobs, result.output_ids),
        "output_token_logprobs_length": len(result.output_ids),
    }
    if job.wanted.top_k and flat != "nested" and result.output_tops:  # as SGLang, which has no flat form of no rows
        part |= _flat_tops(result.output_tops, flat)
    elif job.wanted.top_k:
        part["output_top_logprobs"] = [_triples(values, ids) for ids, values in result.output_tops]
    if job.wanted.token_ids is not None:
        part["output_token_ids_logprobs"] = [_triples(v, job.wanted.token_ids) for v in result.output_picked]
    return part


def _flat_tops(tops: Sequence[tuple[Ids, Floats]], flat: Flat) -> dict[str, Any]:
    """Written tokens' top-k rows as two arrays, row after row: lists, or base64 of their little-endian bytes."""
    ids_RK, values_RK = np.stack([ids for ids, _ in tops]), np.stack([values for _, values in tops])
    shape = {"output_top_logprobs_shape": ids_RK.shape, "output_top_logprobs_null_prefix": 0}
    if flat == "flat":
        return shape | {
            "output_top_logprobs_val_flat": values_RK.ravel().tolist(),
            "output_top_logprobs_idx_flat": ids_RK.ravel().tolist(),
        }
    return shape | {
        "output_top_logprobs_val_flat_b64": base64.b64encode(values_RK.astype("<f4").tobytes()).decode(),
        "output_top_logprobs_idx_flat_b64": base64.b64encode(ids_RK.astype("<i4").tobytes()).decode(),
        "output_top_logprobs_val_flat_b64_dtype": "float32",
        "output_top_logprobs_idx_flat_b64_dtype": "int32",
    }


def _triples(logprobs: Floats, ids: Ids) -> list[tuple[float, int, None]]:
    return [(value, token, None) for value, token in zip(logprobs.tolist(), ids.tolist(), strict=True)]
