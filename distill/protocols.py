"""The seams. Each is small, loads no torch, and has one contract test run over every implementation.

Wiring happens in `distill.build`; order happens in `distill.loop`; nothing else knows two sides of a seam.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from distill.types import (
    Batch,
    GenerateRequest,
    Generation,
    Prompt,
    Sample,
    ScoredSample,
    ScoreRequest,
    Signal,
    SignalSpec,
    StepResult,
    Support,
    TeacherScores,
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a model server is now. `incarnation` rises by one each time the program behind it was started again."""

    name: str
    url: str
    incarnation: int
    mesh: Mapping[str, Any] | None = None
    """Where its weight receiver listens (`distill.transfermesh.Endpoint.to_dict()`); None when it has none."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a model server says of itself."""

    program: str
    version: str
    vocab_size: int
    context_length: int
    weight_version: str
    packed: bool
    """It answers scoring requests in the packed binary form."""


class ModelServer(Protocol):
    """A client of one model server that speaks SGLang's native HTTP API. Every call has a deadline.

    Raises ServerError when the server cannot be reached, refuses, or answers wrongly; TeacherError for scores that
    cannot be right.
    """

    async def info(self) -> ServerInfo: ...
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...
    async def score(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, teacher: str, expected_version: str
    ) -> list[TeacherScores]: ...
    async def load_weights(self, path: Path, version: str, vocab_size: int | None = None) -> None:
        """`vocab_size`: log-probabilities are over ids below it from now on; None: over as many as before."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Tensor name -> xxh3-64 of its bytes as the server holds it, 16 hex digits.

        A program that digests otherwise has its name before each tensor's: such digests are no file's.
        """
        ...

    async def pause(self, mode: str) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One weight object for teacher servers: a whole model, or a LoRA adapter over another object."""

    name: str
    """What servers call it: a teacher's name, or that of a base that adapters share."""
    folder: Path
    version: str
    """Label of exactly these weights: replies that were computed with them carry it."""
    vocab_size: int | None = None
    """Log-probabilities are over ids below it; None: as config.json says."""
    base: str | None = None
    """Of an adapter: the name of the object that it belongs to."""


@dataclass(frozen=True, slots=True)
class WeightCosts:
    """What an object takes on a server. Bytes are exact."""

    bytes: int
    """On the device while it is resident, in the dtype that the server holds."""
    layers: int
    total_params: int
    active_params: int
    """Parameters that one token passes through: fewer than `total_params` in a mixture of experts."""
    stream_bytes: int | None
    """On the device while a batch is streamed through it; None: this server cannot stream it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A copy into a slot that has ended."""

    seconds: float
    from_disk: bool
    """Host memory did not hold it."""
    checksums: Mapping[str, str]
    """Tensor name in the file -> xxh3-64 of the bytes that were copied, as in `TeacherServer.checksums`."""


@dataclass(frozen=True, slots=True)
class SlotLedger:
    """Bytes of one slot, and of the host memory that it shares with the other slots of its machine."""

    budget_bytes: int
    used_bytes: int
    """Residents, copies under way and stream buffers."""
    peak_bytes: int
    residents: Mapping[str, int]
    """Object -> bytes."""
    host_budget_bytes: int
    host_bytes: int


class TeacherServer(Protocol):
    """A client of one slot: a device with a byte budget on which several teachers can be resident, one be copied while
    others score, and one be streamed layer by layer without ever being resident.

    Objects are registered once for each incarnation of the server; what is not registered is unknown. Every call has a
    deadline. Raises ServerError when the server cannot be reached, refuses or answers wrongly, TeacherError for weights
    or scores that cannot be right.
    """

    @property
    def holds_one(self) -> bool:
        """The program serves one model at a time: a load replaces it, and nothing is copied while it scores."""
        ...

    async def info(self) -> ServerInfo: ...
    async def register(self, source: WeightSource) -> WeightCosts:
        """Make the object known; nothing of its weights is read. Registering the same source again changes nothing."""
        ...

    async def load(self, name: str) -> Loaded:
        """Copy a registered object into the slot; an adapter's base has to be resident. Scoring goes on meanwhile.
        Raises EnvironmentFault, and leaves everything as it was, where it does not fit into what is free."""
        ...

    async def release(self, name: str) -> None:
        """Give up a resident object. Raises ServerError while requests use it."""
        ...

    async def checksums(self, name: str) -> dict[str, str]:
        """Tensor name -> xxh3-64 of its bytes on the device, 16 hex digits; as `ModelServer.checksums`."""
        ...

    async def score(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, *, stream: bool = False
    ) -> list[TeacherScores]:
        """Each request is scored by the object that it names (`ScoreRequest.teacher`): adapters of one base may share a
        call. With `stream` all name the same object, which need not be resident."""
        ...

    async def generate(self, requests: Sequence[GenerateRequest], teacher: str) -> list[Generation]: ...
    async def ledger(self) -> SlotLedger: ...
    async def close(self) -> None: ...


