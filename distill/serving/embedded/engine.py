"""The engine: one thread that owns the model. Everything else talks to it through an inbox.

Between two decode steps, in this order: operations (weight changes, pauses), one group of scoring requests, admission
of waiting requests. Then one token for all running rows. Nothing else ever touches the weights or the cache.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from distill.errors import ServerError
from distill.modeling.adapters import LoraAdapter, applied
from distill.serving.embedded.jobs import Finish, Job, Refusal
from distill.serving.embedded.rows import Rows
from distill.serving.embedded.scoring import next_group, score
from distill.serving.embedded.served import ServedModel

T = TypeVar("T")
log = logging.getLogger("distill.embedded")

ABORTED = "Aborted"
_PREFILL_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Padded tokens of one prefill."""
_HOLD_BACK_STEPS = 8
"""Longest that a free row waits for company."""


class Engine:
    """Serves jobs with `served`. Start it, submit jobs, and run changes through `run_between_steps`.

    `reproducible`: jobs of different HTTP requests never share a forward pass. The last bits of a number depend on what
    it was computed together with; this way they depend on the request alone, at the price of smaller batches.
    """

    def __init__(
        self, served: ServedModel, *, max_batch_size: int, version: str, threads: int, reproducible: bool = False
    ) -> None:
        self.served: ServedModel | None = served
        """None while the weights are released. Replaced by operations only."""
        self.version = version
        self.max_batch_size = max_batch_size
        self.paused = False
        self.tokens_written = 0
        self.tokens_scored = 0
        self.failure: BaseException | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._rows = Rows(max_batch_size)
        self._room = max_batch_size
        self._threads = threads
        self._reproducible = reproducible
        self._held_back = 0
        self._to_score: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._inbox: deque[Job] = deque()
        self._operations: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- for other threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float = 10.0) -> bool:
        """End after the current step; whatever still waits is aborted. False if that took longer than the deadline."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs; their `done` futures tell the rest."""
        jobs = list(jobs)
        with self._wake:
            if self._stopping or self.failure is not None:
                raise Refusal(503, "the server is going down")
            for job in jobs:
                job.done.set_running_or_notify_cancel()
            self._inbox.extend(jobs)
            self._wake.notify()

    def run_between_steps(self, operation: Callable[[], T]) -> Future[T]:
        """Run `operation` on the engine thread between two decode steps: the only way to touch the model."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on only the engine thread settles it
        with self._wake:
            if self._stopping or self.failure is not None:
                raise Refusal(503, "the server is going down")
            self._operations.append((operation, future))
            self._wake.notify()
        return future

    # --- operations: to be called through run_between_steps ----------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._to_score)

    @property
    def cache_bytes(self) -> int:
        return self._rows.kv.nbytes

    @property
    def idle(self) -> bool:
        return not (self._rows or self._waiting or self._to_score)

    def require_model(self) -> ServedModel:
        """The model, or a 503 while its weights are released."""
        if self.served is None:
            raise Refusal(503, "the weights are released: POST /resume_memory_occupation first")
        return self.served

    def set_version(self, version: str) -> None:
        """Tokens from now on are written by `version`."""
        self.version = version
        self._rows.mark(version)
        log.info("weight version %s, with %d requests running", version, len(self._rows))

    def pause(self, mode: str) -> int:
        """Stop decoding and scoring. `abort` ends all requests, `retract` sends running ones back to the queue (their
        cache is dropped and read again later), `in_place` keeps everything. Returns the number of requests held."""
        self.paused = True
        if mode == "abort":
            self.abort(lambda job: True)
        elif mode == "retract":
            self._retract()
        return len(self._rows) + self.waiting

    def resume(self) -> None:
        self.paused = False

    def abort(self, chosen: Callable[[Job], bool]) -> int:
        """End the chosen jobs with what they have written so far. Returns how many there were."""
        victims = [self._rows.remove(row) for row in range(len(self._rows) - 1, -1, -1) if chosen(self._rows.jobs[row])]
        for queue in (self._waiting, self._to_score):
            leaving = [job for job in queue if chosen(job)]
            for job in leaving:
                queue.remove(job)
            victims += leaving
        for job in victims:
            job.finish(self.version, Finish("abort", message=ABORTED))
        return len(victims)

    def drop_cache(self) -> None:
        """Give the memory of the key/value cache back. Only when no row runs."""
        assert not self._rows
        self._rows.kv.clear()

    # --- the engine thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this number a thread
        with torch.inference_mode():
            try:
                while self._next():
                    pass
            except BaseException as error:
                log.exception("the engine thread died")
                self.failure = error
                self.on_death()
                raise
            finally:
                self._leave()

    def _next(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._inbox or self._operations or self._can_work)
            if self._stopping:
                return False
            operations = list(self._operations)
            self._operations.clear()
            for job in self._inbox:
                self._sort_in(job)
            self._inbox.clear()
        for operation, future in operations:
            _settle(operation, future)
        if self._can_work and self.served is not None:
            self._score_some(self.served)
            self._admit(self.served)
            self._step(self.served)
        return True

    @property
    def _can_work(self) -> bool:
        return not self.paused and not self.idle

    def _sort_in(self, job: Job) -> None:
        if self.served is None:
            job.fail(Refusal(503, "the weights are released: POST /resume_memory_occupation first"))
        elif job.wants_scores:
            self._to_score.append(job)
        else:
            self._hand_on(job)

    def _hand_on(self, job: Job) -> None:
        """To writing, or to its end when there is nothing to write."""
        if job.sampling.max_new_tokens:
            self._waiting.append(job)
        else:
            job.finish(self.version, Finish("length"))

    def _score_some(self, served: ServedModel) -> None:
        if not self._to_score:
            return
        group = next_group(self._to_score, served.limits.device.type, one_call=self._reproducible)
        gone = {id(job) for job in group}
        self._to_score = [job for job in self._to_score if id(job) not in gone]
        self._each_or_together(group, lambda jobs: self._score(served, jobs))

    def _score(self, served: ServedModel, jobs: Sequence[Job]) -> None:
        """Scores that are no numbers go out as they are, as from SGLang: the client refuses them, and knows whose."""
        for job, scores in zip(jobs, score(served, jobs, [job.adapter for job in jobs]), strict=True):
            job.scores = scores
            self.tokens_scored += len(scores.logprobs)
            self._hand_on(job)

    def _admit(self, served: ServedModel) -> None:
        """Prefill waiting jobs, oldest first, as far as rows and the token budget allow."""
        if not (self._rows or self._waiting):
            self._room = self.max_batch_size
        budget = _PREFILL_TOKENS.get(served.limits.device.type, _PREFILL_TOKENS["cpu"])
        if not self._worth_a_prefill():
            return
        while self._next_may_join([]):
            group: list[Job] = []
            width = 0
            while self._next_may_join(group):
                wider = max(width, len(self._waiting[0].context))
                if group and wider * (len(group) + 1) > budget:
                    break
                width = wider
                group.append(self._waiting.popleft())
            self._each_or_together(group, lambda jobs: self._prefill(served, jobs))

    def _worth_a_prefill(self) -> bool:
        """Where more wait than there is room for, rows that come free are filled several at a time: a prefill of one
        row costs almost as much as a step of all."""
        free = self._room - len(self._rows)
        crowded = len(self._waiting) > free and free < self._room // 8
        self._held_back = self._held_back + 1 if crowded and self._rows else 0
        return self._held_back % _HOLD_BACK_STEPS == 0

    def _next_may_join(self, group: Sequence[Job]) -> bool:
        """There is a waiting job, and a row for it beside those that run and those of `group`, whose adapter it has."""
        if not self._waiting or len(self._rows) + len(group) >= self._room:
            return False
        beside = [*self._rows.jobs[:1], *group[:1]]
        if any(job.adapter is not self._waiting[0].adapter for job in beside):
            return False
        if self._reproducible and not beside:
            self._rows.kv.clear()  # where its tensors lie in memory must not depend on earlier requests either
        return not self._reproducible or all(job.call == self._waiting[0].call for job in beside)

    def _prefill(self, served: ServedModel, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.mark(self.version, len(job.output_ids))
        first = len(self._rows)
        with applied(served.model, _beside(jobs[0])):
            self._rows.prefill(served, jobs)
        self.tokens_written += len(jobs)
        self._rows.collect(self.version, first)

    def _each_or_together(self, jobs: Sequence[Job], work: Callable[[Sequence[Job]], None]) -> None:
        """Work on all jobs at once; if that fails, on each alone, so that only the one at fault is lost."""
        try:
            work(jobs)
        except Exception as error:  # noqa: BLE001 - it belongs to the requests
            if len(jobs) > 1:
                for job in jobs:
                    self._each_or_together([job], work)
            else:
                log.warning("request %s failed: %s", jobs[0].rid, error)
                jobs[0].fail(ServerError(f"request {jobs[0].rid}: the model failed: {type(error).__name__}: {error}"))
        except BaseException:
            for job in jobs:
                job.fail(ServerError(f"request {job.rid}: the server is going down"))
            raise

    def _step(self, served: ServedModel) -> None:
        if not self._rows:
            return
        rows = len(self._rows)
        try:
            with applied(served.model, _beside(self._rows.jobs[0])):
                self._rows.step(served)
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("a decode step over %d requests failed: %s", rows, error)
            if rows == 1:
                job = self._rows.remove_all()[0]
                job.fail(ServerError(f"request {job.rid}: the model failed: {type(error).__name__}: {error}"))
                return
            # Which row is at fault is not known, or memory is short: read them again, half as many at a time.
            self._room = rows // 2
            self._retract()
            return
        self.tokens_written += rows
        self._rows.collect(self.version)

    def _retract(self) -> None:
        jobs = self._rows.remove_all()
        for job in jobs:
            job.retractions += 1
        self._waiting.extendleft(reversed(jobs))

    def _leave(self) -> None:
        with self._wake:
            self._stopping = True
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            operations = list(self._operations)
            self._operations.clear()
        self.abort(lambda job: True)
        for _, future in operations:
            future.set_exception(Refusal(503, "the server is going down"))


def _beside(job: Job) -> list[tuple[LoraAdapter, slice | None]]:
    """What its rows, and all that run with it, are computed with beside the model."""
    return [] if job.adapter is None else [(job.adapter, None)]


def _settle(operation: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(operation())
    except Exception as error:  # noqa: BLE001 - raised again where the future is read
        future.set_exception(error)
