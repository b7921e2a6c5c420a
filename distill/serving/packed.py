"""Scores in the packed binary form of the embedded server, under the same rules as the JSON forms of `replies`.

`meta` is {"items": [{"id", "prompt_tokens", "rows", "weight_version", "digest"}, ...]}, each with its "temperature"
where that is not 1. The arrays hold all items one after another, rows for the tokens after `logprob_start_len` only, so
that no null row needs to be dropped. What was sent, the ids of each row included, is not sent back: the digest stands
for it. So a row of K ids costs 8 (K + 1) bytes in both directions together, and 6 K + 8 where the row's
log-probabilities travel as float16. The score of the response token and the tail are float32 always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from distill.packing import PackingError, unpack
from distill.serving.replies import (
    Asked,
    Scores,
    check_mass,
    check_sampled,
    check_topk,
    check_version,
    score_error,
)
from distill.serving.wire import ROUNDING, BrokenReply, check_logprobs
from distill.types import Floats, Hidden, Ids

_LOWEST_HALF = -65504.0
"""The least finite number of float16."""
_HIDDEN_DTYPES = ("<f4", "<f2", "<i2")
"""int16: the bits of bfloat16."""


class _PackedItem(msgspec.Struct):
    id: str
    prompt_tokens: int
    rows: int
    weight_version: str
    digest: str
    temperature: float = 1.0


class _PackedMeta(msgspec.Struct):
    items: list[_PackedItem]


def request_digest(input_ids: Ids, row_ids: Ids | None) -> str:
    """xxh3-64 of the token ids of a request and of the ids of its rows, 16 hex digits: which question is answered."""
    hasher = xxhash.xxh3_64(np.ascontiguousarray(input_ids, "<i4").data)
    if row_ids is not None:
        hasher.update(np.ascontiguousarray(row_ids, "<i4").data)
    return hasher.hexdigest()


def to_half(logprobs: Floats) -> NDArray[np.float16]:
    """Rounded to nearest. -inf stays; what is finite stays finite, at -65504 at least: q = 0 is another statement."""
    saturated = np.where(logprobs < _LOWEST_HALF, np.float32(_LOWEST_HALF), logprobs)
    return np.where(logprobs == -np.inf, logprobs, saturated).astype(np.float16)


def parse_packed(
    body: bytes | memoryview, asked: Sequence[Asked], teacher: str, *, full: bool = False, hidden: bool = False
) -> list[Scores]:
    """The scores in a packed reply: read-only views of `body`, but for what was float16 and is float32 here. Raises
    TeacherError.

    `full` says that whole rows were asked for, `hidden` hidden states. `Asked.start` must be the prompt's length less
    one, and `k`, `half`, `vocab_size` and the width of `row_ids` the same for all.
    """
    k, vocab_size, of_rows = asked[0].k, asked[0].vocab_size, "<f2" if asked[0].half else "<f4"
    columns = 0 if asked[0].row_ids is None else asked[0].row_ids.shape[1]
    try:
        meta, arrays = _open(body, asked)
        total = sum(one.response_len for one in asked)
        logprobs = _array(arrays, "logprobs", "<f4", (total,))
        topk_ids = _array(arrays, "topk_ids", "<i4", (total, k)) if k else None
        topk_logprobs = _wide(_array(arrays, "topk_logprobs", of_rows, (total, k))) if k else None
        tails = _array(arrays, "log_tail", "<f4", (total,)) if k or columns else None
        row_logprobs = _wide(_array(arrays, "row_logprobs", of_rows, (total, columns))) if columns else None
        full_logprobs = _array(arrays, "full_logprobs", "<f4", (total, vocab_size)) if full else None
        hidden_states = _hidden(arrays, total) if hidden else None
    except BrokenReply as error:
        raise score_error(teacher, asked, error) from None
    optional: tuple[NDArray[Any] | None, ...] = (
        topk_ids,
        topk_logprobs,
        tails,
        full_logprobs,
        None,
        row_logprobs,
        hidden_states,
    )
    scores: list[Scores] = []
    begin = 0
    for item, one in zip(meta.items, asked, strict=True):
        rows = slice(begin, begin + one.response_len)
        begin = rows.stop
        views: list[Any] = [None if array is None else array[rows] for array in optional]
        found = Scores(logprobs[rows], *views)
        try:
            _check(found, item, one)
        except BrokenReply as error:
            raise score_error(teacher, [one], error) from None
        scores.append(found)
    return scores


def _open(body: bytes | memoryview, asked: Sequence[Asked]) -> tuple[_PackedMeta, dict[str, NDArray[Any]]]:
    try:
        plain, arrays = unpack(body)
        meta = msgspec.convert(plain, _PackedMeta)
    except (PackingError, msgspec.ValidationError) as error:
        raise BrokenReply(f"the packed reply cannot be read: {error}") from error
    if len(meta.items) != len(asked):
        raise BrokenReply(f"{len(meta.items)} replies came back for {len(asked)} requests")
    for item, one in zip(meta.items, asked, strict=True):
        if item.rows != one.response_len:
            raise BrokenReply(f"{item.rows} rows came back for the {one.response_len} response tokens of {one.id}")
    return meta, arrays


def _array(arrays: Mapping[str, NDArray[Any]], name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    array = arrays.get(name)
    if array is None:
        raise BrokenReply(f"the packed reply has no {name}")
    if array.dtype.str != dtype or array.shape != shape:
        raise BrokenReply(f"{name} is {array.dtype.str} {array.shape}, {dtype} {shape} was expected")
    return array


def _wide(array: NDArray[Any]) -> Floats:
    return array.astype(np.float32, copy=False)


def _hidden(arrays: Mapping[str, NDArray[Any]], rows: int) -> Hidden:
    """(rows, D) in the teacher's own dtype."""
    array = arrays.get("hidden")
    if array is None:
        raise BrokenReply("the packed reply has no hidden")
    if array.dtype.str not in _HIDDEN_DTYPES or array.ndim != 2 or len(array) != rows or not array.shape[1]:
        raise BrokenReply(
            f"hidden is {array.dtype.str} {array.shape}, ({rows}, D) of {', '.join(_HIDDEN_DTYPES)} was expected"
        )
    return array


