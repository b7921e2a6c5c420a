"""Hundreds of swaps among more teachers than two slots hold, while servers are killed, files cut short and exchanged,
and the memory tier's disk is full: every score is that of the right teacher, and every sample is answered once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from distill.config import TeacherManagerConfig
from distill.protocols import ServerAddress, TeacherServer
from distill.serving.teacher_client import TeacherClient
from distill.teacher_manager import CanaryStore, Catalogue, Slot, Teacher, TeacherManager, failures
from distill.teacher_manager.planning.policy import policy_for_runs
from distill.types import Sample, Signal, SignalSpec
from tests.builders import sample
from tests.builders_serving import VOCAB, launcher, reference_logprobs, save_tiny_llama

NAMES = tuple("abcdefg")
SWAPS = 200
ATOL = 1e-5
ROOM = 2.2
"""Teachers that a slot holds."""
TIER_BYTES = 2_000_000
"""Of the filesystem under the memory tier: a few teachers fill it."""
GROWTH_BYTES = 24_000_000
"""Of a server's resident memory over the whole test, beside its first minute's."""


@dataclass
class Chaos:
    """Servers, folders, and the ways to break them."""

    hosts: list[Any]
    folders: dict[str, Path]
    tier: Path
    random: random.Random = field(default_factory=lambda: random.Random(7))
    done: Counter[str] = field(default_factory=Counter[str])

    async def strike(self) -> None:
        """One fault, mended before it returns."""
        fault = self.random.choice((self.kill, self.cut_short, self.exchange, self.fill_the_disk))
        self.done[fault.__name__] += 1
        await fault()

    async def kill(self) -> None:
        name = f"embedded-{self.random.randrange(len(self.hosts))}"
        for child in psutil.Process().children(recursive=True):
            if "distill.serving.embedded" in child.cmdline() and name in child.cmdline():
                os.kill(child.pid, signal.SIGKILL)

    async def cut_short(self) -> None:
        file = self.folders[self.random.choice(NAMES)] / "model.safetensors"
        kept = file.rename(file.with_suffix(".kept"))
        file.write_bytes(kept.read_bytes()[: -self.random.randrange(1, 4000)])
        await asyncio.sleep(0.15)
        kept.rename(file)

    async def exchange(self) -> None:
        one, other = (self.folders[name] / "model.safetensors" for name in self.random.sample(NAMES, 2))
        aside = one.rename(one.with_suffix(".aside"))
        other.rename(one)
        aside.rename(other)
        await asyncio.sleep(0.15)
        aside = one.rename(one.with_suffix(".aside"))
        other.rename(one)
        aside.rename(other)

    async def fill_the_disk(self) -> None:
        filler = self.tier / "filler"
        try:
            filler.write_bytes(bytes(2 * TIER_BYTES))
        except OSError:
            pass
        await asyncio.sleep(0.15)
        filler.unlink(missing_ok=True)

    def resident_bytes(self) -> dict[str, int]:
        """Server -> resident memory of its process."""
        found: dict[str, int] = {}
        for child in psutil.Process().children(recursive=True):
            line = child.cmdline()
            if "distill.serving.embedded" in line:
                found[line[line.index("--name") + 1]] = child.memory_info().rss
        return found


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A filesystem of TIER_BYTES, where this user may mount one; a plain folder otherwise."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TIER_BYTES}", "tier", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    folders = {name: save_tiny_llama(tmp_path / name, seed) for seed, name in enumerate(NAMES, start=31)}
    size = Teacher.open("a", folders["a"]).bytes
    with small_disk(tmp_path / "tier") as tier:
        slot = {"slot_gb": ROOM * size / 1e9, "host_gb": 4 * TIER_BYTES / 1e9, "host_folder": tier / "weights"}
        hosts = [
            launcher("embedded", folders["a"], tmp_path / "logs", index=index, slot=slot, max_restarts=1000)
            for index in range(2)
        ]
        try:
            for host in hosts:
                host.start()
            yield Chaos(hosts, folders, tier)
        finally:
            for host in hosts:
                host.stop()


@pytest.fixture
async def manager(chaos: Chaos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TeacherManager]:
    monkeypatch.setattr(failures, "_FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(failures, "_LONGEST_WAIT_S", 0.4)
    teachers = [Teacher.open(name, folder) for name, folder in chaos.folders.items()]

    def connect(address: ServerAddress) -> TeacherServer:
        return TeacherClient(address.url, name=address.name, timeout_s=60)

    def slot(index: int) -> Slot:
        async def locate(deadline_s: float) -> ServerAddress:
            return await asyncio.to_thread(chaos.hosts[index].address, deadline_s)

        return Slot(f"slot-{index}", locate, connect, round(ROOM * teachers[0].bytes))

    made = TeacherManager(
        Catalogue(teachers),
        [slot(index) for index in range(2)],
        lambda system: policy_for_runs(system, visit_tokens=64),
        SignalSpec(Signal.TOPK, 4),
        TeacherManagerConfig(slots=2, timeout_s=60, call_tokens=64, on_teacher_failure="wait"),
        vocab_size=VOCAB,
        canaries=CanaryStore(tmp_path / "canaries.json"),
        on_span=lambda *_: None,
        on_event=lambda *_: None,
    )
    await made.start()
    yield made
    await made.close()


class Examiner:
    """Knows the right answers, by a direct forward of each teacher."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._rows: dict[tuple[str, bytes], np.ndarray] = {}
        self.answered: Counter[str] = Counter()

    def prepare(self, items: list[Sample]) -> None:
        """All answers before anything is broken: the folders are right now."""
        for item in items:
            for teacher in item.teachers:
                ids = np.concatenate([item.prompt_ids, item.response_ids])
                rows = reference_logprobs(self._folders[teacher], ids)
                self._rows[teacher, ids.tobytes()] = rows[len(item.prompt_ids) - 1 : -1]

    async def examine(self, manager: TeacherManager, item: Sample) -> None:
        found = await manager.score(item)
        self.answered[item.id] += 1
        ids = np.concatenate([item.prompt_ids, item.response_ids])
        assert [scores.teacher for scores in found.scores] == list(item.teachers)
        for scores in found.scores:
            rows_RV = self._rows[scores.teacher, ids.tobytes()]
            sampled_R = rows_RV[np.arange(len(item.response_ids)), item.response_ids]
            np.testing.assert_allclose(scores.logprobs, sampled_R, atol=ATOL)


