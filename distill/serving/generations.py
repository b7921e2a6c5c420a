"""What a model server writes, from the JSON of `/generate`, checked and turned into arrays. No torch, no network.

R written tokens, K most probable tokens reported with each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distill.errors import ServerError
from distill.serving.wire import BrokenReply, Item, Meta, agree, check_logprobs, decode, floats, ids, meta_of, top_rows
from distill.types import Floats, GenerateRequest, Generation, Ids


def parse_generations(body: bytes | str, requests: Sequence[GenerateRequest], server: str) -> list[Generation]:
    """What a server wrote for a batch, in the order of the requests. Raises ServerError."""
    request_id = ", ".join(request.id for request in requests)
    try:
        generations: list[Generation] = []
        for item, request in zip(decode(body, len(requests)), requests, strict=True):
            request_id = request.id
            generations.append(_generation(item, request))
    except BrokenReply as error:
        raise ServerError(f"server {server}: request {request_id}: {error}") from None
    return generations


def _generation(item: Item, request: GenerateRequest) -> Generation:
    meta = meta_of(item, len(request.input_ids))
    finish = meta.finish_reason.type if meta.finish_reason else ""
    if finish not in ("stop", "length", "abort"):
        raise BrokenReply(f"the finish reason is {finish!r}, none of stop, length, abort")
    output_ids = ids(item.output_ids or [], "output_ids")
    entries = meta.output_token_logprobs or []
    if len(entries) != len(output_ids):
        raise BrokenReply(f"{len(output_ids)} tokens came with {len(entries)} log-probabilities")
    echoed = np.array([entry[1] for entry in entries], np.int64)
    if not ((echoed == output_ids) | (echoed == 0)).all():
        raise BrokenReply("output_token_logprobs is about other ids than output_ids")
    logprobs = floats([entry[0] for entry in entries], "the log-probability of written token {}")
    check_logprobs(logprobs, "the log-probability of a written token")
    topk_ids = _reported(meta, request.report_k, output_ids, logprobs) if request.report_k else None
    return Generation(request.id, output_ids, logprobs, _versions(meta, len(output_ids)), finish, topk_ids)


def _reported(meta: Meta, k: int, output_ids: Ids, logprobs_R: Floats) -> Ids:
    """(R, k): the most probable tokens of each row.

    Their values are of the temperature-scaled distribution, as `logprobs` are (SGLang 0.5.23 and the embedded server).
    Only the ids are kept: dividing logits by a temperature keeps their order, so the k largest are those of the
    distribution at temperature 1, and cuts by top-k and top-p come after.
    """
    if not len(output_ids):  # aborted before the first token; SGLang has no flat form for no rows
        return np.empty((0, k), np.int32)
    ids_RK, values_RK = top_rows(meta, "output", len(output_ids), len(output_ids), k)
    check_logprobs(values_RK, "an entry of output_top_logprobs")
    ordered_RK = np.sort(ids_RK, axis=1)
    if (ordered_RK[:, 1:] == ordered_RK[:, :-1]).any():
        raise BrokenReply("a row of output_top_logprobs names the same id twice")
    if not agree(ids_RK, values_RK, output_ids, logprobs_R):
        raise BrokenReply("output_top_logprobs and output_token_logprobs do not agree on a written token")
    return ids_RK


def _versions(meta: Meta, count: int) -> tuple[str, ...]:
    """One weight version a token. SGLang before 0.5.20 has no spans and names only the version at the end."""
    if meta.weight_versions is None:
        if meta.weight_version is None:
            raise BrokenReply("the reply does not say which weight version wrote it")
        return (meta.weight_version,) * count
    labels: list[str] = []
    for span in meta.weight_versions:
        if span.start != len(labels) or span.end < span.start or span.end > count:
            raise BrokenReply(f"weight_versions does not cover {count} tokens without gaps: {meta.weight_versions}")
        labels.extend([span.version] * (span.end - span.start))
    if len(labels) != count:
        raise BrokenReply(f"weight_versions covers {len(labels)} of {count} tokens")
    return tuple(labels)


def generate_body(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """The JSON that asks for answers to all of them."""
    body: dict[str, Any] = {
        "input_ids": [request.input_ids.tolist() for request in requests],
        "rid": [request.id for request in requests],
        "sampling_params": [_sampling_params(request) for request in requests],
        "return_logprob": True,
    }
    if any(request.report_k for request in requests):
        body |= {
            "top_logprobs_num": [request.report_k for request in requests],
            # the flag of the prompt's rows, of which there are none, is for a version that knows only that one:
            # SGLang refuses the encoding beside no flag that it knows
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_output_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
    return body


def _sampling_params(request: GenerateRequest) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": list(request.stop_token_ids),
    }
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    return params
