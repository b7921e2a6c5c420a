"""Tiny teachers as folders, and a model server in this process that can be broken in the ways that real ones break."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import xxhash
from safetensors.numpy import load_file, save_file

from distill.config import TeacherManagerConfig
from distill.errors import EnvironmentFault, ServerError, TeacherError
from distill.protocols import Loaded, ServerAddress, ServerInfo, SlotLedger, WeightCosts, WeightSource
from distill.teacher_manager import CanaryStore, Catalogue, Slot, Teacher, TeacherManager, Translation
from distill.teacher_manager.planning.policy import policy_for_runs
from distill.teacher_manager.reuse import Reuse
from distill.teacher_manager.score_cache import ScoreCache
from distill.transfermesh.digest import tensor_digest
from distill.types import (
    Floats,
    GenerateRequest,
    Generation,
    Ids,
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


def of_prefix(ids: Ids, rows: int) -> Floats:
    """(rows,) a number for each of the last tokens that all tokens before it decide too."""
    ends = range(len(ids) - rows + 1, len(ids) + 1)
    return np.array([xxhash.xxh3_64_intdigest(ids[:end].tobytes()) % 1000 for end in ends], np.float32)


class FakeServer:
    """A teacher server and its host. Set the attributes to break it; they act on the next call that they concern."""

    def __init__(self, name: str = "slot-0", *, budget_bytes: int = 10_000, holds_one: bool = True) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.holds_one = holds_one
        self.incarnation = 0
        self.alive = True
        self.sources: dict[str, WeightSource] = {}
        self.tensors: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        """Object -> what is resident of it."""
        self.relabel: str | None = None
        """Version that every reply carries in place of its own."""
        self.loads: list[str] = []
        self.score_calls: list[list[str]] = []
        self.streamed: list[list[str]] = []
        self.rows: Counter[str] = Counter()
        """Object -> response tokens that it was asked about, those of canaries excepted."""
        self.reads_prefix = False
        """Scores depend on all tokens before, too."""
        self.streams_folder: Path | None = None
        """What is streamed in place of the object's own folder."""
        self.corrupt_loads = 0
        """Loads that end with one tensor changed."""
        self.stale_buffer = 0.0
        """Added to every score: a fault that the weights do not show."""
        self.die_at_call: int | None = None
        """Index of the scoring call in which the process dies; it is started again when it is next looked for."""
        self.unreachable = False
        """It cannot be started again either."""
        self.fail_loads = 0
        self.load_s = 0.0
        self.gate: asyncio.Event | None = None
        """Scores wait for it, canaries excepted."""
        self.refuse: set[str] = set()
        """Samples that no try can score."""
        self.nonsense: dict[str, int] = {}
        """Sample -> calls in which its scores are no numbers. The client refuses such a call and names the sample."""

    async def locate(self, deadline_s: float) -> ServerAddress:
        if self.unreachable:
            raise ServerError(f"server {self.name} ended, after 5 restarts")
        if not self.alive:
            self.restart()
        return ServerAddress(self.name, f"http://{self.name}", self.incarnation)

    def restart(self) -> None:
        self.incarnation += 1
        self.alive = True
        self.tensors = {}
        self.sources = {}

    def connect(self, address: ServerAddress) -> FakeClient:
        return FakeClient(self, address.incarnation)

    def slot(self, budget_bytes: int | None = None) -> Slot:
        return Slot(self.name, self.locate, self.connect, budget_bytes or self.budget_bytes)


