"""A teacher that somebody else serves: it is asked over HTTP, takes no slot, and its weights are out of reach.

What stands in for the checks of a slot: every scoring call carries the canary, a fixed sequence, beside the sample, and
the whole reply is dropped where the canary's log-probabilities have moved. A server that came back with another model,
or one of several behind an address that has another, is noticed in its first reply.

UP ◀──▶ DOWN    the server was not there; one caller looks at it again from time to time, the others wait for that
 └──▶ REFUSED   it is not what it was: for good
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

import numpy as np

from distill.errors import ConfigError, DistillError, ServerError, TeacherError
from distill.protocols import TeacherCaps
from distill.serving.openai import TryAgain
from distill.teacher_manager.gate import CANARY_RESPONSE, CanaryStore, canary_ids
from distill.teacher_manager.spans import EventSink
from distill.types import (
    Floats,
    GenerateRequest,
    Generation,
    Ids,
    ScoreRequest,
    Signal,
    SignalSpec,
    TeacherScores,
)

T = TypeVar("T")
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 15.0
CANARY = "canary"
"""Its id in a call; no sample is called so."""


class State(Enum):
    NEW = "new"
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"


class RemoteApi(Protocol):
    """What one kind of server is asked, once. Raises TryAgain for what another try may cure, else a DistillError."""

    label: str
    """Names the teacher and its address in errors."""

    async def connect(self, ids: Ids, spec: SignalSpec) -> int | None:
        """Look at the server and whether it can give `spec`, trying `ids`; returns its context length if it tells."""
        ...

    def caps(self, spec: SignalSpec) -> TeacherCaps: ...
    async def score(self, requests: Sequence[ScoreRequest], spec: SignalSpec) -> list[TeacherScores]:
        """One HTTP call."""
        ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...
    async def close(self) -> None: ...


class RemoteTeacher:
    """One teacher behind a URL. Use and close it in one event loop; calls may overlap.

    `timeout_s` bounds one request from its turn to its end: all its tries, and the pauses between them. A request waits
    for its turn while `concurrency` others are under way, each of which is bounded so.
    """

    def __init__(
        self,
        name: str,
        api: RemoteApi,
        spec: SignalSpec,
        *,
        vocab_size: int,
        concurrency: int,
        timeout_s: float,
        max_tries: int,
        atol: float,
        canaries: CanaryStore | None,
        on_event: EventSink,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`canaries`: None compares with the canary of this process alone. `atol`: nats, see `_compare`."""
        self.name = name
        self._api = api
        self._spec = spec
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._max_tries = max_tries
        self._atol = atol
        self._canaries = canaries
        self._event = on_event
        self._first_pause_s = first_pause_s
        self._turns = asyncio.Semaphore(concurrency)
        self._state = State.NEW
        self._fault: DistillError | None = None
        """Why it is REFUSED, or DOWN."""
        self._down_since = 0.0
        self._look_at = 0.0
        """When a server that is DOWN may be looked at again."""
        self._pause_s = first_pause_s
        self._looking = asyncio.Lock()
        self._canary: Floats | None = None
        self.context_length: int | None = None
        """As the server tells, once it was looked at."""

    @property
    def state(self) -> State:
        return self._state

    @property
    def caps(self) -> TeacherCaps:
        return self._api.caps(self._spec)

    async def start(self) -> None:
        """Look at the server now instead of with the first request. Raises what `score` does."""
        await self._bounded(self._up)

    async def health(self) -> None:
        """Look at the server once: returns if it is there and says what it said before.

        Raises ServerError, or TeacherError for another model.
        """
        try:
            async with asyncio.timeout(self._timeout_s), self._looking:
                if self._state is State.REFUSED:
                    raise _again(self._fault)
                await self._look()
        except TryAgain as again:
            raise again.error from again
        except TimeoutError as error:
            raise self._too_late(self._fault) from error

    async def score(self, requests: Sequence[ScoreRequest], spec: SignalSpec) -> list[TeacherScores]:
        """One reply a request, in their order; each goes out in a call of its own.

        Raises ConfigError for a signal that `caps` do not have, ServerError when the server does not answer in time or
        fails too often, TeacherError with the sample's id for scores of that sample that cannot be right, and without
        one for a server that is not the teacher.
        """
        self._check_signal(spec)
        return await _together([self._in_turn(lambda one=one: self._score(one, spec)) for one in requests])

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """What the teacher writes after each prompt. Raises as `score` does."""
        return await _together([self._in_turn(lambda one=one: self._generate(one)) for one in requests])

    async def close(self) -> None:
        await self._api.close()

    async def _in_turn(self, ask: Callable[[], Awaitable[T]]) -> T:
        async with self._turns:
            return await self._bounded(lambda deadline: self._tried(ask, deadline))

    async def _bounded(self, work: Callable[[float], Awaitable[T]]) -> T:
        """`work` with its deadline, which is also one for whatever it waits for."""
        deadline = time.monotonic() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work(deadline)
        except TimeoutError as error:
            too_late = self._too_late(self._fault)
            if self._state is State.UP:
                self._went_down(too_late)
            raise too_late from error

    async def _tried(self, ask: Callable[[], Awaitable[T]], deadline: float) -> T:
        for tries in range(1, self._max_tries + 1):
            await self._up(deadline)
            try:
                return await ask()
            except TryAgain as again:
                if again.gone:
                    self._went_down(again.error)
                if tries == self._max_tries:
                    raise _with_tries(again.error, tries) from again
                pause = max(again.after_s, self._backoff(tries))
                if time.monotonic() + pause >= deadline:
                    raise _with_tries(again.error, tries, f"a pause of {pause:.1f} s before the next") from again
            await asyncio.sleep(pause)
        raise AssertionError("max_tries is at least 1")

    async def _score(self, request: ScoreRequest, spec: SignalSpec) -> TeacherScores:
        self._check_request(request.id, request.input_ids, 1)
        try:
            canary, scores = await self._api.score([self._canary_request(spec), request], spec)
        except TeacherError as error:
            if error.sample_id != CANARY:
                raise
            raise TeacherError(error.what, why=error.why, fix=error.fix, teacher=self.name) from error
        self._compare(canary.logprobs)
        return scores

    async def _generate(self, request: GenerateRequest) -> Generation:
        """What it writes is graded and never learnt from: it goes without a canary of its own."""
        self._check_request(request.id, request.input_ids, request.max_new_tokens)
        (written,) = await self._api.generate([request])
        return written

    async def _up(self, deadline: float) -> None:
        """Return when the server is UP. One caller at a time looks at it; the deadline is the caller's own."""
        if self._is_up():
            return
        async with self._looking:
            while not self._is_up():
                if self._state is State.REFUSED:
                    raise _again(self._fault)
                wait = self._look_at - time.monotonic()
                if time.monotonic() + wait >= deadline:
                    raise self._too_late(self._fault)
                await asyncio.sleep(max(wait, 0.0))
                try:
                    await self._look()
                except TryAgain:
                    pass  # it is DOWN now, and there is a time to look at it again

    def _is_up(self) -> bool:
        return self._state is State.UP

    async def _look(self) -> None:
        """UP afterwards, unless it raises. A server that cannot be what it must be is REFUSED."""
        try:
            self.context_length = await self._api.connect(canary_ids(self._vocab_size), self._spec)
            (canary,) = await self._api.score([self._canary_request(self._spec)], self._spec)
            self._compare(canary.logprobs)
        except (ConfigError, TeacherError) as error:
            self._refuse(error)
            raise
        except TryAgain as again:
            self._went_down(again.error)
            self._look_at = time.monotonic() + max(again.after_s, self._pause_s * random.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            raise
        if self._state is State.DOWN:
            self._event("info", f"{self._api.label} is back after {time.monotonic() - self._down_since:.0f} s")
        self._state, self._fault, self._pause_s = State.UP, None, self._first_pause_s

    def _went_down(self, why: DistillError) -> None:
        if self._state is State.REFUSED:
            return
        if self._state is not State.DOWN:
            self._down_since = time.monotonic()
            self._event("warning", f"{why.what}; it is looked at again until it is back")
        self._state, self._fault = State.DOWN, why

    def _refuse(self, error: DistillError) -> None:
        self._state, self._fault = State.REFUSED, error

    def _backoff(self, tries: int) -> float:
        """Seconds before the next try; drawn, so that those who failed together do not come back together."""
        return min(self._first_pause_s * 2 ** (tries - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)

    def _canary_request(self, spec: SignalSpec) -> ScoreRequest:
        ids = canary_ids(self._vocab_size)
        student_ids = None
        if spec.student_k:
            student_ids = np.tile(np.arange(spec.student_k, dtype=np.int32), (CANARY_RESPONSE, 1))
        return ScoreRequest(CANARY, ids, CANARY_RESPONSE, student_ids)

    def _compare(self, found: Floats) -> None:
        """Raises TeacherError, now and for ever, when the canary has moved.

        By the median of its tokens: a server that computes in bfloat16 moves single tokens by an eighth of a nat when
        they share a batch with others, another model moves most of them by whole nats.
        """
        if self._canary is None:
            self._canary = self._recorded(found)
        moved = float(np.median(np.abs(found - self._canary)))
        if moved <= self._atol:  # a NaN must not pass
            return
        error = TeacherError(
            f"{self._api.label}: its canary moved by {moved:.3g} nat (median of {len(found)} tokens), at most "
            f"{self._atol:g} was expected",
            why="the server does not serve the model that it served when the run began",
            fix="serve that model again and resume the run; if it is the same model on other hardware or in another "
            "dtype, raise teacher_manager.remote_canary_atol",
            teacher=self.name,
        )
        self._refuse(error)
        raise _again(error)

    def _recorded(self, found: Floats) -> Floats:
        """What the canary was when the run first asked this teacher; it is recorded then."""
        if self._canaries is None:
            return found
        key = f"remote-{self.name}"
        recorded = self._canaries.get(key)
        if recorded is None:
            self._canaries.put(key, self.name, found)
        return found if recorded is None else recorded

    def _check_signal(self, spec: SignalSpec) -> None:
        caps = self.caps
        if spec.signal not in caps.signals or (spec.signal is Signal.TOPK and spec.support not in caps.supports):
            raise ConfigError(
                f"{self._api.label} cannot be asked for the signal {spec.signal.value} ({spec.support.value})",
                fix="ask for sampled tokens, or for the teacher's own most probable ids "
                "(objective.support=teacher_topk)",
            )

    def _check_request(self, request_id: str, ids: Ids, new_tokens: int) -> None:
        """Refuse what the server would refuse. `new_tokens`: a server that scores has to write a token too."""
        if not len(ids) or ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ServerError(
                f"{self._api.label}: not sent: request {request_id} has no tokens, or ids outside the vocabulary of "
                f"{self._vocab_size}",
                fix=f"check teachers.{self.name}.tokenizer",
            )
        if self.context_length is not None and len(ids) + new_tokens > self.context_length:
            raise ServerError(
                f"{self._api.label}: not sent: request {request_id} has {len(ids)} tokens, and {new_tokens} come "
                f"behind them; the server reads {self.context_length}",
                fix="lower rollout.max_new_tokens, or start the server with a longer context",
            )

    def _too_late(self, last: DistillError | None) -> ServerError:
        return ServerError(
            f"{self._api.label} gave no answer within {self._timeout_s:g} s"
            + (f" and is {self._state.value}; last: {last.what}" if last else ""),
            why="it is overloaded, stuck or not there",
            fix="look at the server; lower the teacher's concurrency, or raise teacher_manager.timeout_s if it is only "
            "slow",
        )


async def _together(asks: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the first error, after which nobody is asked any more."""
    tasks = [asyncio.ensure_future(ask) for ask in asks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _again(error: DistillError | None) -> DistillError:
    """A copy to raise: an exception that was raised carries the traceback of whoever got it."""
    assert error is not None, "a teacher that is refused has a reason"
    return type(error)(error.what, why=error.why, fix=error.fix)


def _with_tries(error: DistillError, tries: int, then: str = "") -> DistillError:
    copy = _again(error)
    ending = f", and the deadline comes before {then}" if then else ""
    copy.what += f" ({tries} {'try' if tries == 1 else 'tries'}{ending})"
    return copy
