"""From scoring requests to the bodies of HTTP calls, and from what comes back to TeacherScores.

A server with packed replies takes ids of each row's own and answers in one call. SGLang 0.5.23 has
`token_ids_logprob`, one list for all rows of a request: scores at the student's ids are asked for in pieces of a few
rows, each with the ids that any of its rows names, and each row picks its own from the answer.

Legend: R response tokens, k ids of the student's choice, J ids that a piece asks for, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distill.errors import ServerError
from distill.packing import pack
from distill.protocols import ServerInfo
from distill.serving.replies import Asked, Scores, check_mass, log_tail, score_error, union
from distill.serving.wire import BrokenReply, agree
from distill.types import Floats, Ids, ScoreRequest, Signal, SignalSpec, Support, TeacherScores

PIECE_ROWS = 16
"""Rows of a piece. J grows with it, so an answer has at most PIECE_ROWS * k entries a row; the number of requests, each
of which carries the whole sequence before it, falls with it. Either alone would be quadratic in R."""
CALL_ENTRIES = 1 << 18
"""Entries that the answer to one call of pieces may have: about 10 MB of JSON."""


def asked_for(
    requests: Sequence[ScoreRequest], spec: SignalSpec, info: ServerInfo, expected_version: str, *, half: bool = False
) -> list[Asked]:
    """What the requests ask for, in terms of the server's API. `half`: top-k rows in float16, where replies are packed.

    Raises ServerError for what a server without packed replies cannot be asked: it would answer something else.
    """
    if not info.packed:
        _require_plain(requests, spec, info.program)
    own = spec.signal is Signal.TOPK and spec.support is not Support.STUDENT
    # a server without packed replies gives the whole vocabulary as the largest possible top-k
    k = spec.k if own else info.vocab_size if spec.signal is Signal.FULL and not info.packed else 0
    return [
        Asked(
            id=request.id,
            input_ids=request.input_ids,
            response_len=request.response_len,
            start=len(request.input_ids) - request.response_len - 1,
            vocab_size=info.vocab_size,
            weight_version=expected_version,
            k=k,
            row_ids=request.student_ids if spec.student_k else None,
            sample_id=request.id,
            half=half and info.packed and spec.signal is Signal.TOPK,
            temperature=request.temperature,
        )
        for request in requests
    ]


def _require_plain(requests: Sequence[ScoreRequest], spec: SignalSpec, program: str) -> None:
    """SGLang 0.5.23 scores at temperature 1 whatever `sampling_params` say, and cannot say of hidden states which
    tokens they belong to once a prefix was cached."""
    if spec.signal is Signal.HIDDEN:
        raise ServerError(
            f"{program} cannot be asked for hidden states",
            why="only the embedded server gives them in a form that is exact and small",
            fix="set teacher_manager.full_rows=rows",
        )
    for request in requests:
        if request.temperature != 1.0:
            raise ServerError(
                f"request {request.id}: {program} cannot be asked for scores at temperature {request.temperature:g}",
                why="it does not say at which temperature it scored, and scores at 1",
                fix="serve this teacher with server.program=embedded, or leave its temperature at 1",
            )


def json_body(asked: Sequence[Asked]) -> dict[str, Any]:
    """A scoring request. It starts one token before the response: the first row of a reply is always null."""
    body = _body(asked) | {
        "return_text_in_logprobs": False,
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }
    if asked[0].token_ids is not None:
        body["token_ids_logprob"] = [one.token_ids.tolist() for one in asked if one.token_ids is not None]
    return body


def packed_body(
    asked: Sequence[Asked], more: Mapping[str, Any] | None = None, *, full: bool = False, hidden: bool = False
) -> dict[str, Any] | bytes:
    """The same for a server with packed replies, and `more` keys; packed itself where each row has ids of its own."""
    body = _body(asked) | {"return_packed": True} | ({"return_full_logprobs": True} if full else {}) | dict(more or {})
    if hidden:
        body["return_hidden_states"] = True
    if asked[0].half:
        body["topk_dtype"] = "float16"
    if any(one.temperature != 1.0 for one in asked):
        body["logprob_temperature"] = [one.temperature for one in asked]
    row_ids = [one.row_ids for one in asked if one.row_ids is not None]
    return pack(body, {"row_ids": np.concatenate(row_ids)}) if row_ids else body


def _body(asked: Sequence[Asked]) -> dict[str, Any]:
    return {
        "input_ids": [one.input_ids.tolist() for one in asked],
        "rid": [one.id for one in asked],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": [one.start for one in asked],
        "top_logprobs_num": asked[0].k,
    }


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one response that are scored by a request of their own."""

    owner: int
    """Which of the whole requests it belongs to."""
    begin: int
    """Its first row in there."""
    asked: Asked


