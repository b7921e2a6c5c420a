"""What a model server answers to `/generate`, checked and turned into arrays. Pure functions; no torch, no network.

A score that cannot be right never passes: each rule that a reply breaks is an error naming the teacher, the request and
the rule. The shapes are those of SGLang 0.5.20 to 0.5.23; `packed` reads the binary form of the embedded server.

Shape legend: N tokens sent, R response tokens, S `logprob_start_len`, K top-k entries, V vocabulary of the server.
A reply covers the tokens S..N-1 and its first row is null, so the response is always the last R rows.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from distill.errors import ServerError, TeacherError
from distill.types import Floats, GenerateRequest, Generation, Ids

ROUNDING = 1e-3
"""How far above 0 a log-probability may come out of a low-precision softmax."""
MASS_ROUNDING = 1e-2
"""How far above 1 the mass of a top-k row may come: float16 values round by up to 5e-4 each."""
TAIL_RESOLUTION = 2.0**-24
"""Half of float32's spacing below 1: a mass closer to 1 than this says nothing of what is left beside it."""
_FLOAT_MARKS = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
_INT_MARKS = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}

_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Entry = tuple[float | None, _Id, Any]
"""(log-probability, token id, text or null)"""


class BrokenReply(Exception):
    """A rule that a reply breaks. The functions that know whom they asked turn it into a DistillError."""


class _Finish(msgspec.Struct):
    type: str = ""
    message: str | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    id: str = ""
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    input_token_logprobs: list[_Entry] | None = None
    input_top_logprobs: list[list[_Entry] | None] | None = None
    input_token_ids_logprobs: list[list[_Entry] | None] | None = None
    output_token_logprobs: list[_Entry] | None = None
    input_top_logprobs_val_flat: list[float | None] | None = None
    input_top_logprobs_idx_flat: list[_Id] | None = None
    input_top_logprobs_val_flat_b64: str | None = None
    input_top_logprobs_idx_flat_b64: str | None = None
    input_top_logprobs_val_flat_b64_dtype: str = "float32"
    input_top_logprobs_idx_flat_b64_dtype: str = "int32"
    input_top_logprobs_shape: tuple[int, int] | None = None
    input_top_logprobs_null_prefix: int = 0


class _Item(msgspec.Struct):
    meta_info: _Meta | None = None
    output_ids: list[_Id] | None = None
    error: Any = None
    message: Any = None


_items = msgspec.json.Decoder(list[_Item] | _Item)


