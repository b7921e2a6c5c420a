"""What the scheduler does for real servers: batches, turns, devices that hold one object, speeds that change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.teacher_manager.planning.outlook import Outlook
from distill.teacher_manager.planning.policy import IndexPolicy
from distill.teacher_manager.planning.serving import visit_jobs
from distill.teacher_manager.planning.settings import TURN_COPIES, Settings
from distill.teacher_manager.timeline.case import Case, Device, Job, Kind, Link, System, Teacher
from distill.teacher_manager.timeline.checker import check
from distill.teacher_manager.timeline.decisions import (
    Announced,
    Arrived,
    Copy,
    CopyEnded,
    Decision,
    DeviceBack,
    DeviceLost,
    Event,
    Evict,
    Stream,
    Visit,
    VisitEnded,
    Withdrawn,
)
from distill.teacher_manager.timeline.fleet import Fleet
from distill.teacher_manager.timeline.schedule import CopyRow, Schedule
from distill.teacher_manager.timeline.simulator import simulate
from tests.builders_timeline import S, case, job, system, teacher


def fixed(id: int, size: int = 4) -> Teacher:
    """It cannot be streamed."""
    return msgspec.structs.replace(teacher(id, size), can_stream=False)


def one_object(of: System) -> System:
    return replace(of, devices=tuple(msgspec.structs.replace(each, holds_one=True) for each in of.devices))


def decided(policy: IndexPolicy, fleet: Fleet, now_ns: int, *events: Event) -> list[Decision]:
    """Arrivals are entered in the fleet first, decisions as they come."""
    for event in events:
        if isinstance(event, Arrived):
            fleet.arrive(event.job)
    made: list[Decision] = []
    for decision in policy.decide(now_ns, events, fleet):
        made.append(decision)
        match decision:
            case Copy():
                fleet.start_copy(decision.device, decision.item, now_ns)
            case Visit():
                fleet.start_visit(decision.device, decision.teacher, decision.jobs, now_ns)
            case _:
                pass
    return made


def queue(jobs: Sequence[tuple[Job, int]], visit_tokens: int) -> Outlook:
    outlook = Outlook(system(), Settings(visit_tokens=visit_tokens))
    for each, group in jobs:
        outlook.demand.arrive(Arrived(each.id, each, group))
    return outlook


def visited(visit_tokens: int, *, idle: int = 1, first: int = 0) -> list[int]:
    """Five jobs of 2 tokens; 0 and 3 share a prompt, 4 and 1 share another one and 4 has the first deadline."""
    groups = {0: 7, 1: 5, 2: -1, 3: 7, 4: 5}
    jobs = [(Job(id, 0, 0, 0, 0, 2, 2, (3 if id == 4 else 10 + id) * S), group) for id, group in groups.items()]
    return [each.id for each in visit_jobs(queue(jobs, visit_tokens), jobs[first][0], idle)]


def test_a_visit_takes_the_group_of_its_first_job_and_then_the_groups_by_their_deadlines() -> None:
    assert visited(100) == [0, 3, 1, 4, 2]
    assert visited(4) == [0, 3]
    assert visited(6) == [0, 3, 1]
    assert visited(4, first=2) == [2, 1]


def test_a_visit_is_one_job_without_a_token_bound_or_where_one_is_enough() -> None:
    assert [visited(0), visited(1), visited(2), visited(3)] == [[0]] * 4


def test_of_two_idle_devices_each_takes_half_the_queue() -> None:
    assert visited(100, idle=2) == [0, 3]  # 10 tokens: 5 for each
    assert visited(100, idle=5) == [0]


def test_what_is_too_long_is_left_out_and_what_is_behind_it_is_not() -> None:
    jobs = [(job(0, 0, tokens=1), -1), (job(1, 0, tokens=9), -1), (job(2, 0, tokens=3), -1)]
    assert [each.id for each in visit_jobs(queue(jobs, 5), jobs[0][0], 1)] == [0, 2]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 2), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_a_batch_is_the_same_in_whatever_order_its_jobs_came(
    rows: list[tuple[int, int, int]], visit_tokens: int, dice: random.Random
) -> None:
    jobs = [(Job(id, 0, 0, 0, 0, 1, tokens, due * S), group) for id, (tokens, group, due) in enumerate(rows)]
    shuffled = list(jobs)
    dice.shuffle(shuffled)
    chosen = visit_jobs(queue(jobs, visit_tokens), jobs[0][0], 1)
    assert visit_jobs(queue(shuffled, visit_tokens), jobs[0][0], 1) == chosen
    assert jobs[0][0] in chosen and len({each.id for each in chosen}) == len(chosen)
    assert sum(each.tokens for each in chosen) <= max(visit_tokens, jobs[0][0].tokens)


def test_waiting_jobs_of_a_teacher_are_served_in_one_visit() -> None:
    of = case([job(id, 0, arrival_s=2) for id in range(4)])
    schedule = simulate(of, IndexPolicy(of.system, Settings(visit_tokens=3)))
    assert [len(visit.jobs) for visit in schedule.visits] == [3, 1]


def two_full_queues(copies: int) -> Case:
    """Copies take 2 s. For `copies` lengths of one, each second brings a job of 1 s to teacher 0 and to teacher 1."""
    jobs = [
        Job(2 * second + whose, whose, 0, 0, second * S, 1, 1, (second + 1) * S)
        for second in range(2 * copies)
        for whose in (0, 1)
    ]
    return case(jobs, system([fixed(0), fixed(1)], budget=4))


def longest_turn_s(schedule: Schedule) -> float:
    """From a copy to the next: nothing else ends a turn."""
    starts = [copy.start_ns for copy in schedule.copies]
    return max(after - before for before, after in pairwise(starts)) / S


@pytest.mark.parametrize("holds_one", [False, True])
def test_a_queue_that_never_empties_gives_its_device_up_after_its_turn(holds_one: bool) -> None:
    """All deadlines are missed, so that they call for nobody."""
    of = two_full_queues(64)
    of = replace(of, system=one_object(of.system)) if holds_one else of
    never = simulate(of, IndexPolicy(of.system, Settings()))
    assert longest_turn_s(never) >= 100
    turns = simulate(of, IndexPolicy(of.system, Settings.for_runs(visit_tokens=4)))
    assert longest_turn_s(turns) <= 2 * (2 * TURN_COPIES + 2 + 4)
    copying_s = sum(copy.end_ns - copy.start_ns for copy in turns.copies) / S
    assert copying_s <= 0.2 * turns.visits[-1].end_ns / S


def test_a_device_that_holds_one_object_is_emptied_before_the_next_comes() -> None:
    """Both would fit. The copy waits for the end of the visit, as nothing is copied beside one."""
    of = one_object(system(budget=100))
    schedule = simulate(case([job(0, 0, 2, tokens=3), job(1, 1, 2, tokens=3)], of), IndexPolicy(of))
    first, second = schedule.copies
    assert [(each.item, each.t_ns) for each in schedule.evictions] == [(first.item, 5 * S)]
    assert (first.start_ns, second.start_ns) == (0, 5 * S)


def test_a_teacher_that_fits_behind_the_last_of_many_links_is_brought_there() -> None:
    """An arrival is offered to eight links; the teacher fits behind the twelfth alone."""
    devices = tuple(Device(id, 8 if id == 11 else 2, 2, id) for id in range(12))
    large = fixed(0, 8)
    of = System(devices, tuple(Link(id, 2) for id in range(12)), None, (large,))
    schedule = simulate(case([job(0, 0, 5, announced_s=5)], of), IndexPolicy(of))
    assert [visit.device for visit in schedule.visits] == [11]


def test_teachers_that_wait_for_a_lost_device_stand_in_nobodys_way() -> None:
    """Twenty large teachers fit on device 0 alone. The small one behind them comes to device 1."""
    large = [fixed(id, 8) for id in range(20)]
    of = System((Device(0, 8, 2, 0), Device(1, 4, 2, 1)), (Link(0, 2), Link(1, 2)), None, (*large, fixed(20)))
    policy, fleet = IndexPolicy(of), Fleet(of)
    fleet.lose(0, 0)
    arrivals = [Arrived(id, job(id, id)) for id in range(21)]
    assert decided(policy, fleet, 0, DeviceLost(0), *arrivals)[0] == Copy(1, 20)
    fleet.restore(0)
    brought = [each for each in decided(policy, fleet, 1, DeviceBack(0)) if isinstance(each, Copy)]
    assert [each.device for each in brought] == [0]


def test_teachers_that_wait_for_the_only_large_device_do_not_keep_a_small_one_idle() -> None:
    large = [fixed(id, 8) for id in range(20)]
    of = System((Device(0, 8, 2, 0), Device(1, 4, 2, 1)), (Link(0, 2), Link(1, 2)), None, (*large, fixed(20)))
    made = decided(IndexPolicy(of), Fleet(of), 0, *[Arrived(id, job(id, id)) for id in range(21)])
    assert Copy(1, 20) in made


def test_a_device_whose_turn_is_over_goes_on_if_the_other_teacher_comes_elsewhere() -> None:
    """Device 0 holds teacher 0. When teacher 1 has waited long enough, device 1 is back and takes it."""
    of = system([fixed(0), fixed(1)], budget=4, device_links=(0, 0))
    policy, fleet = IndexPolicy(of, Settings(turn_copies=1.0)), Fleet(of)
    fleet.lose(1, 0)
    assert Copy(0, 0) in decided(policy, fleet, 0, DeviceLost(1), Arrived(0, job(0, 0)), Arrived(1, job(1, 0)))
    fleet.end_copy(CopyRow(0, 0, 0, 0, 2 * S, 0), 2 * S)
    late = Arrived(2, replace_deadline(job(2, 1), 999))
    assert decided(policy, fleet, 2 * S, CopyEnded(0, 0, 0), late) == [Visit(0, 0, (0,))]
    fleet.end_visit(0, 50 * S)
    fleet.restore(1)
    made = decided(policy, fleet, 50 * S, VisitEnded(0, 0, (0,)), DeviceBack(1))
    assert made == [Copy(1, 1), Visit(0, 0, (1,))]


def test_the_jobs_and_the_teacher_of_a_lost_device_go_to_another_one() -> None:
    of = system([fixed(0)], budget=4, device_links=(0, 1))
    policy, fleet = IndexPolicy(of), Fleet(of)
    first = decided(policy, fleet, 0, Arrived(0, job(0, 0)))
    device = next(each.device for each in first if isinstance(each, Copy))
    fleet.end_copy(CopyRow(device, device, 0, 0, 2 * S, 0), 2 * S)
    assert decided(policy, fleet, 2 * S, CopyEnded(device, device, 0)) == [Visit(device, 0, (0,))]
    assert fleet.lose(device, 3 * S) == (0,)
    assert Copy(1 - device, 0) in decided(policy, fleet, 3 * S, DeviceLost(device))


def test_a_queue_is_not_held_for_a_rollout_that_was_withdrawn() -> None:
    of = system([fixed(0)], budget=4)
    policy, fleet = IndexPolicy(of, Settings(patience_copies=16, announced_share=0.0)), Fleet(of)
    held = decided(policy, fleet, 0, Announced(1, 0, 9), Arrived(0, replace_deadline(job(0, 0), 99)))
    assert not any(isinstance(each, Copy) for each in held)
    assert decided(policy, fleet, S, Withdrawn(1)) == [Copy(0, 0)]


def replace_deadline(of: Job, deadline_s: int) -> Job:
    return msgspec.structs.replace(of, deadline_ns=deadline_s * S)


def test_an_adapter_has_no_home_where_one_object_is_held_and_a_large_teacher_none_where_it_cannot_be_streamed() -> None:
    teachers = [teacher(0, 2, Kind.BASE), teacher(1, 1, Kind.LORA, base=0), teacher(2, 99), teacher(3, 16)]
    assert system(teachers).homeless() == (2,)
    assert one_object(system(teachers)).homeless() == (1, 2, 3)
    teachers[3] = fixed(3, 16)
    teachers[2] = msgspec.structs.replace(teachers[2], stream_bytes=8)
    assert system(teachers).homeless() == (3,)


def test_measured_speeds_change_the_choice_and_nothing_else() -> None:
    """A copy of 2 s is worth 5 s of queued work; one of 200 s is not while more is announced."""
    of = system([fixed(0)], budget=4)
    slow = replace(of, links=(msgspec.structs.replace(of.links[0], bytes_per_s=1),))
    for retimed in (of, slow):
        policy, fleet = IndexPolicy(of), Fleet(of)
        policy.retime(retimed)
        fleet.retime(retimed)
        events = (Announced(1, 0, 9), Arrived(0, replace_deadline(job(0, 0, tokens=5), 99)))
        assert (Copy(0, 0) in decided(policy, fleet, 0, *events)) == (retimed is of)


@pytest.mark.parametrize("what", ["devices", "links", "teachers"])
def test_a_system_of_another_shape_is_no_change_of_speed(what: str) -> None:
    of = system()
    other = {
        "devices": replace(of, devices=(msgspec.structs.replace(of.devices[0], budget_bytes=9),)),
        "links": replace(of, links=(*of.links, Link(1, 2))),
        "teachers": replace(of, teachers=(teacher(0, 5), teacher(1))),
    }[what]
    for each in (IndexPolicy(of), Fleet(of)):
        with pytest.raises(ValueError, match="in more than its speeds"):
            each.retime(other)


def first_decisions(arrivals: Sequence[Arrived], of: System) -> list[Decision]:
    """Teacher 1 is resident and has nothing to do when they come."""
    policy, fleet = IndexPolicy(of, Settings.for_runs(visit_tokens=0)), Fleet(of)
    list(policy.decide(0, [], fleet))
    copy = fleet.start_copy(0, 1, 1)
    policy._outlook.copy_starts(0, 1)  # pyright: ignore[reportPrivateUsage]
    fleet.end_copy(copy, 2 * S)
    list(policy.decide(2 * S, [CopyEnded(0, 0, 1)], fleet))
    for each in arrivals:
        fleet.arrive(each.job)
    found: list[Decision] = []
    for decision in policy.decide(3 * S, arrivals, fleet):
        found.append(decision)
        match decision:
            case Evict(device=device, item=item):
                fleet.evict(device, item, 3 * S)
            case Copy(device=device, item=item):
                fleet.start_copy(device, item, 3 * S)
            case Stream(device=device, teacher=teacher, jobs=jobs):
                fleet.start_stream(device, teacher, jobs, 3 * S)
            case _:
                pass
    return found


def test_work_that_hides_the_reading_is_streamed_unless_a_job_needs_the_teacher_to_be_resident() -> None:
    of = system(budget=4)  # a copy takes 2 s, and one displaces the other
    long = Arrived(0, job(0, 0, 3, tokens=6))
    assert [type(each) for each in first_decisions([long], of)] == [Evict, Stream]
    writes = Arrived(1, job(1, 0, 3), resident=True)
    assert [type(each) for each in first_decisions([long, writes], of)] == [Evict, Copy]


def test_what_has_room_is_copied_and_stays_however_much_work_there_is() -> None:
    of = system(budget=8)
    assert [type(each) for each in first_decisions([Arrived(0, job(0, 0, 3, tokens=6))], of)] == [Copy]


def test_little_work_is_no_reason_to_stream() -> None:
    of = system(budget=4)
    found = first_decisions([Arrived(0, job(0, 0, 3, tokens=1))], of)
    assert Copy in [type(each) for each in found] and Stream not in [type(each) for each in found]


def test_adapters_leave_before_the_base_that_they_stand_on() -> None:
    """Room for base and one adapter, or for the other teacher."""
    stacked = [teacher(0, 4, Kind.BASE), teacher(1, 1, Kind.LORA, base=0), fixed(2, 5)]
    of = system(stacked, budget=6)
    jobs = [job(0, 1, 0, tokens=4), job(1, 2, 20, tokens=4)]
    evicted = [each.item for each in simulate(case(jobs, of), IndexPolicy(of, Settings.for_runs(0))).evictions]
    assert evicted == [1, 0]


def test_the_copy_that_a_long_visit_hides_starts_in_its_middle_though_nothing_happens_then() -> None:
    """Three teachers in the room of two, visits of 10 s, copies of 2 s; jobs of the first two are announced for later,
    so that neither goes before its time. The third comes as late as it still ends with what there is to do."""
    of = system([fixed(0), fixed(1), fixed(2)], budget=8)
    jobs = [job(number, number, tokens=10) for number in range(3)] + [job(3, 0, 100), job(4, 1, 100)]
    patient = [msgspec.structs.replace(each, deadline_ns=999 * S) for each in jobs]
    found = simulate(case(patient, of), IndexPolicy(of, Settings.for_runs(visit_tokens=10)))
    first, second, third = found.visits[:3]
    assert (first.start_ns, first.end_ns) == (2 * S, 12 * S)
    assert second.start_ns == first.end_ns and third.start_ns == second.end_ns == 22 * S
    (copy,) = [copy for copy in found.copies if copy.item == third.teacher]
    assert 19.9 * S < copy.start_ns < copy.end_ns <= 22 * S


ADAPTERS = (teacher(0, 4), *(teacher(id, 1, Kind.LORA, 0) for id in (1, 2, 3)))


def of_adapters(visit_tokens: int) -> Schedule:
    """A base that is a teacher too and three adapters, all of which have room; two jobs of 2 tokens each, after a first
    one of each that has it copied."""
    jobs = [job(id, id, tokens=1) for id in range(4)] + [job(4 + id, id % 4, 60, tokens=2) for id in range(8)]
    of = system(ADAPTERS, budget=7)
    patient = [msgspec.structs.replace(each, deadline_ns=999 * S + each.id) for each in jobs]
    trace = case(patient, of)
    found = simulate(trace, IndexPolicy(of, Settings.for_runs(visit_tokens)))
    assert check(trace, found) == []
    return found


def test_adapters_of_one_base_fill_a_visit_together() -> None:
    late = [visit for visit in of_adapters(16).visits if visit.start_ns >= 60 * S]
    assert [(visit.start_ns, visit.end_ns) for visit in late] == [(60 * S, 76 * S)]
    assert sorted(late[0].jobs) == list(range(4, 12))


def test_a_visit_takes_jobs_of_other_adapters_in_the_room_that_its_own_leave() -> None:
    late = [visit for visit in of_adapters(6).visits if visit.start_ns >= 60 * S]
    own = [sum(id % 4 == visit.teacher for id in visit.jobs) for visit in late]
    assert [len(visit.jobs) for visit in late] == [3, 3, 2] and own == [2, 1, 2]


def test_without_batches_each_visit_is_one_job_of_one_adapter() -> None:
    assert {len(visit.jobs) for visit in of_adapters(0).visits} == {1}


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=16),
    visit_tokens=st.integers(1, 12),
    budget=st.integers(5, 8),
)
def test_a_visit_of_several_adapters_is_legal_keeps_to_its_tokens_and_serves_its_own_teacher_first(
    rows: list[tuple[int, int, int]], visit_tokens: int, budget: int
) -> None:
    of = system(ADAPTERS, budget=budget)
    jobs = [job(id, *row[:2], tokens=row[2]) for id, row in enumerate(sorted(rows, key=lambda row: row[1]))]
    trace = case(jobs, of)
    found = simulate(trace, IndexPolicy(of, Settings.for_runs(visit_tokens)))
    assert check(trace, found) == []
    assert sorted(id for visit in found.visits for id in visit.jobs) == [each.id for each in jobs]
    for visit in found.visits:
        tokens = [jobs[id].tokens for id in visit.jobs]
        assert len(tokens) == 1 or sum(tokens) <= visit_tokens
        own = [jobs[id].teacher == visit.teacher for id in visit.jobs]
        assert own[0] and own == sorted(own, reverse=True)
