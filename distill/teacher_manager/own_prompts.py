"""The run's prompts as one teacher reads them, where that is not as the student does.

Such a teacher has another tokenizer, or reads more of a row than the student's prompt shows. Its tokens of every prompt
of the data are made before the run starts; a prompt is then found again by the row that it came from, or by the
student's tokens of it where they tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distill.errors import TeacherError
from distill.types import Ids, Sample, sample_id


@dataclass(frozen=True)
class RowPrompts:
    """Prompts by the row of the data: rows may read the same to the student, and differ in what the teacher reads."""

    row_of: Callable[[int], int]
    """Ordinal of a sample -> its row."""
    student_ids: Sequence[Ids]
    """The student's, of every row."""
    teacher_ids: Mapping[int, Ids]
    """Row -> the teacher's, for the rows that are routed to it."""

    def of(self, sample: Sample) -> Ids | None:
        """None for a sample that is no rollout of one of these rows: an answer of an evaluation, or the segment of a
        trajectory, whose prompt has grown."""
        if sample.id != sample_id(sample.ordinal):
            return None
        row = self.row_of(sample.ordinal)
        return self.teacher_ids.get(row) if np.array_equal(self.student_ids[row], sample.prompt_ids) else None


@dataclass(frozen=True)
class OwnPrompts:
    """One teacher's token ids of the prompts."""

    teacher: str
    by_ids: Mapping[bytes, Ids]
    """`prompt_key` of the student's ids of a prompt -> the teacher's ids of it."""
    rows: RowPrompts | None = None

    def of_sample(self, sample: Sample) -> Ids:
        """Raises TeacherError, with the sample's id, for a prompt that is not of the run's data."""
        found = None if self.rows is None else self.rows.of(sample)
        return self.of_ids(sample.prompt_ids, sample.id, sample.id) if found is None else found

    def of_ids(self, prompt_ids: Ids, name: str, sample_id: str = "") -> Ids:
        """`name` is what is asked, for errors. Raises TeacherError for a prompt that is not of the run's data."""
        found = self.by_ids.get(prompt_key(prompt_ids))
        if found is None:
            raise TeacherError(
                f"{name}: its prompt is none of the run's data, so teacher {self.teacher} cannot be asked about it",
                why="that teacher reads prompts otherwise than the student, and those of the data were spelled for it "
                "beforehand",
                fix="use teachers of the student's tokenizer, without a context, for prompts that are made during the "
                "run",
                sample_id=sample_id,
                teacher=self.teacher,
            )
        return found


def prompt_key(prompt_ids: Ids) -> bytes:
    return np.asarray(prompt_ids, np.int32).tobytes()
