"""The loop, in the order in which things happen. It knows protocols and constructs nothing; `distill.build` wires it.

Three things go on at once: rollout servers write samples, teachers score each as soon as it is finished, the student
learns from batches. `Admission` bounds how far rollout runs ahead; only ids and finished samples pass through here.
A sample that cannot be used is set aside; its ordinal counts as done, and its batch is trained without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distill.checkpoint import Checkpoints
from distill.errors import DistillError, RunStopped, ServerError, ServiceError, TeacherDropped
from distill.evaluation import Accuracy, Evaluator
from distill.idle_steps import IdleSteps
from distill.observe import EvalRecord, Observer
from distill.protocols import PublishResult, RolloutEngine, SampleStore, StudentHandle, TeacherBackend
from distill.quarantine import Quarantine
from distill.rollout.admission import Admission
from distill.types import Batch, Sample, ScoredSample, StepResult, sample_id


@dataclass(frozen=True, slots=True)
class Parts:
    """The rooms of the house, wired."""

    rollout: RolloutEngine
    teachers: TeacherBackend
    student: StudentHandle
    store: SampleStore
    admission: Admission
    evaluator: Evaluator
    checkpoints: Checkpoints
    quarantine: Quarantine
    idle_steps: IdleSteps
    observer: Observer
    grade: Callable[[Sample], Awaitable[float]] | None = None
    """What gives a finished sample its reward; None where the objective needs no outcome."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in numbers."""

    steps: int
    batch_size: int
    group_size: int
    """Samples that a rollout call carries."""
    expected_tokens: int
    """Response tokens that a sample is announced with."""
    synchronous: bool
    """Nothing overlaps training: the run is reproducible."""
    evaluated_teachers: Sequence[str]
    evaluate_every: int | None
    checkpoint_every: int | None
    patience_s: float
    """Longest wait for a batch before the run is given up."""
    settings: Mapping[str, Any]
    """Those of the run, which a checkpoint keeps for whoever goes on from it."""


async def run(parts: Parts, plan: Plan, stop: asyncio.Event) -> None:
    """Train until `plan.steps`. Raises RunStopped after a stop that was saved, else the first error of any task."""
    try:
        async with asyncio.TaskGroup() as tasks:
            await publish(parts, parts.rollout.receivers())
            current = tasks.create_task(keep_servers_current(parts))
            if plan.synchronous:
                await evaluate_start(parts, plan, tasks)
                writing = tasks.create_task(write_samples(parts, plan))
            else:
                writing = tasks.create_task(write_samples(parts, plan))
                await evaluate_start(parts, plan, tasks)
            try:
                await train(parts, plan, stop, tasks)
            finally:
                current.cancel()
                writing.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    finally:
        parts.observer.swapped(parts.teachers.swap_counts(), parts.teachers.figures())


async def write_samples(parts: Parts, plan: Plan) -> None:
    """Start samples as fast as admission lets them."""
    held = parts.store.ordinals
    async with asyncio.TaskGroup() as flights:
        while ordinals := await parts.admission.next(plan.group_size, held=held):
            for ordinal in ordinals:
                teachers = list(parts.rollout.prompt(ordinal).teachers)
                parts.teachers.announce(sample_id(ordinal), teachers, plan.expected_tokens)
            flights.create_task(write_group(parts, ordinals, flights))


async def write_group(parts: Parts, ordinals: Sequence[int], flights: asyncio.TaskGroup) -> None:
    async for sample in parts.rollout.generate(ordinals):
        flights.create_task(score(parts, sample))


async def score(parts: Parts, sample: Sample) -> None:
    """A finished sample is scored at once, while others are still being written."""
    try:
        scored = await judge(parts, sample)
    except TeacherDropped:  # counted by the teacher manager
        await parts.store.skip(sample.ordinal)
    except ServiceError as error:
        await set_aside(parts, sample, error)
    else:
        parts.quarantine.passed(sample)
        await parts.store.put(scored)
    parts.admission.accept()


async def judge(parts: Parts, sample: Sample) -> ScoredSample:
    """The teachers' scores and, where the objective needs one, the reward of the outcome, both at the same time."""
    if parts.grade is None:
        return await parts.teachers.score(sample)
    scored, reward = await asyncio.gather(parts.teachers.score(sample), parts.grade(sample), return_exceptions=True)
    if isinstance(scored, BaseException):
        raise scored
    if isinstance(reward, BaseException):
        raise reward
    return replace(scored, sample=replace(scored.sample, reward=reward))


async def set_aside(parts: Parts, sample: Sample, error: ServiceError) -> None:
    """Go on without the sample. Raises the error when it is not the sample's, or when the run cannot go on."""
    if error.sample_id != sample.id:
        raise error
    parts.quarantine.add(sample, error)
    await parts.store.skip(sample.ordinal)