@dataclass(frozen=True, slots=True)
class Asked:
    """What one scoring request asked for, and so what its reply must hold."""

    id: str
    input_ids: Ids
    response_len: int
    start: int
    """`logprob_start_len` as it was sent: the prompt's length less one, or less."""
    vocab_size: int
    weight_version: str
    k: int = 0
    token_ids: Ids | None = None
    """The ids of `token_ids_logprob`, if they were asked for."""

    @property
    def rows(self) -> int:
        return len(self.input_ids) - self.start

    @property
    def response_ids(self) -> Ids:
        return self.input_ids[len(self.input_ids) - self.response_len :]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a reply says of one response, complete and checked. Row t is about response token t."""

    logprobs: Floats
    """(R,)"""
    topk_ids: Ids | None = None
    """(R, K)"""
    topk_logprobs: Floats | None = None
    """(R, K)"""
    log_tail: Floats | None = None
    """(R,)"""
    full_logprobs: Floats | None = None
    """(R, V)"""
    ids_logprobs: Floats | None = None
    """(R, len(Asked.token_ids))"""


def parse_scores(body: bytes | str, asked: Sequence[Asked], teacher: str) -> list[Scores]:
    """The scores in a JSON reply, nested, flat or flat base64 by the keys that it has. Raises TeacherError."""
    try:
        items = _decode(body, len(asked))
    except BrokenReply as error:
        raise score_error(teacher, ", ".join(one.id for one in asked), error) from None
    scores: list[Scores] = []
    for item, one in zip(items, asked, strict=True):
        try:
            scores.append(_scores(item, one))
        except BrokenReply as error:
            raise score_error(teacher, one.id, error) from None
    return scores


def score_error(teacher: str, request: str, rule: BrokenReply | str) -> TeacherError:
    """The error for a scoring reply that breaks `rule`."""
    return TeacherError(
        f"teacher {teacher}: request {request}: {rule}",
        why="a score that is missing, shifted or not a number would teach the student something else, silently",
        fix="look at the teacher's weights (NaN, a broken file) and at the log of its server",
    )


def parse_generations(body: bytes | str, requests: Sequence[GenerateRequest], server: str) -> list[Generation]:
    """What a server wrote for a batch, in the order of the requests. Raises ServerError."""
    request_id = ", ".join(request.id for request in requests)
    try:
        generations: list[Generation] = []
        for item, request in zip(_decode(body, len(requests)), requests, strict=True):
            request_id = request.id
            generations.append(_generation(item, request))
    except BrokenReply as error:
        raise ServerError(f"server {server}: request {request_id}: {error}") from None
    return generations


def log_tail(topk_logprobs_RK: Floats, vocab_size: int) -> Floats:
    """log(1 - mass of each row), (R,) float32; -inf when the row holds the whole vocabulary.

    Summed in float64. A smaller row whose mass rounds to 1 still has a tail, too small to be seen in float32: it gets
    `TAIL_RESOLUTION`, because a tail of exactly 0 would make KL(p || q) infinite wherever the student leaves any mass.
    """
    if topk_logprobs_RK.shape[1] >= vocab_size:
        return np.full(len(topk_logprobs_RK), -np.inf, np.float32)
    mass_R = np.exp(topk_logprobs_RK.astype(np.float64)).sum(1)
    return np.log(np.maximum(1.0 - mass_R, TAIL_RESOLUTION)).astype(np.float32)


def check_logprobs(logprobs: Floats, what: str) -> None:
    """Refuse NaN, +inf and values above 0. -inf, a token of probability 0, passes."""
    if not logprobs.size:
        return
    peak = logprobs.max()  # one pass: NaN wins every comparison that max makes
    if not peak <= ROUNDING:
        raise BrokenReply(f"{what} {'is not a number' if np.isnan(peak) else f'is {peak:g}, above 0'}")


def check_sampled(logprobs_R: Floats) -> None:
    """Refuse sampled scores that are not finite log-probabilities."""
    check_logprobs(logprobs_R, "the score of a response token")
    if not np.isfinite(logprobs_R).all():
        raise BrokenReply(f"the score of response token {int(np.argmin(np.isfinite(logprobs_R)))} is -inf")


def check_topk(ids_RK: Ids, logprobs_RK: Floats, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary or named twice in a row, values that cannot be, and rows of too much mass."""
    check_logprobs(logprobs_RK, "a top-k entry")
    if not ids_RK.size:
        return
    ordered_RK = np.sort(ids_RK, axis=1)
    if ordered_RK[:, 0].min() < 0 or ordered_RK[:, -1].max() >= vocab_size:
        raise BrokenReply(f"a top-k id lies outside the vocabulary of {vocab_size}")
    if (ordered_RK[:, 1:] == ordered_RK[:, :-1]).any():
        raise BrokenReply("a top-k row names the same id twice, which counts its mass twice")
    mass = float(np.exp(logprobs_RK.astype(np.float64)).sum(1).max())
    if mass > 1 + MASS_ROUNDING:
        raise BrokenReply(f"a top-k row has a mass of {mass:.4f}, more than 1")


def check_version(got: str | None, expected: str) -> None:
    if got != expected:
        raise BrokenReply(f"the reply comes from weight version {got!r}, {expected!r} was expected")


def _decode(body: bytes | str, count: int) -> list[_Item]:
    try:
        decoded = _items.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BrokenReply(f"the reply is not the JSON of a /generate reply: {error}") from error
    items = [decoded] if isinstance(decoded, _Item) else decoded
    if isinstance(decoded, _Item) and decoded.meta_info is None:
        raise BrokenReply(_refusal(decoded))
    if len(items) != count:
        raise BrokenReply(f"{len(items)} replies came back for {count} requests")
    return items


