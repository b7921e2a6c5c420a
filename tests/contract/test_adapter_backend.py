"""Several LoRA teachers over one base in a run's teacher manager: one forward pass for all, and the right scores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.config import TeacherManagerConfig
from distill.errors import ServerError, TeacherError
from distill.protocols import ServerAddress
from distill.serving.teacher_client import TeacherClient
from distill.teacher_manager import CanaryStore, Catalogue, Slot, Teacher, TeacherManager
from distill.teacher_manager.planning.policy import policy_for_runs
from distill.types import Sample, ScoredSample, ScoreRequest, Signal, SignalSpec
from tests.builders import sample
from tests.builders_serving import VOCAB, launcher, reference_logprobs, save_adapter, save_merged, save_tiny_llama

ADAPTERS = ("poet", "critic", "clerk", "judge")


@dataclass
class Calls:
    """What the clients of a manager are asked, and what breaks it."""

    teachers: list[set[str]] = field(default_factory=list[set[str]])
    """Of each request."""
    refused: str = ""
    """Request whose scores are never accepted."""
    breaks: int = 0
    """Requests to several teachers that break off."""


class Counted(TeacherClient):
    calls: Calls

    async def score(self, requests: Sequence[ScoreRequest], spec: SignalSpec, **options: Any) -> Any:
        names = {request.teacher for request in requests}
        self.calls.teachers.append(names)
        found = await super().score(requests, spec, **options)
        if self.calls.refused in {request.id for request in requests}:
            raise TeacherError("no numbers", sample_id=self.calls.refused)
        if len(names) > 1 and self.calls.breaks:
            self.calls.breaks -= 1
            raise ServerError("the connection broke")
        return found


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, Path], dict[str, Path]]]:
    """A slot with room for base and adapters; the folders of the teachers, and of models that are equal to them."""
    root = tmp_path_factory.mktemp("adapters")
    base = save_tiny_llama(root / "base", 3)
    folders = {name: save_adapter(root / name, base, seed) for seed, name in enumerate(ADAPTERS)}
    equal = {name: save_merged(root / f"{name}-merged", base, folder) for name, folder in folders.items()}
    host = launcher("embedded", base, root / "logs", slot={"slot_gb": 0.01})
    try:
        host.start()
        yield host, {"base": base, **folders}, {"base": base, **equal}
    finally:
        host.stop()


def manager(house: tuple[Any, dict[str, Path], dict[str, Path]], tmp_path: Path, calls: Calls) -> TeacherManager:
    host, folders, _ = house
    base = Teacher.open("base", folders["base"])
    adapters = [Teacher.open(name, folders[name]) for name in ADAPTERS]

    async def locate(deadline_s: float) -> ServerAddress:
        return host.address(deadline_s)

    def connect(address: ServerAddress) -> TeacherClient:
        client = Counted(address.url, name=address.name, timeout_s=60)
        client.calls = calls
        return client

    settings = TeacherManagerConfig(timeout_s=60)
    return TeacherManager(
        Catalogue([base, *adapters], dict.fromkeys(ADAPTERS, base)),
        [Slot("slot-0", locate, connect, 10_000_000)],
        lambda system: policy_for_runs(system, visit_tokens=settings.call_tokens),
        SignalSpec(Signal.SAMPLED),
        settings,
        vocab_size=VOCAB,
        canaries=CanaryStore(tmp_path / "canaries.json"),
        on_span=lambda *_: None,
        on_event=lambda *_: None,
    )


def expected(folder: Path, item: Sample) -> np.ndarray:
    ids = np.concatenate([item.prompt_ids, item.response_ids])
    rows_RV = reference_logprobs(folder, ids)[len(item.prompt_ids) - 1 : -1]
    return rows_RV[np.arange(len(item.response_ids)), item.response_ids]


NAMES = ("base", *ADAPTERS)


async def warm(backend: TeacherManager) -> None:
    """All are resident afterwards."""
    first = [sample(number, teachers=(name,)) for number, name in enumerate(NAMES)]
    await asyncio.gather(*map(backend.score, first))


def check(found: ScoredSample, equal: dict[str, Path]) -> None:
    assert tuple(scores.teacher for scores in found.scores) == tuple(found.sample.teachers)
    for scores in found.scores:
        np.testing.assert_allclose(scores.logprobs, expected(equal[scores.teacher], found.sample), atol=2e-5)


async def test_adapters_and_their_base_answer_in_one_request_once_they_are_there(
    house: tuple[Any, dict[str, Path], dict[str, Path]], tmp_path: Path
) -> None:
    calls = Calls()
    backend = manager(house, tmp_path, calls)
    await backend.start()
    try:
        await warm(backend)
        calls.teachers.clear()
        later = [sample(10 + number, length=8, teachers=(name,)) for number, name in enumerate(NAMES * 3)]
        scored = await asyncio.gather(*map(backend.score, later))
    finally:
        await backend.close()
    assert max(map(len, calls.teachers)) >= 4 and len(calls.teachers) <= 2
    for each in scored:
        check(each, house[2])


async def test_a_sample_of_several_adapters_of_one_base_is_asked_for_in_one_request(
    house: tuple[Any, dict[str, Path], dict[str, Path]], tmp_path: Path
) -> None:
    calls = Calls()
    backend = manager(house, tmp_path, calls)
    await backend.start()
    try:
        await warm(backend)
        calls.teachers.clear()
        scored = await asyncio.gather(*(backend.score(sample(10 + number, teachers=NAMES)) for number in range(3)))
        swaps = backend.swap_counts()
    finally:
        await backend.close()
    assert max(map(len, calls.teachers)) == len(NAMES) and len(calls.teachers) <= 2
    assert set(swaps.values()) == {1}, "the slot was not emptied on the way"
    for each in scored:
        check(each, house[2])


async def test_refused_scores_in_a_request_to_several_adapters_fail_their_own_sample_alone(
    house: tuple[Any, dict[str, Path], dict[str, Path]], tmp_path: Path
) -> None:
    calls = Calls(refused="sample-00000011 (critic)")
    backend = manager(house, tmp_path, calls)
    await backend.start()
    try:
        await warm(backend)
        asked = [sample(10 + number, teachers=NAMES) for number in range(3)]
        first, second, third = await asyncio.gather(*map(backend.score, asked), return_exceptions=True)
    finally:
        await backend.close()
    assert isinstance(second, TeacherError)
    assert (second.sample_id, second.teacher) == ("sample-00000011", "critic")
    for each in (first, third):
        assert isinstance(each, ScoredSample)
        check(each, house[2])


async def test_a_request_to_several_adapters_that_breaks_off_is_asked_again_and_none_is_lost(
    house: tuple[Any, dict[str, Path], dict[str, Path]], tmp_path: Path
) -> None:
    calls = Calls()
    backend = manager(house, tmp_path, calls)
    await backend.start()
    try:
        await warm(backend)
        calls.breaks = 1
        later = [sample(10 + number, length=8, teachers=(name,)) for number, name in enumerate(NAMES * 3)]
        scored = await asyncio.gather(*map(backend.score, later))
        tokens = backend.token_counts()
    finally:
        await backend.close()
    assert calls.breaks == 0
    for each in scored:
        check(each, house[2])
    assert set(tokens.values()) == {7 + 3 * 12}, "each was answered once: a prompt of 4, and 3 or 8 tokens"
