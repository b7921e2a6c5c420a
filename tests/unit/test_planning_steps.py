"""Work in steps: the order inside a step is free, and some of it may wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.teacher_manager.planning.ages import Alone, Work
from distill.teacher_manager.planning.room import Room
from distill.teacher_manager.planning.step_search import search
from distill.teacher_manager.planning.steps import StepPlanner, StepTurn
from tests.golden.scheduling.planned import ALL, play_steps
from tests.golden.scheduling.steps import least_cost

Steps = Sequence[Mapping[int, int]]


def planner(room: Room, steps: Steps, *, count: int | None = None) -> StepPlanner:
    made = StepPlanner(room, count)
    for step, work in enumerate(steps):
        made.announce(step, work)
    return made


def equal(teachers: int, slots: int) -> Room:
    return Room((1,) * teachers, (1,) * teachers, slots)


def at_once(*teachers: int) -> dict[int, int]:
    return dict.fromkeys(teachers, 0)


def loads(turn: StepTurn) -> int:
    return len(turn.passing) + len(turn.loaded)


def test_residents_are_served_first_and_the_last_ones_loaded_stay() -> None:
    steps = planner(equal(3, 2), [at_once(0, 1, 2)] * 2, count=2)
    first = steps.next()
    assert (first.hits, loads(first), len(first.loaded)) == ((), 3, 2)
    stayed = steps.residents
    second = steps.next()
    assert (set(second.hits), loads(second)) == (stayed, 1)


@pytest.mark.parametrize(("teachers", "slots"), [(5, 1), (5, 3), (8, 7), (12, 5)])
def test_each_step_after_the_first_loads_only_those_that_do_not_fit(teachers: int, slots: int) -> None:
    steps = StepPlanner(equal(teachers, slots))
    counts: list[int] = []
    for step in range(4):
        steps.announce(step, at_once(*range(teachers)))
        counts.append(loads(steps.next()))
    assert counts == [teachers] + 3 * [teachers - slots]


def test_one_that_stays_all_through_leaves_room_for_each_that_passes() -> None:
    """Teacher 0 (3 bytes) would be needed again, but 1 (4 of 6 bytes) has to pass in between."""
    room = Room((3, 4), (9, 1), 6)
    steps = planner(room, [at_once(0), at_once(1), at_once(0)], count=3)
    turns = [steps.next() for _ in range(3)]
    assert turns[1].leaving == (0,)
    assert [loads(turn) for turn in turns] == [1, 1, 1]


def test_work_waits_where_that_saves_a_load() -> None:
    """One slot. At once: 0, 1, then 1 is there and 0 comes again. With 0 waiting: 1, then 1 is there and 0 comes."""
    steps = planner(equal(2, 1), [{0: 1, 1: 0}, {0: 0, 1: 0}], count=2)
    first, second = steps.next(), steps.next()
    assert (first.passing + first.loaded, first.hits) == ((1,), ())
    assert (second.passing + second.loaded, second.hits) == ((0,), (1,))


def test_waiting_work_is_served_at_the_latest_when_it_is_due() -> None:
    steps = planner(Room((1, 1), (1, 1), 1), [{0: 2}, {1: 0}, {1: 0}], count=3)
    served: dict[int, list[int]] = {0: [], 1: []}
    for step in range(3):
        turn = steps.next()
        for teacher in (*turn.hits, *turn.passing, *turn.loaded):
            served[teacher].append(step)
    assert served[1] == [1, 2]
    assert len(served[0]) == 1


def test_no_work_waits_beyond_the_last_step() -> None:
    steps = planner(equal(1, 1), [{0: 5}], count=1)
    assert loads(steps.next()) == 1


def test_of_two_works_of_one_teacher_the_strictest_counts() -> None:
    steps = StepPlanner(equal(1, 1))
    steps.announce(0, {0: 3})
    steps.announce(0, {0: 0})
    assert loads(steps.next()) == 1


def test_new_work_that_may_not_wait_hastens_work_that_waits() -> None:
    steps = StepPlanner(equal(2, 1))
    steps.announce(0, {0: 2, 1: 0})
    steps.announce(1, {0: 0, 1: 0})
    first = steps.next()
    assert 0 not in first.passing + first.loaded
    steps.announce(2, {1: 0})
    second = steps.next()
    assert second.hits == (1,)
    assert second.passing + second.loaded == (0,)


def test_work_for_a_step_that_is_over_is_refused() -> None:
    steps = planner(equal(1, 1), [at_once(0)])
    steps.next()
    with pytest.raises(ConfigError, match="work for step 0 was announced in step 1"):
        steps.announce(0, at_once(0))


def test_what_was_needed_more_often_stays_for_steps_that_are_not_announced() -> None:
    steps = planner(Room((1, 1, 1), (10, 10, 10), 2), [at_once(0), at_once(0, 1), at_once(0)])
    for _ in range(3):
        steps.next()
    assert steps.residents == {0, 1}
    steps.announce(3, at_once(0, 2))
    assert steps.next().leaving == (1,)


def test_a_plan_is_called_the_best_only_if_nothing_was_given_up() -> None:
    room = Room(tuple(range(3, 13)), tuple((7 * k) % 11 + 1 for k in range(10)), 30)
    steps = [{teacher: (teacher * step) % 3 for teacher in range(10) if (teacher + step) % 4} for step in range(6)]
    short, long = search(room, [], steps, limit=0), search(room, [], steps)
    assert not short.exact
    assert long.exact
    assert short.cost is not None
    assert long.cost is not None
    assert long.cost <= short.cost


def test_a_wider_search_finds_what_a_narrow_one_gave_up() -> None:
    room = Room((5, 2, 7, 6, 5, 6, 7), (2, 3, 4, 7, 8, 7, 8), 16)
    steps = [
        {0: 2, 2: 1, 3: 2, 4: 1, 5: 0},
        {0: 2, 1: 2, 2: 2, 3: 0, 5: 0, 6: 0},
        {0: 1, 1: 2, 2: 1, 3: 0, 4: 1, 5: 0, 6: 1},
        {0: 0, 2: 1, 4: 0, 5: 2},
        {0: 2, 1: 0, 2: 1, 4: 1, 5: 0},
        {0: 0, 1: 0, 3: 0, 6: 1},
    ]
    assert (search(room, [], steps, limit=0).cost, search(room, [], steps).cost) == (71, 70)


def test_a_narrow_search_finds_a_plan_although_nearly_every_choice_leaves_no_room() -> None:
    """All twelve that are there would be needed again, but the large one has to pass alone."""
    room = Room((1,) * 12 + (12,), tuple(range(10, 23)), 12)
    small = at_once(*range(12))
    found = search(room, range(12), [small, at_once(12), small], limit=0)
    assert found.cost == sum(range(10, 23))


def test_alone_a_teacher_waits_for_its_next_work_or_pays_for_its_bytes() -> None:
    """Cost 10, 2 bytes. Work at steps 0 (may wait for one) and 1. Staying over boundary 0 costs 2 * price."""
    room, work = Room((2,), (10,), 2), Work.of([{0: 1}, {0: 0}], 1)
    free = Alone.of(room, work, np.zeros(1, dtype=np.int64), np.array([50.0, 0.0]))
    assert free.total(np.array([False]), work) == 10  # waits
    work = Work.of([{0: 0}, {0: 0}], 1)
    dear = Alone.of(room, work, np.zeros(1, dtype=np.int64), np.array([50.0, 0.0]))
    assert dear.total(np.array([False]), work) == 20  # two loads
    cheap = Alone.of(room, work, np.zeros(1, dtype=np.int64), np.array([3.0, 0.0]))
    assert cheap.total(np.array([False]), work) == 16  # a load, and 2 bytes at 3
    assert cheap.stays(np.array([False]), work)[:, 0].tolist() == [True, False]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Room, list[dict[int, int]]]:
    teachers = draw(st.integers(1, 5))
    most = draw(st.sampled_from([1, 9]))  # all alike, or not
    numbers = st.lists(st.integers(1, most), min_size=teachers, max_size=teachers)
    size, cost = draw(numbers), draw(numbers)
    room = Room(tuple(size), tuple(cost), max(size) + draw(st.integers(0, 2 * most)))
    work = st.dictionaries(st.integers(0, teachers - 1), st.integers(0, 2))
    return room, draw(st.lists(work, min_size=1, max_size=6))


def optimum(room: Room, steps: Steps) -> int:
    jobs = [(teacher, step, wait) for step, work in enumerate(steps) for teacher, wait in work.items()]
    return least_cost(room.size, room.cost, room.budget, len(steps), jobs)


@given(problems())
@settings(max_examples=50, deadline=None)
def test_with_all_announced_the_loads_cost_the_optimum(problem: tuple[Room, list[dict[int, int]]]) -> None:
    room, steps = problem
    played = play_steps(room, steps, ALL)
    assert played.faults == []
    assert played.proven
    assert played.cost == optimum(room, steps)


@given(problems(), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_whatever_is_announced_all_is_served_in_time_within_the_budget(
    problem: tuple[Room, list[dict[int, int]]], ahead: int
) -> None:
    room, steps = problem
    played = play_steps(room, steps, ahead)
    assert played.faults == []
    assert played.cost >= optimum(room, steps)
