"""What is to be scored, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config import DataConfig, RunConfig
from distill.errors import ConfigError
from distill.registry import did_you_mean
from distill.types import Signal, SignalSpec

WINDOW = 1024
_ALL = "all"
"""Domain of rows whose teachers are named for all of them, so that no domain has to say who they are."""


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """A file of answers to score."""

    source: Path
    """JSONL or Parquet."""
    output: Path
    """Parquet."""
    teachers: tuple[str, ...] = ()
    """Of every row; empty: those that the run's routing gives it."""
    signal: Signal | None = None
    """None: what the run's objective asks for."""
    k: int | None = None
    keep: tuple[str, ...] = ()
    """Columns that are carried through."""
    limit: int | None = None
    """Rows from the beginning; None: all."""
    prompt_field: str | None = None
    """None: that of the run's first data entry."""
    domain: str | None = None
    """Of every row; None: the row's column `domain`."""
    append_end: bool = False
    """A `response` that is a text gets the student's end token."""
    resume: bool = False
    window: int = WINDOW
    """Rows that are scored at a time."""

    def check(self, config: RunConfig, reserved: frozenset[str]) -> None:
        """Raises ConfigError for what needs no look at the rows. `reserved`: columns that the output has anyway."""
        for name in self.teachers:
            if name not in config.teachers:
                raise ConfigError(
                    f"--teacher: the run has no teacher {name!r}", fix=did_you_mean(name, config.teachers)
                )
        for given, words in ((self.teachers, "--teacher"), (self.keep, "--keep")):
            twice = next((name for name in given if given.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"{words}: {twice!r} is given twice", fix="give it once")
        if self.output.suffix != ".parquet":
            raise ConfigError(f"--output: {self.output} does not end in .parquet", why="scores are written as Parquet")
        if not self.output.parent.is_dir():
            raise ConfigError(f"--output: there is no folder {self.output.parent}", fix="make it first")
        if self.output.exists():
            raise ConfigError(f"--output: {self.output} exists", fix="remove it, or choose another name")
        taken = next((name for name in self.keep if name in reserved), None)
        if taken is not None:
            raise ConfigError(
                f"--keep: the output has a column {taken!r} of its own", fix="rename the column of the input"
            )

    def data(self, config: RunConfig) -> DataConfig:
        """The file as an entry of the run's data."""
        first = config.data[0]
        return DataConfig(
            path=self.source,
            domain=self.domain or (_ALL if self.teachers else None),
            teachers=list(self.teachers) or None,
            prompt_field=self.prompt_field or first.prompt_field,
            answer_field=first.answer_field,
        )

    def settings(self, config: RunConfig, spec: SignalSpec) -> dict[str, Any]:
        """What has to be the same when a broken job goes on. JSON types only."""
        found = self.source.stat()
        return {
            "--input": [str(self.source.resolve()), found.st_size, found.st_mtime_ns],
            "--signal": [str(spec.signal), spec.k],
            "--teacher": list(self.teachers),
            "--keep": list(self.keep),
            "--limit": self.limit,
            "--prompt-field": self.data(config).prompt_field,
            "--domain": self.domain,
            "--append-end": self.append_end,
            "teachers": {name: each.model_dump(mode="json") for name, each in config.teachers.items()},
            "routing": config.routing.model_dump(mode="json"),
            "server.dtype": config.server.dtype,
            "the student's tokenizer": str(config.student.tokenizer or config.student.model),
        }
