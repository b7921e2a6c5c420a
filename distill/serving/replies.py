"""What a model server says of a response, checked and turned into arrays. Pure functions; no torch, no network.

A score that cannot be right never passes: each rule that a reply breaks is an error naming the teacher, the request and
the rule. `wire` knows the shapes of the JSON; `packed` reads the binary form of the embedded server.

Shape legend: N tokens sent, R response tokens, S `logprob_start_len`, K top-k entries, J entries of a list that all
rows share, V vocabulary of the server. A reply covers the tokens S..N-1 and its first row is null, so the response is
always the last R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distill.errors import TeacherError
from distill.serving.wire import (
    ROUNDING,
    BrokenReply,
    Item,
    Meta,
    ServerAtFault,
    check_logprobs,
    decode,
    floats,
    last_rows,
    meta_of,
    nested,
    top_rows,
)
from distill.types import Floats, Hidden, Ids

MASS_ROUNDING = 1e-2
"""How far above 1 the mass of a top-k row may come: float16 values round by up to 5e-4 each."""
TAIL_RESOLUTION = 2.0**-24
"""Half of float32's spacing below 1: a mass closer to 1 than this says nothing of what is left beside it."""
_UNUSED = -1
"""The id in a slot of a row that is not used."""


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
    """(J,) the ids of `token_ids_logprob`, if they were asked for: the same for all rows."""
    row_ids: Ids | None = None
    """(R, k) ids of each row's own, if they were asked for: in a packed request, or as part of `token_ids`."""
    sample_id: str = ""
    """The sample whose fault a broken reply is, unless the server is at fault."""
    half: bool = False
    """The log-probabilities of top-k rows come as float16 (packed replies only)."""
    temperature: float = 1.0
    """What the teacher's logits are divided by (packed replies only)."""

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
    """(R, K) the server's own most probable tokens."""
    topk_logprobs: Floats | None = None
    """(R, K)"""
    log_tail: Floats | None = None
    """(R,) of the mass beside all ids that were asked for, the server's own and those of each row."""
    full_logprobs: Floats | None = None
    """(R, V)"""
    ids_logprobs: Floats | None = None
    """(R, J) at `Asked.token_ids`."""
    row_logprobs: Floats | None = None
    """(R, k) at `Asked.row_ids`."""
    hidden: Hidden | None = None
    """(R, D)"""


def parse_scores(body: bytes | str, asked: Sequence[Asked], teacher: str) -> list[Scores]:
    """The scores in a JSON reply, nested, flat or flat base64 by the keys that it has. Raises TeacherError."""
    try:
        items = decode(body, len(asked))
    except BrokenReply as error:
        raise score_error(teacher, asked, error) from None
    scores: list[Scores] = []
    for item, one in zip(items, asked, strict=True):
        try:
            scores.append(_scores(item, one))
        except BrokenReply as error:
            raise score_error(teacher, [one], error) from None
    return scores


def score_error(teacher: str, asked: Sequence[Asked], rule: BrokenReply) -> TeacherError:
    """The error for a scoring reply that breaks `rule`. It names a sample where it can only be that sample's."""
    samples = {one.sample_id for one in asked}
    return TeacherError(
        f"teacher {teacher}: request {', '.join(one.id for one in asked)}: {rule}",
        why="a score that is missing, shifted or not a number would teach the student something else, silently",
        fix="look at the teacher's weights (NaN, a broken file) and at the log of its server",
        sample_id=samples.pop() if len(samples) == 1 and not isinstance(rule, ServerAtFault) else "",
        teacher=teacher,
    )


def log_tail(ids_RK: Ids, logprobs_RK: Floats, vocab_size: int) -> Floats:
    """log(1 - mass of each row), (R,) float32; -inf when the row names the whole vocabulary. Unused slots are -1, -inf.

    Summed in float64, so it is as good as the float32 log-probabilities: they round by up to 6e-8 of the mass, and a
    tail near that size has no digit that is right. A smaller row whose mass rounds to 1 still has a tail, too small to
    be seen in float32: it gets `TAIL_RESOLUTION`, because a tail of exactly 0 would make KL(p || q) infinite wherever
    the student leaves any mass.
    """
    mass_R = np.exp(logprobs_RK.astype(np.float64)).sum(1)
    tail_R = np.log(np.maximum(1.0 - mass_R, TAIL_RESOLUTION)).astype(np.float32)
    tail_R[(ids_RK != _UNUSED).sum(1) >= vocab_size] = -np.inf
    return tail_R