def _refusal(item: _Item) -> str:
    return f"the server answered with an error: {item.error or item.message or 'no meta_info'}"


def _meta_of(item: _Item, prompt_len: int) -> _Meta:
    meta = item.meta_info
    if meta is None:
        raise BrokenReply(_refusal(item))
    if meta.prompt_tokens is not None and meta.prompt_tokens != prompt_len:
        raise BrokenReply(f"the reply is about {meta.prompt_tokens} tokens, {prompt_len} were sent")
    return meta


def _scores(item: _Item, asked: Asked) -> Scores:
    meta = _meta_of(item, len(asked.input_ids))
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        raise BrokenReply(f"the server aborted it: {meta.finish_reason.message}")
    check_version(meta.weight_version, asked.weight_version)
    logprobs_R = _sampled(meta, asked)
    ids_logprobs = None if asked.token_ids is None else _picked(meta, asked, asked.token_ids)
    if not asked.k:
        return Scores(logprobs_R, ids_logprobs=ids_logprobs)
    ids_RK, top_RK = _topk(meta, asked)
    check_topk(ids_RK, top_RK, asked.vocab_size)
    return Scores(logprobs_R, ids_RK, top_RK, log_tail(top_RK, asked.vocab_size), ids_logprobs=ids_logprobs)


def _response_rows(rows: list[Any] | None, asked: Asked, key: str) -> list[Any]:
    """The last R rows, once their number is right. What the prompt's rows hold is nobody's business."""
    if rows is None:
        raise BrokenReply(f"the reply has no {key}: something on the way dropped a field of the request")
    if len(rows) != asked.rows:
        raise BrokenReply(f"{key} has {len(rows)} rows for the {asked.rows} tokens from {asked.start} on")
    return rows[len(rows) - asked.response_len :]


def _sampled(meta: _Meta, asked: Asked) -> Floats:
    rows = _response_rows(meta.input_token_logprobs, asked, "input_token_logprobs")
    echoed = np.array([entry[1] for entry in meta.input_token_logprobs or ()], np.int64)
    sent = asked.input_ids[asked.start :]
    # SGLang rewrites ids >= V-1 to 0 in this list alone; the value still belongs to the id that was sent
    same = (echoed == sent) | ((sent >= asked.vocab_size - 1) & (echoed == 0))
    if not same.all():
        at = int(np.argmin(same))
        raise BrokenReply(
            f"token {asked.start + at} comes back as id {echoed[at]}, {sent[at]} was sent: the reply is shifted, or "
            "belongs to another request"
        )
    logprobs_R = _floats([entry[0] for entry in rows], "the score of response token {}")
    check_sampled(logprobs_R)
    return logprobs_R


def _floats(values: list[float | None], what: str) -> Floats:
    """Null is what orjson makes of NaN and of both infinities: nobody can say which, so it is refused."""
    if None in values:
        raise BrokenReply(f"{what.format(values.index(None))} is null")
    return np.array(values, np.float32)


def _picked(meta: _Meta, asked: Asked, token_ids: Ids) -> Floats:
    rows = _response_rows(meta.input_token_ids_logprobs, asked, "input_token_ids_logprobs")
    ids_RJ, logprobs_RJ = _nested(rows, len(token_ids), "input_token_ids_logprobs")
    if (ids_RJ != token_ids).any():
        raise BrokenReply("input_token_ids_logprobs is about other ids than those that were asked for")
    check_logprobs(logprobs_RJ, "the score of an asked id")
    return logprobs_RJ


def _topk(meta: _Meta, asked: Asked) -> tuple[Ids, Floats]:
    """(R, K) ids and values, from whichever of the three forms the reply has."""
    if meta.input_top_logprobs_val_flat_b64 is not None or meta.input_top_logprobs_val_flat is not None:
        return _flat(meta, asked)
    return _nested(_response_rows(meta.input_top_logprobs, asked, "input_top_logprobs"), asked.k, "input_top_logprobs")


