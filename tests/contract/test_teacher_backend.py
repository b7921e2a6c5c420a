"""What a teacher backend does with real model servers: three teachers, one slot, real weights, real deaths."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from distill.config import TeacherManagerConfig
from distill.errors import TeacherError
from distill.protocols import ServerAddress, TeacherServer, WeightCosts, WeightSource
from distill.serving import client, teacher_client
from distill.serving.client import ServerClient
from distill.serving.single import SingleTeacherServer
from distill.serving.teacher_client import TeacherClient
from distill.teacher_manager import CanaryStore, Catalogue, Slot, Teacher, TeacherManager
from distill.teacher_manager.planning.policy import policy_for_runs
from distill.types import GenerateRequest, Sample, ScoredSample, Signal, SignalSpec
from tests.builders import sample
from tests.builders_serving import VOCAB, launcher, reference_greedy, reference_logprobs, save_tiny_llama

NAMES = ("a", "b", "c")
ATOL = 1e-5


@dataclass
class House:
    """A running server and the folders of three teachers."""

    host: Any
    folders: dict[str, Path]
    shares: bool = True
    """The server is a slot; otherwise it holds one model at a time."""
    expected: dict[tuple[str, bytes], np.ndarray] = field(default_factory=dict[tuple[str, bytes], np.ndarray])

    def reference(self, teacher: str, item: Sample) -> np.ndarray:
        """(R, V) from a direct forward of transformers."""
        ids = np.concatenate([item.prompt_ids, item.response_ids])
        key = (teacher, ids.tobytes())
        if key not in self.expected:
            self.expected[key] = reference_logprobs(self.folders[teacher], ids)[len(item.prompt_ids) - 1 : -1]
        return self.expected[key]

    def check(self, scored: ScoredSample) -> None:
        item = scored.sample
        assert [scores.teacher for scores in scored.scores] == list(item.teachers)
        for scores in scored.scores:
            rows_RV = self.reference(scores.teacher, item)
            sampled = rows_RV[np.arange(len(item.response_ids)), item.response_ids]
            np.testing.assert_allclose(scores.logprobs, sampled, atol=ATOL)
            assert scores.topk_ids is not None and scores.topk_logprobs is not None
            named = np.take_along_axis(rows_RV, scores.topk_ids.astype(np.intp), axis=1)
            np.testing.assert_allclose(scores.topk_logprobs, named, atol=ATOL)

    def connect(self, address: ServerAddress) -> TeacherServer:
        if self.shares:
            return TeacherClient(address.url, name=address.name, timeout_s=60)
        return SingleTeacherServer(ServerClient(address.url, name=address.name, timeout_s=60))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """A signal to the server's process, found among our own children."""
        for child in psutil.Process().children(recursive=True):
            if "distill.serving.embedded" in child.cmdline():
                os.kill(child.pid, number)


