"""The JSON of a `/generate` reply: its shapes, and how the parts that scores and answers share are read and checked.

The shapes are those of SGLang 0.5.20 to 0.5.23. Legend: N rows, K entries of a row.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from distill.types import Floats, Ids

ROUNDING = 1e-3
"""How far above 0 a log-probability may come out of a low-precision softmax."""
HALF_ROUNDING = 2.0**-11
"""Largest relative error of a number that was rounded to float16, as far as float16 has normal numbers there."""
_FLOAT_MARKS = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
_INT_MARKS = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}

_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Entry = tuple[float | None, _Id, Any]
"""(log-probability, token id, text or null)"""
Side = Literal["input", "output"]


class BrokenReply(Exception):
    """A rule that a reply breaks. The functions that know whom they asked turn it into a DistillError."""


class ServerAtFault(BrokenReply):
    """A rule that would be broken for any request: the server refused, was stopped, or holds other weights."""


class Finish(msgspec.Struct):
    type: str = ""
    message: str | None = None


class Span(msgspec.Struct):
    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    id: str = ""
    finish_reason: Finish | None = None
    prompt_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None
    input_token_logprobs: list[Entry] | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None
    input_token_ids_logprobs: list[list[Entry] | None] | None = None
    output_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None
    input_top_logprobs_val_flat: list[float | None] | None = None
    input_top_logprobs_idx_flat: list[_Id] | None = None
    input_top_logprobs_val_flat_b64: str | None = None
    input_top_logprobs_idx_flat_b64: str | None = None
    input_top_logprobs_val_flat_b64_dtype: str = "float32"
    input_top_logprobs_idx_flat_b64_dtype: str = "int32"
    input_top_logprobs_shape: tuple[int, int] | None = None
    input_top_logprobs_null_prefix: int = 0
    output_top_logprobs_val_flat: list[float | None] | None = None
    output_top_logprobs_idx_flat: list[_Id] | None = None
    output_top_logprobs_val_flat_b64: str | None = None
    output_top_logprobs_idx_flat_b64: str | None = None
    output_top_logprobs_val_flat_b64_dtype: str = "float32"
    output_top_logprobs_idx_flat_b64_dtype: str = "int32"
    output_top_logprobs_shape: tuple[int, int] | None = None
    output_top_logprobs_null_prefix: int = 0


class Item(msgspec.Struct):
    meta_info: Meta | None = None
    output_ids: list[_Id] | None = None
    error: Any = None
    message: Any = None


_items = msgspec.json.Decoder(list[Item] | Item)


def decode(body: bytes | str, count: int) -> list[Item]:
    """The items of a reply to `count` requests."""
    try:
        decoded = _items.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BrokenReply(f"the reply is not the JSON of a /generate reply: {error}") from error
    items = [decoded] if isinstance(decoded, Item) else decoded
    if isinstance(decoded, Item) and decoded.meta_info is None:
        raise ServerAtFault(_refusal(decoded))
    if len(items) != count:
        raise BrokenReply(f"{len(items)} replies came back for {count} requests")
    return items


def meta_of(item: Item, prompt_len: int) -> Meta:
    meta = item.meta_info
    if meta is None:
        raise ServerAtFault(_refusal(item))
    if meta.prompt_tokens is not None and meta.prompt_tokens != prompt_len:
        raise BrokenReply(f"the reply is about {meta.prompt_tokens} tokens, {prompt_len} were sent")
    return meta


def _refusal(item: Item) -> str:
    return f"the server answered with an error: {item.error or item.message or 'no meta_info'}"


def floats(values: list[float | None], what: str) -> Floats:
    """Null is what orjson makes of NaN and of both infinities: nobody can say which, so it is refused."""
    if None in values:
        raise BrokenReply(f"{what.format(values.index(None))} is null")
    return np.array(values, np.float32)


def ids(values: list[int] | NDArray[Any], key: str) -> Ids:
    wide = np.asarray(values, np.int64)
    if wide.size and (wide.min() < 0 or wide.max() >= 2**31):
        raise BrokenReply(f"{key}: an id does not fit in 31 bits")
    return wide.astype(np.int32)


def check_logprobs(logprobs: Floats, what: str) -> None:
    """Refuse NaN, +inf and values above 0. -inf, a token of probability 0, passes."""
    if not logprobs.size:
        return
    peak = logprobs.max()  # one pass: NaN wins every comparison that max makes
    if not peak <= ROUNDING:
        raise BrokenReply(f"{what} {'is not a number' if np.isnan(peak) else f'is {peak:g}, above 0'}")


def agree(ids_RK: Ids, values_RK: Floats, tokens_R: Ids, logprobs_R: Floats, *, half: bool = False) -> bool:
    """Whether each row that names its token says of it what `logprobs_R`, which are finite, say.

    `half`: the rows were rounded to float16, and `logprobs_R` were not.
    """
    of_token_RK = np.where(ids_RK == tokens_R[:, None], values_RK, logprobs_R[:, None])
    slack_R1 = ROUNDING + (HALF_ROUNDING * np.abs(logprobs_R[:, None]) if half else 0.0)
    return bool((np.abs(of_token_RK - logprobs_R[:, None]) <= slack_R1).all())


def nested(rows: list[list[Entry] | None], k: int, key: str) -> tuple[Ids, Floats]:
    """(N, k) ids and values of rows of triples."""
    entries: list[Entry] = []
    for at, row in enumerate(rows):
        if row is None or len(row) != k:
            found = "missing" if row is None else f"of {len(row)} entries"
            raise BrokenReply(f"{key}: the row of response token {at} is {found}, {k} were asked for")
        entries.extend(row)
    logprobs = floats([entry[0] for entry in entries], key + ": entry {}")
    return ids([entry[1] for entry in entries], key).reshape(-1, k), logprobs.reshape(-1, k)


def last_rows(rows: list[Any] | None, wanted: int, total: int, key: str) -> list[Any]:
    """The last `wanted` rows, once there are `total`. What the prompt's rows hold is nobody's business."""
    if rows is None:
        raise BrokenReply(f"the reply has no {key}: something on the way dropped a field of the request")
    if len(rows) != total:
        raise BrokenReply(f"{key} has {len(rows)} rows, {total} were asked for")
    return rows[total - wanted :]


def top_rows(meta: Meta, side: Side, wanted: int, total: int, k: int) -> tuple[Ids, Floats]:
    """(wanted, k) ids and values: the last of `total` top-k rows, from whichever of the three forms the reply has."""
    key = f"{side}_top_logprobs"
    if getattr(meta, f"{key}_val_flat_b64") is None and getattr(meta, f"{key}_val_flat") is None:
        return nested(last_rows(getattr(meta, key), wanted, total, key), k, key)
    shape: tuple[int, int] | None = getattr(meta, f"{key}_shape")
    if shape is None:
        raise BrokenReply(f"the reply has flat top-k values without {key}_shape")
    prefix: int = getattr(meta, f"{key}_null_prefix")
    rows, columns = shape
    if columns != k or prefix < 0 or rows < wanted or rows + prefix != total:
        raise BrokenReply(
            f"flat top-k of shape {rows} x {columns} after {prefix} null rows, for {wanted} response tokens "
            f"among {total} rows of {k}"
        )
    flat_ids, values = _flat_buffers(meta, key)
    if len(flat_ids) != rows * k or len(values) != rows * k:
        raise BrokenReply(f"flat top-k has {len(flat_ids)} ids and {len(values)} values, its shape says {rows * k}")
    return flat_ids.reshape(rows, k)[rows - wanted :], values.reshape(rows, k)[rows - wanted :]


def _flat_buffers(meta: Meta, key: str) -> tuple[Ids, Floats]:
    packed = getattr(meta, f"{key}_val_flat_b64") is not None
    form = "flat_b64" if packed else "flat"
    values, names = getattr(meta, f"{key}_val_{form}"), getattr(meta, f"{key}_idx_{form}")
    if names is None:
        raise BrokenReply("the reply has flat top-k values without their ids")
    if not packed:
        return ids(names, "flat top-k"), floats(values, "flat top-k: entry {}")
    return (
        ids(_from_base64(names, getattr(meta, f"{key}_idx_flat_b64_dtype"), _INT_MARKS), "flat top-k"),
        _from_base64(values, getattr(meta, f"{key}_val_flat_b64_dtype"), _FLOAT_MARKS).astype(np.float32),
    )


def _from_base64(text: str, mark: str, known: dict[str, np.dtype[Any]]) -> NDArray[Any]:
    dtype = known.get(mark)
    if dtype is None:
        raise BrokenReply(f"flat top-k is marked as {mark!r}, which is none of {', '.join(known)}")
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype)
    except (binascii.Error, ValueError) as error:
        raise BrokenReply(f"flat top-k cannot be read: {error}") from error
