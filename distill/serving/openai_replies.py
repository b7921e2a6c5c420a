"""What an OpenAI-compatible server says of a prompt's tokens, checked and turned into arrays. No torch, no network.

Two forms of one answer. `prompt_logprobs` (vLLM): a list of as many rows as tokens were sent, the first one null, each
{"id": {"logprob", "rank", "decoded_token"}}. `echo` with `logprobs` (the older API): lists `tokens`, `token_logprobs`
and `top_logprobs`, whose keys are texts; the ids are known only where the server writes tokens as "token_id:17", which
vLLM does for `return_tokens_as_token_ids`. Texts never stand for ids: several ids may have the same text.

A row is about the token at its own place: it holds the k most probable ids there, and that token, so k or k + 1 ids.
Legend: N tokens sent, R response tokens (the last R rows), k ids asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from distill.errors import TeacherError
from distill.serving.replies import Asked, Scores, check_sampled, check_topk, log_tail, score_error
from distill.serving.wire import ROUNDING, BrokenReply, ServerAtFault, floats
from distill.types import GenerateRequest, Generation

Style = Literal["prompt_logprobs", "echo"]
LEAST_LOGPROB = -9999.0
"""vLLM writes this in place of minus infinity, for which JSON has no sign."""
_NO_NUMBER = re.compile(rb"(?<=[:\[, ])-?(NaN|Infinity)(?=[,\]} ])")
"""How Python's json writes what is no number. It is no JSON."""
_TOKEN_ID = re.compile(r"token_id:(0|[1-9]\d{0,9})")
_ID = re.compile(r"0|[1-9]\d{0,9}")


class Value(msgspec.Struct):
    logprob: float | None
    rank: int | None = None


class Listed(msgspec.Struct):
    """The older form, of prompts and of answers."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, Value] | None] | None = None
    logprobs: Listed | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class Completion(msgspec.Struct):
    choices: list[Choice]
    usage: Usage | None = None


Row = Mapping[int, Value]
_completions = msgspec.json.Decoder(Completion)


class NoLogprobs(ServerAtFault):
    """The reply says nothing of the prompt's tokens, or not of which."""


def decode(body: bytes, sent: Sequence[int]) -> list[Choice]:
    """The choices of a reply in the order of the prompts, which had `sent` tokens each. Raises BrokenReply."""
    if b"NaN" in body or b"Infinity" in body:
        body = _NO_NUMBER.sub(b"null", body)
    try:
        completion = _completions.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BrokenReply(f"the reply is not the JSON of /v1/completions: {error}") from error
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(len(sent))):
        indices = [choice.index for choice in completion.choices]
        raise BrokenReply(f"the choices {indices} came back for {len(sent)} prompts")
    counted = completion.usage.prompt_tokens if completion.usage else None
    if counted is not None and counted != sum(sent):
        raise BrokenReply(f"the reply is about {counted} prompt tokens, {sum(sent)} were sent")
    return choices


def parse_scores(choices: Sequence[Choice], asked: Sequence[Asked], style: Style, teacher: str) -> list[Scores]:
    """The scores of each prompt. Raises TeacherError with the sample's id, as `replies.parse_scores` does."""
    found: list[Scores] = []
    for choice, one in zip(choices, asked, strict=True):
        try:
            found.append(_scores(choice, one, style))
        except BrokenReply as error:
            raise score_error(teacher, [one], error) from None
    return found


def has_logprobs(choice: Choice, style: Style) -> bool:
    """Whether the reply has this form: a server that does not know a field of the request leaves it out."""
    if style == "prompt_logprobs":
        return choice.prompt_logprobs is not None
    tokens = choice.logprobs.tokens if choice.logprobs is not None else []
    return bool(tokens) and all(_TOKEN_ID.fullmatch(token) for token in tokens)


def _scores(choice: Choice, asked: Asked, style: Style) -> Scores:
    first, rows = _prompt_rows(choice, asked) if style == "prompt_logprobs" else _echoed_rows(choice, asked)
    if first is not None:
        raise BrokenReply(f"{style}: the first token has a row, though nothing comes before it: the rows are shifted")
    sampled: list[float | None] = []
    entries: list[tuple[list[int], list[float | None]]] = []
    for at, row in enumerate(rows):
        if row is None:
            raise BrokenReply(f"{style}: the row of response token {at} is null")
        token = int(asked.response_ids[at])
        if token not in row:
            raise BrokenReply(
                f"{style}: the row of response token {at} does not hold its id {token}, but "
                f"{sorted(row)[:4]} and others: the rows are shifted, or belong to another request"
            )
        sampled.append(row[token].logprob)
        entries.append(_most_probable(row, token, asked.k, at))
    logprobs_R = _unclamped(floats(sampled, "the score of response token {}"))
    check_sampled(logprobs_R)
    ids_RK = np.array([ids for ids, _ in entries], np.int64)
    values_RK = _unclamped(floats([value for _, values in entries for value in values], "top-k entry {}"))
    values_RK = values_RK.reshape(ids_RK.shape)
    order_RK = np.argsort(-values_RK, axis=1, kind="stable")
    ids_RK = np.take_along_axis(ids_RK, order_RK, axis=1)
    values_RK = np.take_along_axis(values_RK, order_RK, axis=1)
    if ids_RK.size and ids_RK.max() >= asked.vocab_size:
        raise BrokenReply(f"a top-k id is {ids_RK.max()}, outside the vocabulary of {asked.vocab_size}")
    top_ids = ids_RK.astype(np.int32)
    check_topk(top_ids, values_RK, asked.vocab_size)
    _check_beside(top_ids, values_RK, asked, logprobs_R)
    return Scores(logprobs_R, top_ids, values_RK, log_tail(top_ids, values_RK, asked.vocab_size))


