"""Samples that cannot be used: set aside, written down and counted; and, when there are too many, the end of the run.

A fault of one sample (an error with its id) takes that sample out of its batch and nothing else. Its ordinal counts as
done. The run ends when more than `limit` samples were set aside, when a teacher fails on one sample after another, or
when nothing of a batch is left.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from distill.errors import ServiceError
from distill.types import Sample

QUARANTINE_FILE = "quarantine.jsonl"
DEFAULT_SHARE = 0.01
DEFAULT_LEAST = 8
"""How many samples may be set aside unless the configuration says it: this share of the run's, and at least these."""
IN_A_ROW = 16
"""A teacher that fails on so many samples one after another is broken itself, whatever the limit is."""


def default_limit(samples: int) -> int:
    """For a run of so many samples."""
    return max(DEFAULT_LEAST, int(DEFAULT_SHARE * samples))


class Quarantine:
    """The samples of a run that were set aside, over all its resumes.

    `on_event` takes (level, message), `on_count` the number of samples by the teacher at fault ("": no teacher) after
    each change.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: int,
        on_event: Callable[[str, str], None],
        on_count: Callable[[Mapping[str, int]], None],
    ) -> None:
        self._path = folder / QUARANTINE_FILE
        self._limit = limit
        self._event = on_event
        self._count = on_count
        self._teachers: dict[int, str] = {}
        """Ordinal -> the teacher at fault."""
        self._in_a_row = Counter[str]()
        self._last: ServiceError | None = None

    def add(self, sample: Sample, error: ServiceError) -> None:
        """Set the sample aside for this fault of it. Raises the error, with the reason, when the run cannot go on."""
        assert sample.ordinal not in self._teachers, f"{sample.id} was set aside before"
        self._teachers[sample.ordinal] = error.teacher
        self._last = error
        self._in_a_row[error.teacher] += 1
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_record(sample, error)) + "\n")
        self._count(self.counts)
        self._require_few(error)
        self._event(
            "warning", f"{sample.id} is set aside ({len(self._teachers)} of at most {self._limit}): {error.what}"
        )

    def passed(self, sample: Sample) -> None:
        """All teachers of the sample have scored it."""
        for teacher in sample.teachers:
            del self._in_a_row[teacher]

    @property
    def counts(self) -> Mapping[str, int]:
        """Samples by the teacher at fault; "" where it was none."""
        return Counter(self._teachers.values())

    def within(self, ordinals: Iterable[int]) -> Mapping[str, int]:
        """The same among these ordinals."""
        return Counter(self._teachers[ordinal] for ordinal in ordinals if ordinal in self._teachers)

    def nothing_left(self, step: int) -> ServiceError:
        """The error for a batch of which every sample was set aside."""
        kind = ServiceError if self._last is None else type(self._last)
        last = "" if self._last is None else f"; the last one: {self._last.what}"
        return kind(
            f"nothing is left to learn from in step {step}: all of its samples were set aside{last}",
            why="" if self._last is None else self._last.why,
            fix=f"{self._path} says of each what was wrong with it",
        )

    def state(self) -> list[tuple[int, str]]:
        """For a checkpoint: plain JSON."""
        return sorted(self._teachers.items())

    def restore(self, state: Iterable[tuple[int, str]], *, first_ordinal: int, held: Collection[int]) -> None:
        """Go on from `state()`. Samples from `first_ordinal` on that the store does not hold are written once more."""
        self._teachers = {ordinal: teacher for ordinal, teacher in state if ordinal < first_ordinal or ordinal in held}
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            fresh = self._path.with_suffix(".partial")
            fresh.write_text("".join(line for line in lines if _ordinal(line) in self._teachers), encoding="utf-8")
            fresh.replace(self._path)
        self._count(self.counts)

    def _require_few(self, error: ServiceError) -> None:
        total, of_teacher = len(self._teachers), self._in_a_row[error.teacher]
        if error.teacher and of_teacher >= IN_A_ROW:
            reason = f"teacher {error.teacher} failed on {of_teacher} samples one after another, so it is broken itself"
            fix = ""
        elif total > self._limit:
            shares = ", ".join(f"{name or 'no teacher'}: {count}" for name, count in sorted(self.counts.items()))
            reason = f"{total} samples had to be set aside ({shares}), and trainer.max_quarantined is {self._limit}"
            fix = "; or raise trainer.max_quarantined, if so many samples may be missing"
        else:
            return
        raise type(error)(
            error.what,
            why=f"{reason}{'; ' if error.why else ''}{error.why}",
            fix=f"{error.fix or 'mend that'} ({self._path} lists the samples){fix}",
            sample_id=error.sample_id,
            teacher=error.teacher,
        )


def _record(sample: Sample, error: ServiceError) -> dict[str, Any]:
    return {
        "id": sample.id,
        "ordinal": sample.ordinal,
        "domain": sample.domain,
        "teacher": error.teacher or None,
        "rule": error.what,
        "error": type(error).__name__,
        "version": sample.oldest_version if len(sample.versions) else None,
        "prompt_ids": sample.prompt_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
    }


def _ordinal(line: str) -> int | None:
    """None for a line that broke off when the machine went down."""
    try:
        return int(json.loads(line)["ordinal"])
    except (ValueError, KeyError, TypeError):
        return None
