"""A scheduling policy on the wall clock: what happens goes in as events, what it decides is carried out on the slots.

The policy sees a `Fleet`, which holds what is resident, coming, visited and free. Here that picture and the servers are
kept in step: a copy is in the fleet from the moment in which it is decided until the server has it and the gate let it
through. A slot whose server failed is lost, with all that it held; what it was doing waits again, and it comes back
empty when its server answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from distill.errors import EnvironmentFault, ServerError, TeacherError
from distill.teacher_manager.calibration import Calibration
from distill.teacher_manager.catalogue import Catalogue
from distill.teacher_manager.gate import Gate
from distill.teacher_manager.slot import Slot
from distill.teacher_manager.stall import Stall
from distill.teacher_manager.timeline.case import Job, System
from distill.teacher_manager.timeline.decisions import (
    Announced,
    Arrived,
    Copy,
    CopyEnded,
    CopyFailed,
    Decision,
    DeviceBack,
    DeviceLost,
    Dropped,
    Event,
    Evict,
    Policy,
    Stream,
    Visit,
    VisitEnded,
    VisitFailed,
    Wake,
    Withdrawn,
)
from distill.teacher_manager.timeline.fleet import Fleet
from distill.teacher_manager.timeline.schedule import CopyRow

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_MISFITS = 2
"""So often a device may lack room that it should have: something else took it, and may give it back."""
_RETIME_S = 1.0
"""How often measured speeds reach the policy: it caches what follows from them."""


class RunPolicy(Policy, Protocol):
    """A policy that a run can use: it also takes measured speeds."""

    def retime(self, system: System) -> None: ...


@dataclass(frozen=True, slots=True)
class Served:
    """How a visit ended."""

    undone: tuple[int, ...] = ()
    """Its jobs that wait again."""
    tokens: int = 0
    """That were scored; 0 where something else was done, whose time tells nothing about scoring."""
    distrust: str = ""
    """Why the slot is to be emptied and verified anew; empty: it is not."""


class Station(Protocol):
    """Who knows what jobs are: the manager."""

    async def serve(self, slot: Slot, item: int, jobs: tuple[int, ...], *, stream: bool) -> Served:
        """Do the jobs. Only a fault of ours is raised."""
        ...

    def wants(self, job: int) -> bool:
        """Somebody still waits for the job."""
        ...

    def loaded(self, item: int, start: float, end: float) -> None: ...
    def refused(self, item: int, error: TeacherError) -> None:
        """The item's weights do not check out: nobody is to wait for it any longer."""
        ...

    def unreachable(self, slot: str, error: ServerError, failures: int) -> None:
        """Its server did not come back, `failures` times in a row by now, and no slot is left."""
        ...

    def event(self, level: str, message: str, /) -> None: ...


@dataclass(slots=True)
class _Device:
    slot: Slot
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    releases: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, asyncio.Task[None]])
    """Item -> its release under way: the bytes are free only afterwards."""
    pause_s: float = 0.0
    failures: int = 0


