"""From the JSON of `/generate` to jobs. Everything that can be wrong with a request is found here, before the engine.

Keys and defaults are those of SGLang 0.5.23 (`GenerateReqInput`, `SamplingParams`), plus our own `return_packed`,
`return_full_logprobs`, `topk_dtype`, `logprob_temperature` and packed bodies, and `return_hidden_states` in a packed
form. A key that would have to be ignored is refused.
"""

from __future__ import annotations

import itertools
import math
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from distill.registry import did_you_mean
from distill.serving.embedded.jobs import Ids, Job, Refusal, Sampling, Wanted
from distill.serving.embedded.replies import Flat

_KEYS = {
    "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob",
    "stream", "rid", "return_packed", "return_full_logprobs", "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_hidden_states", "topk_dtype",
    "logprob_temperature",
}  # fmt: skip
_HARMLESS_KEYS = {
    "return_text_in_logprobs", "log_metrics", "extra_key", "cache_salt", "priority", "routed_dp_rank",
}  # fmt: skip
"""SGLang's keys that change speed, or a form that a client has to detect in the reply anyway."""
_SAMPLING_KEYS = {
    "max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "sampling_seed", "seed", "ignore_eos",
}  # fmt: skip
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (1,), "min_p": (0,), "min_new_tokens": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "stop": (None, [], ""), "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False), "no_stop_trim": (True, False),
}  # fmt: skip
"""Parameters that are accepted with these values, which change no token."""
_DEFAULT_MAX_NEW_TOKENS = 128
"""Less where the context has no room for so many. A number that was given is never cut: it fits or is refused."""

_LEAST_TEMPERATURE = 1e-6
"""What is lower counts as 0, as in SGLang 0.5.23: logits divided by it would soon leave float32."""

_CALLS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must respect; changes only with the model."""

    vocab_size: int
    context_length: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One HTTP request: its jobs in order, and the form of the reply."""

    jobs: list[Job]
    batched: bool
    stream: bool
    packed: bool
    flat: Flat


def parse_generate(body: Any, bounds: Bounds, arrays: Mapping[str, NDArray[Any]]) -> GenerateCall:
    """Check a decoded `/generate` body. Raises Refusal (400): what is wrong, and in which request of a batch.

    `arrays` came with a packed body: "row_ids" (N, J) int32 are further ids to be scored, J of its own for each scored
    row, the rows of all requests one after another.
    """
    if not isinstance(body, dict):
        raise _bad("the body must be a JSON object")
    body = cast("dict[str, Any]", body)
    for key in body:
        if key not in _KEYS | _HARMLESS_KEYS:
            hint = "this server takes input_ids only" if key == "text" else did_you_mean(key, _KEYS)
            raise _bad(f"unknown key {key!r}: {hint}")
    stream, packed = _flag(body, "stream"), _flag(body, "return_packed")
    if stream and packed:
        raise _bad("stream and return_packed exclude one another: a packed reply is one buffer")
    rows, batched = _input_ids(body.get("input_ids"))
    count = len(rows)
    rids = _rids(body.get("rid"), count, batched)
    samplings = _per_request("sampling_params", body.get("sampling_params"), count)
    starts = _per_request("logprob_start_len", body.get("logprob_start_len"), count)
    tops = _per_request("top_logprobs_num", body.get("top_logprobs_num"), count)
    flags = _per_request("return_logprob", body.get("return_logprob"), count)
    picks = _token_id_lists(body.get("token_ids_logprob"), count)
    full = _flag(body, "return_full_logprobs")
    if full and not packed:
        raise _bad("return_full_logprobs needs return_packed: true")
    if packed and (len(set(map(str, tops))) > 1 or body.get("token_ids_logprob") is not None):
        raise _bad("return_packed needs one top_logprobs_num for the whole batch, and gives no token_ids_logprob")
    flat = _flat(body, stream)
    jobs: list[Job] = []
    call = next(_CALLS)
    batch_rid = body["rid"] if batched and isinstance(body.get("rid"), str) else ""
    for i in range(count):
        where = f"input_ids[{i}]: " if batched else ""
        prompt = _prompt(rows[i], bounds, where)
        sampling = _sampling(samplings[i], bounds, len(prompt), where)
        total = len(prompt) + sampling.max_new_tokens
        if total > bounds.context_length:
            raise _bad(
                f"{where}{len(prompt)} prompt tokens and max_new_tokens {sampling.max_new_tokens} make {total}, "
                f"more than the context length of {bounds.context_length}"
            )
        wanted = _wanted(flags[i], starts[i], tops[i], picks[i], full, len(prompt), bounds, where)
        if packed and sampling.max_new_tokens:
            raise _bad(f"{where}return_packed is for scoring: set max_new_tokens to 0")
        if packed and wanted.start < 0:
            raise _bad(f"{where}return_packed needs return_logprob: true and logprob_start_len >= 0")
        jobs.append(Job(rids[i], prompt, sampling, wanted, call, batch_rid))
    if arrays:
        _give_row_ids(jobs, arrays, packed, bounds)
    _give_form(jobs, body, packed)
    return GenerateCall(jobs, batched, stream, packed, flat)