class ServerHost(Protocol):
    """Starts a model server, watches it and starts it again when it dies. One lives in each server's Ray actor."""

    def start(self) -> ServerAddress: ...
    def address(self, deadline_s: float) -> ServerAddress:
        """Where the server is, waiting for a restart that is under way. Raises ServerError past the deadline."""
        ...

    def restart(self, incarnation: int) -> None:
        """The program of this incarnation hangs: end it, and start it again. Nothing if another one runs already, or if
        it is not ours to end."""
        ...

    def log_tail(self) -> str: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TeacherCaps:
    """What a teacher backend can give."""

    signals: frozenset[Signal]
    max_k: int
    vocab_size: int
    supports: frozenset[Support] = frozenset(Support)
    """Whose most probable tokens it can be asked about."""


@dataclass(frozen=True, slots=True)
class TeacherFigures:
    """What sharing the slots came to, since the start. Seconds are summed over the slots."""

    loads: int = 0
    load_bytes: int = 0
    load_s: float = 0.0
    """Copies and their verification, hidden behind scoring or not."""
    streams: int = 0
    busy_s: float = 0.0
    """A slot worked for a teacher."""
    stalled_s: float = 0.0
    """A slot stood still although something waited for a teacher."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Teacher -> samples that went on without it."""
    cache_requests: int = 0
    """Samples that teachers were to score while there was a score cache, each counted for each of its teachers."""
    cache_requests_found: int = 0
    """All of whose scores were found there."""
    cache_tokens: int = 0
    """Response tokens of `cache_requests`."""
    cache_tokens_found: int = 0

    @property
    def cache_hit_share(self) -> float:
        """Of the response tokens."""
        return self.cache_tokens_found / self.cache_tokens if self.cache_tokens else 0.0

    @property
    def stall_share(self) -> float:
        """Stalled over busy and stalled."""
        wanted = self.busy_s + self.stalled_s
        return self.stalled_s / wanted if wanted else 0.0

    def plus(self, other: TeacherFigures) -> TeacherFigures:
        """Those of two processes of one run."""
        names = dict.fromkeys([*self.dropped, *other.dropped])
        return TeacherFigures(
            self.loads + other.loads,
            self.load_bytes + other.load_bytes,
            self.load_s + other.load_s,
            self.streams + other.streams,
            self.busy_s + other.busy_s,
            self.stalled_s + other.stalled_s,
            {name: self.dropped.get(name, 0) + other.dropped.get(name, 0) for name in names},
            self.cache_requests + other.cache_requests,
            self.cache_requests_found + other.cache_requests_found,
            self.cache_tokens + other.cache_tokens,
            self.cache_tokens_found + other.cache_tokens_found,
        )