async def train(parts: Parts, plan: Plan, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
    evaluating: asyncio.Task[None] | None = None
    version = parts.admission.version
    parts.teachers.advance(version)
    while version < plan.steps:
        samples = await next_batch(parts, plan, version, stop)
        if samples is None:
            await checkpoint(parts, plan, version)
            raise RunStopped(f"stopped at step {version} of {plan.steps}, and saved", fix="resume=auto goes on")
        result, samples = await learn(parts, version, samples)
        published = await publish(parts, parts.rollout.receivers())
        await parts.store.commit(samples)
        ordinals = range(version * plan.batch_size, (version + 1) * plan.batch_size)
        version = result.version
        parts.teachers.advance(version)
        parts.observer.step(
            result,
            samples,
            set_aside=parts.quarantine.within(ordinals),
            queue_age_s=parts.teachers.queue_ages(),
            swaps=parts.teachers.swap_counts(),
            slots=parts.teachers.figures(),
            publish=published,
            store_size=len(parts.store),
        )
        parts.idle_steps.take(result)
        if _due(version, plan.evaluate_every) or version == plan.steps:
            if evaluating is not None:
                await evaluating
            evaluating = tasks.create_task(evaluate(parts, "student", version))
            if plan.synchronous or version == plan.steps:
                await evaluating
        parts.admission.publish(version)
        if _due(version, plan.checkpoint_every) or version == plan.steps:
            await checkpoint(parts, plan, version)


async def learn(
    parts: Parts, version: int, samples: tuple[ScoredSample, ...]
) -> tuple[StepResult, tuple[ScoredSample, ...]]:
    """One step, and what was learnt from. A sample that the student refuses is set aside, and the step done without
    it: a refused step has changed nothing. Raises ServiceError when nothing is left."""
    while samples:
        batch = Batch(version, samples)
        try:
            with parts.observer.span("train", amount=batch.response_tokens):
                return await parts.student.step(batch), samples
        except ServiceError as error:
            refused = [item for item in samples if item.sample.id == error.sample_id]
            if not refused:
                raise
            await set_aside(parts, refused[0].sample, error)
            samples = tuple(item for item in samples if item is not refused[0])
    raise parts.quarantine.nothing_left(version + 1)


async def next_batch(parts: Parts, plan: Plan, version: int, stop: asyncio.Event) -> tuple[ScoredSample, ...] | None:
    """The next step's samples without those set aside, or None when the run is to stop."""
    taking = asyncio.ensure_future(parts.store.take(plan.batch_size))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({taking, stopping}, timeout=plan.patience_s, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return None
        if not taking.done():
            missing = parts.store.missing(plan.batch_size)
            raise ServerError(
                f"step {version} waited {plan.patience_s:.0f} s for {len(missing)} of {plan.batch_size} samples, "
                f"the first is {sample_id(missing[0])}",
                why="neither a rollout server nor a teacher reported an error, and none finished",
                fix="look at logs/ in the run's folder; raise rollout.timeout_s if answers are only long",
            )
        return taking.result()
    finally:
        for task in (taking, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def publish(parts: Parts, receivers: Sequence[Any]) -> PublishResult:
    """Send the student's weights to these servers, and route to those that committed them."""
    with parts.observer.span("publish") as span:
        result = await parts.student.publish(receivers)
        span.amount = result.bytes
    parts.rollout.committed(result)
    for name, reason in result.failed.items():
        parts.observer.event("warning", f"weights {result.version} did not reach {name}: {reason}")
    return result


async def keep_servers_current(parts: Parts) -> None:
    """Send the current weights to servers that come back without them."""
    while True:
        await publish(parts, await parts.rollout.joining())


async def evaluate_start(parts: Parts, plan: Plan, tasks: asyncio.TaskGroup) -> None:
    """The base before the first step; the teachers beside training, unless the run is synchronous."""
    if parts.evaluator.measures_kl:
        for error in await parts.evaluator.write_held_out(parts.teachers):
            parts.observer.event("warning", f"a held-out answer is left out of the KL: {error.what}")
    if not parts.observer.evaluated("base"):
        await evaluate(parts, "base", parts.admission.version)
    if not parts.evaluator.measures_accuracy:
        return
    remaining = [name for name in plan.evaluated_teachers if not parts.observer.evaluated(name)]
    task = tasks.create_task(evaluate_teachers(parts, remaining))
    if plan.synchronous:
        await task


async def evaluate_teachers(parts: Parts, names: Sequence[str]) -> None:
    for name in names:
        try:
            with parts.observer.span("eval", label=name):
                found = await parts.evaluator.teacher_accuracy(parts.teachers, name)
        except TeacherDropped as dropped:
            parts.observer.event("warning", f"teacher {name} is not evaluated: {dropped.what}")
            continue
        _record(parts, name, 0, found, {})


async def evaluate(parts: Parts, who: str, version: int) -> None:
    """Accuracy and KL of the student (as "base" before the first step). Training goes on meanwhile."""
    if not (parts.evaluator.measures_accuracy or parts.evaluator.measures_kl):
        return
    with parts.observer.span("eval", label=who):
        found: list[Accuracy] = []
        if parts.evaluator.measures_accuracy:
            found = await parts.evaluator.student_accuracy(parts.rollout, f"{who}-{version}")
        kl = await parts.evaluator.student_kl(parts.student) if parts.evaluator.measures_kl else {}
    _record(parts, who, version, found, kl)


def _record(parts: Parts, who: str, version: int, found: Sequence[Accuracy], kl: Mapping[str, float]) -> None:
    accuracy = {item.domain: item for item in found}
    for domain in dict.fromkeys([*accuracy, *kl]):
        item = accuracy.get(domain)
        parts.observer.evaluation(
            EvalRecord(
                step=version,
                version=version,
                who=who,
                domain=domain,
                accuracy=item.value if item else None,
                kl=kl.get(domain),
                count=item.count if item else 0,
            )
        )


async def checkpoint(parts: Parts, plan: Plan, version: int) -> None:
    with parts.observer.span("checkpoint"):
        await parts.checkpoints.write(
            version,
            parts.student.save,
            samples=parts.store.snapshot(),
            state={
                "settings": dict(plan.settings),
                "observer": parts.observer.state(),
                "quarantine": parts.quarantine.state(),
                "idle_steps": parts.idle_steps.state(),
            },
        )


def _due(version: int, every: int | None) -> bool:
    return every is not None and version % every == 0


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that explains the run's end: one of ours before a stranger's, a fault before a stop."""
    flat: list[BaseException] = []

    def collect(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                collect(inner)
        else:
            flat.append(error)

    collect(group)
    return min(flat, key=lambda error: (not isinstance(error, DistillError), isinstance(error, RunStopped)))
