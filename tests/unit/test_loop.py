"""The loop over parts that live in this process: order, staleness, errors, stops. Real processes: tests/integration."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill import loop
from distill.checkpoint import Checkpoints
from distill.config import EvaluationConfig, ObserveConfig
from distill.errors import RunStopped, ServerError, TeacherError
from distill.evaluation import Evaluator
from distill.observe import Observer
from distill.protocols import PublishResult, ServerAddress, TeacherCaps
from distill.rollout.admission import Admission
from distill.rollout.graders import exact_match
from distill.store.memory import MemoryStore
from distill.types import Batch, GenerateRequest, Generation, Prompt, Sample, ScoredSample, Signal, StepResult
from tests.builders import sample, scored


class Rollout:
    """Writes a sample in the time that its ordinal's seed says, with the version that is published when it starts."""

    def __init__(self) -> None:
        self.version = -1
        self.broken_at: int | None = None
        self.silent_at: int | None = None
        self.answered: list[str] = []

    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, "math", np.array([1], np.int32), {"t": 1.0})

    async def generate(self, ordinals: Sequence[int]) -> AsyncIterator[Sample]:
        for ordinal in ordinals:
            version = self.version
            await asyncio.sleep(np.random.default_rng(ordinal).random() * 0.004)
            if ordinal == self.broken_at:
                raise ServerError("rollout-0: gone")
            if ordinal == self.silent_at:
                await asyncio.Event().wait()
            yield sample(ordinal, version=version)

    async def answer(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.answered += [request.id for request in requests]
        return [Generation(r.id, np.array([7], np.int32), np.zeros(1, np.float32), ("0",), "stop") for r in requests]

    def receivers(self) -> list[ServerAddress]:
        return [ServerAddress("rollout-0", "", 1, {})]

    def committed(self, result: PublishResult) -> None:
        self.version = result.version

    async def joining(self) -> list[ServerAddress]:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None: ...


class Teachers:
    def __init__(self) -> None:
        self.caps = TeacherCaps(frozenset(Signal), 50, 50)
        self.announced: list[str] = []
        self.broken = False
        self.wrote: list[str] = []

    def announce(self, sample_id: str, teachers: Sequence[str], expected_tokens: int) -> None:
        self.announced.append(sample_id)

    async def score(self, item: Sample) -> ScoredSample:
        if self.broken:
            raise TeacherError("teachers.t: the canary moved")
        assert item.id in self.announced or item.id.startswith("eval-"), "announced before it is scored"
        await asyncio.sleep(0)
        return dataclasses.replace(scored(item.ordinal), sample=item)

    async def generate(self, teacher: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.wrote.append(teacher)
        return [Generation(r.id, np.array([7], np.int32), np.zeros(1, np.float32), ("t",), "stop") for r in requests]

    def queue_ages(self) -> Mapping[str, float]:
        return {"t": 0.0}

    def swap_counts(self) -> Mapping[str, int]:
        return {"t": 1}

    async def close(self) -> None: ...


class Student:
    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.trained: list[list[int]] = []
        self.lags: list[int] = []

    async def step(self, batch: Batch) -> StepResult:
        assert batch.version == self.version
        await asyncio.sleep(0.002)
        self.trained.append([item.sample.ordinal for item in batch.samples])
        self.lags += [batch.version - item.sample.oldest_version for item in batch.samples]
        self.version += 1
        return StepResult(self.version, 0.1, 1.0, 1e-3, batch.response_tokens, 0.1, kl={"t": 0.1})

    async def evaluate(self, batch: Batch) -> dict[str, float]:
        return {"math": 1.0 / (1 + self.version)}

    async def publish(self, receivers: Sequence[ServerAddress]) -> PublishResult:
        return PublishResult(self.version, "d", 8, 0.0, tuple(server.name for server in receivers))

    async def save(self, folder: Path) -> None:
        folder.mkdir()

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None: ...


@dataclasses.dataclass
class House:
    """Parts over a folder, and the run through them."""

    folder: Path
    steps: int = 6
    batch: int = 4
    staleness: int = 1
    kl: bool = False
    patience_s: float = 20.0
    version: int = 0

    def __post_init__(self) -> None:
        self.rollout, self.teachers, self.student = Rollout(), Teachers(), Student(self.version)
        self.store = MemoryStore(capacity=64, first_ordinal=self.version * self.batch)
        self.stop = asyncio.Event()
        self.observer = Observer(
            self.folder,
            ObserveConfig(progress="none", sinks=[]),
            run_name="test",
            total_steps=self.steps,
            teachers=["t"],
            domain_teachers={"math": ["t"]},
        )

    def parts(self) -> loop.Parts:
        prompts = {"math": [Prompt(i, "math", np.array([1], np.int32), {"t": 1.0}, "x") for i in range(3)]}
        return loop.Parts(
            rollout=self.rollout,
            teachers=self.teachers,
            student=self.student,
            store=self.store,
            admission=Admission(
                batch_size=self.batch,
                max_staleness=self.staleness,
                total=self.steps * self.batch,
                version=self.version,
            ),
            evaluator=Evaluator(
                prompts,
                EvaluationConfig(kl=self.kl),
                grade=exact_match,
                decode=lambda _ids: "x",
                max_new_tokens=4,
                stop_token_ids=(2,),
            ),
            checkpoints=Checkpoints(self.folder / "checkpoints", keep=2),
            observer=self.observer,
        )

    async def run(self, **changes: Any) -> dict[str, Any]:
        plan = loop.Plan(
            steps=self.steps,
            batch_size=self.batch,
            group_size=3,
            expected_tokens=4,
            synchronous=self.staleness == 0,
            evaluated_teachers=["t"],
            evaluate_every=2,
            checkpoint_every=None,
            patience_s=self.patience_s,
            identity={},
        )
        try:
            await loop.run(self.parts(), dataclasses.replace(plan, **changes), self.stop)
        finally:
            result = self.observer.finish("done")
        return result


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_every_sample_is_trained_once_in_order_and_within_its_staleness(tmp_path: Path, staleness: int) -> None:
    house = House(tmp_path, staleness=staleness)
    result = await house.run()
    assert [ordinal for batch in house.student.trained for ordinal in batch] == list(range(24))
    assert max(house.student.lags) == result["max_staleness_seen"] <= staleness
    assert min(house.student.lags) >= 0
    assert (result["samples"], result["weight_updates"]) == (24, 6)


async def test_base_student_and_teachers_are_evaluated_beside_training(tmp_path: Path) -> None:
    house = House(tmp_path, kl=True)
    result = await house.run()
    assert result["domains"]["math"] == {"base": 1.0, "teacher": 1.0, "student": 1.0}
    assert result["kl"]["math"]["first"] == 1.0
    assert result["kl"]["math"]["last"] == pytest.approx(1 / 7)
    asked = {name.rsplit("-", 1)[0] for name in house.rollout.answered}
    assert asked == {"eval-base-0-math", "eval-student-2-math", "eval-student-4-math", "eval-student-6-math"}
    assert len(house.teachers.wrote) == 2, "once for its accuracy, once for the answers of the KL"


async def test_a_server_that_is_given_up_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.rollout.broken_at = 9
    with pytest.raises(ServerError, match="rollout-0: gone"):
        await house.run()


async def test_a_teacher_that_cannot_be_trusted_ends_the_run(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.teachers.broken = True
    with pytest.raises(TeacherError, match="canary moved"):
        await house.run()
    assert house.student.trained == []


async def test_a_batch_that_never_comes_is_named_after_its_deadline(tmp_path: Path) -> None:
    house = House(tmp_path, patience_s=0.3)
    house.rollout.silent_at = 5
    with pytest.raises(ServerError, match=r"step 1 waited 0 s for \d of 4 samples, the first is sample-00000005"):
        await house.run()


async def test_a_stop_saves_finished_samples_and_a_resume_trains_the_rest_once(tmp_path: Path) -> None:
    first = House(tmp_path)
    running = asyncio.create_task(first.run())
    while len(first.student.trained) < 2:
        await asyncio.sleep(0.001)
    first.stop.set()
    with pytest.raises(RunStopped, match=r"stopped at step \d of 6, and saved"):
        await running
    saved = Checkpoints(tmp_path / "checkpoints", keep=2).latest()
    assert saved is not None and saved.step == len(first.student.trained)

    second = House(tmp_path, version=saved.step)
    second.store.restore(saved.samples)
    held = second.store.ordinals
    second.observer.restore(saved.state["observer"])
    result = await second.run()
    trained = [ordinal for batch in first.student.trained + second.student.trained for ordinal in batch]
    assert trained == list(range(24))
    assert not held & {int(name.split("-")[1]) for name in second.teachers.announced}, (
        "held samples are not written again"
    )
    assert result["samples"] == 24
    assert max(second.student.lags) <= 1