class FakeClient:
    """Implements `TeacherServer` over a FakeServer. A client of a dead incarnation gets ServerErrors."""

    def __init__(self, server: FakeServer, incarnation: int) -> None:
        self.server = server
        self.incarnation = incarnation

    @property
    def holds_one(self) -> bool:
        return self.server.holds_one

    def _reach(self) -> FakeServer:
        if not self.server.alive or self.server.unreachable or self.server.incarnation != self.incarnation:
            raise ServerError(f"{self.server.name} gave no answer")
        return self.server

    async def info(self) -> ServerInfo:
        self._reach()
        return ServerInfo("fake", "0", VOCAB, 1000, "default", packed=True)

    async def register(self, source: WeightSource) -> WeightCosts:
        server = self._reach()
        server.sources[source.name] = source
        size = sum(tensor.nbytes for tensor in load_file(source.folder / "model.safetensors").values())
        return WeightCosts(size, 2, size // 4, size // 4, None if server.holds_one else size // 2)

    async def load(self, name: str) -> Loaded:
        server = self._reach()
        await asyncio.sleep(server.load_s)
        server = self._reach()
        if server.fail_loads:
            server.fail_loads -= 1
            raise ServerError(f"{server.name} ran out of memory")
        if server.holds_one:
            server.tensors.clear()
        tensors = load_file(server.sources[name].folder / "model.safetensors")
        used = sum(tensor.nbytes for held in server.tensors.values() for tensor in held.values())
        if used + sum(tensor.nbytes for tensor in tensors.values()) > server.budget_bytes:
            raise EnvironmentFault(f"{server.name}: {name} does not fit")
        server.loads.append(name)
        if server.corrupt_loads:
            server.corrupt_loads -= 1
            tensors["table"] = tensors["table"] + np.float32(1e-3)
        server.tensors[name] = tensors
        return Loaded(server.load_s, True, {key: tensor_digest(tensor) for key, tensor in tensors.items()})

    async def release(self, name: str) -> None:
        self._reach().tensors.pop(name, None)

    async def checksums(self, name: str) -> dict[str, str]:
        server = self._reach()
        held = server.tensors[name] if name in server.tensors else self._files(server, name)
        return {key: tensor_digest(tensor) for key, tensor in held.items()}

    def _files(self, server: FakeServer, name: str) -> dict[str, np.ndarray[Any, Any]]:
        """What is streamed."""
        return load_file((server.streams_folder or server.sources[name].folder) / "model.safetensors")

    async def score(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, *, stream: bool = False
    ) -> list[TeacherScores]:
        server = self._reach()
        asked = [request.id for request in requests if not request.id.startswith("canary")]
        if asked:
            (server.streamed if stream else server.score_calls).append(asked)
            if server.die_at_call == len(server.score_calls) - 1:
                server.alive = False
            if server.gate is not None:
                await server.gate.wait()
        await asyncio.sleep(0)
        server = self._reach()
        return [self._scores(server, request, stream) for request in self._checked(server, requests)]

    def _checked(self, server: FakeServer, requests: Sequence[ScoreRequest]) -> Sequence[ScoreRequest]:
        for request in requests:
            expected = server.sources[request.teacher].version
            if (server.relabel or expected) != expected:
                raise TeacherError(f"teacher {request.teacher}: the reply comes from weights {server.relabel}")
        if broken := server.refuse & {request.id for request in requests}:
            raise ServerError(f"{server.name} cannot score {broken.pop()}")
        for request in requests:
            if server.nonsense.get(request.id):
                server.nonsense[request.id] -= 1
                what = f"teacher {request.teacher}: {request.id}: no number"
                raise TeacherError(what, sample_id=request.id, teacher=request.teacher)
        return requests

    def _scores(self, server: FakeServer, request: ScoreRequest, stream: bool) -> TeacherScores:
        held = self._files(server, request.teacher) if stream else server.tensors[request.teacher]
        response = request.input_ids[len(request.input_ids) - request.response_len :]
        if not request.id.startswith("canary"):
            server.rows[request.teacher] += request.response_len
        scores = held["table"][response] + np.float32(server.stale_buffer)
        if server.reads_prefix:
            scores += of_prefix(request.input_ids, request.response_len)
        return TeacherScores(request.teacher, scores)

    async def generate(self, requests: Sequence[GenerateRequest], teacher: str) -> list[Generation]:
        server = self._reach()
        best = int(np.argmax(server.tensors[teacher]["table"]))
        version = server.relabel or server.sources[teacher].version
        return [
            Generation(
                request.id,
                np.full(request.max_new_tokens, best, np.int32),
                np.zeros(request.max_new_tokens, np.float32),
                (version,) * request.max_new_tokens,
                "length",
            )
            for request in requests
        ]

    async def ledger(self) -> SlotLedger:
        server = self._reach()
        sizes = {name: sum(each.nbytes for each in held.values()) for name, held in server.tensors.items()}
        used = sum(sizes.values())
        return SlotLedger(server.budget_bytes, used, used, sizes, 0, 0)

    async def close(self) -> None: ...


class Rig:
    """A manager over fake servers, with what it reported. `async with` starts and closes it."""

    def __init__(
        self,
        root: Path,
        teachers: Sequence[Teacher],
        servers: Sequence[FakeServer],
        *,
        barrier: bool = False,
        spec: SignalSpec = SAMPLED,
        translations: Mapping[str, Translation] = MappingProxyType({}),
        timeout_s: float = 30,
        cache: ScoreCache | None = None,
        **config: Any,
    ) -> None:
        self.teachers = {teacher.name: teacher for teacher in teachers}
        self.servers = list(servers)
        self.spans: list[tuple[str, float, float, str, int]] = []
        self.events: list[tuple[str, str]] = []
        settings = TeacherManagerConfig(slots=len(servers), timeout_s=timeout_s, **config)
        visit_tokens = 0 if barrier else settings.call_tokens
        catalogue = Catalogue(teachers)
        self.manager = TeacherManager(
            catalogue,
            [server.slot() for server in servers],
            lambda system: policy_for_runs(system, visit_tokens=visit_tokens),
            spec,
            settings,
            vocab_size=VOCAB,
            canaries=CanaryStore(root / "canaries.json"),
            on_span=lambda *span: self.spans.append(span),
            on_event=lambda *event: self.events.append(event),
            translations=translations,
            barrier=barrier,
            reuse=Reuse(
                catalogue,
                cache,
                spec=spec,
                vocab_size=VOCAB,
                on_event=lambda *event: self.events.append(event),
            ),
        )

    async def __aenter__(self) -> Self:
        await self.manager.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()

    def expected(self, sample: Sample) -> list[Floats]:
        return [true_scores(self.teachers[name].folder, sample.response_ids) for name in sample.teachers]
