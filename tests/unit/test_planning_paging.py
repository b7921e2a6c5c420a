"""Visits in a fixed order: what goes, what stays, what is streamed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.teacher_manager.planning.intervals import plan_stays
from distill.teacher_manager.planning.paging import Mode, Pager
from distill.teacher_manager.planning.prices import Floats, ascend
from distill.teacher_manager.planning.room import Room
from tests.golden.scheduling.paging import belady_loads, least_cost, oldest_out_loads
from tests.golden.scheduling.planned import ALL, play_visits


def pager(room: Room, visits: list[int], *, last: bool = True) -> Pager:
    made = Pager(room)
    made.announce(visits, last=last)
    return made


def equal(teachers: int, slots: int) -> Room:
    return Room((1,) * teachers, (1,) * teachers, slots)


def test_of_equal_teachers_the_farthest_announced_use_goes() -> None:
    turns = pager(equal(3, 2), [0, 1, 2, 0, 1])
    assert [turns.serve().evicted for _ in range(4)] == [(), (), (1,), ()]
    assert turns.serve().mode is Mode.LOAD
    assert turns.residents == {0, 1}


def test_a_use_that_is_not_announced_is_the_farthest_and_the_rarest_teacher_goes() -> None:
    turns = pager(equal(4, 3), [0, 0, 1, 2, 3, 2])
    for _ in range(4):
        turns.serve()
    assert turns.serve().evicted == (1,)


def test_the_dear_teacher_stays_although_the_cheap_one_is_needed_sooner() -> None:
    """0 and 1 cannot both stay while 2 is served: keeping 1 saves 5, keeping 0 saves 1."""
    turns = pager(Room((1, 1, 1), (1, 5, 1), 2), [0, 1, 2, 0, 1])
    modes = [(turn.mode, turn.evicted) for turn in (turns.serve() for _ in range(5))]
    assert modes == [
        (Mode.LOAD, ()),
        (Mode.LOAD, ()),
        (Mode.LOAD, (0,)),
        (Mode.LOAD, (2,)),
        (Mode.HIT, ()),
    ]


def test_two_small_teachers_stay_rather_than_a_large_one_that_costs_less() -> None:
    room = Room((4, 2, 2, 4), (5, 3, 3, 5), 8)
    turns = pager(room, [0, 1, 2, 3, 1, 2, 0])
    assert sum(room.cost[turn.teacher] for turn in (turns.serve() for _ in range(7)) if turn.mode is not Mode.HIT) == 21


def test_what_is_used_once_is_streamed_past_the_residents() -> None:
    room = Room((3, 3, 6), (3, 3, 6), 7, stream_size=(1, 1, 1))
    turns = pager(room, [0, 1, 2, 0, 1])
    modes = [turns.serve().mode for _ in range(5)]
    assert modes == [Mode.LOAD, Mode.LOAD, Mode.STREAM, Mode.HIT, Mode.HIT]


def test_a_teacher_larger_than_the_budget_is_streamed() -> None:
    turn = pager(Room((9, 1), (9, 1), 4, stream_size=(2, 1)), [0]).serve()
    assert turn.mode is Mode.STREAM


def test_a_teacher_that_never_fits_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="teacher 1 needs 9 bytes, the budget is 4"):
        Room((1, 9), (1, 1), 4)


def test_a_dear_teacher_is_kept_for_a_use_that_is_not_announced_yet() -> None:
    """Teacher 0 came every third visit so far; the two announced visits are cheap."""
    room = Room((1, 1, 1, 1), (50, 1, 1, 1), 2)
    turns = pager(room, [0, 1, 2, 0, 1, 2, 0, 1, 2], last=False)
    for _ in range(8):
        turns.serve()
    turns.announce([3, 1])
    for _ in range(3):
        turns.serve()
    assert 0 in turns.residents


def test_one_just_loaded_stays_for_a_use_that_is_not_announced_beside_one_that_stays_too() -> None:
    assert plan_stays(Room((3, 3), (3, 3), 6), [0], [1], {0: 3, 1: 3}).after == (True,)
    assert plan_stays(Room((3, 3), (3, 3), 6), [0], [1], {0: 3, 1: 3}).residents == {0}


def test_nobody_is_kept_after_the_last_visit() -> None:
    stays = plan_stays(Room((1, 1), (1, 1), 2), [0], [1, 1], {})
    assert (stays.residents, stays.after) == (frozenset(), (True, False))


def test_what_it_is_worth_to_be_there_in_the_end_decides_who_stays() -> None:
    room = Room((1, 1, 1), (1, 1, 1), 2)
    assert plan_stays(room, [0, 1], [2], {0: 2, 1: 3}).residents == {1}
    assert plan_stays(room, [0, 1], [2], {0: 3, 1: 2}).residents == {0}


def test_more_than_64_teachers_are_told_apart() -> None:
    """Teachers 1 and 65 would share a bit of one word: both stay, beside 129, and 2 does not fit."""
    room = Room((1,) * 130, (1,) * 130, 4)
    assert plan_stays(room, [1, 65, 129, 2], [0], {1: 5, 65: 5, 129: 5, 2: 1}).residents == {1, 65, 129}
    assert plan_stays(room, [1, 65, 129, 2], [0, 65, 1], {}).after == (False, False, False)


@pytest.mark.parametrize(("size", "cost"), [((1, 0), (1, 1)), ((1, 1), (1,))])
def test_a_size_of_nothing_and_a_missing_cost_are_refused(size: tuple[int, ...], cost: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="teachers with"):
        Room(size, cost, 4)


def test_a_plan_that_was_cut_is_not_called_the_best() -> None:
    room, visits = Room((2, 3, 4, 5), (2, 7, 4, 9), 9), [0, 1, 2, 3] * 4
    assert plan_stays(room, [], visits, {}, width=256).exact
    assert not plan_stays(room, [], visits, {}, width=1).exact


def test_prices_rise_until_as_much_is_wanted_as_there_is() -> None:
    """The slope of 10 + 4 p - p^2 / 2 is 4 - p: the maximum is at 4. The second price only does harm."""

    def dual(prices: Floats) -> tuple[float, Floats]:
        price, idle = prices
        return 10 + 4 * price - price**2 / 2 - 3 * idle, np.array([4 - price, -3.0])

    assert ascend(dual, 2) == pytest.approx([4.0, 0.0], abs=1e-2)


@st.composite
def rooms(draw: st.DrawFn, most: int = 5) -> Room:
    teachers = draw(st.integers(1, most))
    numbers = st.lists(st.integers(1, 9), min_size=teachers, max_size=teachers)
    size, cost = draw(numbers), draw(numbers)
    streamed = draw(st.booleans())
    part = tuple((bytes_ + 2) // 3 for bytes_ in size)
    return Room(tuple(size), tuple(cost), max(size) + draw(st.integers(0, 9)), part if streamed else None)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Room, list[int]]:
    room = draw(rooms())
    return room, draw(st.lists(st.integers(0, len(room.size) - 1), max_size=14))


@given(orders())
@settings(max_examples=60, deadline=None)
def test_with_all_announced_a_few_teachers_cost_the_optimum(order: tuple[Room, list[int]]) -> None:
    room, visits = order
    played = play_visits(room, visits, ALL)
    assert played.faults == []
    assert played.proven
    assert played.cost == least_cost(room.size, room.cost, room.budget, visits, room.stream_size)


@given(orders(), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_whatever_is_announced_the_budget_holds_and_no_optimum_is_beaten(
    order: tuple[Room, list[int]], ahead: int
) -> None:
    room, visits = order
    played = play_visits(room, visits, ahead)
    assert played.faults == []
    assert played.cost >= least_cost(room.size, room.cost, room.budget, visits, room.stream_size)


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 6))
@settings(deadline=None)
def test_equal_teachers_are_never_loaded_more_often_than_with_lru(visits: list[int], slots: int) -> None:
    played = play_visits(equal(7, slots), visits, ALL)
    assert played.cost == belady_loads(visits, slots) <= oldest_out_loads(visits, slots, touch=True)
