"""The virtual clock: what a policy is told and when, and that whatever it may do makes a right schedule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.teacher_manager.timeline.bounds import bounds
from distill.teacher_manager.timeline.case import Case, HostTier, Kind
from distill.teacher_manager.timeline.checker import check
from distill.teacher_manager.timeline.choosers import Barrier, Fifo, LongestDrain, OldestDrain, StepGate
from distill.teacher_manager.timeline.decisions import (
    Announced,
    Arrived,
    Copy,
    CopyEnded,
    Decision,
    Event,
    Evict,
    LinkReleased,
    Policy,
    Stream,
    Visit,
    VisitEnded,
    Wake,
)
from distill.teacher_manager.timeline.fleet import Fleet, IllegalDecision
from distill.teacher_manager.timeline.metrics import measure
from distill.teacher_manager.timeline.on_demand import OnDemand
from distill.teacher_manager.timeline.prefetch import PrefetchReplay
from distill.teacher_manager.timeline.schedule import Mode, Schedule
from distill.teacher_manager.timeline.simulator import rollout_keys, simulate
from tests.builders_timeline import S, case, job, system, teacher

Plan = Callable[[int, Sequence[Event], Fleet], Iterable[Decision]]


class Planned:
    """Does what a function says, and remembers what it was told."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.told: list[tuple[int, Event]] = []
        self.asked_ns: list[int] = []

    def decide(self, now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterable[Decision]:
        self.asked_ns.append(now_ns)
        self.told += [(now_ns, event) for event in events]
        return self.plan(now_ns, events, fleet)


def streams(now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
    """Streams whatever waits, as soon as it can."""
    for each in list(fleet.waiting.values()):
        if fleet.devices[0].visit is None and fleet.can_transfer(0, each.teacher):
            yield Stream(0, each.teacher, (each.id,))


class Restless:
    """Does anything that is allowed, at random, but seldom evicts; it wakes itself every second."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def decide(self, now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        may_copy = True
        for _ in range(self._random.randrange(1, 8)):
            options = list(self._options(fleet, may_copy))
            choice = self._random.choice(options) if options else None
            if choice is not None and (not isinstance(choice, Evict) or self._random.random() < 0.1):
                may_copy = may_copy and not isinstance(choice, Stream)
                yield choice
        yield Wake(now_ns + S)

    def _options(self, fleet: Fleet, may_copy: bool) -> Iterator[Decision]:
        for device in fleet.devices:
            for item in device.resident:
                if not fleet.is_in_use(device.id, item):
                    yield Evict(device.id, item)
            for each in fleet.system.teachers:
                is_there = each.id in device.resident or each.id == device.coming
                can_transfer = fleet.can_transfer(device.id, each.id)
                if may_copy and not is_there and can_transfer and each.bytes <= device.free_bytes:
                    yield Copy(device.id, each.id)
                jobs = tuple(one.id for one in fleet.waiting.values() if one.teacher == each.id)
                if device.visit is not None or not jobs:
                    continue
                if not fleet.missing(device.id, each.id):
                    yield from [Visit(device.id, each.id, self._some(jobs))] * 3
                streams = each.base is None and fleet.system.stream_bytes(each.id) <= device.free_bytes
                if streams and can_transfer:
                    yield Stream(device.id, each.id, self._some(jobs))

    def _some(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._random.sample(jobs, self._random.randrange(1, len(jobs) + 1)))


TEACHERS = (
    teacher(0, 4),
    teacher(1, 8),
    teacher(2, 4, Kind.MOE),
    teacher(3, 4, Kind.BASE),
    teacher(4, 2, Kind.LORA, 3),
    teacher(5, 2, Kind.LORA, 3),
)
HOSTS = st.sampled_from([None, HostTier(0, 1), HostTier(8, 1), HostTier(12, 2, (0, 3)), HostTier(16, 4, (1,))])
LINKS = st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1)])


@st.composite
def traces(draw: st.DrawFn) -> Case:
    arrivals = sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=8)))
    jobs = [
        job(
            id,
            draw(st.sampled_from([0, 1, 2, 4, 5])),
            arrival_s,
            draw(st.integers(1, 5)),
            step=arrival_s // 5,
            announced_s=draw(st.integers(0, arrival_s)),
        )
        for id, arrival_s in enumerate(arrivals)
    ]
    of = system(TEACHERS, budget=draw(st.integers(8, 16)), device_links=draw(LINKS), host=draw(HOSTS))
    return case(jobs, of)


def policies(trace: Case) -> dict[str, Policy]:
    of = trace.system
    return {
        "fifo": OnDemand(of, Fifo()),
        "oldest_drain": OnDemand(of, OldestDrain()),
        "longest_drain": OnDemand(of, LongestDrain(of)),
        "barrier": OnDemand(of, Barrier(trace), one_teacher=True),
        "oldest_drain_stream": OnDemand(of, OldestDrain(), stream=True),
    }


def sampled_stalls(trace: Case, schedule: Schedule) -> tuple[float, float]:
    """(exposed, under a copy), in ns, by looking at the middle of each eighth of a second: every time here is whole in
    them. The streams' excess is added."""
    grain = S // 8
    makespan = measure(trace, schedule).makespan_ns
    start_of = {id: visit.start_ns for visit in schedule.visits for id in visit.jobs}
    exposed = under_copy = 0
    for t in range(grain // 2, makespan, grain):
        if not any(each.arrival_ns < t < start_of[each.id] for each in trace.jobs):
            continue
        for device in range(len(trace.system.devices)):
            if not any(visit.device == device and visit.start_ns < t < visit.end_ns for visit in schedule.visits):
                exposed += grain
                under_copy += grain * any(
                    copy.device == device and copy.start_ns < t < copy.end_ns for copy in schedule.copies
                )
    excess = sum(
        visit.end_ns - visit.start_ns - sum(trace.jobs[id].tokens * S for id in visit.jobs)
        for visit in schedule.visits
        if visit.mode is Mode.STREAM
    )
    return exposed + excess, under_copy + excess


@settings(deadline=None, max_examples=150)
@given(trace=traces(), seed=st.integers(0, 2**32))
def test_whatever_the_rules_allow_is_a_right_schedule_above_its_bounds(trace: Case, seed: int) -> None:
    schedule = simulate(trace, Restless(seed))
    assert check(trace, schedule) == []
    got, least = measure(trace, schedule), bounds(trace)
    assert (got.exposed_stall_ns, got.copy_stall_ns) == sampled_stalls(trace, schedule)
    assert got.makespan_ns >= least.makespan_lb_ns
    assert got.latency_mean_ns >= least.latency_mean_lb_ns
    assert got.missed_deadlines >= least.missed_deadlines_lb
    assert got.bytes_moved >= least.bytes_lb_each_once
    assert got.busy_fraction <= least.busy_fraction_ub + 1e-9
    if got.missed_deadlines == 0:
        assert got.bytes_moved >= least.bytes_lb_all_deadlines_met
        assert least.all_deadlines_feasible_for_compute_alone


@settings(deadline=None, max_examples=60)
@given(trace=traces())
def test_the_simple_policies_and_their_replays_are_right_schedules(trace: Case) -> None:
    for name, policy in policies(trace).items():
        schedule = simulate(trace, policy)
        assert check(trace, schedule) == [], name
        if name != "oldest_drain_stream":
            gate = StepGate(trace) if name == "barrier" else None
            replayed = simulate(trace, PrefetchReplay(trace, schedule, gate))
            assert check(trace, replayed) == [], name
            assert sorted(visit.jobs for visit in replayed.visits) == sorted(visit.jobs for visit in schedule.visits)


def test_a_policy_is_told_of_each_thing_when_it_happens_and_of_nothing_before() -> None:
    trace = case([job(0, 0, 2, 4, announced_s=1), job(1, 1, 3, 1, announced_s=0)])
    policy = Planned(streams)
    simulate(trace, policy)
    first, second = trace.jobs
    assert policy.told == [
        (0, Announced(0, 1, 2)),
        (S, Announced(1, 0, 5)),
        (2 * S, Arrived(1, first)),
        (3 * S, Arrived(0, second)),
        (int(5.5 * S), LinkReleased(0)),
        (int(6.5 * S), VisitEnded(0, 0, (0,))),
        (int(8.5 * S), LinkReleased(0)),
        (int(8.75 * S), VisitEnded(0, 1, (1,))),
    ]


def test_at_one_instant_ends_are_told_before_announcements_and_those_before_arrivals() -> None:
    trace = case([job(0, 0, 0, 1), job(1, 0, 2, 1, announced_s=2)])

    def plan(now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        if now_ns == 0:
            yield Copy(0, 0)
        elif now_ns >= 2 * S and fleet.waiting and fleet.devices[0].visit is None:
            yield Visit(0, 0, tuple(fleet.waiting))

    policy = Planned(plan)
    schedule = simulate(trace, policy)
    assert [type(event) for t_ns, event in policy.told if t_ns == 2 * S] == [CopyEnded, Announced, Arrived]
    assert schedule.visits[0].jobs == (0, 1)


def test_a_generator_finds_each_of_its_decisions_carried_out() -> None:
    found: list[int] = []

    def plan(now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        if now_ns == 0:
            yield Copy(0, 0)
            found.append(fleet.devices[0].free_bytes)
        elif fleet.waiting and not fleet.missing(0, 0):
            yield Visit(0, 0, tuple(fleet.waiting))
            found.append(len(fleet.waiting))
            yield Copy(0, 1)

    simulate(case([job(0, 0)]), Planned(plan))
    assert found == [4, 0]


def test_rollouts_that_start_together_are_not_announced_in_the_order_of_their_arrivals() -> None:
    keys = rollout_keys([job(id, 0, arrival_s=id) for id in range(16)])
    assert sorted(keys) == list(range(16))
    assert keys != list(range(16)) and keys != list(range(16))[::-1]


def test_a_policy_is_asked_at_time_0_and_when_it_wanted_to_be_woken_and_not_in_between() -> None:
    trace = case([job(0, 0, 5)])

    def plan(now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        if now_ns == S:
            yield Wake(4 * S)
        elif now_ns < S:
            yield Wake(S)
        else:
            yield from streams(now_ns, events, fleet)

    policy = Planned(plan)
    simulate(trace, policy)
    assert policy.asked_ns == [0, S, 4 * S, 5 * S, 7 * S, int(7.25 * S)]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (lambda now_ns, events, fleet: [], "waits for ever: 1 jobs are not done"),
        (lambda now_ns, events, fleet: [Wake(now_ns)], "wake at 0 ns"),
        (lambda now_ns, events, fleet: [Visit(0, 0, (0,))], r"objects \[0\] are not resident"),
        (lambda now_ns, events, fleet: [Copy(0, 0), Copy(0, 1)], "link 0 is busy"),
    ],
)
def test_an_illegal_answer_stops_the_simulation_with_its_reason(plan: Plan, said: str) -> None:
    with pytest.raises(IllegalDecision, match=said):
        simulate(case([job(0, 0)]), Planned(plan))


def test_the_barrier_serves_a_step_only_when_all_of_it_arrived_and_the_step_before_is_done() -> None:
    trace = case([job(0, 0, 0, 1, step=0), job(1, 0, 1, 1, step=1), job(2, 0, 6, 1, step=0), job(3, 0, 7, 1, step=1)])
    schedule = simulate(trace, policies(trace)["barrier"])
    assert [(visit.jobs, visit.start_ns) for visit in schedule.visits] == [((0, 2), 8 * S), ((1, 3), 10 * S)]
