from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.rollout.admission import Admission


async def started_by_version(admission: Admission, group: int) -> list[int]:
    """Ordinals that may start at the admission's present version."""
    started: list[int] = []
    while admission.capacity > 0:
        started += await admission.next(group)
    return started


@given(
    batch=st.integers(1, 9),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 6),
    group=st.integers(1, 12),
    first=st.integers(0, 3),
)
def test_a_sample_never_lags_more_versions_than_allowed(
    batch: int, staleness: int, steps: int, group: int, first: int
) -> None:
    steps += first
    admission = Admission(batch_size=batch, max_staleness=staleness, total=steps * batch, version=first)
    seen: list[int] = []

    async def drive() -> None:
        for version in range(first, steps):
            admission.publish(version)
            for ordinal in await started_by_version(admission, group):
                trained_at = ordinal // batch
                assert 0 <= trained_at - version <= staleness
                seen.append(ordinal)
                admission.accept()
            assert len(seen) >= (version + 1 - first) * batch, "the step's own samples may always start"

    asyncio.run(drive())
    assert seen == list(range(first * batch, steps * batch))


async def test_capacity_follows_the_rule_of_areal() -> None:
    admission = Admission(batch_size=10, max_staleness=2, total=1000)
    assert admission.capacity == 30
    assert await admission.next(25) == list(range(25))
    assert admission.capacity == 5
    admission.accept(25)
    assert admission.capacity == 5, "accepted samples count until they are trained and published"
    admission.publish(1)
    assert admission.capacity == 15


async def test_a_resumed_run_has_the_capacity_of_a_fresh_one() -> None:
    fresh = Admission(batch_size=8, max_staleness=1, total=1000)
    resumed = Admission(batch_size=8, max_staleness=1, total=1000, version=50)
    assert resumed.capacity == fresh.capacity == 16
    assert (await resumed.next(1)) == [400]


async def test_samples_of_a_checkpoint_are_counted_and_not_started_again() -> None:
    admission = Admission(batch_size=4, max_staleness=0, total=8)
    assert await admission.next(4, held=frozenset({0, 2})) == [1, 3]
    assert (admission.accepted, admission.running, admission.capacity) == (2, 2, 0)


async def test_next_waits_for_a_publish_and_ends_with_an_empty_list() -> None:
    admission = Admission(batch_size=2, max_staleness=0, total=4)
    assert await admission.next(9) == [0, 1]
    waiting = asyncio.create_task(admission.next(9))
    await asyncio.sleep(0)
    assert not waiting.done()
    admission.accept(2)
    admission.publish(1)
    assert await waiting == [2, 3]
    assert await admission.next(9) == []


@pytest.mark.parametrize("held", [frozenset({0, 1, 2, 3}), frozenset({3, 1, 0, 2, 7})])
async def test_a_run_whose_samples_are_all_held_starts_nothing(held: frozenset[int]) -> None:
    admission = Admission(batch_size=4, max_staleness=0, total=4)
    assert await admission.next(4, held=held) == []
    assert admission.accepted == 4