class Driver:
    """Runs until it is cancelled; `run` raises what is a fault of ours."""

    def __init__(
        self,
        catalogue: Catalogue,
        system: System,
        policy: RunPolicy,
        slots: Sequence[Slot],
        station: Station,
        gate: Gate,
        timeout_s: float,
    ) -> None:
        self.fleet = Fleet(system)
        self.stall = Stall(len(slots))
        self._catalogue = catalogue
        self._policy = policy
        self._station = station
        self._gate = gate
        self._timeout_s = timeout_s
        self._calibration = Calibration(system)
        self._retimed = time.monotonic()
        self._devices = [_Device(slot) for slot in slots]
        self._start_ns = time.monotonic_ns()
        self._now_ns = -1
        self._wake_ns: int | None = 0
        self._events: list[Event] = []
        self._misfits = Counter[int]()
        """Item -> times that it did not fit where it should have."""
        self._fault: BaseException | None = None
        self._changed = asyncio.Event()

    # What the manager tells.

    def announce(self, rollout: int, item: int, tokens: int) -> None:
        self._tell(Announced(rollout, item, tokens))

    def withdraw(self, rollout: int) -> None:
        self._tell(Withdrawn(rollout))

    def arrive(self, rollout: int, job: Job, group: int, *, resident: bool) -> None:
        """`group`: jobs of one group share the beginning of their sequences; -1: none. `resident`: it cannot be
        streamed."""
        self.fleet.arrive(job)
        self._tell(Arrived(rollout, job, group, resident))

    def drop(self, job: int) -> None:
        """Nobody wants it any more. One that is on a visit is left to that visit."""
        if job in self.fleet.waiting:
            self.fleet.drop(job)
            self._tell(Dropped(job))

    def now_ns(self) -> int:
        """Since the driver was made; the time of `Job.arrival_ns` and `deadline_ns`."""
        return time.monotonic_ns() - self._start_ns

    async def run(self) -> None:
        try:
            while True:
                self._decide()
                await self._happens()
        finally:
            for device in self._devices:
                for task in [*device.tasks, *device.releases.values()]:
                    task.cancel()

    # The clock and the policy.

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()

    async def _happens(self) -> None:
        wait_s = None if self._wake_ns is None else max(0.0, (self._wake_ns - self.now_ns()) / 1e9)
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
        if self._fault is not None:
            raise self._fault

    def _decide(self) -> None:
        self._now_ns = max(self.now_ns(), self._now_ns + 1)
        self._take_speeds()
        events, self._events, self._wake_ns = self._events, [], None
        for decision in self._policy.decide(self._now_ns, events, self.fleet):
            self._carry_out(decision)
        self.stall.see(self.fleet, time.monotonic())

    def _take_speeds(self) -> None:
        if time.monotonic() < self._retimed + _RETIME_S:
            return
        self._retimed = time.monotonic()
        system = self._calibration.system()
        if system != self.fleet.system:
            self.fleet.retime(system)
            self._policy.retime(system)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Copy(device=device, item=item):
                self._start(device, self._copy(self.fleet.start_copy(device, item, self._now_ns)))
            case Evict(device=device, item=item):
                self.fleet.evict(device, item, self._now_ns)
                earlier = tuple(self._devices[device].releases.values())
                self._devices[device].releases[item] = self._spawn(self._release(device, item, earlier))
            case Visit(device=device, teacher=item, jobs=jobs):
                self.fleet.start_visit(device, item, jobs, self._now_ns)
                self._start(device, self._visit(device, item, jobs, stream=False))
            case Stream(device=device, teacher=item, jobs=jobs):
                self.fleet.start_stream(device, item, jobs, self._now_ns)
                self._start(device, self._visit(device, item, jobs, stream=True))
            case Wake(at_ns=at_ns):
                self._wake_ns = at_ns

    # What is under way. Each of these ends with the fleet and an event, unless its device was lost meanwhile: then it
    # was cancelled.

    async def _copy(self, copy: CopyRow) -> None:
        device, item = self._devices[copy.device], self._catalogue.items[copy.item]
        start = time.monotonic()
        try:
            await self._released(device)
            loaded = await device.slot.bring(item.files, self._gate, self._timeout_s, scores=bool(item.teachers))
        except TeacherError as error:
            self.fleet.fail_copy(copy, self._end_ns())
            self._tell(CopyFailed(copy.link, copy.device, copy.item))
            self._station.refused(copy.item, error)
        except (ServerError, EnvironmentFault) as error:
            self._misfits[copy.item] += isinstance(error, EnvironmentFault)
            if self._misfits[copy.item] > _MISFITS:
                self._station.refused(copy.item, TeacherError(error.what, why=error.why, fix=error.fix))
            self._lose(copy.device, f"loading {item.files.name} failed: {error.what}")
        else:
            end = time.monotonic()
            self._calibration.copied(
                copy.device, self.fleet.system.teachers[copy.item].bytes, end - start, from_disk=loaded.from_disk
            )
            self._station.loaded(copy.item, start, end)
            self.fleet.end_copy(copy, self._end_ns())
            self._tell(CopyEnded(copy.link, copy.device, copy.item))

    async def _visit(self, number: int, item: int, jobs: tuple[int, ...], *, stream: bool) -> None:
        device, start = self._devices[number], time.monotonic()
        if stream:
            await self._released(device)
        served = await self._station.serve(device.slot, item, jobs, stream=stream)
        if served.tokens and not served.undone and not stream:
            self._calibration.visited(number, item, served.tokens, time.monotonic() - start)
        if served.undone:
            self.fleet.fail_visit(number, served.undone, self._end_ns())
            self._tell(VisitFailed(number, item, served.undone))
        else:
            self.fleet.end_visit(number, self._end_ns())
            self._tell(VisitEnded(number, item, jobs))
        if served.distrust:
            self._lose(number, served.distrust)
        else:
            device.pause_s = 0.0

    async def _release(self, number: int, item: int, earlier: Sequence[asyncio.Task[None]]) -> None:
        """After those that were decided earlier: adapters leave before their base does."""
        device = self._devices[number]
        try:
            if earlier:
                await asyncio.wait(earlier)
            await device.slot.give_up(self._catalogue.items[item].files.name, self._timeout_s)
        except ServerError as error:
            self._lose(number, error.what)
        finally:
            device.releases.pop(item, None)

    async def _released(self, device: _Device) -> None:
        """What was evicted is gone, and its room is free."""
        while device.releases:
            await asyncio.wait(list(device.releases.values()))

    def _lose(self, number: int, reason: str) -> None:
        """Nothing is known of the slot any more: forget what it held, and start over with it."""
        if self.fleet.devices[number].lost:
            return
        device = self._devices[number]
        self._station.event("warning", f"{device.slot.name}: {reason}; it is emptied and verified anew")
        device.slot.fail()
        current = asyncio.current_task()
        for task in [*device.tasks, *device.releases.values()]:
            if task is not current:
                task.cancel()
        device.releases.clear()
        waiting = self.fleet.lose(number, self._end_ns())
        self._tell(DeviceLost(number))
        for job in waiting:
            if not self._station.wants(job):
                self.drop(job)
        self._start(number, self._revive(number))

    async def _revive(self, number: int) -> None:
        device = self._devices[number]
        while True:
            await asyncio.sleep(device.pause_s)
            device.pause_s = min(max(2 * device.pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                await device.slot.open(self._catalogue.sources, self._timeout_s)
                break
            except ServerError as error:
                device.failures += 1
                if all(state.lost for state in self.fleet.devices):
                    self._station.unreachable(device.slot.name, error, device.failures)
        device.failures = 0
        self.fleet.restore(number)
        self._tell(DeviceBack(number))

    def _end_ns(self) -> int:
        return max(self.now_ns(), self._now_ns)

    def _start(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._spawn(work)
        self._devices[number].tasks.add(task)
        task.add_done_callback(self._devices[number].tasks.discard)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """None of them fails unless it is a fault of ours: `run` passes it on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = error
            self._changed.set()
