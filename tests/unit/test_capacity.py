"""What sharing slots will cost: formulas by hand, and stalls that can be told in advance."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.teacher_manager.capacity import (
    changes,
    cheapest,
    expect,
    gigabytes,
    larger,
    load,
    load_limit,
    placement,
    stays_resident,
    swap_s,
    wider,
    with_faster_link,
    with_one_slot_more,
)
from distill.teacher_manager.capacity_loop import UNITS, Demand, draw, run
from distill.teacher_manager.timeline.case import Device, Kind, Link, System, Teacher
from distill.teacher_manager.timeline.checker import check

GB = 10**9
SEEDS = (0,)


def slots(teachers: int, count: int = 1, *, budget: int = GB, streams: bool = False) -> System:
    """Teachers of 1 GB and 5e8 parameters; a link copies 1 GB/s and a slot computes 1e12 FLOP/s: 1 ms a token."""
    return System(
        tuple(Device(slot, budget, 10**12, slot) for slot in range(count)),
        tuple(Link(slot, GB) for slot in range(count)),
        None,
        tuple(Teacher(id, Kind.DENSE, GB, GB // 2, GB // 2, 10, can_stream=streams) for id in range(teachers)),
    )


def asked(teachers: int, *, together: bool = False, **changes: object) -> Demand:
    """A step of 32 samples of 500 tokens: 16 s of work where each sample has one teacher."""
    every = tuple(range(teachers))
    routes = ((every, 1.0),) if together else tuple(((each,), 1 / teachers) for each in every)
    demand = Demand(routes, 32, 32, 500, max_staleness=1, visit_tokens=4096, deadline_s=120.0, step_s=None)
    return replace(demand, **changes)


def test_break_even_and_swaps_are_those_of_the_formulas() -> None:
    system = slots(3)
    # 1e9 bytes x 1e12 FLOP/s / (2 x 1e9 bytes/s x 5e8)
    assert placement(system, 0).break_even_tokens == 1000
    assert placement(with_faster_link(system), 0).break_even_tokens == 500
    assert swap_s(system) == 3.0 and swap_s(with_faster_link(system)) == 1.5


def test_the_limit_of_the_load_is_what_swaps_leave_of_the_deadline() -> None:
    assert load_limit(slots(3), asked(3)) == 1 - 3 / 120
    assert load_limit(slots(8, 2), asked(8)) == 1 - 8 / 240
    assert load_limit(slots(3), asked(3, deadline_s=2.0)) == 0.0
    assert load_limit(slots(3, budget=3 * GB), asked(3)) == 1.0, "nothing is swapped"


def test_the_load_is_the_work_of_a_step_over_the_time_of_the_slots() -> None:
    assert asked(3).work_s(slots(3)) == pytest.approx(16.0)
    assert load(slots(3), asked(3, step_s=20.0)) == pytest.approx(0.8)
    assert load(slots(3, 2), asked(3, step_s=20.0)) == pytest.approx(0.4)
    assert load(slots(3, 2), asked(3)) == 1.0, "as fast as the slots"
    assert load(slots(2), asked(2, together=True, step_s=64.0)) == pytest.approx(0.5), "each sample is scored twice"
    assert asked(2, together=True).shares() == {0: 1.0, 1: 1.0}


def test_objects_stay_where_they_have_room_together() -> None:
    assert not stays_resident(slots(3, 2)) and stays_resident(slots(3, 3))
    assert stays_resident(slots(3, 2, budget=2 * GB)) and not stays_resident(slots(3, budget=3 * GB - 1))
    one_object = [msgspec.structs.replace(each, holds_one=True) for each in slots(3, budget=3 * GB).devices]
    assert not stays_resident(replace(slots(3), devices=tuple(one_object)))


def test_where_all_stay_nothing_stalls_and_a_step_takes_its_work() -> None:
    expected = expect(slots(3, budget=3 * GB), asked(3))
    assert (expected.loads, expected.streams, expected.stall_s, expected.late_share) == (0, 0, 0, 0)
    assert expected.busy_s == pytest.approx(16.0, rel=0.05) and expected.step_s == pytest.approx(16.0, rel=0.05)
    assert cheapest(expected, changes(slots(3, budget=3 * GB), asked(3), expected, SEEDS)) is None


def test_one_swap_a_step_stalls_for_one_copy_and_what_halves_it_is_found() -> None:
    """Two teachers score each sample, one slot holds one of them, and the samples of a step come together: it stays on
    the teacher that it has, copies the other in a second, and begins the next step with that."""
    system, demand = slots(2), asked(2, together=True, max_staleness=0, tokens_per_sample=100)
    expected = expect(system, demand, SEEDS)
    assert expected.loads == 1 and expected.stall_s == pytest.approx(1.0, abs=1e-6)
    assert expected.stall_share == pytest.approx(1 / (1 + expected.busy_s), rel=1e-6)
    tried = {change.name: change for change in changes(system, demand, expected, SEEDS)}
    assert list(tried) == ["slot_gb", "slots", "link", "batch_size"]
    assert tried["slot_gb"].expected.stall_s == 0 and tried["slots"].expected.stall_s == 0
    assert tried["link"].expected.stall_s == pytest.approx(0.5, abs=1e-6)
    assert tried["batch_size"].expected.stall_s == pytest.approx(1.0, abs=1e-6), "for twice the samples"
    best = cheapest(expected, list(tried.values()))
    assert best is not None and best.name == "slot_gb" and "teacher_manager.slot_gb=2:" in best.what


@pytest.mark.parametrize("streams", [False, True])
def test_a_change_that_is_said_to_halve_the_stall_does_so(streams: bool) -> None:
    system, demand = slots(4, streams=streams), asked(4, step_s=20.0)
    expected = expect(system, demand)
    tried = changes(system, demand, expected)
    assert expected.stall_share > 0.01
    again = {
        "slot_gb": expect(wider(system), demand),
        "slots": expect(with_one_slot_more(system), demand),
        "link": expect(with_faster_link(system), demand),
        "batch_size": expect(system, larger(demand)),
    }
    for change in tried:
        assert change.expected == again[change.name]
        assert change.halves == (change.expected.stall_s / change.expected.samples <= expected.stall_s / 32 / 2)
    best = cheapest(expected, tried)
    assert best is (next(change for change in tried if change.halves) if any(each.halves for each in tried) else None)


def test_a_run_that_waits_for_its_teachers_asks_for_no_more() -> None:
    """The student could ask for sixteen times as much as the slot can do."""
    system, demand = slots(3, budget=3 * GB), asked(3, step_s=1.0)
    steps = [draw(demand, 0, step) for step in range(6)]
    case, schedule = run(system, demand, steps)
    assert not check(case, schedule)
    ends = [
        max(visit.end_ns for visit in schedule.visits for id in visit.jobs if case.jobs[id].step == k) for k in range(6)
    ]
    starts = [next(job.announced_ns for job in case.jobs if job.step == step) for step in range(6)]
    assert starts[:2] == [0, GB], "one step may be ahead"
    assert starts[2:] == ends[:4]
    assert expect(system, demand, SEEDS).step_s == pytest.approx(16.0, rel=0.1)


def test_the_samples_of_a_step_are_those_of_the_run() -> None:
    demand = replace(asked(4), routes=(((0,), 0.5), ((1,), 0.25), ((2, 3), 0.25)), batch_size=256, prompts=256)
    units = draw(demand, 0, 0)
    assert len(units) == UNITS and [sum(unit.items == items for unit in units) for items, _ in demand.routes] == [
        16,
        8,
        8,
    ]
    assert sum(unit.tokens for unit in units) == pytest.approx(256 * 500, rel=0.2)
    assert all(1 / 3 <= unit.written <= 1 for unit in units)
    assert draw(demand, 0, 0) == units != draw(demand, 1, 0)
    many = draw(replace(asked(40), batch_size=256, prompts=256), 0, 0)
    assert sorted(unit.items[0] for unit in many) == list(range(40)), "each teacher has its share of each step"
    few = draw(replace(demand, prompts=2), 0, 0)
    assert len({unit.items for unit in few[:16]}) == 1 and len({unit.items for unit in few[16:]}) == 1


def test_a_teacher_that_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="no slot can hold or stream teacher 0"):
        expect(slots(2, budget=GB - 1), asked(2))


@given(st.integers(1, 10**13))
def test_a_budget_that_is_proposed_is_never_too_small(count: int) -> None:
    assert count <= int(float(gigabytes(count)) * 1e9) <= max(count + 2, 1.003 * count)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 200))
def test_what_stays_resident_has_room(sizes: list[int], count: int, budget: int) -> None:
    teachers = [Teacher(id, Kind.DENSE, size, 1, 1, 1) for id, size in enumerate(sizes)]
    system = replace(slots(0, count, budget=budget), teachers=tuple(teachers))
    if stays_resident(system):
        assert sum(sizes) <= count * budget and max(sizes) <= budget
    elif count == 1:
        assert sum(sizes) > budget


def test_adapters_stand_on_a_base() -> None:
    base, small = Teacher(0, Kind.BASE, GB, GB // 2, GB // 2, 10), GB // 100
    adapters = [Teacher(id, Kind.LORA, small, small // 2, small // 2, 10, base=0) for id in (1, 2)]
    system = replace(slots(0, budget=GB + 2 * small), teachers=(base, *adapters))
    assert stays_resident(system) and not stays_resident(replace(system, teachers=(*system.teachers, base)))
    assert swap_s(system) == pytest.approx(1.02)
