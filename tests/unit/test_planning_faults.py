"""The scheduler on machines that fail: copies and visits break off, devices go and come back, jobs are given up, and
nothing takes as long as the model says."""

from __future__ import annotations

import random
from collections import Counter
from heapq import heappop, heappush

from hypothesis import given, settings
from hypothesis import strategies as st

from distill.teacher_manager.planning.policy import IndexPolicy
from distill.teacher_manager.planning.settings import Settings
from distill.teacher_manager.timeline.case import Device, HostTier, Job, Kind, Link, System, Teacher
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
    LinkReleased,
    Stream,
    Visit,
    VisitEnded,
    VisitFailed,
    Withdrawn,
)
from distill.teacher_manager.timeline.fleet import Fleet
from distill.teacher_manager.timeline.schedule import CopyRow, Mode, VisitRow
from tests.builders_timeline import S, teacher

INSTANTS = 4000
"""More than any of these small systems needs."""

Happening = CopyRow | VisitRow | LinkReleased | DeviceBack | Announced | Arrived | Withdrawn | int
"""What is to come; a number is a device that will be lost."""


class Troubled:
    """Drives a policy, with trouble until `calm_ns`. What was under way on a device when it was lost is forgotten."""

    def __init__(self, of: System, policy: IndexPolicy, seed: int, calm_ns: int) -> None:
        self.fleet = Fleet(of)
        self.served = Counter[int]()
        self.dropped: set[int] = set()
        self.arrived: set[int] = set()
        self._policy = policy
        self._random = random.Random(seed)
        self._calm_ns = calm_ns
        self._agenda: list[tuple[int, int, Happening]] = []
        self._entries = 0
        self._events: list[Event] = []
        self.now_ns: int = -1
        self.instants = 0

    def plan(self, at_ns: int, what: Happening) -> None:
        self._entries += 1
        heappush(self._agenda, (at_ns, self._entries, what))

    def run(self) -> None:
        """Until nothing is under way and nobody asks to be woken."""
        wake_ns: int | None = 0
        while self._agenda or wake_ns is not None:
            times: list[int] = [self._agenda[0][0]] if self._agenda else []
            times += [] if wake_ns is None else [wake_ns]
            self.now_ns = max(self.now_ns + 1, min(times))
            wake_ns = None
            while self._agenda and self._agenda[0][0] <= self.now_ns:
                self._happens(heappop(self._agenda)[2])
            self._give_up_somebody()
            events, self._events = self._events, []
            for decision in self._policy.decide(self.now_ns, events, self.fleet):
                if (at_ns := self._carry_out(decision)) is not None:
                    wake_ns = at_ns
                self.check_bytes()
            self.instants += 1
            assert self.instants < INSTANTS, f"{len(self.fleet.waiting)} jobs wait at {self.now_ns} ns"

    def _is_trouble(self, chance: float) -> bool:
        return self.now_ns < self._calm_ns and self._random.random() < chance

    def _happens(self, what: Happening) -> None:
        match what:
            case CopyRow():
                self._copy_ends(what)
            case VisitRow():
                self._visit_ends(what)
            case LinkReleased(link=link):
                transfer = self.fleet.transfers[link]
                assert transfer is not None
                self.fleet.end_transfer(link, self.now_ns)
                self._events.append(what)
            case DeviceBack(device=device):
                self.fleet.restore(device)
                self._events.append(what)
            case Arrived(job=of):
                self.fleet.arrive(of)
                self.arrived.add(of.id)
                self._events.append(what)
            case int():
                self._lose(what)
            case _:
                self._events.append(what)

    def _copy_ends(self, copy: CopyRow) -> None:
        if self._is_trouble(0.3):
            self.fleet.fail_copy(copy, self.now_ns)
            self._events.append(CopyFailed(copy.link, copy.device, copy.item))
        else:
            self.fleet.end_copy(copy, self.now_ns)
            self._events.append(CopyEnded(copy.link, copy.device, copy.item))

    def _visit_ends(self, visit: VisitRow) -> None:
        again: tuple[int, ...] = ()
        if self._is_trouble(0.3):
            again = tuple(id for id in visit.jobs if self._random.random() < 0.7)
        self.served.update(set(visit.jobs).difference(again))
        self._forget(visit.device, copies=False)
        if again:
            self.fleet.fail_visit(visit.device, again, self.now_ns)
            self._events.append(VisitFailed(visit.device, visit.teacher, again))
        else:
            self.fleet.end_visit(visit.device, self.now_ns)
            self._events.append(VisitEnded(visit.device, visit.teacher, visit.jobs))

    def _lose(self, device: int) -> None:
        if self.fleet.devices[device].lost or self.now_ns >= self._calm_ns:
            return
        self._forget(device, copies=True)
        self.fleet.lose(device, self.now_ns)
        self._events.append(DeviceLost(device))
        self.plan(self.now_ns + self._random.randrange(1, 10 * S), DeviceBack(device))

    def _forget(self, device: int, *, copies: bool) -> None:
        """Ends on the device that do not happen any more: of its visit, with `copies` all."""
        transfer = self.fleet.transfers[self.fleet.devices[device].link]
        reads = transfer is not None and transfer.device == device and self.fleet.devices[device].coming is None
        gone = [
            entry
            for entry in self._agenda
            if (isinstance(entry[2], VisitRow) and entry[2].device == device)
            or (copies and isinstance(entry[2], CopyRow) and entry[2].device == device)
            or (reads and transfer and isinstance(entry[2], LinkReleased) and entry[2].link == transfer.link)
        ]
        self._agenda = sorted(entry for entry in self._agenda if entry not in gone)

    def _give_up_somebody(self) -> None:
        if self.fleet.waiting and self._is_trouble(0.1):
            id = self._random.choice(list(self.fleet.waiting))
            self.fleet.drop(id)
            self.dropped.add(id)
            self._events.append(Dropped(id))

    def _carry_out(self, decision: Decision) -> int | None:
        fleet = self.fleet
        match decision:
            case Copy():
                copy = fleet.start_copy(decision.device, decision.item, self.now_ns)
                self.plan(self._about(copy.end_ns), copy)
            case Evict():
                fleet.evict(decision.device, decision.item, self.now_ns)
            case Visit():
                visit = fleet.start_visit(decision.device, decision.teacher, decision.jobs, self.now_ns)
                self.plan(self._about(visit.end_ns), visit)
            case Stream():
                visit = fleet.start_stream(decision.device, decision.teacher, decision.jobs, self.now_ns)
                end_ns = self._about(visit.end_ns)
                if self._random.random() < 0.5:  # else the link is given up with the visit
                    self.plan(self.now_ns + (end_ns - self.now_ns) // 2, LinkReleased(fleet.devices[visit.device].link))
                self.plan(end_ns, visit)
            case _:
                assert decision.at_ns > self.now_ns
                return decision.at_ns
        return None

    def _about(self, end_ns: int) -> int:
        return self.now_ns + 1 + int((end_ns - self.now_ns) * self._random.choice([0.0, 0.3, 1.0, 1.0, 4.0]))

    def check_bytes(self) -> None:
        of = self.fleet.system
        for state, device in zip(self.fleet.devices, of.devices, strict=True):
            used = sum(of.teachers[item].bytes for item in state.resident)
            used += 0 if state.coming is None else of.teachers[state.coming].bytes
            if state.visit is not None and state.visit.mode is Mode.STREAM:
                used += of.stream_bytes(state.visit.teacher)
            assert 0 <= state.free_bytes == device.budget_bytes - used
            if device.holds_one:
                assert len(state.resident) + (state.coming is not None) <= 1
                assert state.coming is None or state.visit is None
            if state.lost:
                assert (used, state.visit, state.coming) == (0, None, None)


KINDS = st.sampled_from([Kind.DENSE, Kind.MOE])


@st.composite
def systems(draw: st.DrawFn) -> System:
    """Up to five teachers and adapters on up to four devices of different sizes, some of which hold one object."""
    teachers = [
        Teacher(
            id, draw(KINDS), draw(st.integers(1, 8)), 1, 1, 4,
            stream_bytes=draw(st.none() | st.integers(1, 4)), can_stream=draw(st.booleans()),
        )
        for id in range(draw(st.integers(1, 5)))
    ]  # fmt: skip
    if draw(st.booleans()):
        base = len(teachers)
        teachers += [teacher(base, 3, Kind.BASE), *(teacher(base + 1 + each, 1, Kind.LORA, base) for each in range(2))]
    links = draw(st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 2, 2)]))
    devices = [
        Device(
            id, draw(st.integers(2, 12)), 2, link, holds_one=draw(st.booleans()), call_ns=draw(st.integers(0, 2)) * S
        )
        for id, link in enumerate(links)
    ]
    devices[-1] = Device(len(devices) - 1, 12, 2, links[-1])  # somebody holds everything
    host = draw(st.none() | st.integers(0, 12).map(lambda size: HostTier(size, 1)))
    return System(tuple(devices), tuple(Link(id, 2) for id in range(links[-1] + 1)), host, tuple(teachers))