def _nested(rows: list[list[_Entry] | None], k: int, key: str) -> tuple[Ids, Floats]:
    entries: list[_Entry] = []
    for at, row in enumerate(rows):
        if row is None or len(row) != k:
            found = "missing" if row is None else f"of {len(row)} entries"
            raise BrokenReply(f"{key}: the row of response token {at} is {found}, {k} were asked for")
        entries.extend(row)
    logprobs = _floats([entry[0] for entry in entries], key + ": entry {}")
    return _ids([entry[1] for entry in entries], key).reshape(-1, k), logprobs.reshape(-1, k)


def _ids(values: list[int] | NDArray[Any], key: str) -> Ids:
    wide = np.asarray(values, np.int64)
    if wide.size and (wide.min() < 0 or wide.max() >= 2**31):
        raise BrokenReply(f"{key}: an id does not fit in 31 bits")
    return wide.astype(np.int32)


def _flat(meta: _Meta, asked: Asked) -> tuple[Ids, Floats]:
    if meta.input_top_logprobs_shape is None:
        raise BrokenReply("the reply has flat top-k values without input_top_logprobs_shape")
    rows, k = meta.input_top_logprobs_shape
    prefix = meta.input_top_logprobs_null_prefix
    if k != asked.k or prefix < 0 or rows < asked.response_len or rows + prefix != asked.rows:
        raise BrokenReply(
            f"flat top-k of shape {rows} x {k} after {prefix} null rows, for {asked.response_len} response tokens "
            f"among {asked.rows} rows of {asked.k}"
        )
    ids, logprobs = _flat_buffers(meta)
    if len(ids) != rows * k or len(logprobs) != rows * k:
        raise BrokenReply(f"flat top-k has {len(ids)} ids and {len(logprobs)} values, its shape says {rows * k}")
    first = rows - asked.response_len
    return ids.reshape(rows, k)[first:], logprobs.reshape(rows, k)[first:]


def _flat_buffers(meta: _Meta) -> tuple[Ids, Floats]:
    values = meta.input_top_logprobs_val_flat_b64
    if values is None:
        ids = meta.input_top_logprobs_idx_flat
        if ids is None:
            raise BrokenReply("the reply has flat top-k values without their ids")
        return _ids(ids, "flat top-k"), _floats(meta.input_top_logprobs_val_flat or [], "flat top-k: entry {}")
    ids = meta.input_top_logprobs_idx_flat_b64
    if ids is None:
        raise BrokenReply("the reply has flat top-k values without their ids")
    return (
        _ids(_from_base64(ids, meta.input_top_logprobs_idx_flat_b64_dtype, _INT_MARKS), "flat top-k"),
        _from_base64(values, meta.input_top_logprobs_val_flat_b64_dtype, _FLOAT_MARKS).astype(np.float32),
    )


def _from_base64(text: str, mark: str, known: dict[str, np.dtype[Any]]) -> NDArray[Any]:
    dtype = known.get(mark)
    if dtype is None:
        raise BrokenReply(f"flat top-k is marked as {mark!r}, which is none of {', '.join(known)}")
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype)
    except (binascii.Error, ValueError) as error:
        raise BrokenReply(f"flat top-k cannot be read: {error}") from error


def _generation(item: _Item, request: GenerateRequest) -> Generation:
    meta = _meta_of(item, len(request.input_ids))
    finish = meta.finish_reason.type if meta.finish_reason else ""
    if finish not in ("stop", "length", "abort"):
        raise BrokenReply(f"the finish reason is {finish!r}, none of stop, length, abort")
    output_ids = _ids(item.output_ids or [], "output_ids")
    entries = meta.output_token_logprobs or []
    if len(entries) != len(output_ids):
        raise BrokenReply(f"{len(output_ids)} tokens came with {len(entries)} log-probabilities")
    echoed = np.array([entry[1] for entry in entries], np.int64)
    if not ((echoed == output_ids) | (echoed == 0)).all():
        raise BrokenReply("output_token_logprobs is about other ids than output_ids")
    logprobs = _floats([entry[0] for entry in entries], "the log-probability of written token {}")
    check_logprobs(logprobs, "the log-probability of a written token")
    return Generation(request.id, output_ids, logprobs, _versions(meta, len(output_ids)), finish)


def _versions(meta: _Meta, count: int) -> tuple[str, ...]:
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
