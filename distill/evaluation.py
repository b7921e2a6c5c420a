"""Evaluation beside training: accuracy of base, student and teachers on held-out prompts, and KL on fixed answers.

Student and base write on the rollout servers, each teacher writes in a slot during a visit of its own; all greedily.
The KL is the student's against each domain's teacher, on answers that the teacher wrote once at the start: the same
tokens every time, so the curve shows the student and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distill.config import EvaluationConfig
from distill.protocols import RolloutEngine, StudentHandle, TeacherBackend
from distill.types import Batch, GenerateRequest, Generation, Ids, Prompt, Sample, ScoredSample

Grader = Callable[[str, str, bool], float]


class Writer(Protocol):
    """Something that continues prompts: the rollout servers, or one teacher."""

    async def __call__(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...


@dataclass(frozen=True, slots=True)
class Accuracy:
    domain: str
    value: float
    count: int


class Evaluator:
    """Held-out prompts and how to judge what is written for them."""

    def __init__(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        config: EvaluationConfig,
        *,
        grade: Grader,
        decode: Callable[[Ids], str],
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._prompts = prompts
        self._config = config
        self._grade = grade
        self._decode = decode
        self._max_new_tokens = max_new_tokens
        self._stop = tuple(stop_token_ids)
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
            written = await write(self._requests(asked, f"{label}-{domain}"))
            marks = [
                self._grade(self._decode(item.output_ids), prompt.answer or "", item.finish_reason == "stop")
                for prompt, item in zip(asked, written, strict=True)
            ]
            found.append(Accuracy(domain, float(np.mean(marks)), len(marks)))
        return found

    def _requests(self, prompts: Sequence[Prompt], label: str) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                id=f"eval-{label}-{index}",
                input_ids=prompt.input_ids,
                max_new_tokens=self._max_new_tokens,
                temperature=0.0,
                stop_token_ids=self._stop,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def write_held_out(self, teachers: TeacherBackend) -> None:
        """Have each domain's first teacher answer its held-out prompts, and all its teachers score the answers."""
        scored: list[ScoredSample] = []
        for domain, prompts in self._prompts.items():
            for teacher, group in _by_teacher(prompts).items():
                written = await teachers.generate(teacher, self._requests(group, f"kl-{teacher}-{domain}"))
                samples = [_held_out_sample(*pair) for pair in zip(group, written, strict=True)]
                scored += await asyncio.gather(*(teachers.score(sample) for sample in samples))
        self._held_out = Batch(version=0, samples=tuple(scored))

    async def student_kl(self, student: StudentHandle) -> dict[str, float]:
        """KL(student || teacher) per domain, mean over the held-out answers' tokens."""
        assert self._held_out is not None, "write_held_out comes first"
        return await student.evaluate(self._held_out)


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
    )
