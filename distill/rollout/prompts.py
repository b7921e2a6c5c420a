"""Prompts: rows of JSONL or Parquet files, their token ids, and the endless order in which a run takes them.

A row holds a `prompt` (a text, or chat messages for the model's chat template) and may hold `domain`, `answer`,
`teacher` and `tags`. Who teaches it is said in `routing`, in which order a run takes it in `order`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from distill.config import DataConfig, RoutingConfig, TeacherConfig
from distill.config.fields import NAME
from distill.config.routing import group_name
from distill.errors import ConfigError
from distill.registry import did_you_mean
from distill.rollout.order import balanced
from distill.rollout.routing import Messages, Router, Routes
from distill.types import Ids, Prompt


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a data file. `line` counts from 1."""

    file: Path
    line: int
    domain: str
    prompt: str | Messages
    answer: str | None
    teachers: Mapping[str, float]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further columns that were asked for, as far as the row has them."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    @property
    def chat_template(self) -> Any: ...
    def __call__(self, text: str) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def read_rows(
    source: DataConfig,
    teachers: Mapping[str, TeacherConfig],
    routes: Routes | None = None,
    *,
    router: Router | None = None,
    columns: Collection[str] = (),
) -> list[PromptRow]:
    """Every row of `source`, with its teachers and their weights, and with those of `columns` that it has.

    `router` applies the run's rules; without one there are none. `routes` maps a domain to the teachers of a row that
    nothing else gives one. Raises ConfigError, which names the file and the line.
    """
    router = router or Router(RoutingConfig(), teachers)
    rows = [prompt_row(source, line, values, router, routes or {}, columns) for line, values in records(source.path)]
    if not rows:
        raise ConfigError(
            f"{source.path} holds no prompt",
            why="a run needs prompts of every entry of data",
            fix="remove the entry, or fill the file",
        )
    return rows


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe, a socket or a device"
        raise ConfigError(f"{path} is {kind}", why="data are read more than once", fix="give a file")
    if not path.is_file():
        raise ConfigError(f"there is no data file {path}", fix=_nearby(path))
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in (".jsonl", ".json"):
            yield from _jsonl(path)
        else:
            raise ConfigError(f"{path}: the kind of this file is not known", fix="data files end in .jsonl or .parquet")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _nearby(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    names = [entry.name for entry in folder.iterdir() if entry.suffix in (".jsonl", ".json", ".parquet")]
    return did_you_mean(path.name, names) if names else f"there is no data file in {folder}"


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{path}:{line}: not a JSON object: {error}", why="a JSONL file holds one object a line"
                ) from error
            except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
                raise ConfigError(f"{path}:{line}: nested too deeply, or a number too long, to be read") from error
            if not isinstance(record, dict):
                raise ConfigError(
                    f"{path}:{line}: not a JSON object, but {type(record).__name__}", why="a row has named columns"
                )
            yield line, record


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
        line = 0
        for batch in table.iter_batches(batch_size=4096):
            for record in batch.to_pylist():
                line += 1
                yield line, record
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not a whole Parquet file: {error}") from error


def prompt_row(
    source: DataConfig, line: int, values: dict[str, Any], router: Router, routes: Routes, columns: Collection[str]
) -> PromptRow:
    place = f"{source.path}:{line}"
    if source.prompt_field not in values:
        raise ConfigError(
            f"{place}: the row has no column {source.prompt_field!r}",
            fix=f"{did_you_mean(source.prompt_field, map(str, values))}; `prompt_field` of the data entry names it",
        )
    prompt = values[source.prompt_field]
    if not _is_prompt(prompt):
        raise ConfigError(
            f"{place}: {source.prompt_field!r} is neither a text nor a list of chat messages",
            fix='write a text that is not empty, or [{"role": "user", "content": "..."}]',
        )
    domain = source.domain if source.domain is not None else values.get("domain")
    if not isinstance(domain, str) or not domain:
        raise ConfigError(
            f"{place}: the row has no domain", fix="give the data entry a `domain`, or each row a column `domain`"
        )
    if not NAME.fullmatch(domain):
        raise ConfigError(
            f"{place}: the domain {domain!r} is more than letters, digits, '_', '.' and '-'",
            why="it becomes a part of the metrics' names",
            fix="rename it, or give the data entry a `domain`",
        )
    answer = values.get(source.answer_field)
    if isinstance(answer, bool | Mapping | list):
        raise ConfigError(f"{place}: {source.answer_field!r} is not a text", fix="answers are compared as texts")
    weights = router.teachers_of(source, place, domain, prompt, values, routes)
    kept = {name: values[name] for name in columns if name in values}
    return PromptRow(source.path, line, domain, prompt, None if answer is None else str(answer), weights, kept)


