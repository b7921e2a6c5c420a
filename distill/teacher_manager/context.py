"""A teacher that reads more with each prompt than the student does: privileged context.

The student's prompt stays as it is. Only what stands before the response is another prompt, so the teacher is asked
about the very tokens that the student wrote, and its scores need no translation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distill.errors import TeacherError
from distill.teacher_manager.own_prompts import OwnPrompts
from distill.teacher_manager.translation import Question
from distill.types import GenerateRequest, Generation, Ids, Sample, ScoreRequest


@dataclass(frozen=True)
class Context:
    """What one teacher with the student's tokenizer reads in place of the student's prompts."""

    teacher: str
    prompts: OwnPrompts
    context_length: int
    """Tokens that the teacher can read."""

    def question(self, sample: Sample, student_ids: Ids | None = None) -> Question:
        """The response behind the teacher's own prompt: the same R tokens, so its scores are the sample's as they are.

        Raises TeacherError, with the sample's id, for a prompt that is not of the run's data and for more tokens than
        the teacher can read.
        """
        ids = np.concatenate([self.prompts.of_sample(sample), sample.response_ids])
        if len(ids) > self.context_length:
            raise TeacherError(
                f"{sample.id}: teacher {self.teacher} reads {len(ids)} tokens with its context of the prompt, and can "
                f"read {self.context_length}",
                why=f"the student's prompt has {len(sample.prompt_ids)}, its response {len(sample.response_ids)}",
                fix=f"shorten teachers.{self.teacher}.context, or lower rollout.max_new_tokens",
                sample_id=sample.id,
                teacher=self.teacher,
            )
        return Question(ScoreRequest(sample.id, ids, len(sample.response_ids), student_ids))

    def prompt(self, request: GenerateRequest) -> GenerateRequest:
        """The request for this teacher to write: it reads its context then, too."""
        return replace(request, input_ids=self.prompts.of_ids(request.input_ids, request.id))

    def written(self, found: Generation) -> Generation:
        return found
