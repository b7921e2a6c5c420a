"""Many teachers on few slots: samples come in when they are finished, scores go out when their teacher had its turn.

The manager keeps the promises (each sample is scored once by each of its teachers, or fails with a reason); a policy
decides what is copied, evicted and served, and the driver carries that out; a slot makes sure that a score comes from
the teacher that it is said to come from.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from distill.config import TeacherManagerConfig
from distill.errors import ServerError, TeacherDropped, TeacherError
from distill.protocols import TeacherCaps, TeacherFigures, WeightCosts
from distill.teacher_manager.barrier import Barrier
from distill.teacher_manager.catalogue import CPU, Catalogue, Rates
from distill.teacher_manager.driver import Driver, RunPolicy, Served
from distill.teacher_manager.elsewhere import Elsewhere
from distill.teacher_manager.failures import Failures
from distill.teacher_manager.gate import CanaryStore, Gate
from distill.teacher_manager.pace import Pace
from distill.teacher_manager.remote import RemoteTeacher
from distill.teacher_manager.slot import ACTIVATIONS, Slot
from distill.teacher_manager.spans import EventSink, SpanSink
from distill.teacher_manager.stall import SlotTimes
from distill.teacher_manager.timeline.case import Job, System
from distill.teacher_manager.translation import Question, Reader, questions
from distill.teacher_manager.work import ELSEWHERE, Work, batches, cost_of_prompt, in_order, settle
from distill.types import GenerateRequest, Generation, Sample, ScoredSample, ScoreRequest, Signal, SignalSpec

_NEVER_NS = 2**62


class TeacherManager:
    """Implements `TeacherBackend` over N teachers and M slots. `start` comes first."""

    def __init__(
        self,
        catalogue: Catalogue,
        slots: Sequence[Slot],
        make_policy: Callable[[System], RunPolicy],
        spec: SignalSpec,
        config: TeacherManagerConfig,
        *,
        vocab_size: int,
        canaries: CanaryStore,
        on_span: SpanSink,
        on_event: EventSink,
        translations: Mapping[str, Reader] = MappingProxyType({}),
        remotes: Mapping[str, RemoteTeacher] = MappingProxyType({}),
        batch_size: int = 1,
        rates: Rates = CPU,
        barrier: bool = False,
    ) -> None:
        """`translations`: for each teacher that does not read the student's ids. `remotes`: teachers that are
        served elsewhere, in no slot and not in the catalogue. `batch_size`: samples that one
        step of the student learns from. With `barrier` what is computed together depends on the samples alone."""
        self._catalogue = catalogue
        self._slots = list(slots)
        self._make_policy = make_policy
        self._spec = spec
        self._config = config
        self._translations = translations
        self._caps = TeacherCaps(frozenset(Signal), max_k=vocab_size, vocab_size=vocab_size)
        self._gate = Gate(canaries, vocab_size=vocab_size, atol=config.canary_atol)
        self._span = on_span
        self.event = on_event
        self._rates = rates
        self._barrier = Barrier() if barrier else None
        self._failures = Failures(config, on_event)
        self._elsewhere = Elsewhere(remotes, spec, self._failures, on_span)
        self._names = (*catalogue.teachers, *remotes)
        self._pace = Pace(batch_size, config.deadline_s)
        self._ids = itertools.count()
        self._announced: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Sample -> teacher -> rollout, until its work arrives."""
        self._works: set[Work] = set()
        self._jobs: dict[int, list[Work]] = {}
        """Of the policy: the works of one job are done in one visit."""
        self._swaps = Counter[str]()
        self._tokens = Counter[str]()
        self._costs: list[WeightCosts] = []
        """By item."""
        self._load_s = 0.0
        self._loaded_bytes = 0
        self._streams = 0
        self._bad_streams = Counter[int]()
        """Item -> streams in a row whose weights were refused."""
        self._driver: Driver | None = None
        self._running: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None

    @property
    def caps(self) -> TeacherCaps:
        return self._caps

    async def start(self) -> None:
        """Make every teacher known to every slot, and begin. Raises ServerError when a slot cannot be reached, and
        TeacherError for a teacher that no slot has room for."""
        await self._elsewhere.start()
        if not self._slots:
            return
        opened = await asyncio.gather(
            *(slot.open(self._catalogue.sources, self._config.timeout_s) for slot in self._slots)
        )
        for slot, costs in zip(self._slots, opened, strict=True):
            self._catalogue.check_budget(costs, slot.name, slot.budget_bytes)
        self._costs = opened[0]
        ledger = await self._slots[0].ledger(self._config.timeout_s)
        system = self._catalogue.system(
            opened[0],
            [slot.budget_bytes for slot in self._slots],
            holds_one=self._slots[0].holds_one,
            rates=self._rates,
            host_bytes=ledger.host_budget_bytes,
        )
        self._driver = Driver(
            self._catalogue,
            system,
            self._make_policy(system),
            self._slots,
            self,
            self._gate,
            self._config.timeout_s,
        )
        self._running = asyncio.create_task(self._driver.run(), name="teacher manager")
        self._running.add_done_callback(self._driver_ended)

    def announce(self, sample_id: str, teachers: Sequence[str], expected_tokens: int) -> None:
        """A rollout starts: these teachers will be asked for it."""
        for teacher in teachers:
            if teacher in self._elsewhere.teachers:
                continue
            rollout, item = next(self._ids), self._catalogue.item_of[teacher]
            self._announced[sample_id][teacher] = rollout
            if self._barrier is not None:
                self._barrier.announce(rollout, item)
            if not self._failures.is_out(item):
                self._ready_driver.announce(rollout, item, expected_tokens)

    def advance(self, version: int) -> None:
        """The student's weights have this version now: what its next steps wait for is in more of a hurry."""
        self._pace.advance(version, time.monotonic())

    def cancel(self, sample_id: str) -> None:
        """The rollout failed: nobody will ask for it."""
        for teacher, rollout in self._announced.pop(sample_id, {}).items():
            self._ready_driver.withdraw(rollout)
            if self._barrier is not None:
                self._send_bundles(self._barrier.end(rollout, self._catalogue.item_of[teacher]))

    async def score(self, sample: Sample) -> ScoredSample:
        """The scores of all teachers of the sample, in that order. Raises TeacherError when one cannot give any, and
        ServerError for a sample without a token. Where failed teachers are dropped, the sample that comes back has
        those alone that scored it; TeacherDropped says that none did.

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
        works = [
            self._submit(teacher, sample.id, len(each.request.input_ids), sample.ordinal, score=each.request)
            for teacher, each in zip(sample.teachers, asked, strict=True)
        ]
        self._announced.pop(sample.id, None)
        return self._scored(sample, asked, await self._results(works))

    async def generate(self, teacher: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Have one teacher write, when it has its turn. Raises TeacherError when it cannot."""
        if not requests:
            return []
        translation = self._translations.get(teacher)
        if translation is not None:
            requests = [translation.prompt(request) for request in requests]
        tokens = sum(map(cost_of_prompt, requests))
        work = self._submit(teacher, requests[0].id, tokens, ordinal=-1, prompts=requests)
        (written,) = await self._results([work])
        if isinstance(written, TeacherDropped):
            raise written
        return written if translation is None else [translation.written(each) for each in written]

    def queue_ages(self) -> Mapping[str, float]:
        now = time.monotonic()
        ages = dict.fromkeys(self._names, 0.0)
        for work in self._works:
            ages[work.teacher] = max(ages[work.teacher], now - work.since)
        return ages

    def swap_counts(self) -> Mapping[str, int]:
        return {name: self._swaps[name] for name in self._names}

    def token_counts(self) -> Mapping[str, int]:
        """Teacher -> tokens that it scored, prompts included."""
        return {name: self._tokens[name] for name in self._names}

    def figures(self) -> TeacherFigures:
        times = SlotTimes() if self._driver is None else self._driver.stall.times(time.monotonic())
        return TeacherFigures(
            loads=sum(self._swaps.values()),
            load_bytes=self._loaded_bytes,
            load_s=self._load_s,
            streams=self._streams,
            busy_s=times.busy_s,
            stalled_s=times.stalled_s,
            dropped=self._failures.dropped(),
        )

    async def close(self) -> None:
        """Stop the slots. Whoever still waits for a score is cancelled."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._failures.close()
        await self._elsewhere.close()
        for work in self._works:
            work.future.cancel()
        for slot in self._slots:
            await slot.close()

    # Works on their way to the policy.

    @property
    def _ready_driver(self) -> Driver:
        assert self._driver is not None, "start() comes first"
        return self._driver

    def _submit(
        self,
        teacher: str,
        sample: str,
        tokens: int,
        ordinal: int,
        *,
        score: ScoreRequest | None = None,
        prompts: Sequence[GenerateRequest] = (),
    ) -> Work:
        item = self._catalogue.item_of.get(teacher, ELSEWHERE)
        if score is not None and item != ELSEWHERE:
            score = replace(
                score,
                teacher=self._catalogue.items[item].files.name,
                temperature=self._catalogue.teachers[teacher].temperature,
            )
        work = Work(teacher, item, sample, tokens, ordinal, time.monotonic(), score, prompts)
        work.rollout = self._announced[sample].get(teacher) if score is not None else None
        self._works.add(work)
        work.future.add_done_callback(lambda _: self._works.discard(work))
        if item == ELSEWHERE:
            self._elsewhere.ask(work)
        elif self._fault is not None:
            work.future.set_exception(self._fault)
        elif not self._failures.take(work):
            self._send(work)
        return work

    def _send(self, work: Work) -> None:
        if self._barrier is None or work.prompts:
            self._arrive([work])
        else:
            self._send_bundles(self._barrier.hold(work))

    def _send_bundles(self, works: Sequence[Work]) -> None:
        """Behind a barrier what shares a request is settled here: one job a request."""
        for bundle in batches(works, lambda work: work.tokens, self._config.call_tokens):
            self._arrive(bundle)

    def _arrive(self, works: Sequence[Work]) -> None:
        """As one job of the policy."""
        driver, first = self._ready_driver, works[0]
        for work in works[1:]:
            if work.rollout is not None:
                driver.withdraw(work.rollout)
        now_ns, tokens = driver.now_ns(), sum(work.tokens for work in works)
        due_s = min(self._pace.due_s(work.ordinal, time.monotonic()) for work in works)
        deadline_ns = _NEVER_NS if self._barrier else now_ns + int(due_s * 1e9)
        rollout = next(self._ids) if first.rollout is None else first.rollout
        job = Job(next(self._ids), first.item, 0, now_ns, now_ns, tokens, tokens, deadline_ns)
        self._jobs[job.id] = list(works)
        for work in works:
            work.job = job.id
        driver.arrive(rollout, job, first.group, resident=bool(first.prompts))

    async def _results(self, works: Sequence[Work]) -> list[Any]:
        """All results, or the first error; what is still waiting then is forgotten. A teacher that is to be done
        without has its error as a result."""
        try:
            return await asyncio.gather(*(self._failures.result(work) for work in works))
        finally:
            for work in works:
                work.future.cancel()
                self._leave(work)

    def _leave(self, work: Work) -> None:
        """It is done, one way or another."""
        if self._barrier is not None:
            self._barrier.forget(work)
        self._failures.forget(work)
        job = work.job
        if self._driver is None or job is None or self.wants(job) or job not in self._driver.fleet.waiting:
            return  # on a visit, it is left to that
        self._driver.drop(job)
        self._jobs.pop(job, None)

    def _scored(self, sample: Sample, asked: Sequence[Question], found: Sequence[Any]) -> ScoredSample:
        scores = {
            name: replace(each.answer(sample, its), teacher=name)
            for (name, each), its in zip(zip(sample.teachers, asked, strict=True), found, strict=True)
            if not isinstance(its, TeacherDropped)
        }
        if not scores:
            raise TeacherDropped(
                f"{sample.id}: none of its teachers could be served",
                why=found[0].what,
                fix="it is left out, as teacher_manager.on_teacher_failure=drop_teacher says",
                sample_id=sample.id,
            )
        if len(scores) < len(sample.teachers):
            sample = replace(sample, teachers={name: sample.teachers[name] for name in scores})
        return ScoredSample(sample, tuple(scores.values()))

    # What the driver asks and tells: see `driver.Station`.

    def wants(self, job: int) -> bool:
        return any(not work.future.done() for work in self._jobs.get(job, ()))

    async def serve(self, slot: Slot, item: int, jobs: tuple[int, ...], *, stream: bool) -> Served:
        works = in_order(work for job in jobs for work in self._jobs.get(job, ()) if not work.future.done())
        tokens, distrust, blamed = 0, "", works
        try:
            for call in self._calls(works):
                blamed = call
                tokens += sum(work.tokens for work in call if work.score is not None)
                distrust = await self._run_or_doubt(slot, item, call, stream=stream) or distrust
        except (ServerError, TeacherError) as error:
            name = self._catalogue.items[item].files.name
            self.event("warning", f"{slot.name}: {len(blamed)} requests for {name} failed: {error.what}")
            distrust = error.what
            if stream and isinstance(error, TeacherError):
                self._distrust_stream(item, error)
            else:
                self._failures.blame(blamed, error)
        undone = tuple(job for job in jobs if self.wants(job))
        for job in set(jobs) - set(undone):
            self._jobs.pop(job, None)
        return Served(undone, 0 if any(work.prompts for work in works) else tokens, distrust)

    def _distrust_stream(self, item: int, error: TeacherError) -> None:
        """As with loads, weights that are wrong twice in a row are given up."""
        self._bad_streams[item] += 1
        if self._bad_streams[item] >= ACTIVATIONS:
            self.refused(item, error)

    def loaded(self, item: int, start: float, end: float) -> None:
        files = self._catalogue.items[item].files
        self._swaps[files.name] += 1
        self._load_s += end - start
        self._loaded_bytes += self._costs[item].bytes
        size = self._costs[item].bytes
        self._span("swap", start, end, files.name, size)
        self.event("debug", f"{files.name} loaded, {size / 1e9:.3f} GB in {end - start:.2f} s")

    def refused(self, item: int, error: TeacherError) -> None:
        name = self._catalogue.items[item].files.name
        if f"teacher {name}" not in error.what:
            error = TeacherError(f"teacher {name}: {error.what}", why=error.why, fix=error.fix)
        members = [number for number, each in enumerate(self._catalogue.items) if item in (number, each.base)]
        for member in members:
            works = [work for work in self._works if work.item == member and not work.future.done()]
            for work in works:
                self._take_back(work)
            for sample in self._announced.values():
                for teacher, rollout in sample.items():
                    if self._catalogue.item_of[teacher] == member:
                        self._ready_driver.withdraw(rollout)
            self._failures.out(member, error, works, again=self._send)

    def unreachable(self, slot: str, error: ServerError, failures: int) -> None:
        self.event("warning", f"{slot}: not reached, and no other slot is left: {error.what}")
        if failures < self._config.max_tries or self._config.on_teacher_failure == "wait":
            return
        for work in list(self._works):
            self._take_back(work)
            self._failures.fail(
                work, TeacherError(f"no slot can be reached: {error.what}", why=error.why, fix=error.fix)
            )

    # Requests.

    def _take_back(self, work: Work) -> None:
        """From the policy; its job's other works go with it."""
        if work.job is not None and self._jobs.pop(work.job, None) is not None:
            self._ready_driver.drop(work.job)
        work.job = None

    async def _run_or_doubt(self, slot: Slot, item: int, call: Sequence[Work], *, stream: bool) -> str:
        """`_run`. Scores that are refused because of one sample end this call and nothing else: all of it is asked for
        again, each by itself, and the sample fails if it is refused once more. Not empty: a second opinion is wanted,
        of weights that were loaded and verified since, and why."""
        try:
            await self._run(slot, item, call, stream=stream)
        except TeacherError as error:
            at_fault = next((work for work in call if work.sample == error.sample_id), None)
            if at_fault is None:
                raise
            for work in call:
                work.alone = True
            if at_fault.doubted:
                settle(at_fault, error)
                return ""
            at_fault.doubted = True
            self.event("warning", f"{slot.name}: scores are refused, and asked for once more: {error.what}")
            return error.what
        return ""

    async def _run(self, slot: Slot, item: int, call: Sequence[Work], *, stream: bool) -> None:
        """One request to the server: samples to score together, or one work that writes."""
        start, files = time.monotonic(), self._catalogue.items[item].files
        requests = [work.score for work in call if work.score is not None]
        if requests:
            if stream:
                replies = await slot.stream(files, self._gate, requests, self._spec, self._config.timeout_s)
                self._streams += 1
                self._bad_streams[item] = 0
            else:
                replies = await slot.score(requests, self._spec, self._config.timeout_s)
            self._account(call, start)
            for work, scores in zip(call, replies, strict=True):
                settle(work, scores)
            return
        (work,) = call
        written: list[Generation] = []
        for prompts in batches(work.prompts, cost_of_prompt, self._config.call_tokens):
            written += await slot.generate(files, prompts, self._config.timeout_s)
        self._span("eval", start, time.monotonic(), work.teacher, sum(len(each.output_ids) for each in written))
        settle(work, written)

    def _account(self, call: Sequence[Work], start: float) -> None:
        """The tokens of each teacher; the time of a call that several share is split by tokens."""
        tokens = Counter[str]()
        for work in call:
            tokens[work.teacher] += work.tokens
        share_s = (time.monotonic() - start) / max(1, tokens.total())
        for teacher, count in tokens.items():
            self._tokens[teacher] += count
            self._span("score", start, start + share_s * count, teacher, count)
            start += share_s * count

    def _calls(self, works: Sequence[Work]) -> list[list[Work]]:
        """The visit's requests, in the order of its works: a function of the works alone."""
        single = [[work] for work in works if work.prompts or work.alone]
        scoring = [work for work in works if not work.prompts and not work.alone]
        return single + batches(scoring, lambda work: work.tokens, self._config.call_tokens)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        """It never ends by itself: pass on why it did, instead of leaving everyone waiting."""
        if task.cancelled():
            return
        self._fault = task.exception()
        assert self._fault is not None, "the driver returned"
        for work in list(self._works):
            settle(work, self._fault)
