"""Which teacher a free slot serves next, and which samples with it.

A scheduler is a decision object: events come in, `next` gives a decision, and the time is always an argument. It holds
no clock, no task and no model, so a simulation can drive the very object that a run uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

MAX_WAIT_S = 120.0
"""Default age at which a waiting sample goes first, whatever that costs in swaps."""


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work for one teacher: a sample to score, or prompts to continue."""

    id: int
    """Unique, never reused."""
    sample: str
    """The sample that was announced; any name that was not announced is fine too."""
    teacher: str
    tokens: int
    ordinal: int
    """Order inside a visit: lowest first."""


@dataclass(frozen=True, slots=True)
class Visit:
    """Load `teacher` unless the slot holds it, then do `jobs` in this order."""

    teacher: str
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until`, or before the next event when it is None."""

    until: float | None = None


class Scheduler(Protocol):
    """Decides for M slots that share N teachers.

    Every free slot asks `next` after every event. A job that arrived is given out by exactly one `next`, and comes back
    only if `finish` returns it. A sample may be announced before its job arrives; the arrival, or `withdraw`, ends the
    announcement.
    """

    def announce(self, sample: str, teacher: str, tokens: int, now: float) -> None: ...
    def withdraw(self, sample: str) -> None: ...
    def arrive(self, job: Job, now: float) -> None: ...
    def drop(self, job: Job) -> None:
        """Forget a job that nobody wants any more. A job inside a visit is left to that visit."""
        ...

    def next(self, slot: str, now: float) -> Visit | Wait:
        """The decision for a slot that is free."""
        ...

    def finish(self, slot: str, returned: Sequence[Job], resident: str | None, now: float) -> None:
        """The slot's visit is over: `returned` were not done and wait again, `resident` is what the slot holds now."""
        ...


@dataclass(slots=True)
class _Slot:
    resident: str | None = None
    """The teacher that it holds, or is being given."""
    visit: Visit | None = None
    stay_tokens: int = 0
    """Tokens served since the resident came."""
    idle_since: float = 0.0
    position: int = -1
    """Index of the teacher that it visited last."""
    direction: int = 1

    @property
    def is_fresh(self) -> bool:
        """It never had a visit."""
        return self.position < 0


@dataclass(slots=True)
class _Queue:
    """What is known of one teacher's work."""

    announced: dict[str, int] = field(default_factory=dict[str, int])
    """Sample -> expected tokens."""
    waiting: dict[int, Job] = field(default_factory=dict[int, Job])
    arrived: dict[int, float] = field(default_factory=dict[int, float])
    """Job id -> arrival, kept until the job is done, so that a returned job keeps its age."""

    def oldest(self) -> float:
        return min(self.arrived[id] for id in self.waiting)


class AnnouncedScheduler:
    """Residents first, then the others in elevator order; a resident with announced samples is held for a moment.

    - A slot serves the teacher that it holds while that has work, up to `max_visit_tokens` a stay if others wait.
    - When it runs out but samples of it are announced, the slot waits `hold_s` before it swaps.
    - Otherwise the next teacher with work in the direction of travel (the order of `teachers`, up and down) is loaded.
      When all N teachers are needed in each step, M slots need N - M loads a step, the least that any order needs.
    - A job older than `max_wait_s` overrides all of this: its teacher is next.
    - A teacher that another slot holds is left to that slot.

    With `barrier`, a teacher is visited only when none of its announced samples is outstanding. What a visit holds then
    depends on the samples alone and not on the times at which they arrived: synchronous runs are reproducible.
    """

    def __init__(
        self,
        teachers: Sequence[str],
        slots: Sequence[str],
        *,
        hold_s: float,
        max_visit_tokens: int,
        max_wait_s: float = MAX_WAIT_S,
        barrier: bool = False,
    ) -> None:
        self._index = {name: index for index, name in enumerate(teachers)}
        self._queues = {name: _Queue() for name in teachers}
        self._slots = {name: _Slot() for name in slots}
        self._hold_s = hold_s
        self._max_visit_tokens = max_visit_tokens
        self._max_wait_s = max_wait_s
        self._barrier = barrier

    def announce(self, sample: str, teacher: str, tokens: int, now: float) -> None:
        self._queues[teacher].announced[sample] = tokens

    def withdraw(self, sample: str) -> None:
        for queue in self._queues.values():
            queue.announced.pop(sample, None)

    def arrive(self, job: Job, now: float) -> None:
        queue = self._queues[job.teacher]
        assert job.id not in queue.arrived, f"job {job.id} arrived twice"
        queue.announced.pop(job.sample, None)
        queue.waiting[job.id] = job
        queue.arrived[job.id] = now

    def drop(self, job: Job) -> None:
        queue = self._queues[job.teacher]
        if queue.waiting.pop(job.id, None) is not None:
            del queue.arrived[job.id]

    def next(self, slot: str, now: float) -> Visit | Wait:
        state = self._slots[slot]
        assert state.visit is None, f"{slot} is still on a visit to {state.visit}"
        ready = [name for name in self._queues if self._is_ready(name, state)]
        if not ready:
            return Wait()
        overdue = self._overdue(ready, now)
        if overdue is not None:
            return self._start(state, overdue)
        stay_is_over = state.stay_tokens >= self._max_visit_tokens
        if state.resident in ready and (not stay_is_over or ready == [state.resident]):
            return self._start(state, state.resident)
        hold_until = state.idle_since + self._hold_s
        if not stay_is_over and self._more_is_due(state) and now < hold_until:
            return Wait(min([hold_until, *self._due_times(ready)]))
        if state.resident is not None and any(other.is_fresh for other in self._slots.values()):
            return Wait()  # an empty slot takes it without giving anything up
        return self._start(state, self._elevator(state, [name for name in ready if name != state.resident]))

    def finish(self, slot: str, returned: Sequence[Job], resident: str | None, now: float) -> None:
        state = self._slots[slot]
        assert state.visit is not None, f"{slot} finished a visit that it never began"
        queue = self._queues[state.visit.teacher]
        back = {job.id for job in returned}
        for job in state.visit.jobs:
            if job.id in back:
                queue.waiting[job.id] = job
            else:
                del queue.arrived[job.id]
        state.visit = None
        state.resident = resident
        state.idle_since = now

    def _is_ready(self, teacher: str, state: _Slot) -> bool:
        queue = self._queues[teacher]
        if not queue.waiting or (self._barrier and queue.announced):
            return False
        return state.resident == teacher or all(other.resident != teacher for other in self._slots.values())

    def _overdue(self, ready: Sequence[str], now: float) -> str | None:
        if self._barrier:  # nothing new arrives for a teacher before its batch is served, so nobody can starve
            return None
        oldest = min(ready, key=lambda name: self._queues[name].oldest())
        return oldest if now >= self._queues[oldest].oldest() + self._max_wait_s else None

    def _due_times(self, ready: Sequence[str]) -> list[float]:
        return [] if self._barrier else [self._queues[name].oldest() + self._max_wait_s for name in ready]

    def _more_is_due(self, state: _Slot) -> bool:
        return state.resident is not None and bool(self._queues[state.resident].announced)

    def _elevator(self, state: _Slot, ready: Sequence[str]) -> str:
        """The nearest teacher ahead; turns round where none is ahead."""
        ahead = [name for name in ready if (self._index[name] - state.position) * state.direction > 0]
        if not ahead:
            state.direction = -state.direction
            ahead = list(ready)
        return min(ahead, key=lambda name: abs(self._index[name] - state.position))

    def _start(self, state: _Slot, teacher: str) -> Visit:
        """Take a snapshot of the teacher's work, as much of it as its stay has room for, and at least one job."""
        if teacher != state.resident or state.stay_tokens >= self._max_visit_tokens:
            state.stay_tokens = 0
        queue = self._queues[teacher]
        jobs: list[Job] = []
        for job in sorted(queue.waiting.values(), key=lambda job: (job.ordinal, job.id)):
            if jobs and state.stay_tokens + job.tokens > self._max_visit_tokens:
                state.stay_tokens = self._max_visit_tokens  # work is left over: others first
                break
            jobs.append(job)
            state.stay_tokens += job.tokens
        for job in jobs:
            del queue.waiting[job.id]
        state.resident = teacher
        state.position = self._index[teacher]
        state.visit = Visit(teacher, tuple(jobs))
        return state.visit
