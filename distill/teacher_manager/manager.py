"""Many teachers on few servers: samples come in when they are finished, scores go out when their teacher had its turn.

The manager keeps the promises (each sample is scored once by each of its teachers, or fails with a reason); the
scheduler decides whose turn it is; a slot makes sure that a score comes from the teacher that it is said to come from.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from distill.config import TeacherManagerConfig
from distill.errors import ServerError, TeacherError
from distill.protocols import TeacherCaps
from distill.teacher_manager.gate import CanaryStore, Gate
from distill.teacher_manager.scheduler import Job, Scheduler, Visit, Wait
from distill.teacher_manager.slot import Slot
from distill.teacher_manager.teachers import Teacher
from distill.teacher_manager.translation import Translation, questions
from distill.types import (
    GenerateRequest,
    Generation,
    Sample,
    ScoredSample,
    ScoreRequest,
    Signal,
    SignalSpec,
    TeacherScores,
)

T = TypeVar("T")
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class SpanSink(Protocol):
    """Takes what took time. `kind` is swap, score or eval; times are of time.monotonic; `amount` is bytes or tokens."""

    def __call__(self, kind: str, start: float, end: float, label: str, amount: int, /) -> None: ...


class EventSink(Protocol):
    """Takes a line for the person who runs it: (level, message)."""

    def __call__(self, level: str, message: str, /) -> None: ...


@dataclass(slots=True, eq=False)
class _Work:
    """A job with what is to be done and who waits for it."""

    job: Job
    score: ScoreRequest | None
    prompts: Sequence[GenerateRequest]
    """Empty for a job that scores."""
    future: asyncio.Future[Any]
    since: float
    tries: int = 0
    alone: bool = False
    """It was in a call whose scores were refused: by itself it shows whether it was to blame."""
    doubted: bool = False
    """Its own scores were refused once."""

    @property
    def name(self) -> str:
        """For a message."""
        return f"a call of {len(self.prompts)} prompts to answer" if self.prompts else self.job.sample


class TeacherManager:
    """Implements `TeacherBackend` over N teachers and M slots."""

    def __init__(
        self,
        teachers: Sequence[Teacher],
        slots: Sequence[Slot],
        scheduler: Scheduler,
        spec: SignalSpec,
        config: TeacherManagerConfig,
        *,
        vocab_size: int,
        canaries: CanaryStore,
        on_span: SpanSink,
        on_event: EventSink,
        translations: Mapping[str, Translation] = MappingProxyType({}),
    ) -> None:
        """`translations`: for each teacher that has another tokenizer than the student."""
        for teacher in teachers:
            for slot in slots:
                slot.check_budget(teacher)
        self._teachers = {teacher.name: teacher for teacher in teachers}
        self._slots = list(slots)
        self._scheduler = scheduler
        self._spec = spec
        self._config = config
        self._translations = translations
        self._caps = TeacherCaps(frozenset(Signal), max_k=vocab_size, vocab_size=vocab_size)
        self._gate = Gate(canaries, vocab_size=vocab_size, atol=config.canary_atol)
        self._span = on_span
        self._event = on_event
        self._ids = itertools.count()
        self._works: dict[int, _Work] = {}
        self._quarantined: dict[str, TeacherError] = {}
        self._fault: Exception | None = None
        """What ended the loop of a slot."""
        self._swaps = Counter[str]()
        self._tokens = Counter[str]()
        self._changed = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def caps(self) -> TeacherCaps:
        return self._caps

    def announce(self, sample_id: str, teachers: Sequence[str], expected_tokens: int) -> None:
        """A rollout starts: these teachers will be asked for it."""
        for teacher in teachers:
            self._scheduler.announce(sample_id, teacher, expected_tokens, time.monotonic())

    def cancel(self, sample_id: str) -> None:
        """The rollout failed: nobody will ask for it."""
        self._scheduler.withdraw(sample_id)
        self._wake()

    async def score(self, sample: Sample) -> ScoredSample:
        """The scores of all teachers of the sample, in that order. Raises TeacherError when one cannot give any, and
        ServerError for a sample without a token.

        The error has the sample's id when its scores were refused twice, the second time in a call of its own and from
        weights that were loaded and verified since: another try would find the same, and no other sample is concerned.
        """
        if not len(sample.response_ids):
            self.cancel(sample.id)
            raise ServerError(
                f"{sample.id}: its rollout server wrote no token", why="there is nothing to score", sample_id=sample.id
            )
        try:
            asked = questions(sample, self._spec, self._translations)
        except TeacherError:
            self.cancel(sample.id)
            raise
        requests = [
            replace(each.request, temperature=self._teachers[name].temperature)
            for name, each in zip(sample.teachers, asked, strict=True)
        ]
        works = [
            self._submit(teacher, sample.id, len(request.input_ids), sample.ordinal, score=request)
            for teacher, request in zip(sample.teachers, requests, strict=True)
        ]
        found: list[TeacherScores] = await self._results(works)
        return ScoredSample(sample, tuple(each.answer(sample, its) for each, its in zip(asked, found, strict=True)))

    async def generate(self, teacher: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Have one teacher write, when it has its turn. Raises TeacherError when it cannot."""
        if not requests:
            return []
        translation = self._translations.get(teacher)
        if translation is not None:
            requests = [translation.prompt(request) for request in requests]
        tokens = sum(map(_cost_of_prompt, requests))
        work = self._submit(teacher, requests[0].id, tokens, ordinal=-1, prompts=requests)
        written: list[Generation] = (await self._results([work]))[0]
        return written if translation is None else [translation.written(each) for each in written]

    def queue_ages(self) -> Mapping[str, float]:
        now = time.monotonic()
        ages = dict.fromkeys(self._teachers, 0.0)
        for work in self._works.values():
            ages[work.job.teacher] = max(ages[work.job.teacher], now - work.since)
        return ages

    def swap_counts(self) -> Mapping[str, int]:
        return {name: self._swaps[name] for name in self._teachers}

    def token_counts(self) -> Mapping[str, int]:
        """Teacher -> tokens that it scored, prompts included."""
        return {name: self._tokens[name] for name in self._teachers}

    async def close(self) -> None:
        """Stop the slots. Whoever still waits for a score is cancelled."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for work in self._works.values():
            work.future.cancel()
        for slot in self._slots:
            await slot.close()

    def _submit(
        self,
        teacher: str,
        sample: str,
        tokens: int,
        ordinal: int,
        *,
        score: ScoreRequest | None = None,
        prompts: Sequence[GenerateRequest] = (),
    ) -> _Work:
        if not self._loops:
            self._loops = [asyncio.create_task(self._serve(slot), name=slot.name) for slot in self._slots]
            for loop in self._loops:
                loop.add_done_callback(self._loop_ended)
        now = time.monotonic()
        job = Job(next(self._ids), sample, teacher, tokens, ordinal)
        work = _Work(job, score, prompts, asyncio.get_running_loop().create_future(), now)
        refusal = self._fault or self._quarantined.get(teacher)
        if refusal is not None:
            work.future.set_exception(_again(refusal) if isinstance(refusal, TeacherError) else refusal)
            return work
        self._works[job.id] = work
        self._scheduler.arrive(job, now)
        self._wake()
        return work

    async def _results(self, works: Sequence[_Work]) -> list[Any]:
        """All results, or the first error; what is still waiting then is forgotten."""
        try:
            return await asyncio.gather(*(work.future for work in works))
        finally:
            for work in works:
                work.future.cancel()
                if self._works.pop(work.job.id, None) is not None:
                    self._scheduler.drop(work.job)

    async def _serve(self, slot: Slot) -> None:
        """One slot's life: decide, visit, and pause for longer each time after its server failed."""
        pause = 0.0
        while True:
            decision = self._scheduler.next(slot.name, time.monotonic())
            if isinstance(decision, Wait):
                await self._event_or(decision.until)
            elif await self._visit(slot, decision):
                pause = 0.0
            else:
                pause = min(max(2 * pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                await asyncio.sleep(pause)

    async def _visit(self, slot: Slot, visit: Visit) -> bool:
        """Serve the jobs; False when the server failed. What was not done waits again, unless it failed too often."""
        works = [work for job in visit.jobs if (work := self._works.get(job.id)) and not work.future.done()]
        blamed, doubts = works, False
        try:
            if works:
                await self._bring(slot, self._teachers[visit.teacher])
            for call in self._calls(works):
                blamed = call
                doubts |= await self._run_or_doubt(slot, visit.teacher, call)
            if doubts:
                slot.fail()  # the second opinion is that of weights which were loaded and verified since
            return True
        except (ServerError, TeacherError) as error:
            slot.fail()
            self._event("warning", f"{slot.name}: {len(blamed)} requests for {visit.teacher} failed: {error.what}")
            self._blame(blamed, error)
            return False
        finally:
            waiting = [work.job for work in works if not work.future.done()]
            self._scheduler.finish(slot.name, waiting, slot.resident, time.monotonic())
            self._wake()

    async def _bring(self, slot: Slot, teacher: Teacher) -> None:
        """Make the teacher resident. One whose weights do not check out is quarantined: all its work fails."""
        if await slot.holds(teacher.name, self._config.timeout_s):
            return
        start = time.monotonic()
        try:
            await slot.activate(teacher, self._gate, self._config.timeout_s)
        except TeacherError as error:
            self._quarantined[teacher.name] = error
            for work in self._works.values():
                if work.job.teacher == teacher.name:
                    self._fail(work, _again(error))
            raise
        end = time.monotonic()
        self._swaps[teacher.name] += 1
        self._span("swap", start, end, teacher.name, teacher.bytes)
        self._event("debug", f"{slot.name}: {teacher.name} loaded, {teacher.bytes / 1e9:.3f} GB in {end - start:.2f} s")

    async def _run_or_doubt(self, slot: Slot, teacher: str, call: Sequence[_Work]) -> bool:
        """`_run`. Scores that are refused because of one sample end this call and nothing else: all of it is asked for
        again, each by itself, and the sample fails if it is refused once more. True: a second opinion is wanted."""
        try:
            await self._run(slot, teacher, call)
        except TeacherError as error:
            at_fault = next((work for work in call if work.job.sample == error.sample_id), None)
            if at_fault is None:
                raise
            for work in call:
                work.alone = True
            if at_fault.doubted:
                self._fail(at_fault, error)
                return False
            at_fault.doubted = True
            self._event("warning", f"{slot.name}: scores are refused, and asked for once more: {error.what}")
            return True
        return False

    async def _run(self, slot: Slot, teacher: str, call: Sequence[_Work]) -> None:
        """One request to the server: samples to score together, or one job that writes."""
        start = time.monotonic()
        requests = [work.score for work in call if work.score is not None]
        if requests:
            replies = await slot.score(slot.epoch, requests, self._spec, self._config.timeout_s)
            tokens = sum(work.job.tokens for work in call)
            self._tokens[teacher] += tokens
            self._span("score", start, time.monotonic(), teacher, tokens)
            for work, scores in zip(call, replies, strict=True):
                self._settle(work, scores)
            return
        (work,) = call
        written: list[Generation] = []
        for prompts in _batches(work.prompts, _cost_of_prompt, self._config.call_tokens):
            written += await slot.generate(slot.epoch, prompts, self._config.timeout_s)
        self._span("eval", start, time.monotonic(), teacher, sum(len(item.output_ids) for item in written))
        self._settle(work, written)

    def _calls(self, works: Sequence[_Work]) -> list[list[_Work]]:
        """The visit's requests, in the order of its jobs: a function of the jobs alone."""
        single = [[work] for work in works if work.prompts or work.alone]
        scoring = [work for work in works if not work.prompts and not work.alone]
        return single + _batches(scoring, lambda work: work.job.tokens, self._config.call_tokens)

    def _settle(self, work: _Work, result: Any) -> None:
        self._works.pop(work.job.id, None)
        if not work.future.done():  # whoever asked may have gone away meanwhile
            work.future.set_result(result)

    def _fail(self, work: _Work, error: Exception) -> None:
        """Ends the job; `_results` takes it out of the books."""
        if not work.future.done():
            work.future.set_exception(error)

    def _blame(self, works: Sequence[_Work], error: ServerError | TeacherError) -> None:
        """Count a try against each."""
        if isinstance(error, TeacherError):
            for work in works:
                work.alone = True  # the next error tells whose fault it is
        for work in works:
            work.tries += 1
            if work.tries < self._config.max_tries:
                continue
            failure = TeacherError(
                f"teacher {work.job.teacher}: {work.name} failed {work.tries} times, last: {error.what}",
                why=error.why or "its server keeps failing",
                fix=error.fix or "look at logs/ in the run's folder",
            )
            self._fail(work, failure)

    def _loop_ended(self, loop: asyncio.Task[None]) -> None:
        """A slot's loop never ends by itself: pass on why it did, instead of leaving everyone waiting."""
        if loop.cancelled():
            return
        error = loop.exception()
        assert isinstance(error, Exception), "the loop of a slot returned"
        self._fault = error
        for work in self._works.values():
            self._fail(work, error)

    async def _event_or(self, until: float | None) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout(None if until is None else max(until - time.monotonic(), 0)):
                await changed.wait()
        except TimeoutError:
            pass

    def _wake(self) -> None:
        """Something changed: every free slot decides anew."""
        self._changed.set()
        self._changed = asyncio.Event()


def _batches(items: Iterable[T], cost: Callable[[T], int], limit: int) -> list[list[T]]:
    """Consecutive items whose costs sum up to `limit` at most; an item that is larger goes alone."""
    batches: list[list[T]] = []
    room = 0
    for item in items:
        if not batches or cost(item) > room:
            batches.append([])
            room = limit
        batches[-1].append(item)
        room -= cost(item)
    return batches


def _cost_of_prompt(request: GenerateRequest) -> int:
    return len(request.input_ids) + request.max_new_tokens


def _again(error: TeacherError) -> TeacherError:
    """A copy for another waiter: a raised exception carries the traceback of the one who got it."""
    return TeacherError(error.what, why=error.why, fix=error.fix)
