"""What every SampleStore promises."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distill.errors import ConfigError
from distill.registry import KINDS, load
from distill.types import ScoredSample
from tests.builders import scored

MakeStore = Callable[..., Any]


@pytest.fixture(params=sorted(KINDS["store"]))
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    return load("store", request.param)


def same(left: ScoredSample, right: ScoredSample) -> bool:
    def flat(value: object) -> object:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: flat(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, tuple):
            return [flat(item) for item in value]
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return flat(left) == flat(right)


async def test_samples_come_out_by_ordinal_whatever_order_they_came_in(make_store: MakeStore) -> None:
    store = make_store(capacity=10)
    for ordinal in (2, 0, 3, 1):
        await store.put(scored(ordinal))
    assert [item.sample.ordinal for item in await store.take(3)] == [0, 1, 2]
    assert store.missing(3) == [4, 5]


async def test_take_waits_for_the_missing_one(make_store: MakeStore) -> None:
    store = make_store(capacity=10)
    await store.put(scored(1))
    taking = asyncio.create_task(store.take(2))
    await asyncio.sleep(0)
    assert not taking.done()
    await store.put(scored(0))
    assert len(await taking) == 2


async def test_a_full_store_makes_put_wait_until_a_commit(make_store: MakeStore) -> None:
    store = make_store(capacity=2)
    await store.put(scored(0))
    await store.put(scored(1))
    waiting = asyncio.create_task(store.put(scored(2)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.commit(await store.take(1))
    await waiting
    assert store.ordinals == {1, 2}


async def test_a_snapshot_keeps_what_was_taken_but_not_trained(make_store: MakeStore) -> None:
    store = make_store(capacity=10)
    items = [scored(0, k=4), scored(1, vocab=7, teachers=("a", "b")), scored(2, length=1)]
    for item in items:
        await store.put(item)
    await store.commit(await store.take(1))
    await store.take(1)
    again = make_store(capacity=10)
    again.restore(store.snapshot())
    assert again.ordinals == {1, 2}
    back = await again.take(2)
    assert all(same(left, right) for left, right in zip(back, items[1:], strict=True))


async def test_a_snapshot_keeps_every_member_of_a_sample_exactly(make_store: MakeStore) -> None:
    plain = scored(0, length=3)
    full = dataclasses.replace(
        scored(1, length=3, k=2),
        sample=dataclasses.replace(
            scored(1, length=3, k=2).sample,
            topk_ids=np.arange(6, dtype=np.int32).reshape(3, 2),
            loss_mask=np.array([1, 0, 1], np.int8),
            reward=0.1,
            trajectory="t-7",
        ),
    )
    store, again = make_store(capacity=10), make_store(capacity=10)
    for item in (plain, full):
        await store.put(item)
    again.restore(store.snapshot())
    back = await again.take(2)
    assert all(same(left, right) for left, right in zip(back, (plain, full), strict=True))
    assert (back[1].sample.reward, back[1].sample.loss_tokens, back[0].sample.loss_mask) == (0.1, 2, None)


async def test_a_sample_set_aside_is_neither_waited_for_nor_given_out_nor_written_again(make_store: MakeStore) -> None:
    store = make_store(capacity=10)
    for ordinal in (0, 2, 4, 5):
        await store.put(scored(ordinal))
    taking = asyncio.create_task(store.take(4))
    await asyncio.sleep(0)
    await store.skip(1)
    await store.skip(3)
    assert [item.sample.ordinal for item in await taking] == [0, 2]
    await store.skip(2)  # it was taken already: the student refuses it
    assert (len(store), store.ordinals) == (3, {0, 1, 2, 3, 4, 5})
    again = make_store(capacity=10)
    again.restore(store.snapshot())
    assert again.ordinals == {0, 1, 2, 3, 4, 5} and again.missing(6) == []
    rest = await again.take(4)
    await again.commit(rest)
    assert ([item.sample.ordinal for item in rest], again.ordinals, again.missing(3)) == ([0], {4, 5}, [6])


async def test_skipping_makes_room(make_store: MakeStore) -> None:
    store = make_store(capacity=2)
    await store.put(scored(1))
    waiting = asyncio.create_task(store.put(scored(2)))
    await asyncio.sleep(0)
    await store.skip(0)
    assert not waiting.done()
    await store.commit(await store.take(2))
    await waiting
    assert store.ordinals == {2}


async def test_what_was_set_aside_or_trained_is_never_stored_or_set_aside_again(make_store: MakeStore) -> None:
    store = make_store(capacity=10)
    await store.put(scored(0))
    await store.skip(1)
    await store.commit(await store.take(1))
    for again in (store.put(scored(1)), store.skip(1), store.skip(0)):
        with pytest.raises(AssertionError, match="before"):
            await again


async def test_a_broken_snapshot_is_refused(make_store: MakeStore) -> None:
    store = make_store(capacity=10)
    await store.put(scored(0))
    data = store.snapshot()
    for broken in (data[:-5], b"nonsense", b""):
        with pytest.raises(ConfigError, match="broken"):
            make_store(capacity=10).restore(broken)


async def test_the_same_sample_twice_is_a_fault(make_store: MakeStore) -> None:
    store = make_store(capacity=10)
    await store.put(scored(0))
    with pytest.raises(AssertionError, match="before"):
        await store.put(scored(0))