def _flat(body: Mapping[str, Any], stream: bool) -> Flat:
    """The layout of written tokens' top-k rows. That of the prompt's is always nested: a packed reply is smaller."""
    flat, base64 = (_flag(body, f"return_flat_raw_{name}") for name in ("output_top_logprobs", "top_logprobs_b64"))
    if flat and stream:
        raise _bad("return_flat_raw_output_top_logprobs is for the finished answer: it excludes stream")
    if base64 and not (flat or _flag(body, "return_flat_raw_top_logprobs")):
        raise _bad("return_flat_raw_top_logprobs_b64 needs one of the two flags whose arrays it encodes")
    return "nested" if not flat else "base64" if base64 else "flat"


def _give_row_ids(jobs: Sequence[Job], arrays: Mapping[str, NDArray[Any]], packed: bool, bounds: Bounds) -> None:
    """Cut the array of a packed body into the rows of each job."""
    ids_NJ = arrays.get("row_ids")
    if ids_NJ is None or len(arrays) > 1 or not packed:
        raise _bad(f"a packed body brings row_ids alone and asks for return_packed, got {sorted(arrays)}")
    counts = [len(job.prompt) - 1 - job.wanted.start for job in jobs]
    if ids_NJ.dtype != np.int32 or ids_NJ.ndim != 2 or len(ids_NJ) != sum(counts) or not ids_NJ.shape[1]:
        raise _bad(f"row_ids is {ids_NJ.dtype} {ids_NJ.shape}, int32 ({sum(counts)}, at least 1) was expected")
    ordered_NJ = np.sort(ids_NJ, axis=1)
    if ids_NJ.size and (ordered_NJ[:, 0].min() < 0 or ordered_NJ[:, -1].max() >= bounds.vocab_size):
        raise _bad(f"row_ids names ids outside of the vocabulary of {bounds.vocab_size}")
    if (ordered_NJ[:, 1:] == ordered_NJ[:, :-1]).any():
        raise _bad("a row of row_ids names the same id twice")
    for job, end, count in zip(jobs, itertools.accumulate(counts), counts, strict=True):
        job.wanted = replace(job.wanted, row_ids=ids_NJ[end - count : end])


def _give_form(jobs: Sequence[Job], body: Mapping[str, Any], packed: bool) -> None:
    """Hidden states, temperatures, and how numbers are written: all of packed replies alone, which can tell them."""
    hidden, dtype = _flag(body, "return_hidden_states"), body.get("topk_dtype")
    if dtype not in (None, "float16", "float32"):
        raise _bad(f"topk_dtype must be float16 or float32, got {dtype!r}")
    temperatures = _per_request("logprob_temperature", body.get("logprob_temperature"), len(jobs))
    for temperature in temperatures:
        if temperature is not None and not (_is_number(temperature) and temperature >= _LEAST_TEMPERATURE):
            raise _bad(f"logprob_temperature must be a number of at least {_LEAST_TEMPERATURE}, got {temperature!r}")
    if not packed and (hidden or dtype is not None or any(one is not None for one in temperatures)):
        raise _bad("return_hidden_states, topk_dtype and logprob_temperature need return_packed: true")
    for job, temperature in zip(jobs, temperatures, strict=True):
        at = 1.0 if temperature is None else float(temperature)
        job.wanted = replace(job.wanted, hidden=hidden, half=dtype == "float16", temperature=at)


def _bad(message: str) -> Refusal:
    return Refusal(400, message)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _bad(f"{key} must be true or false, got {value!r}")
    return value


def _input_ids(value: Any) -> tuple[list[Any], bool]:
    if not isinstance(value, list):
        raise _bad("input_ids must be a list of token ids, or a list of such lists")
    value = cast("list[Any]", value)
    if not value:
        raise _bad("input_ids is empty: there is nothing to read")
    if isinstance(value[0], list):
        return value, True
    return [value], False


def _prompt(ids: Any, bounds: Bounds, where: str) -> Ids:
    if not isinstance(ids, list):
        raise _bad(f"{where}must be a list of token ids")
    ids = cast("list[Any]", ids)
    if not ids:
        raise _bad(f"{where}is empty: there is nothing to read" if where else "input_ids is empty")
    if len(ids) > bounds.context_length:
        raise _bad(f"{where}{len(ids)} tokens are more than the context length of {bounds.context_length}")
    if set(map(type, ids)) != {int}:
        raise _bad(f"{where}token ids must be integers")
    low, high = min(ids), max(ids)
    if low < 0 or high >= bounds.vocab_size:
        wrong = low if low < 0 else high
        raise _bad(f"{where}token id {wrong} is outside of the vocabulary of {bounds.vocab_size}")
    return np.array(ids, np.int32)


