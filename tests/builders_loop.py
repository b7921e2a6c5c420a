"""The parts of a run in this process, each with the ways to break it that tests need, and the run through them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distill import loop
from distill.checkpoint import Checkpoints
from distill.config import EvaluationConfig, ObserveConfig
from distill.errors import ServerError, StudentError, TeacherDropped, TeacherError
from distill.evaluation import Evaluator
from distill.idle_steps import IdleSteps
from distill.observe import Observer
from distill.protocols import PublishResult, ServerAddress, TeacherCaps, TeacherFigures
from distill.quarantine import Quarantine
from distill.rollout.admission import Admission
from distill.rollout.graders import Marker, exact_match
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
        self.refuse: set[str] = set()
        """Ids of samples that no teacher can score."""
        self.dropped: set[str] = set()
        """Ids of samples whose teachers the run goes on without."""
        self.wrote: list[str] = []
        self.versions: list[int] = []

    async def start(self) -> None: ...

    def announce(self, sample_id: str, teachers: Sequence[str], expected_tokens: int) -> None:
        self.announced.append(sample_id)

    async def score(self, item: Sample) -> ScoredSample:
        if self.broken:
            raise TeacherError("teachers.t: the canary moved")
        assert item.id in self.announced or item.id.startswith("eval-"), "announced before it is scored"
        await asyncio.sleep(0)
        if item.id in self.dropped:
            raise TeacherDropped(f"{item.id}: none of its teachers could be served", sample_id=item.id)
        if item.id in self.refuse:
            raise TeacherError(f"teacher t: {item.id}: not a number", sample_id=item.id, teacher="t")
        return dataclasses.replace(scored(item.ordinal), sample=item)

    async def generate(self, teacher: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.wrote.append(teacher)
        return [Generation(r.id, np.array([7], np.int32), np.zeros(1, np.float32), ("t",), "stop") for r in requests]

    def advance(self, version: int) -> None:
        self.versions.append(version)

    def queue_ages(self) -> Mapping[str, float]:
        return {"t": 0.0}

    def swap_counts(self) -> Mapping[str, int]:
        return {"t": 1}

    def figures(self) -> TeacherFigures:
        return TeacherFigures(loads=1, load_bytes=8, busy_s=3.0, stalled_s=1.0)

    async def close(self) -> None: ...


class Student:
    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.trained: list[list[int]] = []
        self.lags: list[int] = []
        self.refuse: set[int] = set()
        """Ordinals whose rows no step can take."""
        self.gated: set[int] = set()
        """Steps, from 1 on, in which a correction leaves out every token."""

    async def step(self, batch: Batch) -> StepResult:
        assert batch.version == self.version
        await asyncio.sleep(0.002)
        for item in batch.samples:
            if item.sample.ordinal in self.refuse:
                raise StudentError(f"sample {item.sample.id}: its loss is infinite", sample_id=item.sample.id)
        self.trained.append([item.sample.ordinal for item in batch.samples])
        self.lags += [batch.version - item.sample.oldest_version for item in batch.samples]
        self.version += 1
        gated = self.version in self.gated
        return StepResult(
            version=self.version,
            loss=0.1,
            grad_norm=0.0 if gated else 1.0,
            lr=1e-3,
            tokens=batch.response_tokens,
            seconds=0.1,
            kl={"t": 0.1},
            token_share={"t": 1.0},
            objective={"gated_low": {"t": float(gated)}},
        )

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
    limit: int = 5
    grade: Callable[[Sample], Awaitable[float]] | None = None
    held_out: Sequence[str] = ("math",)
    """Domains of the held-out prompts."""

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
            resumed_from=self.version,
        )
        self.quarantine = Quarantine(
            self.folder, limit=self.limit, on_event=self.observer.event, on_count=self.observer.quarantined
        )

        self.idle_steps = IdleSteps("toy", total_steps=self.steps, on_event=self.observer.event)

    def parts(self) -> loop.Parts:
        prompts = {
            domain: [Prompt(i, domain, np.array([1], np.int32), {"t": 1.0}, "x") for i in range(3)]
            for domain in self.held_out
        }
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
                marker=Marker("exact_match", exact_match),
                decode=lambda _ids: "x",
                max_new_tokens=4,
                stop_token_ids=(2,),
            ),
            checkpoints=Checkpoints(self.folder / "checkpoints", keep=2),
            quarantine=self.quarantine,
            idle_steps=self.idle_steps,
            observer=self.observer,
            grade=self.grade,
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
            settings={},
        )
        try:
            await loop.run(self.parts(), dataclasses.replace(plan, **changes), self.stop)
        finally:
            result = self.observer.finish("done")
        return result


def go_on(folder: Path, **settings: Any) -> House:
    """A house that goes on from the newest checkpoint in `folder`."""
    saved = Checkpoints(folder / "checkpoints", keep=2).latest()
    assert saved is not None
    house = House(folder, version=saved.step, **settings)
    if house.staleness:
        house.store.restore(saved.samples)
    first = saved.step * house.batch
    house.quarantine.restore(saved.state["quarantine"], first_ordinal=first, held=house.store.ordinals)
    house.idle_steps.restore(saved.state["idle_steps"])
    house.observer.restore(saved.state["observer"])
    return house