def _prompt_rows(choice: Choice, asked: Asked) -> tuple[Any, list[Row | None]]:
    """The first row as it came, and those of the response. What else the prompt's rows hold is nobody's business."""
    rows = choice.prompt_logprobs
    if rows is None:
        raise NoLogprobs("the reply has no prompt_logprobs")
    _check_count(len(rows), asked, "prompt_logprobs")
    return rows[0], [
        None if row is None else {_id(key, _ID): value for key, value in row.items()}
        for row in rows[-asked.response_len :]
    ]


def _echoed_rows(choice: Choice, asked: Asked) -> tuple[Any, list[Row | None]]:
    """The same of the older form. There a row may leave out its own token, whose value stands beside it."""
    listed = choice.logprobs
    if listed is None:
        raise NoLogprobs("the reply has no logprobs")
    tops = listed.top_logprobs or []
    _check_count(len(listed.tokens), asked, "tokens")
    _check_count(len(listed.token_logprobs), asked, "token_logprobs")
    _check_count(len(tops), asked, "top_logprobs")
    for at, token in enumerate(listed.tokens):
        if _id(token, _TOKEN_ID) != asked.input_ids[at]:
            raise BrokenReply(
                f"token {at} comes back as {token}, {asked.input_ids[at]} was sent: the reply is shifted, or belongs "
                "to another request"
            )
    return tops[0], [
        _echoed_row(tops[at], int(asked.input_ids[at]), listed.token_logprobs[at], at)
        for at in range(len(tops) - asked.response_len, len(tops))
    ]


def _echoed_row(top: Mapping[str, float | None] | None, own: int, logprob: float | None, at: int) -> Row | None:
    if top is None:
        return None
    row = {_id(key, _TOKEN_ID): Value(value) for key, value in top.items()}
    if own in row and not _same(row[own].logprob, logprob):
        raise BrokenReply(f"token {at} has two scores, {logprob} and {row[own].logprob}")
    return row | {own: Value(logprob)}


def _check_count(found: int, asked: Asked, key: str) -> None:
    if found != len(asked.input_ids):
        raise BrokenReply(f"{key} has {found} rows, {len(asked.input_ids)} tokens were sent")


def _id(key: str, pattern: re.Pattern[str]) -> int:
    match = pattern.fullmatch(key)
    if match is None:
        raise NoLogprobs(f"{key!r} stands where a token id should, and no text tells an id")
    return int(match[match.lastindex or 0])


def _same(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= ROUNDING


def _most_probable(row: Row, token: int, k: int, at: int) -> tuple[list[int], list[float | None]]:
    """The k most probable ids of a row with their values; the row's own token may be one of them, or beside them.

    With k entries all are. With k + 1 the token is beside them. Where the server ranks them, the ranks must say so too.
    """
    if not k <= len(row) <= k + 1:
        raise BrokenReply(f"the row of response token {at} has {len(row)} ids, {k} and its own were asked for")
    kept = {index: value for index, value in row.items() if len(row) == k or index != token}
    ranks = [value.rank for value in kept.values()]
    if None not in ranks and sorted(rank or 0 for rank in ranks) != list(range(1, k + 1)):
        raise BrokenReply(f"the row of response token {at} has the ranks {ranks}, 1 to {k} were asked for")
    return list(kept), [value.logprob for value in kept.values()]


def _check_beside(ids_RK: Any, values_RK: Any, asked: Asked, logprobs_R: Any) -> None:
    """A token that is none of the most probable cannot be more probable than the least of them."""
    beside_R = ~(ids_RK == asked.response_ids[:, None]).any(1)
    wrong_R = beside_R & (logprobs_R > values_RK[:, -1] + ROUNDING)
    if wrong_R.any():
        raise BrokenReply(
            f"response token {int(wrong_R.argmax())} is not among the {asked.k} most probable ids of its row, but more "
            "probable than the least of them"
        )


def _unclamped(values: Any) -> Any:
    return np.where(values <= LEAST_LOGPROB, np.float32(-np.inf), values)


def parse_generation(choice: Choice, request: GenerateRequest, version: str, server: str) -> Generation:
    """What the server wrote after one prompt. Raises TeacherError."""
    try:
        listed = choice.logprobs
        if listed is None:
            raise NoLogprobs("the answer has no logprobs")
        if choice.finish_reason not in ("stop", "length"):
            raise BrokenReply(f"the finish reason is {choice.finish_reason!r}, neither stop nor length")
        written = [_id(token, _TOKEN_ID) for token in listed.tokens]
        if len(written) != len(listed.token_logprobs) or len(written) > request.max_new_tokens:
            raise BrokenReply(
                f"{len(written)} tokens came with {len(listed.token_logprobs)} log-probabilities, at most "
                f"{request.max_new_tokens} were asked for"
            )
        logprobs = _unclamped(floats(listed.token_logprobs, "the log-probability of written token {}"))
        check_sampled(logprobs)
    except BrokenReply as error:
        raise TeacherError(
            f"{server}: request {request.id}: {error}",
            why="an answer is graded by its token ids",
            fix="use a server that writes tokens as ids (vLLM: return_tokens_as_token_ids), or set "
            "evaluation.teachers=false",
        ) from None
    ids = np.array(written, np.int32)
    return Generation(request.id, ids, logprobs, (version,) * len(ids), choice.finish_reason)