def _rids(value: Any, count: int, batched: bool) -> list[str]:
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(value, str):
        return [f"{value}_{i}" for i in range(count)] if batched else [value]
    if not isinstance(value, list) or not all(isinstance(rid, str) for rid in cast("list[Any]", value)):
        raise _bad("rid must be a string, or a list of strings for a batch")
    rids = cast("list[str]", value)
    if len(rids) != count or len(set(rids)) != count:
        raise _bad(f"rid holds {len(set(rids))} different names for {count} requests")
    return rids


def _per_request(key: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    values = cast("list[Any]", value)
    if len(values) != count:
        raise _bad(f"{key} holds {len(values)} entries for {count} requests")
    return values


def _token_id_lists(value: Any, count: int) -> list[Any]:
    """One list for all, or one list (or null) a request."""
    if isinstance(value, list) and any(isinstance(entry, list) for entry in cast("list[Any]", value)):
        return _per_request("token_ids_logprob", value, count)
    return [value] * count


def _sampling(value: Any, bounds: Bounds, prompt_length: int, where: str) -> Sampling:
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise _bad(f"{where}sampling_params must be an object")
    params = cast("dict[str, Any]", value)
    for key, given in params.items():
        if key in _NEUTRAL_SAMPLING:
            if given is not None and given not in _NEUTRAL_SAMPLING[key]:
                raise _bad(f"{where}sampling_params.{key} = {given!r} is not supported here")
        elif key not in _SAMPLING_KEYS:
            raise _bad(f"{where}unknown sampling parameter {key!r}: {did_you_mean(key, _SAMPLING_KEYS)}")
    get = {key: given for key, given in params.items() if given is not None}.get
    room = bounds.context_length - prompt_length
    length = get("max_new_tokens", max(1, min(_DEFAULT_MAX_NEW_TOKENS, room)))
    if not _is_int(length) or length < 0:
        raise _bad(f"{where}max_new_tokens must be a whole number >= 0, got {length!r}")
    temperature = get("temperature", 1.0)
    if not _is_number(temperature) or temperature < 0:
        raise _bad(f"{where}temperature must be a number >= 0, got {temperature!r}")
    top_p = get("top_p", 1.0)
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise _bad(f"{where}top_p must be in (0, 1], got {top_p!r}")
    top_k = get("top_k", -1)
    if not _is_int(top_k) or top_k < -1 or top_k == 0:
        raise _bad(f"{where}top_k must be -1 (no limit) or at least 1, got {top_k!r}")
    stops = _stop_ids(get("stop_token_ids", []), bounds, where)
    return Sampling(
        max_new_tokens=length,
        temperature=float(temperature) if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_p=float(top_p),
        top_k=min(top_k, bounds.vocab_size),
        stop_ids=() if _flag(params, "ignore_eos") else tuple(dict.fromkeys(bounds.stop_ids + stops)),
        seed=_seed(get("sampling_seed", None), get("seed", None), where),
    )


def _stop_ids(value: Any, bounds: Bounds, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_int(i) for i in cast("list[Any]", value)):
        raise _bad(f"{where}stop_token_ids must be a list of token ids")
    ids = tuple(cast("list[int]", value))
    for i in ids:
        if not 0 <= i < bounds.vocab_size:
            raise _bad(f"{where}stop_token_ids: {i} is outside of the vocabulary of {bounds.vocab_size}")
    return ids


def _seed(sampling_seed: Any, seed: Any, where: str) -> int:
    """`sampling_seed` is SGLang's name; `seed` is an alias. Any whole number will do."""
    if sampling_seed is not None and seed is not None and sampling_seed != seed:
        raise _bad(f"{where}sampling_seed and seed differ: give one of them")
    given = seed if sampling_seed is None else sampling_seed
    if given is None:
        return secrets.randbits(64)
    if not _is_int(given):
        raise _bad(f"{where}sampling_seed must be a whole number, got {given!r}")
    return given & 0xFFFF_FFFF_FFFF_FFFF


def _wanted(flag: Any, start: Any, top: Any, ids: Any, full: bool, length: int, bounds: Bounds, where: str) -> Wanted:
    if flag is not None and not isinstance(flag, bool):
        raise _bad(f"{where}return_logprob must be true or false, got {flag!r}")
    start, top = -1 if start is None else start, 0 if top is None else top
    if not _is_int(start) or not -1 <= start < length:
        raise _bad(f"{where}logprob_start_len must be between -1 and {length - 1} for {length} tokens, got {start!r}")
    if not _is_int(top) or not 0 <= top <= bounds.vocab_size:
        raise _bad(f"{where}top_logprobs_num must be between 0 and {bounds.vocab_size}, got {top!r}")
    picked: Ids | None = None
    if ids is not None:
        if not isinstance(ids, list) or not all(_is_int(i) for i in cast("list[Any]", ids)):
            raise _bad(f"{where}token_ids_logprob must be a list of token ids")
        picked = np.array(ids, np.int32)
        if picked.size and (picked.min() < 0 or picked.max() >= bounds.vocab_size):
            raise _bad(f"{where}token_ids_logprob names ids outside of the vocabulary of {bounds.vocab_size}")
    if not flag:
        return Wanted()
    return Wanted(start=start, output=True, top_k=top, token_ids=picked, full=full)
