"""What is asked of a teacher about a sample, also of one with another tokenizer, and what its scores say of the sample.

Such a teacher reads the same text in its own tokens: the prompt as its own tokenizer spells the row of the data, then
the response, spelled by itself so that the boundary between them is one of its tokens' too. Its log-probabilities come
back on the byte spans that both tokenizers spell. Legend: R response tokens of the student, T of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from distill.errors import TeacherError
from distill.objectives.alignment import NONE, Alignment, align
from distill.teacher_manager.own_prompts import OwnPrompts
from distill.teacher_manager.spelling import Spelling, readable
from distill.types import GenerateRequest, Generation, Ids, Sample, ScoreRequest, SignalSpec, TeacherScores


@dataclass(frozen=True, slots=True)
class Question:
    """A sample as one teacher reads it."""

    request: ScoreRequest
    alignment: Alignment | None = None
    """Of the two tokenizations of the response; None where the teacher has the student's tokenizer."""

    def answer(self, sample: Sample, found: TeacherScores) -> TeacherScores:
        """The scores of the student's tokens, (R,), from those of the teacher's, (T,).

        A span that holds a token without a loss is left out whole: its log q is of tokens that are not trained, too.
        """
        if self.alignment is None:
            return found
        spans_R = self.alignment.student_span.copy()
        if sample.loss_mask is not None:
            spans_R[np.isin(spans_R, spans_R[sample.loss_mask == 0])] = NONE
        logprobs_R = self.alignment.teacher_on_student(found.logprobs)
        logprobs_R[spans_R == NONE] = 0.0
        return TeacherScores(found.teacher, logprobs_R.astype(np.float32), spans=spans_R)


class Reader(Protocol):
    """A teacher that does not read the student's very ids: it has another tokenizer, or a context of its own."""

    def question(self, sample: Sample, student_ids: Ids | None = None) -> Question:
        """What it is asked; `student_ids` as in ScoreRequest. Raises TeacherError with the sample's id."""
        ...

    def prompt(self, request: GenerateRequest) -> GenerateRequest:
        """The request as it reads it. Raises TeacherError for a prompt that is not of the run's data."""
        ...

    def written(self, found: Generation) -> Generation:
        """What it wrote, in the student's tokens."""
        ...


@dataclass(frozen=True)
class Translation:
    """Between the student's tokens and those of one teacher with another tokenizer."""

    teacher: str
    student: Spelling
    spelling: Spelling
    """The teacher's."""
    prompts: OwnPrompts
    context_length: int
    """Tokens that the teacher can read."""
    student_context_length: int
    """Tokens that the student can read: what the teacher wrote may be more of its tokens than the teacher's."""

    def question(self, sample: Sample, student_ids: Ids | None = None) -> Question:
        """The sample in the teacher's tokens. A response without any text is asked about with one token, so that every
        sample is one request. `student_ids` are of no use: they are not its tokens.

        Raises TeacherError, with the sample's id, for a prompt that is not of the run's data and for more tokens than
        the teacher can read.
        """
        spelled_R = self.student.spell(sample.response_ids)
        text, ended = readable(spelled_R)
        response_T = self.spelling.encode(text, ended=ended)
        alignment = align(spelled_R, self.spelling.spell(response_T))
        if not len(response_T):
            response_T = np.asarray([self.spelling.end_id or 0], np.int32)
            alignment = align(spelled_R, [b""])
        ids = np.concatenate([self.prompts.of_sample(sample), response_T])
        own_tokens = len(sample.prompt_ids) + len(sample.response_ids)
        self._require_room(sample, f"teacher {self.teacher}", len(ids), self.context_length)
        self._require_room(sample, "the student", own_tokens, self.student_context_length)
        return Question(ScoreRequest(sample.id, ids, len(response_T)), alignment)

    def prompt(self, request: GenerateRequest) -> GenerateRequest:
        """The request for this teacher to write: its own tokens, and its own ends."""
        ids = self.prompts.of_ids(request.input_ids, request.id)
        return replace(request, input_ids=ids, stop_token_ids=tuple(sorted(self.spelling.end_ids)))

    def written(self, found: Generation) -> Generation:
        """What the teacher wrote in the student's tokens, each span's log-probability at the first of its tokens."""
        spelled_T = self.spelling.spell(found.output_ids)
        text, ended = readable(spelled_T)
        ids_R = self.student.encode(text, ended=ended)
        logprobs_R = align(self.student.spell(ids_R), spelled_T).teacher_on_student(found.logprobs)
        return replace(
            found,
            output_ids=ids_R,
            logprobs=logprobs_R.astype(np.float32),
            versions=found.versions[:1] * len(ids_R),
        )

    def _require_room(self, sample: Sample, reader: str, tokens: int, room: int) -> None:
        if tokens > room:
            raise TeacherError(
                f"{sample.id}: {reader} spells it in {tokens} tokens, more than its context of {room}",
                why="it was written by a model with another tokenizer, in which it is shorter",
                fix="lower rollout.max_new_tokens and evaluation.max_new_tokens",
                sample_id=sample.id,
                teacher=self.teacher,
            )


def questions(sample: Sample, spec: SignalSpec, readers: Mapping[str, Reader]) -> list[Question]:
    """One for each of the sample's teachers, in their order; all but `readers` read the student's ids.

    Raises TeacherError with the sample's id.
    """
    ids = np.concatenate([sample.prompt_ids, sample.response_ids])
    student_ids = _student_ids(sample, spec)
    plain = Question(ScoreRequest(sample.id, ids, len(sample.response_ids), student_ids))
    return [readers[name].question(sample, student_ids) if name in readers else plain for name in sample.teachers]


def _student_ids(sample: Sample, spec: SignalSpec) -> Ids | None:
    """What the teachers are asked about, where that is the student's choice."""
    if not spec.student_k:
        return None
    shape = (len(sample.response_ids), spec.student_k)
    if sample.topk_ids is None or sample.topk_ids.shape != shape:
        found = "none" if sample.topk_ids is None else f"some of shape {sample.topk_ids.shape}"
        raise TeacherError(
            f"{sample.id}: needs the student's most probable tokens, of shape {shape}, and has {found}",
            why=f"support {spec.support} is about tokens of the student's choice",
            fix="rollout servers report them with each token; a sample made otherwise has to bring them",
            sample_id=sample.id,
        )
    return sample.topk_ids
