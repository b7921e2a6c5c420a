"""The scheduler, one rule at a time on systems small enough to follow by hand, and on random ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distill.teacher_manager.planning.loading import held_until_ns
from distill.teacher_manager.planning.outlook import Outlook
from distill.teacher_manager.planning.policy import IndexPolicy
from distill.teacher_manager.planning.settings import Settings
from distill.teacher_manager.planning.urgency import critical_teacher
from distill.teacher_manager.timeline.case import Case, HostTier, Job, Kind, Teacher
from distill.teacher_manager.timeline.checker import check
from distill.teacher_manager.timeline.decisions import Announced, Arrived
from distill.teacher_manager.timeline.metrics import measure
from distill.teacher_manager.timeline.schedule import Mode, Schedule
from distill.teacher_manager.timeline.simulator import simulate
from tests.builders_timeline import S, case, job, system, teacher


def scheduled(of: Case) -> Schedule:
    schedule = simulate(of, IndexPolicy(of.system))
    assert [str(fault) for fault in check(of, schedule)] == []
    return schedule


def test_an_announced_teacher_is_there_when_its_job_arrives() -> None:
    schedule = scheduled(case([job(0, 0, arrival_s=5)]))
    assert [(copy.item, copy.start_ns) for copy in schedule.copies] == [(0, 0)]
    assert [(visit.start_ns, visit.end_ns) for visit in schedule.visits] == [(5 * S, 6 * S)]


def test_the_next_teacher_comes_while_the_present_one_is_served() -> None:
    """Copies take 2 s. Teacher 1 is copied under the first job of teacher 0 into the free half of the budget."""
    of = case([job(0, 0, 2, tokens=3), job(1, 1, 2, tokens=3)])
    schedule = scheduled(of)
    assert measure(of, schedule).exposed_stall_ns == 0
    assert [visit.mode for visit in schedule.visits] == [Mode.RESIDENT, Mode.RESIDENT]


def test_a_teacher_larger_than_the_budget_is_streamed() -> None:
    """16 bytes in 8; its two buffers of 4 of its 4 layers take exactly 8."""
    of = case([job(0, 0, tokens=10)], system([teacher(0, size=16)], budget=8))
    schedule = scheduled(of)
    assert schedule.copies == []
    assert [(visit.mode, visit.start_ns, visit.end_ns) for visit in schedule.visits] == [(Mode.STREAM, 0, 12 * S)]


def test_an_endangered_deadline_goes_before_shorter_jobs() -> None:
    """Both jobs wait for the same copy; job 1 is longer but could not wait for job 0."""
    long = Job(1, 0, 0, 0, 0, 5, 5, deadline_ns=9 * S)
    schedule = scheduled(case([job(0, 0, tokens=3), long], system([teacher(0)], budget=4)))
    served = [id for visit in schedule.visits for id in visit.jobs]
    assert served.index(1) < served.index(0)


def test_what_has_no_work_left_makes_room() -> None:
    """One slot: teacher 1 displaces teacher 0, for which nothing more is announced."""
    schedule = scheduled(case([job(0, 0, 2), job(1, 1, 4, announced_s=3)], system(budget=4)))
    assert [(each.item, each.t_ns) for each in schedule.evictions] == [(0, 3 * S)]
    assert schedule.visits[-1].teacher == 1


def test_an_adapter_comes_after_its_base_and_both_stay_for_the_next_adapter() -> None:
    teachers = [teacher(0, 8, Kind.BASE), teacher(1, 1, Kind.LORA, base=0), teacher(2, 1, Kind.LORA, base=0)]
    schedule = scheduled(case([job(0, 1), job(1, 2)], system(teachers, budget=10)))
    assert sorted(copy.item for copy in schedule.copies) == [0, 1, 2]
    assert schedule.copies[0].item == 0


def test_a_small_queue_waits_for_the_rollouts_that_will_lengthen_it() -> None:
    """A copy takes 2 s, and 1 s of work is not worth two of them. Without anybody to come it is not held."""
    outlook = Outlook(system(), Settings(worth_copies=2, patience_copies=16))
    outlook.demand.announce(Announced(0, 0, 1))
    outlook.demand.announce(Announced(1, 0, 1))
    outlook.demand.arrive(Arrived(0, job(0, 0, tokens=1)))
    assert held_until_ns(outlook, 0, 0, 2.0) == 5 * S  # deadline 10 s less copy, work and the margin of 2 s
    outlook.demand.arrive(Arrived(1, job(1, 0, tokens=1)))
    assert held_until_ns(outlook, 0, 0, 2.0) == 0


def test_a_queue_behind_another_is_critical_before_its_own_deadline_is_near() -> None:
    """Teachers 0 and 1 have 3 s of work, copies of 2 s and a deadline at 10 s: alone each may start at 7 - 2 = 5 s; one
    after the other the second must start 3 s earlier, and with 2 s of margin the first is critical now."""
    outlook = Outlook(system(), Settings(deadline_margin_s=2))
    for id in (0, 1):
        outlook.demand.announce(Announced(id, id, 3))
        outlook.demand.arrive(Arrived(id, job(id, id, tokens=3)))
        if id == 0:
            assert critical_teacher(outlook, [0], 0) is None
    assert critical_teacher(outlook, [0, 1], 0) is None  # 5 - 3 = 2 s, not under the margin
    outlook.now_ns = S
    assert critical_teacher(outlook, [0, 1], 0) == 0


def test_what_goes_is_worth_least_for_its_bytes() -> None:
    of = system([teacher(0, 4), teacher(1, 2), teacher(2, 6)], budget=8)
    outlook = Outlook(of, Settings())
    for item, size in ((0, 4), (1, 2)):
        outlook.fleet.devices[0].resident[item] = 0
        outlook.fleet.devices[0].free_bytes -= size
    outlook.demand.announce(Announced(0, 0, 3))
    outlook.demand.announce(Announced(1, 1, 2))
    assert outlook.victims(0, 2) == [0]  # 3 s for 4 bytes against 2 s for 2 bytes


def test_two_devices_share_a_long_queue() -> None:
    """A copy takes 2 s and the queue 40 s of work: the second device takes its part."""
    of = case([job(id, 0, tokens=4) for id in range(10)], system([teacher(0)], budget=4, device_links=(0, 1)))
    schedule = scheduled(of)
    assert {visit.device for visit in schedule.visits} == {0, 1}
    assert measure(of, schedule).makespan_ns <= 24 * S


KINDS = st.sampled_from([Kind.DENSE, Kind.MOE])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to five teachers and an adapter, three devices, shared links, sometimes a small host memory."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    teachers: list[Teacher] = [teacher(id, size, draw(KINDS)) for id, size in enumerate(sizes)]
    if draw(st.booleans()):
        teachers += [teacher(len(sizes), 3, Kind.BASE), teacher(len(sizes) + 1, 1, Kind.LORA, base=len(sizes))]
    asked = [each.id for each in teachers if each.kind is not Kind.BASE]
    links = draw(st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1)]))
    host = draw(st.none() | st.integers(4, 12).map(lambda size: HostTier(size, 1)))
    times = sorted(draw(st.lists(st.integers(0, 30), min_size=1, max_size=12)))
    jobs = [
        Job(id, draw(st.sampled_from(asked)), 0, draw(st.integers(0, at)) * S, at * S, 3, draw(st.integers(1, 6)),
            (at + draw(st.integers(1, 40))) * S)
        for id, at in enumerate(times)
    ]  # fmt: skip
    return case(jobs, system(teachers, budget=draw(st.integers(8, 14)), device_links=links, host=host))


@settings(max_examples=300, deadline=None)
@given(of=cases())
def test_every_schedule_is_legal_and_serves_every_job(of: Case) -> None:
    schedule = scheduled(of)
    assert sorted(id for visit in schedule.visits for id in visit.jobs) == [each.id for each in of.jobs]


@settings(max_examples=100, deadline=None)
@given(of=cases())
def test_no_job_starves(of: Case) -> None:
    """After the last arrival there is work for all of it, and a copy of everything that a job needs, in a row."""
    tokens = sum(each.tokens for each in of.jobs)
    copied = sum(sum(of.system.teachers[item].bytes for item in of.system.needs[each.teacher]) for each in of.jobs)
    slowest = 1 if of.system.host else 2
    bound_ns = of.jobs[-1].arrival_ns + 2 * (tokens + copied // slowest + len(of.jobs)) * S
    assert measure(of, scheduled(of)).makespan_ns <= bound_ns