@pytest.fixture(scope="module", params=["slot", "single"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A slot that has room for one teacher, or a server of one model at a time."""
    root = tmp_path_factory.mktemp("teachers")
    folders = {name: save_tiny_llama(root / name, seed) for seed, name in enumerate(NAMES, start=11)}
    budget = Teacher.open("a", folders["a"]).bytes
    slot = {"slot_gb": budget / 1e9} if request.param == "slot" else None
    host = launcher("embedded", folders["a"], root / "logs", slot=slot)
    try:
        host.start()
        yield House(host, folders, shares=slot is not None)
    finally:
        host.stop()


class Backend:
    """A teacher manager over the one server."""

    def __init__(self, house: House, tmp_path: Path, *, budget: int | None = None, **config: Any) -> None:
        self.house = house
        self.loads: dict[str, Path] = {}
        """Teacher -> the folder that its server is told to load in its place."""
        self.messages: list[str] = []
        self.spans: list[str] = []
        self.scored = asyncio.Event()
        teachers = [Teacher.open(name, folder) for name, folder in house.folders.items()]
        settings = TeacherManagerConfig(**{"timeout_s": 120, **config})
        self.manager = TeacherManager(
            Catalogue(teachers),
            [
                Slot(
                    "slot-0",
                    self.locate,
                    self.connect,
                    budget or max(teacher.bytes for teacher in teachers),
                    self.restart,
                )
            ],
            lambda system: policy_for_runs(system, visit_tokens=settings.call_tokens),
            SignalSpec(Signal.TOPK, 4),
            settings,
            vocab_size=VOCAB,
            canaries=CanaryStore(tmp_path / "canaries.json"),
            on_span=self.span,
            on_event=lambda _, message: self.messages.append(message),
        )

    async def __aenter__(self) -> Self:
        await self.manager.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()

    def span(self, kind: str, *_: object) -> None:
        self.spans.append(kind)
        if kind == "score":
            self.scored.set()

    async def restart(self, incarnation: int) -> None:
        await asyncio.to_thread(self.house.host.restart, incarnation)

    async def locate(self, deadline_s: float) -> ServerAddress:
        return await asyncio.to_thread(self.house.host.address, deadline_s)

    def connect(self, address: ServerAddress) -> TeacherServer:
        server = self.house.connect(address)
        register = server.register

        async def told(source: WeightSource) -> WeightCosts:
            return await register(replace(source, folder=self.loads.get(source.name, source.folder)))

        server.register = told  # pyright: ignore[reportAttributeAccessIssue]
        return server


@pytest.fixture
async def backend(house: House, tmp_path: Path) -> AsyncIterator[Backend]:
    async with Backend(house, tmp_path, call_tokens=32) as made:
        yield made


async def test_it_says_what_it_can_give(backend: Backend) -> None:
    caps = backend.manager.caps
    assert caps.vocab_size == VOCAB
    assert Signal.FULL in caps.signals and caps.max_k == VOCAB


async def test_samples_of_three_teachers_come_back_with_the_scores_of_a_direct_forward(backend: Backend) -> None:
    samples = [sample(index, length=1 + index % 9, teachers=NAMES[index % 3 :]) for index in range(18)]
    for item in samples:
        backend.manager.announce(item.id, list(item.teachers), 10)
    for scored in await asyncio.gather(*map(backend.manager.score, samples)):
        backend.house.check(scored)
    assert backend.manager.swap_counts() == {"a": 1, "b": 1, "c": 1}


async def test_after_fifty_random_swaps_every_score_is_still_that_of_its_teacher(backend: Backend) -> None:
    """Each one that is not there is loaded, or streamed where computing is so slow that it hides the reading."""
    random = np.random.default_rng(0)
    name, resident = "a", ""
    for index in range(50):
        name = str(random.choice([other for other in NAMES if other != name]))
        before = backend.manager.figures()
        backend.house.check(await backend.manager.score(sample(index % 12, length=7, teachers=(name,))))
        after = backend.manager.figures()
        loads, streams = after.loads - before.loads, after.streams - before.streams
        assert loads + streams == (name != resident)
        resident = name if loads else resident
    assert backend.spans.count("swap") == sum(backend.manager.swap_counts().values()) == backend.manager.figures().loads


async def test_a_teacher_writes_its_own_answers_between_scores(backend: Backend) -> None:
    prompt = np.array([5, 9, 11], np.int32)
    request = GenerateRequest("g", prompt, 6, temperature=0.0)
    scoring = asyncio.gather(*(backend.manager.score(sample(index, teachers=("a",))) for index in range(4)))
    answers = await asyncio.gather(*(backend.manager.generate(name, [request]) for name in NAMES))
    for scored in await scoring:
        backend.house.check(scored)
    for name, (answer,) in zip(NAMES, answers, strict=True):
        expected = reference_greedy(backend.house.folders[name], prompt, 6)
        assert answer.output_ids.tolist() == expected[: len(answer.output_ids)].tolist()
        assert len(answer.output_ids) == 6 or answer.finish_reason == "stop"


@pytest.mark.faults
async def test_a_server_killed_in_the_middle_loses_no_sample_and_gives_no_wrong_score(backend: Backend) -> None:
    samples = [sample(index, length=9, teachers=NAMES) for index in range(60)]
    tasks = [asyncio.create_task(backend.manager.score(item)) for item in samples]
    await backend.scored.wait()
    backend.house.kill()
    scored = await asyncio.gather(*tasks)
    assert [result.sample.id for result in scored] == [item.id for item in samples]
    for result in scored:
        backend.house.check(result)
    assert any(message.startswith("slot-0: ") and "verified anew" in message for message in backend.messages)
    assert sum(backend.manager.swap_counts().values()) >= 4, "what was resident had to be loaded again"


@pytest.mark.faults
async def test_a_server_that_hangs_is_started_again_and_its_samples_are_scored(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: its port still accepts connections, and nothing ever answers."""
    monkeypatch.setattr(teacher_client, "QUICK_S", 1.0)
    monkeypatch.setattr(client, "QUICK_S", 1.0)
    async with Backend(house, tmp_path, timeout_s=20) as backend:
        before = house.host.address(10).incarnation
        house.kill(signal.SIGSTOP)
        for scored in await asyncio.gather(
            *(backend.manager.score(sample(index, teachers=NAMES)) for index in range(4))
        ):
            house.check(scored)
        assert house.host.address(60).incarnation == before + 1


@pytest.mark.faults
async def test_weights_that_change_on_disk_are_caught_before_they_score_anything(house: House, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(house.folders["a"], tmp_path / "a"))
    async with Backend(replace(house, folders=house.folders | {"a": folder}, expected={}), tmp_path) as backend:
        backend.house.check(await backend.manager.score(sample(0, teachers=("a",))))
        backend.house.check(await backend.manager.score(sample(1, teachers=("b",))))
        model = LlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.model.norm.weight[3] += 1e-3
        model.save_pretrained(folder)
        with pytest.raises(
            TeacherError, match=r"teacher a: .*(other bytes.*norm\.weight|norm\.weight.* had \w{16} before)"
        ):
            await backend.manager.score(sample(2, teachers=("a",)))
        backend.house.check(await backend.manager.score(sample(3, teachers=("c",))))


@pytest.mark.faults
async def test_a_load_of_other_weights_under_the_right_label_is_caught(house: House, tmp_path: Path) -> None:
    backend = Backend(house, tmp_path)
    backend.loads["a"] = house.folders["c"]
    async with backend:
        with pytest.raises(TeacherError, match=r"teacher a: .* tensors with other bytes"):
            await backend.manager.score(sample(1, teachers=("a",)))


@pytest.mark.faults
async def test_other_weights_under_the_right_label_are_caught_in_the_first_batch_that_is_streamed(
    house: House, tmp_path: Path
) -> None:
    if not house.shares:
        pytest.skip("it streams nothing")
    too_small = Teacher.open("a", house.folders["a"]).bytes - 1
    async with Backend(house, tmp_path, budget=too_small) as backend:
        backend.house.check(await backend.manager.score(sample(0, teachers=("a",))))
        assert backend.manager.figures().streams == 1 and backend.spans.count("swap") == 0
    other = Backend(house, tmp_path / "other", budget=too_small)
    other.loads["b"] = house.folders["c"]
    async with other:
        with pytest.raises(TeacherError, match=r"teacher b: slot-0 streamed \d+ of \d+ tensors with other bytes"):
            await other.manager.score(sample(1, teachers=("b",)))
        assert not (tmp_path / "other" / "canaries.json").exists(), "nothing is remembered of the wrong ones"
        other.house.check(await other.manager.score(sample(2, teachers=("a",))))


@pytest.mark.faults
async def test_a_checkpoint_cut_short_during_the_run_is_named_with_its_bytes(house: House, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(house.folders["a"], tmp_path / "a"))
    async with Backend(replace(house, folders=house.folders | {"a": folder}, expected={}), tmp_path) as backend:
        file = folder / "model.safetensors"
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.truncate(size - 100)
        with pytest.raises(TeacherError, match=f"expected {size} bytes, found {size - 100}"):
            await backend.manager.score(sample(2, teachers=("a",)))


async def test_a_budget_that_is_too_small_is_refused_before_anything_is_loaded(house: House, tmp_path: Path) -> None:
    backend = Backend(house, tmp_path, budget=1000)
    with pytest.raises(TeacherError, match=r"slot-0 holds 0\.000 GB \(1000 bytes\)"):
        await backend.manager.start()
    await backend.manager.close()