@pytest.mark.slow
@pytest.mark.faults
async def test_after_two_hundred_swaps_among_faults_every_score_is_right(chaos: Chaos, manager: TeacherManager) -> None:
    choose = random.Random(3)
    pool = [sample(index, length=3 + index % 7, teachers=NAMES) for index in range(6)]
    examiner = Examiner(chaos.folders)
    examiner.prepare(pool)
    baseline: dict[str, int] = {}
    asked = 0
    while sum(manager.swap_counts().values()) + manager.figures().streams < SWAPS:
        works = []
        for _ in range(6):
            teachers = dict.fromkeys(choose.sample(NAMES, choose.choice((1, 1, 2))), 1.0)
            item = replace(choose.choice(pool), id=f"sample-{asked}", teachers=teachers)
            works.append(examiner.examine(manager, item))
            asked += 1
        striking = chaos.strike() if choose.random() < 0.4 else asyncio.sleep(0)
        async with asyncio.timeout(240):
            await asyncio.gather(striking, *works)
        if not baseline and asked > 60:
            baseline = chaos.resident_bytes()
    assert set(examiner.answered.values()) == {1} and len(examiner.answered) == asked
    assert set(chaos.done) == {"kill", "cut_short", "exchange", "fill_the_disk"}, "each fault happened"
    assert manager.queue_ages() == dict.fromkeys(NAMES, 0.0)
    for name, size in chaos.resident_bytes().items():
        assert size < baseline[name] + GROWTH_BYTES