class TeacherBackend(Protocol):
    """Scores finished samples. Announce when a rollout starts, so that the scheduler knows the future."""

    @property
    def caps(self) -> TeacherCaps: ...
    async def start(self) -> None:
        """Reach what scores. Everything else comes afterwards."""
        ...

    def announce(self, sample_id: str, teachers: Sequence[str], expected_tokens: int) -> None: ...
    async def score(self, sample: Sample) -> ScoredSample:
        """Raises TeacherError: with the sample's id when trying again is of no use and no other sample is concerned."""
        ...

    async def generate(self, teacher: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Have one teacher write, for its evaluation."""
        ...

    def advance(self, version: int) -> None:
        """The student has done so many steps: the samples of the next ones are in more of a hurry than others."""
        ...

    def queue_ages(self) -> Mapping[str, float]:
        """Teacher -> seconds that its oldest waiting sample has waited."""
        ...

    def swap_counts(self) -> Mapping[str, int]:
        """Teacher -> times it was loaded into a slot."""
        ...

    def figures(self) -> TeacherFigures: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PublishResult:
    """One weight version sent to the rollout servers. `failed` maps receivers to reasons; they are to be fenced."""

    version: int
    digest: str
    bytes: int
    seconds: float
    committed: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    transports: Mapping[str, str] = field(default_factory=dict[str, str])
    """Receiver name -> transport that carried the payload."""


class RolloutEngine(Protocol):
    """Writes samples with the newest weights that its servers have committed."""

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt that sample `ordinal` answers."""
        ...

    def generate(self, ordinals: Sequence[int]) -> AsyncIterator[Sample]:
        """The samples with these ordinals, in any order, each as soon as it is finished."""
        ...

    async def answer(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Plain generation beside the rollouts, for evaluation."""
        ...

    def receivers(self) -> list[ServerAddress]:
        """The servers that the next weight version goes to."""
        ...

    def committed(self, result: PublishResult) -> None:
        """Route to the servers that hold `result.version`; fence those that failed."""
        ...

    async def joining(self) -> list[ServerAddress]:
        """Wait until servers came back without current weights, and name them."""
        ...

    async def close(self) -> None: ...


class StudentHandle(Protocol):
    """The student's process, as the loop sees it. Raises StudentError when that process dies."""

    async def step(self, batch: Batch) -> StepResult:
        """Raises an error with the id of the one sample that is at fault, if one is; nothing has changed then."""
        ...

    async def evaluate(self, batch: Batch) -> dict[str, float]: ...
    async def publish(self, receivers: Sequence[ServerAddress]) -> PublishResult: ...
    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...
    async def export(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank of a student of several ranks is."""

    rank: int
    ranks: int
    meet: str
    """host:port at which rank 0 waits for the others."""
    host: str
    """Address of this rank's machine."""
    device: int
    """How many ranks of a lower number share that machine: its CUDA device there."""


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """Where the student finds the head of a teacher whose full rows come as hidden states."""

    folder: Path
    """The teacher's own; of an adapter that leaves the head alone, its base's."""
    dtype: str
    """What the teacher's server holds: float32, bfloat16 or float16."""
    temperature: float = 1.0
    """What the teacher's logits are divided by."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A box of one weight. The boxes of all ranks together hold every element of every weight exactly once."""

    name: str
    """Hugging Face name."""
    dtype: str
    """As torch spells it."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    offset: tuple[int, ...]
    """Where the box begins, per dimension."""
    size: tuple[int, ...]
    """How far it reaches, per dimension."""
    data: Any
    """Flat uint8 numpy array of its bytes, the last dimension running fastest."""


class StudentBackend(Protocol):
    """Trains the student. Built by `cls(config.student, seed=..., total_steps=..., vocab_size=..., rules=objective)`,
    where `rules` is the run's `ObjectiveConfig`; with `teacher_heads={teacher: HeadFolder}` too where full rows come as
    hidden states, which is so for the backend hf only.

    With several ranks each is a process with a backend of its own, and every method below is called on all of them with
    the same arguments: they work, and fail, together.
    """

    @property
    def version(self) -> int:
        """Optimiser steps that the weights have seen."""
        ...

    def step(self, batch: Batch, objective: Objective) -> StepResult: ...
    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Token mean of KL(p || q) per domain, without learning.

        An objective on sampled tokens can but estimate KL(q || p), of samples that a teacher wrote.
        """
        ...

    def weights(self) -> Iterator[tuple[str, str, tuple[int, ...], Any]]:
        """(Hugging Face name, dtype name as torch spells it, shape, flat uint8 numpy array of its bytes), whole weights
        on every rank. Every rank must take all of them."""
        ...

    def shards(self) -> Iterator[WeightShard]:
        """What this rank is to send of the weights; no rank ever holds all of them. Every rank must take all of its."""
        ...

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face folder: safetensors, config, tokenizer."""
        ...


@dataclass(frozen=True, slots=True)
class Contract:
    """What an objective promises."""

    optimises: str
    """In expectation over the sampled tokens."""
    depends_on_action: bool
    """The loss of a row depends on which token was sampled."""
    source: str = ""
    couples_tokens: bool = False
    """The loss of a row depends on other tokens of its sample: `condition` is called, once, before the loss."""
    reads_spans: bool = False
    """It can learn from a teacher with another tokenizer: from `TokenRows.span_N`, which others would not look at."""
    reads_sampled_only: bool = False
    """Of the student it looks at log p of the sampled tokens alone, as `sampled.token_logp` gives it, for the loss and
    for every metric: it can be called with rows that have no logits."""


@runtime_checkable
class Objective(Protocol):
    """A loss per response token; a frozen dataclass whose fields are its settings in YAML.

    Called with `TokenRows` (objectives/rows.py): returns the loss (N,), differentiable, and metrics (N,) that are not.
    Where its contract says `couples_tokens` it is a `SequenceObjective`.
    """

    @property
    def spec(self) -> SignalSpec: ...
    @property
    def contract(self) -> Contract: ...
    def __call__(self, rows: Any) -> tuple[Any, dict[str, Any]]: ...


@runtime_checkable
class SequenceObjective(Objective, Protocol):
    """An objective with gates, returns or weights over whole samples: constants, through which no gradient flows."""

    def condition(self, rows: Any, student_logp_N: Any) -> Any:
        """The rows of whole samples, with `advantage_N` and `gate_N` set from the student's present log p(y) (N,).

        The result may be cut into any chunks of rows; the loss of each is then its own.
        """
        ...


class SampleStore(Protocol):
    """Scored samples between the teachers and the trainer. Bounded: `put` waits when it is full."""

    async def put(self, item: ScoredSample) -> None: ...
    async def skip(self, ordinal: int) -> None:
        """The sample with this ordinal was set aside: it counts as done, whether it was here or never came."""
        ...

    async def take(self, count: int) -> tuple[ScoredSample, ...]:
        """The samples with the next `count` ordinals, in their order; waits until each is there or was skipped."""
        ...

    def missing(self, count: int) -> list[int]:
        """Which of the next `count` ordinals are awaited."""
        ...

    async def commit(self, samples: Sequence[ScoredSample]) -> None:
        """These, and those skipped among them, are done: they will never be given again."""
        ...

    def snapshot(self) -> bytes: ...
    def restore(self, data: bytes) -> None: ...
    @property
    def ordinals(self) -> frozenset[int]:
        """What is held or was skipped, and is not committed."""
        ...

    def __len__(self) -> int: ...


@runtime_checkable
class Sink(Protocol):
    """Where metrics go. `values` holds names of `distill.observe.metrics.METRICS`."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...