def calls_of_pieces(whole: Sequence[Asked]) -> Iterator[list[Piece]]:
    """The pieces of all requests, call by call.

    The last piece of each response comes first: it carries the whole sequence, which is in the server's prefix cache
    when the others come, so each of those computes its own few rows only. The cache is a matter of speed alone.
    """
    pieces = [list(_pieces(owner, one)) for owner, one in enumerate(whole)]
    yield from _calls([own[-1] for own in pieces])
    yield from _calls([piece for own in pieces for piece in own[:-1]])


def _pieces(owner: int, whole: Asked) -> Iterator[Piece]:
    assert whole.row_ids is not None
    for begin in range(0, whole.response_len, PIECE_ROWS):
        end = min(whole.response_len, begin + PIECE_ROWS)
        asked = replace(
            whole,
            id=f"{whole.id}#{begin}",
            input_ids=whole.input_ids[: len(whole.input_ids) - whole.response_len + end],
            response_len=end - begin,
            start=whole.start + begin,
            token_ids=np.unique(whole.row_ids[begin:end]),
            row_ids=whole.row_ids[begin:end],
        )
        yield Piece(owner, begin, asked)


def _calls(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    call: list[Piece] = []
    room = CALL_ENTRIES
    for piece in pieces:
        assert piece.asked.token_ids is not None
        entries = piece.asked.rows * (len(piece.asked.token_ids) + piece.asked.k)
        if call and entries > room:
            yield call
            call, room = [], CALL_ENTRIES
        call.append(piece)
        room -= entries
    if call:
        yield call


def joined(found: Sequence[tuple[Piece, Scores]]) -> list[Scores]:
    """The scores of the whole requests, in their order, from those of all pieces."""
    parts: dict[int, list[tuple[int, Scores]]] = defaultdict(list)
    for piece, scores in found:
        parts[piece.owner].append((piece.begin, _picked(piece.asked, scores)))
    return [
        _concatenated([scores for _, scores in sorted(own, key=lambda part: part[0])])
        for _, own in sorted(parts.items())
    ]


def _picked(asked: Asked, scores: Scores) -> Scores:
    """The scores with each row's own ids picked out of those that the piece asked for."""
    assert asked.token_ids is not None and asked.row_ids is not None and scores.ids_logprobs is not None
    at = np.searchsorted(asked.token_ids, asked.row_ids)
    row_logprobs = np.take_along_axis(scores.ids_logprobs, at, axis=1)
    return replace(scores, log_tail=None, ids_logprobs=None, row_logprobs=row_logprobs)


def _concatenated(parts: Sequence[Scores]) -> Scores:
    def whole(name: str) -> Any:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    return Scores(whole("logprobs"), whole("topk_ids"), whole("topk_logprobs"), row_logprobs=whole("row_logprobs"))


def teacher_scores(teacher: str, spec: SignalSpec, asked: Asked, scores: Scores) -> TeacherScores:
    """What a checked reply says, in the order and form of `spec`. Raises TeacherError where it contradicts itself."""
    if spec.signal is Signal.HIDDEN:
        return TeacherScores(teacher, scores.logprobs, hidden=scores.hidden)
    if spec.signal is Signal.FULL:
        return TeacherScores(teacher, scores.logprobs, full_logprobs=_full_rows(scores, asked.vocab_size))
    if spec.student_k == 0:
        return TeacherScores(teacher, scores.logprobs, scores.topk_ids, scores.topk_logprobs, scores.log_tail)
    try:
        ids_RK, logprobs_RK = _support(asked, scores)
    except BrokenReply as error:
        raise score_error(teacher, [asked], error) from None
    tail_R = scores.log_tail
    if tail_R is None:
        tail_R = log_tail(ids_RK, logprobs_RK, asked.vocab_size)
    return TeacherScores(teacher, scores.logprobs, ids_RK, logprobs_RK, tail_R)


def _support(asked: Asked, scores: Scores) -> tuple[Ids, Floats]:
    """The ids of the student's choice, or both models', with log q."""
    student_ids_Rk, student_Rk = asked.row_ids, scores.row_logprobs
    assert student_ids_Rk is not None and student_Rk is not None
    if not agree(student_ids_Rk, student_Rk, asked.response_ids, scores.logprobs, half=asked.half):
        raise BrokenReply("the score of a response token and that of the same id in its row do not agree")
    if scores.topk_ids is None or scores.topk_logprobs is None:
        rows = student_ids_Rk, student_Rk
    else:
        rows = union(scores.topk_ids, scores.topk_logprobs, student_ids_Rk, student_Rk)
    check_mass(rows[1])
    return rows


def _full_rows(scores: Scores, vocab_size: int) -> Floats:
    if scores.full_logprobs is not None:
        return scores.full_logprobs
    assert scores.topk_ids is not None and scores.topk_logprobs is not None
    rows_RV = np.empty((len(scores.logprobs), vocab_size), np.float32)
    np.put_along_axis(rows_RV, scores.topk_ids.astype(np.intp), scores.topk_logprobs, axis=1)
    return rows_RV