POLICIES = st.builds(Settings, visit_tokens=st.sampled_from([0, 1, 6]), turn_copies=st.sampled_from([0.0, 1.0, 8.0]))


@settings(max_examples=300, deadline=None)
@given(of=systems(), chosen=POLICIES, seed=st.integers(0, 2**32), jobs=st.integers(1, 15), calm=st.booleans())
def test_whatever_fails_each_job_is_served_once_or_dropped(
    of: System, chosen: Settings, seed: int, jobs: int, calm: bool
) -> None:
    """With everything whole again the queue drains, within the rules and the budgets all the way."""
    assert of.homeless() == ()
    dice = random.Random(seed)
    driver = Troubled(of, IndexPolicy(of, chosen), seed, calm_ns=0 if calm else 40 * S)
    asked = [each.id for each in of.teachers if each.kind is not Kind.BASE]
    withdrawn: set[int] = set()
    for id in range(jobs):
        whose, at_ns, tokens = dice.choice(asked), dice.randrange(30 * S), dice.randrange(1, 7)
        if dice.random() < 0.8:
            driver.plan(dice.randrange(at_ns + 1), Announced(id, whose, tokens + 1))
        if dice.random() < 0.1:
            withdrawn.add(id)
            driver.plan(at_ns, Withdrawn(id))
        else:
            deadline_ns = at_ns + dice.randrange(1, 40) * S
            of_prompt = dice.choice([-1, 0, 1])
            driver.plan(at_ns, Arrived(id, Job(id, whose, 0, 0, at_ns, tokens + 1, tokens, deadline_ns), of_prompt))
    for _ in range(dice.randrange(5)):
        driver.plan(dice.randrange(40 * S), dice.randrange(len(of.devices)))
    driver.run()
    assert driver.arrived == set(range(jobs)) - withdrawn
    assert set(driver.served) == driver.arrived - driver.dropped
    assert set(driver.served.values()) <= {1}
    assert driver.fleet.waiting == {}
