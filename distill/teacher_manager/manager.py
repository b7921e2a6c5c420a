"""Many teachers on few slots: samples come in when they are finished, scores go out when their teacher had its turn.

The manager keeps the promises (each sample is scored once by each of its teachers, or fails with a reason); a policy
decides what is copied, evicted and served, and the driver carries that out; a slot makes sure that a score comes from
the teacher that it is said to come from.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from distill.config import TeacherManagerConfig
from distill.errors import ServerError, TeacherDropped, TeacherError
from distill.protocols import TeacherCaps, TeacherFigures, WeightCosts
from distill.teacher_manager.arrivals import Arrivals
from distill.teacher_manager.calls import Calls
from distill.teacher_manager.catalogue import CPU, Catalogue, Rates
from distill.teacher_manager.driver import Driver, RunPolicy, Served
from distill.teacher_manager.elsewhere import Elsewhere
from distill.teacher_manager.failures import Failures
from distill.teacher_manager.gate import CanaryStore, Gate
from distill.teacher_manager.pace import Pace
from distill.teacher_manager.remote import RemoteTeacher
from distill.teacher_manager.reuse import Recall, Reuse
from distill.teacher_manager.slot import ACTIVATIONS, Slot
from distill.teacher_manager.spans import EventSink, SpanSink
from distill.teacher_manager.stall import SlotTimes
from distill.teacher_manager.timeline.case import System
from distill.teacher_manager.translation import Question, Reader, questions
from distill.teacher_manager.work import ELSEWHERE, Work, cost_of_prompt, in_order, settle
from distill.types import GenerateRequest, Generation, Sample, ScoredSample, ScoreRequest, Signal, SignalSpec


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
        reuse: Reuse | None = None,
    ) -> None:
        """`translations`: for each teacher that does not read the student's ids. `remotes`: teachers that are
        served elsewhere, in no slot and not in the catalogue. `batch_size`: samples that one
        step of the student learns from. With `barrier` what is computed together depends on the samples alone.
        `reuse`: scores of earlier; None: everything is asked."""
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
        self._failures = Failures(config, on_event)
        self._elsewhere = Elsewhere(remotes, spec, self._failures, on_span)
        self._names = (*catalogue.teachers, *remotes)
        self._pace = Pace(batch_size, config.deadline_s)
        self._arrivals = Arrivals(self._pace, barrier=barrier, call_tokens=config.call_tokens)
        self._calls = Calls(catalogue, self._gate, spec, config, on_span, on_event)
        self._reuse = reuse or Reuse(catalogue, spec=spec, vocab_size=vocab_size)
        self._works: set[Work] = set()
        self._swaps = Counter[str]()
        self._costs: list[WeightCosts] = []
        """By item."""
        self._load_s = 0.0
        self._loaded_bytes = 0
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
        self._arrivals.driver = self._driver
        self._running = asyncio.create_task(self._driver.run(), name="teacher manager")
        self._running.add_done_callback(self._driver_ended)

    def announce(self, sample_id: str, teachers: Sequence[str], expected_tokens: int) -> None:
        """A rollout starts: these teachers will be asked for it."""
        for teacher in teachers:
            if teacher in self._elsewhere.teachers:
                continue
            item = self._catalogue.item_of[teacher]
            self._arrivals.announce(sample_id, teacher, item, expected_tokens, served=not self._failures.is_out(item))

    def advance(self, version: int) -> None:
        """The student's weights have this version now: what its next steps wait for is in more of a hurry."""
        self._pace.advance(version, time.monotonic())

    def cancel(self, sample_id: str) -> None:
        """The rollout failed: nobody will ask for it."""
        self._arrivals.withdraw(sample_id)

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
            recalls = [
                await self._reuse.find(teacher, self._addressed(teacher, each.request))
                for teacher, each in zip(sample.teachers, asked, strict=True)
            ]
        except BaseException:
            self.cancel(sample.id)
            raise
        works = [
            self._submit(recall.teacher, sample.id, len(recall.left.input_ids), sample.ordinal, score=recall.left)
            for recall in recalls
            if recall.left is not None
        ]
        self.cancel(sample.id)  # what is still announced of it is not asked for: its scores were found
        fresh = iter(await self._results(works))
        found = [recall.found if recall.left is None else await self._kept(recall, next(fresh)) for recall in recalls]
        return self._scored(sample, asked, found)

    async def generate(self, teacher: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Have one teacher write, when it has its turn. Raises TeacherError when it cannot."""
        if not requests:
            return []
        self._require_home(teacher)
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
        return {name: self._calls.tokens[name] for name in self._names}

    def figures(self) -> TeacherFigures:
        times = SlotTimes() if self._driver is None else self._driver.stall.times(time.monotonic())
        return TeacherFigures(
            loads=sum(self._swaps.values()),
            load_bytes=self._loaded_bytes,
            load_s=self._load_s,
            streams=self._calls.streams,
            busy_s=times.busy_s,
            stalled_s=times.stalled_s,
            dropped=self._failures.dropped(),
            cache_requests=self._reuse.hits.requests,
            cache_requests_found=self._reuse.hits.whole,
            cache_tokens=self._reuse.hits.tokens,
            cache_tokens_found=self._reuse.hits.found,
        )

    async def close(self) -> None:
        """Stop the slots. Whoever still waits for a score is cancelled."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._failures.close()
        await self._elsewhere.close()
        await self._reuse.close()
        for work in self._works:
            work.future.cancel()
        for slot in self._slots:
            await slot.close()

    # Works.

    def _require_home(self, teacher: str) -> None:
        """Who writes has to be resident. Raises TeacherError for a teacher that no slot has room for."""
        item = self._catalogue.item_of.get(teacher, ELSEWHERE)
        if self._driver is None or item == ELSEWHERE:
            return
        system = self._driver.fleet.system
        if any(system.fits(item, device.id) for device in system.devices):
            return
        wanted, room = self._costs[item].bytes, max(slot.budget_bytes for slot in self._slots)
        raise TeacherError(
            f"teacher {teacher} cannot write: it has {wanted} bytes of weights, and slots hold {room}",
            why="a teacher that is streamed layer by layer scores whole answers, and writes none",
            fix="raise teacher_manager.slot_gb, or set evaluation.teachers=false and evaluation.kl=false",
        )

    def _addressed(self, teacher: str, request: ScoreRequest) -> ScoreRequest:
        """To the object that the teacher is served from; one elsewhere knows itself."""
        item = self._catalogue.item_of.get(teacher, ELSEWHERE)
        if item == ELSEWHERE:
            return request
        served, temperature = self._catalogue.items[item], self._catalogue.teachers[teacher].temperature
        # teachers of one sample may share a call: their requests need names of their own there
        name = f"{request.id} ({teacher})" if self._catalogue.shares_calls(item) else request.id
        return replace(request, id=name, teacher=served.files.name, temperature=temperature)

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
        work = Work(teacher, item, sample, tokens, ordinal, time.monotonic(), score, prompts)
        work.rollout = self._arrivals.take_rollout(sample, teacher) if score is not None else None
        self._works.add(work)
        work.future.add_done_callback(lambda _: self._works.discard(work))
        if item == ELSEWHERE:
            self._elsewhere.ask(work)
        elif self._fault is not None:
            work.future.set_exception(self._fault)
        elif not self._failures.take(work):
            self._arrivals.send(work)
        return work

    async def _results(self, works: Sequence[Work]) -> list[Any]:
        """All results, or the first error; what is still waiting then is forgotten. A teacher that is to be done
        without has its error as a result."""
        try:
            return await asyncio.gather(*(self._failures.result(work) for work in works))
        finally:
            for work in works:
                work.future.cancel()
                self._failures.forget(work)
                self._arrivals.leave(work)

    async def _kept(self, recall: Recall, fresh: Any) -> Any:
        return fresh if isinstance(fresh, TeacherDropped) else await self._reuse.keep(recall, fresh)

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
        return self._arrivals.wants(job)

    async def serve(self, slot: Slot, item: int, jobs: tuple[int, ...], *, stream: bool) -> Served:
        works = in_order(self._arrivals.works(jobs))
        outcome = await self._calls.visit(slot, item, works, stream=stream)
        if stream and isinstance(outcome.error, TeacherError):
            if self._calls.bad_streams[item] >= ACTIVATIONS:  # as with loads
                self.refused(item, outcome.error)
        elif outcome.error is not None:
            self._failures.blame(outcome.blamed, outcome.error)
        undone = tuple(job for job in jobs if self.wants(job))
        self._arrivals.end(set(jobs) - set(undone))
        return Served(undone, 0 if any(work.prompts for work in works) else outcome.tokens, outcome.distrust)

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
                self._arrivals.take_back(work)
            self._arrivals.give_up(member)
            self._failures.out(member, error, works, again=self._arrivals.send)

    def unreachable(self, slot: str, error: ServerError, failures: int) -> None:
        self.event("warning", f"{slot}: not reached, and no other slot is left: {error.what}")
        if failures < self._config.max_tries or self._config.on_teacher_failure == "wait":
            return
        for work in list(self._works):
            self._arrivals.take_back(work)
            self._failures.fail(
                work, TeacherError(f"no slot can be reached: {error.what}", why=error.why, fix=error.fix)
            )

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        """It never ends by itself: pass on why it did, instead of leaving everyone waiting."""
        if task.cancelled():
            return
        self._fault = task.exception()
        assert self._fault is not None, "the driver returned"
        for work in list(self._works):
            settle(work, self._fault)
