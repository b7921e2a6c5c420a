"""A slot in one process: copies beside scoring, the host memory under it, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.errors import DistillError, TeacherError
from distill.protocols import WeightSource
from distill.serving.embedded import slot as slot_module
from distill.serving.embedded.arena import Arena
from distill.serving.embedded.jobs import Job, Refusal, Sampling, Wanted
from distill.serving.embedded.served import Limits
from distill.serving.embedded.slot import EngineSettings, Slot
from distill.serving.embedded.streaming import Streamer
from distill.weights.host import HostStore
from distill.weights.link import Link
from tests.builders_serving import VOCAB, reference_logprobs, save_tiny_llama

LIMITS = Limits(torch.device("cpu"), torch.float32, None, None)
BUDGET = 700_000
"""Two teachers of 280,000 bytes, and some room."""


def make_slot(folder: Path, *, host_bytes: int = 0, rate: float | None = None) -> Slot:
    host = HostStore(folder / "host", host_bytes) if host_bytes else None
    return Slot(Arena(BUDGET, LIMITS.device), LIMITS, EngineSettings(8, 1, False), host=host, link=Link(rate))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return {name: save_tiny_llama(folder / name, seed) for seed, name in enumerate(("a", "b", "c"))}


@pytest.fixture
async def slot(tmp_path: Path, folders: dict[str, Path]) -> AsyncIterator[Slot]:
    slot = make_slot(tmp_path, host_bytes=10_000_000)
    await register(slot, folders)
    yield slot
    slot.stop(10)


async def register(slot: Slot, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        await slot.register(WeightSource(name, folder, f"{name}@1"))


def scoring_job(rid: str = "j", seed: int = 1) -> Job:
    ids = np.random.default_rng(seed).integers(3, VOCAB, 24).astype(np.int32)
    return Job(rid, ids, Sampling(0, 1.0, 1.0, -1, (), 0), Wanted(start=11, full=True))


async def scores(slot: Slot, name: str, job: Job) -> np.ndarray:
    slot.resident(name).engine.submit([job])
    result = await asyncio.wrap_future(job.done)
    assert result.scores is not None and result.scores.full is not None
    assert result.weight_version == f"{name}@1"
    return result.scores.full


async def test_the_second_copy_comes_from_host_memory_and_is_the_same(slot: Slot, folders: dict[str, Path]) -> None:
    first = await slot.load("a")
    before = await scores(slot, "a", scoring_job())
    await slot.release("a")
    again = await slot.load("a")
    assert (first.from_disk, again.from_disk) == (True, False)
    assert dict(first.checksums) == dict(again.checksums) == await slot.checksums("a")
    np.testing.assert_array_equal(await scores(slot, "a", scoring_job()), before)
    np.testing.assert_allclose(before, reference_logprobs(folders["a"], scoring_job().prompt)[11:-1], atol=2e-5)


async def test_scoring_goes_on_while_a_slow_copy_is_under_way(tmp_path: Path, folders: dict[str, Path]) -> None:
    slot = make_slot(tmp_path, rate=1e12)
    await register(slot, folders)
    await slot.load("a")
    slot.link = Link(slot.known("b").costs.bytes / 1.0)  # one second for a teacher
    loading = asyncio.create_task(slot.load("b"))
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="b is being loaded with version b@1"):
        await slot.register(WeightSource("b", folders["c"], "b@2"))
    during = 0
    while not loading.done():
        await scores(slot, "a", scoring_job(f"j{during}"))
        during += not loading.done()
    assert during >= 2
    assert (await loading).seconds >= 0.99
    slot.stop(10)


async def test_copies_wait_for_one_another(tmp_path: Path, folders: dict[str, Path]) -> None:
    slot = make_slot(tmp_path)
    await register(slot, folders)
    slot.link = Link(slot.known("a").costs.bytes / 0.3)
    began = time.monotonic()
    await asyncio.gather(slot.load("a"), slot.load("b"))
    assert time.monotonic() - began >= 0.59
    slot.stop(10)


@pytest.mark.parametrize("piece", [0, 1, 3])
async def test_a_copy_that_fails_half_way_gives_every_byte_back(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    await slot.load("a")
    real = slot_module.Feed.fill

    def failing(self: Any, index: int, buffer: torch.Tensor) -> None:
        if index == piece:
            raise TeacherError("the disk went away")
        real(self, index, buffer)

    before = slot.arena.owners
    with monkeypatch.context() as patch:
        patch.setattr(slot_module.Feed, "fill", failing)
        with pytest.raises(TeacherError, match="went away"):
            await slot.load("b")
    assert slot.arena.owners == before and set(slot.residents) == {"a"}
    await slot.load("b")
    await slot.release("b")


async def test_many_swaps_leave_bytes_and_scores_as_they_were(slot: Slot, folders: dict[str, Path]) -> None:
    wanted = {name: reference_logprobs(folder, scoring_job().prompt)[11:-1] for name, folder in folders.items()}
    await slot.load("a")
    for turn in range(12):
        name = "bc"[turn % 2]
        await slot.load(name)
        for each in ("a", name):
            np.testing.assert_allclose(await scores(slot, each, scoring_job(f"{each}{turn}")), wanted[each], atol=2e-5)
        await slot.release(name)
    assert slot.arena.owners == {"a": slot.known("a").costs.bytes}


async def test_a_stream_takes_two_layers_and_gives_the_same_bits(slot: Slot) -> None:
    await slot.load("a")
    streamer, job = Streamer(slot, 1), scoring_job("streamed")
    streamer.submit(slot.known("b"), [job])
    result = await asyncio.wrap_future(job.done)
    assert result.weight_version == "b@1" and result.scores is not None and result.scores.full is not None
    costs = slot.known("b").costs
    assert costs.stream_bytes is not None
    assert slot.arena.peak_bytes == costs.bytes + costs.stream_bytes
    assert slot.arena.owners == {"a": costs.bytes}
    await slot.load("b")
    np.testing.assert_array_equal(await scores(slot, "b", scoring_job()), result.scores.full)


async def test_a_stream_without_room_or_without_its_client_ends_and_leaves_nothing(slot: Slot) -> None:
    await slot.load("a")
    await slot.load("b")
    streamer, job, gone = Streamer(slot, 1), scoring_job("one"), scoring_job("gone")
    streamer.submit(slot.known("c"), [job])
    streamer.abort({"gone"})
    streamer.submit(slot.known("c"), [gone])
    found: list[BaseException | None] = []
    for each in (job, gone):
        with pytest.raises((DistillError, Refusal)) as caught:
            await asyncio.wrap_future(each.done)
        found.append(caught.value)
    assert "stream of c needs" in str(found[0]) and "the client is gone" in str(found[1])
    assert set(slot.arena.owners) == {"a", "b"}


async def test_another_source_under_the_name_of_a_resident_is_refused(slot: Slot, folders: dict[str, Path]) -> None:
    await slot.load("a")
    with pytest.raises(Refusal, match="a is resident with version a@1"):
        await slot.register(WeightSource("a", folders["b"], "a@2"))
    await slot.register(WeightSource("a", folders["a"], "a@1"))
    await slot.release("a")
    await slot.register(WeightSource("a", folders["b"], "a@2"))


def test_a_link_carries_bytes_at_its_rate_and_counts_what_the_copy_took() -> None:
    link = Link(1e6)
    began = time.monotonic()
    link.carry(100_000)
    link.carry(100_000)
    assert time.monotonic() - began >= 0.2
    assert Link(1e6).carry(50_000, began=time.monotonic() - 10) == 0
    assert Link(None).carry(1 << 40) == 0
