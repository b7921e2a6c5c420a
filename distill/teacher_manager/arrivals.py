"""Works on their way to the policy: announced while they are being written, held back behind a barrier, then jobs."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from distill.teacher_manager.barrier import Barrier
from distill.teacher_manager.driver import Driver
from distill.teacher_manager.pace import Pace
from distill.teacher_manager.timeline.case import Job
from distill.teacher_manager.work import Work, batches

_NEVER_NS = 2**62


class Arrivals:
    """Which rollouts are announced, and which works a job of the policy stands for."""

    def __init__(self, pace: Pace, *, barrier: bool, call_tokens: int) -> None:
        self.driver: Driver | None = None
        """Known once the slots are open, and before anything is announced or sent."""
        self._pace = pace
        self._barrier = Barrier() if barrier else None
        self._call_tokens = call_tokens
        self._ids = itertools.count()
        self._announced: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        """Sample -> teacher -> rollout and item, until its work arrives."""
        self._jobs: dict[int, list[Work]] = {}
        """The works of one job are done in one visit."""

    # Rollouts that are being written.

    def announce(self, sample: str, teacher: str, item: int, tokens: int, *, served: bool) -> None:
        """`served` is False while the item is out: the policy need not get ready for it."""
        rollout = next(self._ids)
        self._announced[sample][teacher] = rollout, item
        if self._barrier is not None:
            self._barrier.announce(rollout, item)
        if served:
            self._ready_driver.announce(rollout, item, tokens)

    def take_rollout(self, sample: str, teacher: str) -> int | None:
        """Under which the work that has arrived was announced; None: it was not."""
        rollout, _ = self._announced[sample].pop(teacher, (None, 0))
        return rollout

    def withdraw(self, sample: str) -> None:
        """Nobody will ask for what is still announced of the sample."""
        for rollout, item in self._announced.pop(sample, {}).values():
            self._ready_driver.withdraw(rollout)
            if self._barrier is not None:
                self._send_bundles(self._barrier.end(rollout, item))

    def give_up(self, item: int) -> None:
        """The policy need not get ready for the item's rollouts any more."""
        for sample in self._announced.values():
            for rollout, announced in sample.values():
                if announced == item:
                    self._ready_driver.withdraw(rollout)

    # Works.

    def send(self, work: Work) -> None:
        if self._barrier is None or work.prompts:
            self._arrive([work])
        else:
            self._send_bundles(self._barrier.hold(work))

    def leave(self, work: Work) -> None:
        """It is done, one way or another."""
        if self._barrier is not None:
            self._barrier.forget(work)
        job = work.job
        if self.driver is None or job is None or self.wants(job) or job not in self.driver.fleet.waiting:
            return  # on a visit, it is left to that
        self.driver.drop(job)
        self._jobs.pop(job, None)

    def take_back(self, work: Work) -> None:
        """From the policy; its job's other works go with it."""
        if work.job is not None and self._jobs.pop(work.job, None) is not None:
            self._ready_driver.drop(work.job)
        work.job = None

    # Jobs.

    def wants(self, job: int) -> bool:
        """Somebody still waits for it."""
        return any(not work.future.done() for work in self._jobs.get(job, ()))

    def works(self, jobs: Iterable[int]) -> list[Work]:
        """Those that somebody still waits for."""
        return [work for job in jobs for work in self._jobs.get(job, ()) if not work.future.done()]

    def end(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            self._jobs.pop(job, None)

    @property
    def _ready_driver(self) -> Driver:
        assert self.driver is not None, "start() comes first"
        return self.driver

    def _send_bundles(self, works: Sequence[Work]) -> None:
        """Behind a barrier what shares a request is settled here: one job a request."""
        for bundle in batches(works, lambda work: work.tokens, self._call_tokens):
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
