"""The visits of a finished run, replayed with copies as early as possible: what perfect prefetch makes of them.

It knows the future, so it is no policy that a run could use. It bounds what prefetch alone can gain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from distill.teacher_manager.timeline.case import Case, System
from distill.teacher_manager.timeline.choosers import StepGate
from distill.teacher_manager.timeline.decisions import (
    Arrived,
    Copy,
    CopyEnded,
    Decision,
    Event,
    Evict,
    Visit,
    VisitEnded,
)
from distill.teacher_manager.timeline.fleet import Fleet
from distill.teacher_manager.timeline.schedule import Schedule, VisitRow


@dataclass(frozen=True, slots=True)
class _Stop:
    """Of a link's pointer: one object of one visit."""

    device: int
    visit: int
    """Index among the device's visits."""
    item: int
    is_last: bool
    """The visit needs nothing after it."""


class _Device:
    """The visits of one device and how far they have got."""

    def __init__(self, system: System, visits: Sequence[VisitRow]) -> None:
        self.visits = visits
        self.ended = 0
        self.passed = 0
        """Visits that the link's pointer has passed."""
        self.to_arrive = [len(visit.jobs) for visit in visits]
        """By visit: jobs that have not arrived."""
        self.needs = [system.needs[visit.teacher] for visit in visits]
        self._uses: dict[int, list[int]] = {}
        """Object -> the visits that need it, ascending."""
        for index, items in enumerate(self.needs):
            for item in items:
                self._uses.setdefault(item, []).append(index)

    def protected(self, visit: int) -> set[int]:
        """The needs of the visits that have not ended, up to and including `visit`."""
        return {item for items in self.needs[self.ended : visit + 1] for item in items}

    def next_use(self, item: int, visit: int) -> float:
        """The first visit after `visit` that needs the object."""
        uses = self._uses[item]
        later = bisect_right(uses, visit)
        return uses[later] if later < len(uses) else inf


class PrefetchReplay:
    """The same visits on the same devices in the same order; each link walks through them ahead of the devices.

    `gate`: visits also wait until their step is open, as they do under a barrier.
    """

    def __init__(self, case: Case, schedule: Schedule, gate: StepGate | None = None) -> None:
        self._jobs = case.jobs
        self._gate = gate
        per_device: list[list[VisitRow]] = [[] for _ in case.system.devices]
        self._stops: list[list[_Stop]] = [[] for _ in case.system.links]
        """By link."""
        self._visit_of: dict[int, tuple[int, int]] = {}
        """Job -> device and index of its visit."""
        for visit in sorted(schedule.visits, key=lambda visit: (visit.start_ns, visit.device)):
            index, needs = len(per_device[visit.device]), case.system.needs[visit.teacher]
            self._visit_of.update(dict.fromkeys(visit.jobs, (visit.device, index)))
            per_device[visit.device].append(visit)
            self._stops[case.system.devices[visit.device].link].extend(
                _Stop(visit.device, index, item, item == needs[-1]) for item in needs
            )
        self._devices = [_Device(case.system, visits) for visits in per_device]
        self._pointers = [0] * len(self._stops)
        self._links = set(range(len(self._stops)))
        """Links that may be able to go on."""
        self._look_at: set[int] = set()
        """Devices that may be able to start their next visit."""

    def decide(self, now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        self._take(events, fleet)
        for link in sorted(self._links):
            yield from self._walk(link, fleet)
        for device in sorted(self._look_at):
            yield from self._start(device, fleet)
        self._look_at.clear()

    def _take(self, events: Sequence[Event], fleet: Fleet) -> None:
        step = self._gate.open_step() if self._gate else None
        for event in events:
            match event:
                case Arrived(job=job):
                    device, index = self._visit_of[job.id]
                    self._devices[device].to_arrive[index] -= 1
                    self._look_at.add(device)
                    if self._gate:
                        self._gate.arrive(job)
                case CopyEnded(link=link, device=device):
                    self._links.add(link)
                    self._look_at.add(device)
                case VisitEnded(device=device, jobs=jobs):
                    self._devices[device].ended += 1
                    self._links.add(fleet.devices[device].link)
                    self._look_at.add(device)
                    if self._gate:
                        self._gate.finish(jobs)
                case _:
                    pass
        if self._gate and self._gate.open_step() != step:
            self._look_at.update(range(len(self._devices)))

    def _walk(self, link: int, fleet: Fleet) -> Iterator[Decision]:
        """Moves the pointer as far as it goes."""
        stops = self._stops[link]
        self._links.discard(link)
        while self._pointers[link] < len(stops):
            stop = stops[self._pointers[link]]
            device = fleet.devices[stop.device]
            if stop.item not in device.resident and stop.item != device.coming:
                if not fleet.can_transfer(stop.device, stop.item):
                    if fleet.transfers[link] is None:  # it waits for the disk, whose end may be no event of this link
                        self._links.add(link)
                    return
                victims = self._victims(stop, fleet)
                if victims is None:
                    return
                yield from victims
                yield Copy(stop.device, stop.item)
            if stop.is_last:
                self._devices[stop.device].passed = stop.visit + 1
                self._look_at.add(stop.device)
            self._pointers[link] += 1

    def _victims(self, stop: _Stop, fleet: Fleet) -> list[Evict] | None:
        """What must go for the object to fit, farthest next use first; None: too much is protected."""
        device, plan = fleet.devices[stop.device], self._devices[stop.device]
        size = [teacher.bytes for teacher in fleet.system.teachers]
        protected = plan.protected(stop.visit)
        unprotected = [item for item in device.resident if item not in protected]
        lacking = size[stop.item] - device.free_bytes
        if sum(size[item] for item in unprotected) < lacking:
            return None
        victims: list[Evict] = []
        for item in sorted(unprotected, key=lambda item: (-plan.next_use(item, stop.visit), item)):
            if lacking <= 0:
                break
            victims.append(Evict(stop.device, item))
            lacking -= size[item]
        return victims

    def _start(self, device: int, fleet: Fleet) -> Iterator[Decision]:
        plan = self._devices[device]
        index = plan.ended
        if fleet.devices[device].visit is not None or index == len(plan.visits):
            return
        visit = plan.visits[index]
        if plan.to_arrive[index] or plan.passed <= index or fleet.missing(device, visit.teacher):
            return
        if self._gate is None or self._gate.open_step() == self._jobs[visit.jobs[0]].step:
            yield Visit(device, visit.teacher, visit.jobs)
