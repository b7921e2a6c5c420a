"""What goes wrong in evaluation is told with the domain, the teacher, the answer and the rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from distill.config import EvaluationConfig
from distill.errors import ServerError, StudentError, TeacherError
from distill.evaluation import Evaluator
from distill.rollout.graders import Marker, exact_match
from distill.types import Batch, GenerateRequest, Generation, Prompt, Sample, ScoredSample
from tests.builders_loop import House, Rollout, Student, Teachers

ID = "eval-kl-t-math-{}"


class Speechless(Teachers):
    """Writes no token for the prompts whose ids end so, and scores the rest."""

    def __init__(self, *ends: str) -> None:
        super().__init__()
        self.ends = ends

    async def generate(self, teacher: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
        written = await super().generate(teacher, requests)
        nothing = np.array([], np.int32), np.array([], np.float32), ()
        return [Generation(each.id, *nothing, "stop") if each.id.endswith(self.ends) else each for each in written]

    async def score(self, item: Sample) -> ScoredSample:
        assert len(item.response_ids), "there is nothing to score"
        return await super().score(item)


class Broken(Teachers):
    async def generate(self, teacher: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
        raise TeacherError(f"teacher {teacher}: a call of {len(requests)} prompts to answer failed 5 times", fix="f")


class Sick(Student):
    async def evaluate(self, batch: Batch) -> dict[str, float]:
        raise StudentError(f"sample {batch.samples[0].sample.id}, teacher t: the student's logits hold NaN")


class Gone(Rollout):
    async def answer(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        raise ServerError("rollout-0: gone", why="w")


def evaluator() -> Evaluator:
    prompts = [Prompt(i, "math", np.array([1], np.int32), {"t": 1.0}, "x") for i in range(2)]
    return Evaluator(
        {"math": prompts},
        EvaluationConfig(kl=True),
        marker=Marker("exact_match", exact_match),
        decode=lambda _ids: "x",
        max_new_tokens=4,
        stop_token_ids=(2,),
    )


async def test_an_answer_without_a_token_is_its_authors_fault_and_left_out_of_the_kl() -> None:
    (fault,) = await evaluator().write_held_out(Speechless("-1"))
    assert fault.what == f"{ID.format(1)}: teacher t wrote no token"
    assert isinstance(fault, TeacherError) and fault.why and fault.fix
    assert (fault.sample_id, fault.teacher) == (ID.format(1), "t")


async def test_a_teacher_that_never_writes_a_token_is_an_error_that_names_it_and_the_domain() -> None:
    with pytest.raises(TeacherError) as caught:
        await evaluator().write_held_out(Speechless("-0", "-1"))
    assert caught.value.what == (
        f"evaluation, domain math, answers of teacher t: {ID.format(0)}: teacher t wrote no token"
    )


async def test_every_error_of_an_evaluation_says_where_in_it(tmp_path: Path) -> None:
    held = evaluator()
    with pytest.raises(TeacherError, match=r"^evaluation, domain math, answers of teacher t: teacher t: a call of 2"):
        await held.write_held_out(Broken())
    with pytest.raises(TeacherError, match=r"^evaluation, domain math: teacher t: a call of 2 prompts"):
        await held.teacher_accuracy(Broken(), "t")
    with pytest.raises(ServerError, match=r"^evaluation, domain math: rollout-0: gone") as gone:
        await held.student_accuracy(Gone(), "base-0")
    assert gone.value.why == "w"
    await held.write_held_out(Teachers())
    with pytest.raises(StudentError, match=r"^evaluation, KL on held-out answers: sample eval-kl-t-math-0, teacher t"):
        await held.student_kl(Sick())


async def test_a_run_goes_on_without_a_held_out_answer_that_has_no_token(tmp_path: Path) -> None:
    house = House(tmp_path, kl=True)
    house.teachers = Speechless("kl-t-math-0")
    assert (await house.run())["steps"] == 6
    lines = [line for line in (tmp_path / "events.log").read_text().splitlines() if "left out of the KL" in line]
    assert len(lines) == 1 and f"{ID.format(0)}: teacher t wrote no token" in lines[0]
