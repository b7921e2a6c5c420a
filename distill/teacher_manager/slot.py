"""One model server that teachers take turns in.

COLD ──▶ LOADING ──▶ VERIFY ──▶ READY ──▶ DRAINING ──▶ LOADING …
  ▲          │          │         │
  └──────────┴──────────┴─────────┘   the server failed, was started again, or holds something else than it should

Nothing is scored unless the slot is READY. The epoch rises whenever the weights may have changed, and a reply that was
asked for in an older epoch is dropped: a score can only come from the teacher that the gate has let through.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

from distill.errors import ServerError, TeacherError
from distill.protocols import ModelServer, ServerAddress
from distill.teacher_manager.gate import Gate
from distill.teacher_manager.teachers import Teacher
from distill.types import GenerateRequest, Generation, ScoreRequest, SignalSpec, TeacherScores

T = TypeVar("T")
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_ACTIVATIONS = 2
"""A load that the gate refuses is done once more: a transfer may go wrong once, a file stays as it is."""


class State(Enum):
    COLD = "cold"
    LOADING = "loading"
    VERIFY = "verify"
    READY = "ready"
    DRAINING = "draining"


class Slot:
    """A server, the teacher that it holds, and whether that is certain.

    `locate(deadline_s)` says where the server is, waiting for a restart under way; `connect` makes a client for it.
    """

    def __init__(
        self,
        name: str,
        locate: Callable[[float], Awaitable[ServerAddress]],
        connect: Callable[[ServerAddress], ModelServer],
        budget_bytes: int,
    ) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.state = State.COLD
        self.epoch = 0
        self._locate = locate
        self._connect = connect
        self._address: ServerAddress | None = None
        self._client: ModelServer | None = None
        self._teacher: Teacher | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def resident(self) -> str | None:
        """The teacher that it can score with now."""
        return self._teacher.name if self._teacher is not None and self.state is State.READY else None

    def check_budget(self, teacher: Teacher) -> None:
        if teacher.bytes > self.budget_bytes:
            raise TeacherError(
                f"teacher {teacher.name} has {teacher.bytes / 1e9:.3f} GB of weights ({teacher.bytes} bytes), "
                f"{self.name} holds {self.budget_bytes / 1e9:.3f} GB ({self.budget_bytes} bytes)",
                why="a slot holds one whole teacher",
                fix="raise teacher_manager.slot_gb, or leave it out: it then follows the largest teacher",
            )

    async def holds(self, teacher: str, deadline_s: float) -> bool:
        """Whether this teacher can be scored now. A server that was started again holds nobody."""
        if self.resident != teacher:
            return False
        address = await self._where(deadline_s)
        if self._address is None or address.incarnation != self._address.incarnation:
            self.fail()
        return self.resident == teacher

    async def activate(self, teacher: Teacher, gate: Gate, deadline_s: float) -> None:
        """Load the teacher and let the gate check it; READY afterwards, COLD after any error.

        Raises TeacherError when the gate refuses the teacher twice, ServerError when the server fails.
        """
        self.check_budget(teacher)
        deadline = time.monotonic() + deadline_s
        try:
            await self._drain(deadline)
            for attempt in range(1, _ACTIVATIONS + 1):
                try:
                    await self._load(teacher, gate, deadline)
                    return
                except TeacherError:
                    if attempt == _ACTIVATIONS:
                        raise
        finally:
            if self.state is not State.READY:
                self.fail()

    async def score(
        self, epoch: int, requests: Sequence[ScoreRequest], spec: SignalSpec, deadline_s: float
    ) -> list[TeacherScores]:
        """Scores of the teacher of this epoch. Raises ServerError when the epoch ended before the reply came."""
        teacher = self._require(epoch)
        ask = self._ready_client.score(requests, spec, teacher.name, teacher.version)
        return await self._within_epoch(epoch, ask, deadline_s)

    async def generate(self, epoch: int, requests: Sequence[GenerateRequest], deadline_s: float) -> list[Generation]:
        """What the teacher of this epoch writes. Raises ServerError as `score`, and for tokens of other weights."""
        teacher = self._require(epoch)
        written = await self._within_epoch(epoch, self._ready_client.generate(requests), deadline_s)
        for item in written:
            other = set(item.versions) - {teacher.version}
            if other or item.finish_reason == "abort":
                found = f"weights {sorted(other)}" if other else "an aborted answer"
                raise ServerError(f"{self.name}: {item.id} should be written by {teacher.version}, found {found}")
        return written

    def fail(self) -> None:
        """What the server holds is unknown from now on."""
        self.state = State.COLD
        self.epoch += 1
        self._teacher = None

    async def close(self) -> None:
        self.fail()
        await self._disconnect()

    @property
    def _ready_client(self) -> ModelServer:
        assert self._client is not None, f"{self.name} is {self.state.value} without a client"
        return self._client

    def _require(self, epoch: int) -> Teacher:
        if self.state is not State.READY or epoch != self.epoch or self._teacher is None:
            raise ServerError(f"{self.name} is {self.state.value} in epoch {self.epoch}; epoch {epoch} is over")
        return self._teacher

    async def _within_epoch(self, epoch: int, ask: Awaitable[T], deadline_s: float) -> T:
        self._in_flight += 1
        self._idle.clear()
        try:
            reply = await self._in_time(ask, deadline_s, "a reply")
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        if epoch != self.epoch:
            raise ServerError(f"{self.name}: a reply of epoch {epoch} came in epoch {self.epoch} and was dropped")
        return reply

    async def _drain(self, deadline: float) -> None:
        """Let what was asked be answered: weights must not change under it."""
        if self.state is State.READY:
            self.state = State.DRAINING
        await self._in_time(self._idle.wait(), deadline - time.monotonic(), "the replies of the last teacher")

    async def _load(self, teacher: Teacher, gate: Gate, deadline: float) -> None:
        self.state = State.LOADING
        self.epoch += 1
        self._teacher = None
        await asyncio.to_thread(teacher.check_files)
        version = await asyncio.to_thread(lambda: teacher.version)  # the first time, this reads the files
        client = await self._connected(deadline)
        loading = client.load_weights(teacher.folder, version, teacher.vocab_size)
        await self._in_time(loading, deadline - time.monotonic(), f"the weights of {teacher.name} to load")
        self.state = State.VERIFY
        checking = gate.check(client, teacher, self.name)
        await self._in_time(checking, deadline - time.monotonic(), f"the check of {teacher.name}")
        self._teacher = teacher
        self.state = State.READY

    async def _connected(self, deadline: float) -> ModelServer:
        """A client of the server as it is now. Waits for one that has just died until its host has noticed that."""
        pause = _FIRST_PAUSE_S
        while True:
            address = await self._where(deadline - time.monotonic())
            if self._client is None or self._address != address:
                await self._disconnect()
                self._client, self._address = self._connect(address), address
            try:
                await self._in_time(self._client.info(), deadline - time.monotonic(), "a sign of life")
                return self._client
            except ServerError:
                await self._disconnect()
                if time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _where(self, deadline_s: float) -> ServerAddress:
        return await self._in_time(self._locate(deadline_s), deadline_s, "its server to be up")

    async def _disconnect(self) -> None:
        client, self._client, self._address = self._client, None, None
        if client is not None:
            with contextlib.suppress(ServerError):  # it may be gone already, that is why we leave
                await client.close()

    async def _in_time(self, awaited: Awaitable[T], deadline_s: float, what: str) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await awaited
        except TimeoutError as error:
            raise ServerError(
                f"{self.name}: waited {max(deadline_s, 0):.1f} s for {what}",
                fix="look at the server's log; raise teacher_manager.timeout_s if it is only slow",
            ) from error
