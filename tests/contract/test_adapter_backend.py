"""Several LoRA teachers over one base in a run's teacher manager: one forward pass for all, and the right scores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.config import TeacherManagerConfig
from distill.protocols import ServerAddress
from distill.serving.teacher_client import TeacherClient
from distill.teacher_manager import CanaryStore, Catalogue, Slot, Teacher, TeacherManager
from distill.teacher_manager.planning.policy import policy_for_runs
from distill.types import Sample, ScoreRequest, Signal, SignalSpec
from tests.builders import sample
from tests.builders_serving import VOCAB, launcher, reference_logprobs, save_adapter, save_merged, save_tiny_llama

ADAPTERS = ("poet", "critic", "clerk", "judge")


class Counted(TeacherClient):
    """Remembers which teachers each request named."""

    calls: list[set[str]]

    async def score(self, requests: Sequence[ScoreRequest], spec: SignalSpec, **options: Any) -> Any:
        self.calls.append({request.teacher for request in requests})
        return await super().score(requests, spec, **options)


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


def manager(
    house: tuple[Any, dict[str, Path], dict[str, Path]], tmp_path: Path, calls: list[set[str]]
) -> TeacherManager:
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


async def test_adapters_and_their_base_answer_in_one_request_once_they_are_there(
    house: tuple[Any, dict[str, Path], dict[str, Path]], tmp_path: Path
) -> None:
    calls: list[set[str]] = []
    names = ("base", *ADAPTERS)
    backend = manager(house, tmp_path, calls)
    await backend.start()
    try:
        await asyncio.gather(*(backend.score(sample(number, teachers=(name,))) for number, name in enumerate(names)))
        calls.clear()
        later = [sample(10 + number, length=8, teachers=(name,)) for number, name in enumerate(names * 3)]
        scored = await asyncio.gather(*map(backend.score, later))
    finally:
        await backend.close()
    assert max(map(len, calls)) >= 4 and len(calls) <= 2
    for each in scored:
        (scores,) = each.scores
        np.testing.assert_allclose(scores.logprobs, expected(house[2][scores.teacher], each.sample), atol=2e-5)