def _is_prompt(value: object) -> TypeGuard[str | Messages]:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def encode(row: PromptRow, tokenizer: Tokenizer, whose: str = "the student's") -> Ids:
    """The row's token ids, (P,) with P >= 1. Raises ConfigError with the row's place and `whose` tokenizer it is."""
    try:
        if isinstance(row.prompt, str):
            ids = tokenizer(row.prompt).input_ids
        else:
            ids = _chat(row, row.prompt, tokenizer, whose)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{row.place}: {whose} tokenizer refuses this prompt: {error}",
            fix=f"remove what {whose} tokenizer cannot spell",
        ) from error
    if not len(ids):
        raise ConfigError(f"{row.place}: {whose} tokenizer makes no token of this prompt")
    return np.asarray(ids, np.int32)


def _chat(row: PromptRow, messages: Messages, tokenizer: Tokenizer, whose: str) -> Sequence[int]:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{row.place}: the prompt is chat messages, and {whose} tokenizer has no chat template",
            fix="use a tokenizer with a chat_template, or write the prompt as a text",
        )
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        raise ConfigError(
            f"{row.place}: the chat template refuses these messages: {type(error).__name__}: {error}"
        ) from error
    # The template writes the special tokens itself.
    return tokenizer(text, add_special_tokens=False).input_ids  # pyright: ignore[reportCallIssue]


class PromptStream:
    """The prompts of a run by ordinal, in an order that only the rows, the seed and the mix decide.

    Every stretch of it has the domains and the teachers of all rows in their shares, and without a mix each row comes
    once an epoch. With a mix the teachers have those shares instead. `at` may be asked in any order, so a run can go on
    anywhere.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        encoded: Sequence[Ids],
        seed: int,
        epochs: int | None = None,
        mix: Mapping[str, float] | None = None,
    ) -> None:
        """`mix`: `group_name` of the teachers of a prompt -> its share. It has one for every group that there is."""
        if not rows:
            raise ValueError("a stream needs prompts")
        self._items = list(zip(rows, encoded, strict=True))
        self._epochs = epochs
        self._order = balanced([(group_name(list(row.teachers)), row.domain) for row in rows], seed, mix)

    @property
    def total(self) -> int | None:
        """Prompts in the whole stream; None when it never ends."""
        return None if self._epochs is None else self._epochs * len(self._items)

    @property
    def prompts_per_epoch(self) -> int:
        return len(self._items)

    def row_at(self, ordinal: int) -> int:
        """Which of the rows the prompt `ordinal` is. Raises IndexError past the last epoch."""
        if ordinal < 0 or (self.total is not None and ordinal >= self.total):
            raise IndexError(f"prompt {ordinal} of {self.total}")
        return self._order.row_at(ordinal)

    def at(self, ordinal: int) -> Prompt:
        """Raises IndexError past the last epoch."""
        row, ids = self._items[self.row_at(ordinal)]
        return Prompt(ordinal, row.domain, ids, row.teachers, row.answer)

    def __iter__(self) -> Iterator[Prompt]:
        ordinal = 0
        while self.total is None or ordinal < self.total:
            yield self.at(ordinal)
            ordinal += 1
