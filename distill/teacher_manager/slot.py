"""One teacher server and the weight objects on it.

          ┌────────────── the server failed, or was started again ──────────────┐
          ▼                                                                     │
COLD or WARM ──▶ LOADING ──▶ VERIFY ──▶ READY ──▶ DRAINING ──▶ RELEASING ──▶ COLD or WARM

WARM: there is a memory tier, and the object was in this slot before. Each object has a state and an epoch of its own.
Nothing is asked of one that is not READY; its epoch rises whenever its weights may have changed, and a reply that was
asked for in an older epoch is dropped: a score can only come from weights that the gate has let through. A streamed
batch has no READY object: it carries the canary with it, and its scores count only if that agrees, and if the bytes
that were read for it are the files'.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from distill.errors import ServerError, TeacherError
from distill.protocols import Loaded, ServerAddress, SlotLedger, TeacherServer, WeightCosts, WeightSource
from distill.teacher_manager.gate import Gate
from distill.teacher_manager.teachers import Teacher
from distill.types import GenerateRequest, Generation, ScoreRequest, SignalSpec, TeacherScores

T = TypeVar("T")
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_SILENT = 3
"""Questions in a row that an incarnation leaves without an answer before it is taken to hang. A dead one has been
replaced by then; each question has a deadline of its own."""
ACTIVATIONS = 2
"""A load that the gate refuses is done once more: a transfer may go wrong once, a file stays as it is."""


class Stage(Enum):
    COLD = "cold"
    WARM = "warm"
    LOADING = "loading"
    VERIFY = "verify"
    READY = "ready"
    DRAINING = "draining"
    RELEASING = "releasing"


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class _Held:
    stage: Stage = Stage.COLD
    epoch: int = 0
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=_set_event)


class Slot:
    """`locate(deadline_s)` says where the server is, waiting for a restart under way; `connect` makes a client."""

    def __init__(
        self,
        name: str,
        locate: Callable[[float], Awaitable[ServerAddress]],
        connect: Callable[[ServerAddress], TeacherServer],
        budget_bytes: int,
        restart: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`restart(incarnation)` has a server that hangs ended and started again, where that can be done."""
        self.name = name
        self.budget_bytes = budget_bytes
        self._locate = locate
        self._connect = connect
        self._restart = restart
        self._server: TeacherServer | None = None
        self._address: ServerAddress | None = None
        self._held: dict[str, _Held] = {}
        self._sources: dict[str, WeightSource] = {}
        self._costs: dict[str, WeightCosts] = {}
        self._unknown: set[str] = set()
        """Objects whose files were broken when the server should have learnt of them."""

    @property
    def holds_one(self) -> bool:
        """See `TeacherServer.holds_one`. Known from the first `open` on."""
        return self._ready_server.holds_one

    def stage(self, name: str) -> Stage:
        return self._object(name).stage

    def epoch(self, name: str) -> int:
        return self._object(name).epoch

    async def open(self, sources: Sequence[WeightSource], deadline_s: float) -> list[WeightCosts]:
        """Reach the server, have it give up whatever it still holds, and make all objects known to it: it is empty
        afterwards. The costs of the objects, in their order. Raises ServerError when that does not succeed in time, and
        the first time TeacherError or ConfigError for an object whose files are broken; later such an object is a
        matter of whoever needs it."""
        self.fail()
        deadline = time.monotonic() + deadline_s
        server = await self._connected(deadline)
        self._sources = {source.name: source for source in sources}
        self._unknown = set(self._sources)
        await self._empty(server, deadline)
        for source in sources:  # what is resident cannot become known with other weights
            try:
                await self._register(source.name, deadline)
            except TeacherError:
                if source.name not in self._costs:
                    raise
        return [self._costs[source.name] for source in sources]

    async def bring(self, teacher: Teacher, gate: Gate, deadline_s: float, *, scores: bool = True) -> Loaded:
        """Copy the object in and let the gate check it; READY afterwards, COLD after any error. `scores` is False for a
        base that is nobody's teacher: its weights are checked, and its adapters' canaries stand for the rest.

        Raises TeacherError when the gate refuses it twice, ServerError when the server fails.
        """
        deadline = time.monotonic() + deadline_s
        held = self._object(teacher.name)
        held.epoch += 1
        try:
            for attempt in range(1, ACTIVATIONS + 1):
                try:
                    return await self._load(teacher, gate, deadline, scores=scores)
                except TeacherError:
                    await self._forget(teacher.name, deadline)
                    self._unknown.add(teacher.name)  # its files may be put back meanwhile
                    if attempt == ACTIVATIONS:
                        raise
            raise AssertionError("unreachable")
        finally:
            if held.stage is not Stage.READY:
                held.stage = Stage.COLD

    async def give_up(self, name: str, deadline_s: float) -> None:
        """Let what was asked be answered, then free the object's bytes. Raises ServerError when the server fails."""
        deadline = time.monotonic() + deadline_s
        held = self._object(name)
        held.stage = Stage.DRAINING
        await self._in_time(held.idle.wait(), deadline_s, f"the replies of {name}")
        held.stage = Stage.RELEASING
        held.epoch += 1
        await self._in_time(self._ready_server.release(name), deadline - time.monotonic(), f"{name} to be released")
        ledger = await self._in_time(self._ready_server.ledger(), deadline - time.monotonic(), "its ledger")
        held.stage = Stage.WARM if ledger.host_budget_bytes else Stage.COLD

    async def score(self, requests: Sequence[ScoreRequest], spec: SignalSpec, deadline_s: float) -> list[TeacherScores]:
        """Scores of READY objects, each request by the one it names. Raises ServerError when an epoch ended before the
        reply came."""
        names = {request.teacher for request in requests}
        return await self._within_epochs(names, lambda server: server.score(requests, spec), deadline_s)

    async def stream(
        self, teacher: Teacher, gate: Gate, requests: Sequence[ScoreRequest], spec: SignalSpec, deadline_s: float
    ) -> list[TeacherScores]:
        """Scores of an object that is not resident, layer by layer. Raises TeacherError when the weights that were read
        are not the files', or the canary that went with the batch does not agree."""
        server = self._ready_server
        await self._make_known(teacher, time.monotonic() + deadline_s)
        asked = [*requests, gate.canary(teacher, spec)]
        ask = server.score(asked, spec, stream=True)
        *found, canary = await self._in_time(ask, deadline_s, "a streamed reply")
        checking = gate.check_streamed(server, teacher, self.name)
        try:
            await self._in_time(checking, deadline_s, f"the check of {teacher.name}")
            await gate.compare(teacher, self.name, canary.logprobs)
        except TeacherError:
            self._unknown.add(teacher.name)  # its files may be put back meanwhile
            raise
        return found

    async def generate(
        self, teacher: Teacher, requests: Sequence[GenerateRequest], deadline_s: float
    ) -> list[Generation]:
        """What a READY object writes. Raises ServerError as `score`, and for tokens of other weights."""
        written = await self._within_epochs(
            {teacher.name}, lambda server: server.generate(requests, teacher.name), deadline_s
        )
        for item in written:
            other = set(item.versions) - {teacher.version}
            if other or item.finish_reason == "abort":
                found = f"weights {sorted(other)}" if other else "an aborted answer"
                raise ServerError(f"{self.name}: {item.id} should be written by {teacher.version}, found {found}")
        return written

    async def ledger(self, deadline_s: float) -> SlotLedger:
        return await self._in_time(self._ready_server.ledger(), deadline_s, "its ledger")

    def fail(self) -> None:
        """What the server holds is unknown from now on."""
        for held in self._held.values():
            held.stage = Stage.COLD
            held.epoch += 1

    async def close(self) -> None:
        self.fail()
        await self._disconnect()

    def _object(self, name: str) -> _Held:
        return self._held.setdefault(name, _Held())

    @property
    def _ready_server(self) -> TeacherServer:
        if self._server is None:
            raise ServerError(f"{self.name} has no server now")
        return self._server

    async def _load(self, teacher: Teacher, gate: Gate, deadline: float, *, scores: bool) -> Loaded:
        held, server = self._object(teacher.name), self._ready_server
        epoch = held.epoch
        held.stage = Stage.LOADING
        await self._make_known(teacher, deadline)
        loading = server.load(teacher.name)
        loaded = await self._in_time(loading, deadline - time.monotonic(), f"the weights of {teacher.name} to load")
        held.stage = Stage.VERIFY
        checking = gate.check(server, teacher, self.name, scores=scores)
        await self._in_time(checking, deadline - time.monotonic(), f"the check of {teacher.name}")
        if held.epoch != epoch:
            raise ServerError(f"{self.name}: {teacher.name} was given up while it was being loaded")
        held.stage = Stage.READY
        return loaded

    async def _empty(self, server: TeacherServer, deadline: float) -> None:
        """Whoever loaded what is there. A base is given up only after its adapters: those go first, or in a second
        round."""
        for last in (False, True):
            ledger = await self._in_time(server.ledger(), deadline - time.monotonic(), "its ledger")
            for name in ledger.residents:
                try:
                    await self._in_time(server.release(name), deadline - time.monotonic(), f"{name} to be released")
                except ServerError:
                    if last:
                        raise

    async def _make_known(self, teacher: Teacher, deadline: float) -> None:
        """The files are those of the run's start, and the server knows of them. Raises TeacherError."""
        await asyncio.to_thread(teacher.check_files)
        if teacher.name in self._unknown:
            await self._register(teacher.name, deadline)

    async def _register(self, name: str, deadline: float) -> None:
        registering = self._ready_server.register(self._sources[name])
        self._costs[name] = await self._in_time(registering, deadline - time.monotonic(), f"{name} to be registered")
        self._unknown.discard(name)

    async def _forget(self, name: str, deadline: float) -> None:
        """Free the bytes of an object that the gate refused, if the server took it at all."""
        self._object(name).epoch += 1
        ledger = await self._in_time(self._ready_server.ledger(), deadline - time.monotonic(), "its ledger")
        if name in ledger.residents:
            releasing = self._ready_server.release(name)
            await self._in_time(releasing, deadline - time.monotonic(), f"{name} to be released")

    async def _within_epochs(
        self, names: set[str], ask: Callable[[TeacherServer], Awaitable[T]], deadline_s: float
    ) -> T:
        helds = {name: self._object(name) for name in names}
        epochs = {name: held.epoch for name, held in helds.items()}
        for name, held in helds.items():
            if held.stage is not Stage.READY:
                raise ServerError(f"{self.name}: {name} is {held.stage.value} and cannot be asked")
        for held in helds.values():
            held.in_flight += 1
            held.idle.clear()
        try:
            reply = await self._in_time(ask(self._ready_server), deadline_s, "a reply")
        finally:
            for held in helds.values():
                held.in_flight -= 1
                if not held.in_flight:
                    held.idle.set()
        over = sorted(name for name, held in helds.items() if held.epoch != epochs[name])
        if over:
            raise ServerError(
                f"{self.name}: a reply of {over[0]} came after its epoch {epochs[over[0]]} and was dropped"
            )
        return reply

    async def _connected(self, deadline: float) -> TeacherServer:
        """A client of the server as it is now. Waits for one that has just died until its host has noticed that; one
        that lives and gives no sign of it is started again."""
        pause, silent = _FIRST_PAUSE_S, Counter[int]()
        while True:
            address = await self._in_time(
                self._locate(deadline - time.monotonic()), deadline - time.monotonic(), "its server to be up"
            )
            if self._server is None or self._address != address:
                await self._disconnect()
                self._server, self._address = self._connect(address), address
            try:
                await self._in_time(self._server.info(), deadline - time.monotonic(), "a sign of life")
                return self._server
            except ServerError:
                await self._disconnect()
                silent[address.incarnation] += 1
                if silent[address.incarnation] == _SILENT and self._restart is not None:
                    await self._restart(address.incarnation)
                if time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _disconnect(self) -> None:
        server, self._server, self._address = self._server, None, None
        if server is not None:
            with contextlib.suppress(ServerError):  # it may be gone already, that is why we leave
                await server.close()

    async def _in_time(self, awaited: Awaitable[T], deadline_s: float, what: str) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await awaited
        except TimeoutError as error:
            raise ServerError(
                f"{self.name}: waited {max(deadline_s, 0):.1f} s for {what}",
                fix="look at the server's log; raise teacher_manager.timeout_s if it is only slow",
            ) from error
