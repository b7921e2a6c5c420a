"""Rows of a file of answers: checked once before anything starts, then read again while they are scored."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.config import RunConfig
from distill.errors import ConfigError
from distill.preflight import Preflight
from distill.preflight.data import context_columns
from distill.registry import did_you_mean
from distill.rollout.prompts import PromptRow, encode, prompt_row, records
from distill.rollout.routing import Router
from distill.score_files.job import ScoreJob
from distill.types import Ids, Sample, sample_id

ID, RESPONSE, RESPONSE_IDS = "id", "response", "response_ids"
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Answer:
    """One row. `index` counts rows from 0."""

    index: int
    id: str
    """The row's own, or `row-LINE`."""
    row: PromptRow
    sample: Sample

    @property
    def tokens(self) -> int:
        return len(self.sample.prompt_ids) + len(self.sample.response_ids)


@dataclass(frozen=True, slots=True)
class Overview:
    """What the rows have in common."""

    rows: int
    teachers: Mapping[str, int]
    """Teacher -> rows that it scores; those alone that score some."""
    kinds: Mapping[str, str]
    """Kept column -> bool, int, float, text or json; empty text: nowhere a value."""


class AnswerFile:
    """The rows of a job, routed as the run's data are."""

    def __init__(self, job: ScoreJob, config: RunConfig, checked: Preflight) -> None:
        self._job = job
        self._config = config
        self._checked = checked
        self._data = job.data(config)
        self._columns = frozenset((*job.keep, ID, RESPONSE, RESPONSE_IDS)) | context_columns(config)
        self._routes = {row.domain: row.teachers for row, _ in reversed(checked.prompts.rows)}

    def check(self) -> Overview:
        """Read every row, without its tokens. Raises ConfigError, with the file and the line, for the first that
        cannot be scored, and for a column to keep that no row has."""
        count, kinds, teachers = 0, dict.fromkeys(self._job.keep, ""), dict.fromkeys(self._config.teachers, 0)
        seen: set[str] = set()
        for row in self._rows():
            _check_response(row)
            _own_id(row)
            seen.update(row.columns)
            for name in kinds:
                kinds[name] = _joined(kinds[name], _kind(row.columns.get(name)))
            for name in row.teachers:
                teachers[name] += 1
            count += 1
        if not count:
            raise ConfigError(f"{self._job.source} holds no row", fix="fill the file, or name another")
        for name in self._job.keep:
            if name not in seen:
                raise ConfigError(f"--keep: no row has a column {name!r}", fix=did_you_mean(name, sorted(seen)))
        return Overview(count, {name: rows for name, rows in teachers.items() if rows}, kinds)

    def answers(self, first: int) -> Iterator[Answer]:
        """The rows from number `first` on, with their tokens. Raises ConfigError with the file and the line."""
        for index, row in enumerate(itertools.islice(self._rows(), first, None), start=first):
            yield self._answer(index, row)

    def _rows(self) -> Iterator[PromptRow]:
        router = Router(self._config.routing, self._config.teachers)
        for line, values in itertools.islice(records(self._data.path), self._job.limit):
            yield prompt_row(self._data, line, values, router, self._routes, self._columns)

    def _answer(self, index: int, row: PromptRow) -> Answer:
        prompt_ids, response_ids = encode(row, self._checked.vocabulary.tokenizer), self._response(row)
        room, tokens = self._checked.models.context_length, len(prompt_ids) + len(response_ids)
        if tokens > room:
            raise ConfigError(
                f"{row.place}: prompt and response have {len(prompt_ids)} and {len(response_ids)} tokens, more than "
                f"the context of {room} ({self._checked.models.tightest})",
                why="nothing is cut silently",
                fix="shorten or remove the row",
            )
        sample = Sample(
            id=sample_id(index),
            ordinal=index,
            domain=row.domain,
            teachers=row.teachers,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            # nobody here knows who wrote it: no teacher's score depends on that
            logprobs=np.zeros(len(response_ids), np.float32),
            versions=np.zeros(len(response_ids), np.int32),
            finish_reason="stop",
        )
        return Answer(index, _own_id(row), row, sample)

    def _response(self, row: PromptRow) -> Ids:
        """(R,), R >= 1."""
        tokenizer, size = self._checked.vocabulary.tokenizer, self._checked.vocab_size
        given = row.columns.get(RESPONSE_IDS)
        if given is None:
            try:
                ids = list(tokenizer(row.columns[RESPONSE], add_special_tokens=False).input_ids)
            except Exception as error:
                raise ConfigError(f"{row.place}: the student's tokenizer refuses this response: {error}") from error
            ids += [tokenizer.eos_token_id] if self._job.append_end else []
        else:
            ids = given
        wrong = next((number for number in ids if number is None or not 0 <= number < size), 0)
        if wrong != 0 or not ids:
            raise ConfigError(
                f"{row.place}: "
                + (
                    f"the response has the id {wrong}"
                    if ids
                    else "the student's tokenizer makes no token of the response"
                ),
                why=f"ids of the student's tokenizer are below {size}",
                fix="use ids of that tokenizer, or give the text" if ids else "remove the row",
            )
        return np.asarray(ids, np.int32)


def _check_response(row: PromptRow) -> None:
    ids, text = row.columns.get(RESPONSE_IDS), row.columns.get(RESPONSE)
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
            raise ConfigError(
                f"{row.place}: {RESPONSE_IDS!r} is no list of token ids", fix="write [17, 4], with one id at least"
            )
        return
    if text is None:
        raise ConfigError(
            f"{row.place}: the row has no answer to score",
            fix=f"give it a column {RESPONSE!r} with a text, or {RESPONSE_IDS!r} with token ids",
        )
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{row.place}: {RESPONSE!r} is not a text, or empty", fix="write a text that is not empty")


def _own_id(row: PromptRow) -> str:
    found = row.columns.get(ID)
    if found is None:
        return f"row-{row.line}"
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise ConfigError(f"{row.place}: {ID!r} is neither a text nor a whole number", fix="rename the column")
    return str(found)


def _kind(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and not -_INT64 <= value < _INT64:
        return "json"
    names = {bool: "bool", int: "int", float: "float", str: "text"}
    return names.get(type(value), "json")


def _joined(one: str, other: str) -> str:
    """What holds both."""
    if not one or not other or one == other:
        return one or other
    return "float" if {one, other} == {"int", "float"} else "json"


def as_kind(value: Any, kind: str) -> Any:
    """A kept value as its column has it."""
    if value is None:
        return None
    return json.dumps(value, ensure_ascii=False) if kind == "json" else float(value) if kind == "float" else value
