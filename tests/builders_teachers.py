"""Tiny teachers as folders, and a model server in this process that can be broken in the ways that real ones break."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from distill.config import TeacherManagerConfig
from distill.errors import ServerError, TeacherError
from distill.protocols import ServerAddress, ServerInfo
from distill.teacher_manager import AnnouncedScheduler, CanaryStore, Slot, Teacher, TeacherManager, Translation
from distill.transfermesh.digest import tensor_digest
from distill.types import (
    Floats,
    GenerateRequest,
    Generation,
    Sample,
    ScoreRequest,
    Signal,
    SignalSpec,
    TeacherScores,
)

VOCAB = 64
SAMPLED = SignalSpec(Signal.SAMPLED)


def write_tensors(folder: Path, seed: int) -> Path:
    """A folder with two tensors: all that `FakeServer` needs of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {
        "table": -random.random(VOCAB, dtype=np.float32) - 0.1,
        "bias": random.standard_normal(3).astype(np.float32),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def open_teachers(root: Path, *names: str) -> list[Teacher]:
    return [Teacher.open(name, write_tensors(root / name, seed)) for seed, name in enumerate(names, start=1)]


def true_scores(folder: Path, response: Any) -> Floats:
    """What a teacher says of a response: its table, looked up."""
    return load_file(folder / "model.safetensors")["table"][response]


class FakeServer:
    """A model server and its host. Set the attributes to break it; they act on the next call that they concern."""

    def __init__(self, name: str = "slot-0") -> None:
        self.name = name
        self.incarnation = 0
        self.alive = True
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.version = "default"
        self.loads: list[str] = []
        self.score_calls: list[list[str]] = []
        self.corrupt_loads = 0
        """Loads that end with one tensor changed."""
        self.stale_buffer = 0.0
        """Added to every score: a fault that the weights do not show."""
        self.die_at_call: int | None = None
        """Index of the scoring call in which the process dies; it is started again when it is next looked for."""
        self.fail_loads = 0
        self.gate: asyncio.Event | None = None
        """Scores wait for it, canaries excepted."""
        self.refuse: set[str] = set()
        """Samples that no try can score."""
        self.nonsense: dict[str, int] = {}
        """Sample -> calls in which its scores are no numbers. The client refuses such a call and names the sample."""

    async def locate(self, deadline_s: float) -> ServerAddress:
        if not self.alive:
            self.restart()
        return ServerAddress(self.name, f"http://{self.name}", self.incarnation)

    def restart(self) -> None:
        self.incarnation += 1
        self.alive = True
        self.tensors = {}
        self.version = "default"

    def connect(self, address: ServerAddress) -> FakeClient:
        return FakeClient(self, address.incarnation)

    def slot(self, budget_bytes: int = 10_000) -> Slot:
        return Slot(self.name, self.locate, self.connect, budget_bytes)


class FakeClient:
    """Implements `ModelServer` over a FakeServer. A client of a dead incarnation gets ServerErrors."""

    def __init__(self, server: FakeServer, incarnation: int) -> None:
        self.server = server
        self.incarnation = incarnation

    def _reach(self) -> FakeServer:
        if not self.server.alive or self.server.incarnation != self.incarnation:
            raise ServerError(f"{self.server.name} gave no answer")
        return self.server

    async def info(self) -> ServerInfo:
        return ServerInfo("fake", "0", VOCAB, 1000, self._reach().version, packed=True)

    async def load_weights(self, path: Path, version: str, vocab_size: int | None = None) -> None:
        server = self._reach()
        await asyncio.sleep(0)
        if server.fail_loads:
            server.fail_loads -= 1
            raise ServerError(f"{server.name} ran out of memory")
        server.tensors = load_file(path / "model.safetensors")
        server.version = version
        server.loads.append(version.partition("@")[0])
        if server.corrupt_loads:
            server.corrupt_loads -= 1
            server.tensors["table"] = server.tensors["table"] + np.float32(1e-3)

    async def checksums(self) -> dict[str, str]:
        return {name: tensor_digest(tensor) for name, tensor in self._reach().tensors.items()}

    async def score(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, teacher: str, expected_version: str
    ) -> list[TeacherScores]:
        server = self._reach()
        if not requests[0].id.startswith("canary"):
            server.score_calls.append([request.id for request in requests])
            if server.die_at_call == len(server.score_calls) - 1:
                server.alive = False
            if server.gate is not None:
                await server.gate.wait()
        await asyncio.sleep(0)
        server = self._reach()
        if server.version != expected_version:
            raise TeacherError(f"teacher {teacher}: the reply comes from weights {server.version}")
        if broken := server.refuse & {request.id for request in requests}:
            raise ServerError(f"{server.name} cannot score {broken.pop()}")
        for request in requests:
            if server.nonsense.get(request.id):
                server.nonsense[request.id] -= 1
                raise TeacherError(f"teacher {teacher}: {request.id}: no number", sample_id=request.id, teacher=teacher)
        table = server.tensors["table"]
        responses = [request.input_ids[len(request.input_ids) - request.response_len :] for request in requests]
        return [TeacherScores(teacher, table[response] + np.float32(server.stale_buffer)) for response in responses]

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        server = self._reach()
        best = int(np.argmax(server.tensors["table"]))
        return [
            Generation(
                request.id,
                np.full(request.max_new_tokens, best, np.int32),
                np.zeros(request.max_new_tokens, np.float32),
                (server.version,) * request.max_new_tokens,
                "length",
            )
            for request in requests
        ]

    async def pause(self, mode: str) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...


class Rig:
    """A manager over fake servers, with what it reported."""

    def __init__(
        self,
        root: Path,
        teachers: Sequence[Teacher],
        servers: Sequence[FakeServer],
        *,
        barrier: bool = False,
        hold_s: float = 0.0,
        spec: SignalSpec = SAMPLED,
        translations: Mapping[str, Translation] = MappingProxyType({}),
        **config: Any,
    ) -> None:
        self.teachers = {teacher.name: teacher for teacher in teachers}
        self.servers = list(servers)
        self.spans: list[tuple[str, float, float, str, int]] = []
        self.events: list[tuple[str, str]] = []
        settings = TeacherManagerConfig(slots=len(servers), hold_s=hold_s, timeout_s=30, **config)
        self.manager = TeacherManager(
            teachers,
            [server.slot() for server in servers],
            AnnouncedScheduler(
                [teacher.name for teacher in teachers],
                [server.name for server in servers],
                hold_s=hold_s,
                max_visit_tokens=settings.max_visit_tokens,
                barrier=barrier,
            ),
            spec,
            settings,
            vocab_size=VOCAB,
            canaries=CanaryStore(root / "canaries.json"),
            on_span=lambda *span: self.spans.append(span),
            on_event=lambda *event: self.events.append(event),
            translations=translations,
        )

    def expected(self, sample: Sample) -> list[Floats]:
        return [true_scores(self.teachers[name].folder, sample.response_ids) for name in sample.teachers]
