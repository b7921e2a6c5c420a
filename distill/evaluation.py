"""Evaluation beside training: accuracy of base, student and teachers on held-out prompts, and KL on fixed answers.

Student and base write on the rollout servers, each teacher writes in a slot during a visit of its own; all greedily.
The KL is the student's against each domain's teacher, on answers that the teacher wrote once at the start: the same
tokens every time, so the curve shows the student and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distill.config import EvaluationConfig
from distill.errors import ServiceError, TeacherError
from distill.protocols import RolloutEngine, StudentHandle, TeacherBackend
from distill.rollout.graders import Marker
from distill.types import Batch, GenerateRequest, Generation, Ids, Prompt, Sample, ScoredSample


class Writer(Protocol):
    """Something that continues prompts: the rollout servers, or one teacher."""

    async def __call__(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...


@dataclass(frozen=True, slots=True)
class Accuracy:
    domain: str
    value: float
    count: int


class Evaluator:
    """Held-out prompts and how to judge what is written for them.

    `report_k`: where the objective is about tokens of the writer's choice, the KL on a held-out answer is about the k
    most probable ones of the teacher that wrote it, however the student changes.
    """

    def __init__(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        config: EvaluationConfig,
        *,
        marker: Marker,
        decode: Callable[[Ids], str],
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        report_k: int = 0,
    ) -> None:
        self._prompts = prompts
        self._config = config
        self._marker = marker
        self._decode = decode
        self._max_new_tokens = max_new_tokens
        self._stop = tuple(stop_token_ids)
        self._report_k = report_k
        self._held_out: Batch | None = None

    @property
    def measures_accuracy(self) -> bool:
        return any(prompt.answer is not None for prompts in self._prompts.values() for prompt in prompts)

    @property
    def measures_kl(self) -> bool:
        return self._config.kl and bool(self._prompts)

    async def student_accuracy(self, rollout: RolloutEngine, label: str) -> list[Accuracy]:
        """Accuracy per domain of whatever weights the rollout servers hold now."""
        return await self._accuracy(rollout.answer, label)

    async def teacher_accuracy(self, teachers: TeacherBackend, name: str) -> list[Accuracy]:
        async def write(requests: Sequence[GenerateRequest]) -> list[Generation]:
            return await teachers.generate(name, requests)

        return await self._accuracy(write, f"teacher-{name}")

    async def _accuracy(self, write: Writer, label: str) -> list[Accuracy]:
        found: list[Accuracy] = []
        for domain, prompts in self._prompts.items():
            asked = [prompt for prompt in prompts if prompt.answer is not None]
            if not asked:
                continue
            with _named(f"evaluation, domain {domain}"):
                written = await write(self._requests(asked, f"{label}-{domain}"))
                marks = await asyncio.gather(*(self._mark(*pair) for pair in zip(asked, written, strict=True)))
            found.append(Accuracy(domain, float(np.mean(marks)), len(marks)))
        return found

    async def _mark(self, prompt: Prompt, answer: Generation) -> float:
        text = self._decode(answer.output_ids)
        return await self._marker.mark(text, prompt.answer or "", answer.finish_reason == "stop", answer.id)

    def _requests(self, prompts: Sequence[Prompt], label: str, report_k: int = 0) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                id=f"eval-{label}-{index}",
                input_ids=prompt.input_ids,
                max_new_tokens=self._max_new_tokens,
                temperature=0.0,
                stop_token_ids=self._stop,
                report_k=report_k,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def write_held_out(self, teachers: TeacherBackend) -> list[ServiceError]:
        """Have each domain's first teacher answer its held-out prompts, and all its teachers score the answers.

        Returns the faults of single answers: those are left out. Raises the first when none of a domain's is left.
        """
        scored: list[ScoredSample] = []
        faults: list[ServiceError] = []
        for domain, prompts in self._prompts.items():
            for teacher, group in _by_teacher(prompts).items():
                with _named(f"evaluation, domain {domain}, answers of teacher {teacher}"):
                    requests = self._requests(group, f"kl-{teacher}-{domain}", self._report_k)
                    written = await teachers.generate(teacher, requests)
                    samples = [_held_out_sample(*pair) for pair in zip(group, written, strict=True)]
                    outcomes = await asyncio.gather(*(_scored_or_fault(teachers, each, teacher) for each in samples))
                    wrong = [outcome for outcome in outcomes if isinstance(outcome, ServiceError)]
                    if len(wrong) == len(outcomes):
                        raise wrong[0]
                faults += wrong
                scored += [outcome for outcome in outcomes if isinstance(outcome, ScoredSample)]
        self._held_out = Batch(version=0, samples=tuple(scored))
        return faults

    async def student_kl(self, student: StudentHandle) -> dict[str, float]:
        """KL(student || teacher) per domain, mean over the held-out answers' tokens."""
        assert self._held_out is not None, "write_held_out comes first"
        with _named("evaluation, KL on held-out answers"):
            return await student.evaluate(self._held_out)


@contextlib.contextmanager
def _named(where: str) -> Generator[None]:
    """An error on the way says first that it came up in evaluation, and where there."""
    try:
        yield
    except ServiceError as error:
        error.what = f"{where}: {error.what}"
        raise


async def _scored_or_fault(teachers: TeacherBackend, sample: Sample, author: str) -> ScoredSample | ServiceError:
    if not len(sample.response_ids):
        return TeacherError(
            f"{sample.id}: teacher {author} wrote no token",
            why="the KL is measured on the tokens of its answer",
            fix="check that its chat template ends where an answer begins, and leave the prompt out if it has none",
            sample_id=sample.id,
            teacher=author,
        )
    try:
        return await teachers.score(sample)
    except ServiceError as error:
        if error.sample_id != sample.id:
            raise
        return error


def _by_teacher(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(next(iter(prompt.teachers)), []).append(prompt)
    return groups


def _held_out_sample(prompt: Prompt, answer: Generation) -> Sample:
    return Sample(
        id=answer.id,
        ordinal=prompt.ordinal,
        domain=prompt.domain,
        teachers=prompt.teachers,
        prompt_ids=prompt.input_ids,
        response_ids=answer.output_ids,
        logprobs=answer.logprobs,
        versions=np.zeros(len(answer.output_ids), np.int32),
        finish_reason=answer.finish_reason,
        topk_ids=answer.topk_ids,
    )