def union(teacher_ids_RK: Ids, teacher_RK: Floats, student_ids_RK: Ids, student_RK: Floats) -> tuple[Ids, Floats]:
    """Both models' most probable tokens, each id once: (R, 2k) ids and log q, -1 and -inf where the student's id is one
    of the teacher's.

    Raises BrokenReply where the two halves contradict one another.
    """
    known_RK, twice_RK = _looked_up(student_ids_RK, teacher_ids_RK, teacher_RK)
    with np.errstate(invalid="ignore"):  # -inf less -inf: they agree
        differ_RK = known_RK & (np.abs(twice_RK - student_RK) > ROUNDING)
    if differ_RK.any():
        raise BrokenReply("an id that the student and the teacher both name has two different scores")
    if (~known_RK & (student_RK > teacher_RK.min(1, keepdims=True) + ROUNDING)).any():
        raise BrokenReply("an id beside the teacher's top-k is more probable than the least of it")
    return (
        np.concatenate([teacher_ids_RK, np.where(known_RK, np.int32(_UNUSED), student_ids_RK)], axis=1),
        np.concatenate([teacher_RK, np.where(known_RK, np.float32(-np.inf), student_RK)], axis=1),
    )


def _looked_up(ids_RJ: Ids, known_ids_RK: Ids, values_RK: Floats) -> tuple[NDArray[np.bool_], Floats]:
    """(R, J): whether row t of `known_ids_RK` names the id, and its value there. Sorted, so that memory is linear."""
    rows_R1 = np.arange(len(ids_RJ), dtype=np.int64)[:, None] << 32
    keys = (rows_R1 + known_ids_RK).ravel()
    order = keys.argsort()
    wanted_RJ = rows_R1 + ids_RJ
    at_RJ = order[np.minimum(np.searchsorted(keys, wanted_RJ, sorter=order), len(keys) - 1)]
    return keys[at_RJ] == wanted_RJ, values_RK.ravel()[at_RJ]


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
    check_mass(logprobs_RK)


def check_mass(logprobs_RK: Floats) -> None:
    """Refuse rows whose ids, each named once, are more probable than 1 together."""
    mass = float(np.exp(logprobs_RK.astype(np.float64)).sum(1).max())
    if mass > 1 + MASS_ROUNDING:
        raise BrokenReply(f"a top-k row has a mass of {mass:.4f}, more than 1")


def check_version(got: str | None, expected: str) -> None:
    if got != expected:
        raise ServerAtFault(f"the reply comes from weight version {got!r}, {expected!r} was expected")


def _scores(item: Item, asked: Asked) -> Scores:
    meta = meta_of(item, len(asked.input_ids))
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        raise ServerAtFault(f"the server aborted it: {meta.finish_reason.message}")
    check_version(meta.weight_version, asked.weight_version)
    logprobs_R = _sampled(meta, asked)
    ids_logprobs = None if asked.token_ids is None else _picked(meta, asked, asked.token_ids)
    if not asked.k:
        return Scores(logprobs_R, ids_logprobs=ids_logprobs)
    ids_RK, top_RK = top_rows(meta, "input", asked.response_len, asked.rows, asked.k)
    check_topk(ids_RK, top_RK, asked.vocab_size)
    return Scores(logprobs_R, ids_RK, top_RK, log_tail(ids_RK, top_RK, asked.vocab_size), ids_logprobs=ids_logprobs)


def _sampled(meta: Meta, asked: Asked) -> Floats:
    rows = last_rows(meta.input_token_logprobs, asked.response_len, asked.rows, "input_token_logprobs")
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
    logprobs_R = floats([entry[0] for entry in rows], "the score of response token {}")
    check_sampled(logprobs_R)
    return logprobs_R


def _picked(meta: Meta, asked: Asked, token_ids: Ids) -> Floats:
    rows = last_rows(meta.input_token_ids_logprobs, asked.response_len, asked.rows, "input_token_ids_logprobs")
    ids_RJ, logprobs_RJ = nested(rows, len(token_ids), "input_token_ids_logprobs")
    if (ids_RJ != token_ids).any():
        raise BrokenReply("input_token_ids_logprobs is about other ids than those that were asked for")
    check_logprobs(logprobs_RJ, "the score of an asked id")
    return logprobs_RJ
