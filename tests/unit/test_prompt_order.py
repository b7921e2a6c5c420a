"""The order of a run's prompts: every group has its share of every batch, however the file is sorted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.rollout.order import apportioned, balanced, turns

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=8)


def by_group(sizes: list[int]) -> list[tuple[str]]:
    """The groups of a file that is sorted by group."""
    return [(f"g{index}",) for index, size in enumerate(sizes) for _ in range(size)]


@given(quotas=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_a_group_is_never_a_whole_turn_away_from_its_share(quotas: list[int]) -> None:
    order, earlier = turns(quotas)
    assert Counter(order.tolist()) == dict(enumerate(quotas))
    for group, quota in enumerate(quotas):
        counts = np.cumsum(order == group)
        share = quota * np.arange(1, len(order) + 1) / len(order)
        assert (abs(counts - share) < 1 - 1e-12).all()
        assert earlier[order == group].tolist() == list(range(quota))


@given(sizes=SIZES, seed=st.integers(0, 2**32 - 1), start=st.integers(0, 5000), factor=st.integers(20, 40))
def test_every_batch_has_the_mix_of_the_data_within_a_tenth_though_the_file_is_sorted(
    sizes: list[int], seed: int, start: int, factor: int
) -> None:
    groups, batch = by_group(sizes), factor * len(sizes)
    order = balanced(groups, seed)
    found = Counter(groups[order.row_at(place)][0] for place in range(start, start + batch))
    for index, size in enumerate(sizes):
        target = batch * size / len(groups)
        difference = abs(found[f"g{index}"] - target)
        assert difference < 2
        if target >= 20:
            assert difference <= 0.1 * target


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    start=st.integers(0, 20_000),
)
def test_every_batch_has_the_mix_that_is_asked_for_within_a_tenth(
    sizes: list[int], data: st.DataObject, seed: int, start: int
) -> None:
    shares = data.draw(st.lists(st.floats(0.1, 1.0), min_size=len(sizes), max_size=len(sizes)))
    mix = {f"g{index}": share for index, share in enumerate(shares)}
    groups = by_group(sizes)
    order = balanced(groups, seed, mix)
    batch = 20 * len(sizes)
    found = Counter(groups[order.row_at(place)][0] for place in range(start, start + batch))
    for name, share in mix.items():
        target = batch * share / sum(shares)
        assert abs(found[name] - target) < 2 + batch * 1e-4
        if target >= 21:
            assert abs(found[name] - target) <= 0.1 * target


@given(sizes=SIZES, seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 3))
def test_without_a_mix_every_row_comes_once_an_epoch(sizes: list[int], seed: int, epoch: int) -> None:
    groups = by_group(sizes)
    order = balanced(groups, seed)
    rows = [order.row_at(epoch * len(groups) + place) for place in range(len(groups))]
    assert sorted(rows) == list(range(len(groups)))


def test_a_groups_own_rows_come_equally_often_whatever_the_mix() -> None:
    order = balanced(by_group([3, 100]), seed=1, mix={"g0": 3.0, "g1": 1.0})
    found = Counter(order.row_at(place) for place in range(400))
    assert [found[row] for row in range(3)] == [100, 100, 100]
    assert {found[row] for row in range(3, 103)} == {1}


def test_domains_keep_their_share_within_a_mix() -> None:
    groups = [("math", "algebra")] * 30 + [("math", "sets")] * 10 + [("code", "python")] * 40
    order = balanced(groups, seed=3, mix={"math": 0.8, "code": 0.2})
    found = Counter(groups[order.row_at(place)] for place in range(50, 150))
    assert found == {("math", "algebra"): 60, ("math", "sets"): 20, ("code", "python"): 20}


def test_the_order_is_a_function_of_place_and_seed_alone() -> None:
    groups = by_group([5, 9])
    forwards = [balanced(groups, seed=7).row_at(place) for place in range(60)]
    again = balanced(groups, seed=7)
    assert [again.row_at(place) for place in reversed(range(60))] == forwards[::-1]
    assert [balanced(groups, seed=8).row_at(place) for place in range(60)] != forwards
    assert forwards[:14] != forwards[14:28], "each epoch has an order of its own"


def test_one_group_has_the_order_of_a_plain_shuffle() -> None:
    order = balanced(by_group([50]), seed=5)
    for epoch in range(3):
        expected = np.random.default_rng((5, epoch)).permutation(50)
        assert [order.row_at(epoch * 50 + place) for place in range(50)] == expected.tolist()


@pytest.mark.parametrize(
    ("shares", "quotas"),
    [([0.5, 0.5], [1, 1]), ([0.8, 0.2], [4, 1]), ([1, 1, 1], [3334, 3333, 3333]), ([1, 1e-3], [9990, 10])],
)
def test_shares_become_whole_quotas(shares: list[float], quotas: list[int]) -> None:
    common = int(np.gcd.reduce(quotas))
    assert apportioned(shares) == [quota // common for quota in quotas]