def _finite(hidden: Hidden) -> bool:
    if hidden.dtype == np.int16:  # bfloat16: infinity and NaN have all 8 bits of the exponent
        return not bool(((hidden & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(hidden).all())


def _check(scores: Scores, item: _PackedItem, asked: Asked) -> None:
    if item.id != asked.id:
        raise BrokenReply(f"the reply is about request {item.id}")
    if item.prompt_tokens != len(asked.input_ids):
        raise BrokenReply(f"the reply is about {item.prompt_tokens} tokens, {len(asked.input_ids)} were sent")
    check_version(item.weight_version, asked.weight_version)
    if item.digest != request_digest(asked.input_ids, asked.row_ids):
        raise BrokenReply("the rows are about other tokens than those that were sent")
    if item.temperature != asked.temperature:
        raise BrokenReply(f"the rows are at temperature {item.temperature:g}, {asked.temperature:g} was asked for")
    if scores.hidden is not None and not _finite(scores.hidden):
        raise BrokenReply("a hidden state is not finite")
    check_sampled(scores.logprobs)
    if scores.topk_ids is not None and scores.topk_logprobs is not None:
        check_topk(scores.topk_ids, scores.topk_logprobs, asked.vocab_size)
    if scores.row_logprobs is not None:
        check_logprobs(scores.row_logprobs, "the score of an asked id")
        check_mass(scores.row_logprobs)
    if scores.log_tail is not None:
        check_logprobs(scores.log_tail, "the tail of a top-k row")
    if scores.full_logprobs is not None:
        check_logprobs(scores.full_logprobs, "an entry of a full row")
        again = np.take_along_axis(scores.full_logprobs, asked.response_ids[:, None].astype(np.intp), axis=1)[:, 0]
        if (np.abs(again - scores.logprobs) > ROUNDING).any():
            raise BrokenReply("the full rows and the scores of the response tokens do not agree")
