"""What the measurements of time-shared teachers stand on: random teachers on disk, a real teacher server, samples."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from distill.config import TeacherManagerConfig
from distill.config.models import ServerConfig
from distill.protocols import ServerAddress, TeacherServer, WeightCosts
from distill.registry import load
from distill.serving.teacher_client import TeacherClient
from distill.teacher_manager import CanaryStore, Catalogue, Slot, Teacher, TeacherManager
from distill.teacher_manager.catalogue import Rates
from distill.teacher_manager.planning.policy import policy_for_runs
from distill.types import Sample, ScoreRequest, Signal, SignalSpec
from distill.weights.costs import costs_of

SPEC = SignalSpec(Signal.SAMPLED)
PROMPT_TOKENS = 8
TIMEOUT_S = 120.0
CALL_TOKENS = 4096
"""Of one scoring request, and of one visit of the manager."""


@dataclass(frozen=True)
class Shape:
    """Of the teachers: all are equally large; every second one is a Qwen3, the others are Llamas."""

    hidden: int
    layers: int
    vocab: int

    @property
    def intermediate(self) -> int:
        return 3 * self.hidden


@dataclass(frozen=True)
class House:
    """The teachers' folders, and where servers keep theirs."""

    root: Path
    folders: Mapping[str, Path]
    shape: Shape
    costs: WeightCosts
    """Of the largest teacher."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def teachers(self) -> list[Teacher]:
        return [Teacher.open(name, folder) for name, folder in self.folders.items()]

    def files(self) -> list[Path]:
        return [file for folder in self.folders.values() for file in folder.glob("*.safetensors")]


@dataclass(frozen=True)
class Served:
    """A running teacher server, which has one slot."""

    house: House
    address: ServerAddress
    budget_bytes: int

    def client(self) -> TeacherClient:
        return TeacherClient(self.address.url, name=self.address.name, timeout_s=TIMEOUT_S)

    def slot(self) -> Slot:
        async def locate(_: float) -> ServerAddress:
            return self.address

        def connect(address: ServerAddress) -> TeacherServer:
            return TeacherClient(address.url, name=address.name, timeout_s=TIMEOUT_S)

        return Slot("slot-0", locate, connect, self.budget_bytes)

    def storage_bytes(self) -> int:
        """What the server's process has read from storage so far (Linux)."""
        for child in psutil.Process().children(recursive=True):
            if self.address.name in child.cmdline():
                lines = Path(f"/proc/{child.pid}/io").read_text().splitlines()
                return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])
        raise SystemExit("error: the teacher server is gone")

    def manager(self, rates: Rates, canaries: Path) -> TeacherManager:
        """Over this one slot, with the scheduler of runs. `rates`: what it believes at first."""
        return TeacherManager(
            Catalogue(self.house.teachers()),
            [self.slot()],
            lambda system: policy_for_runs(system, visit_tokens=CALL_TOKENS),
            SPEC,
            TeacherManagerConfig(timeout_s=TIMEOUT_S, call_tokens=CALL_TOKENS, deadline_s=3600),
            vocab_size=self.house.shape.vocab,
            canaries=CanaryStore(canaries),
            on_span=_ignore,
            on_event=_ignore,
            rates=rates,
        )


def _ignore(*_: Any) -> None:
    """Takes what a run would write down."""


def build_house(root: Path, count: int, shape: Shape) -> House:
    """`count` random teachers in `root`, float32."""
    folders = {f"t{number}": root / f"t{number}" for number in range(count)}
    for seed, folder in enumerate(folders.values()):
        save_teacher(folder, shape, seed)
    costs = [costs_of(folder, "F32") for folder in folders.values()]
    return House(root, folders, shape, max(costs, key=lambda cost: cost.bytes))


def save_teacher(folder: Path, shape: Shape, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    heads = max(1, shape.hidden // 64)
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": shape.hidden // heads,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)) if seed % 2 == 0 else Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.save_pretrained(folder)


@contextmanager
def serve(
    house: House,
    *,
    room: float,
    host_tier: bool = True,
    link_bytes_per_s: float | None = None,
    name: str = "teachers",
) -> Generator[Served]:
    """A teacher server of one thread, with room for so many teachers. `link_bytes_per_s`: its emulated link."""
    memory = Path("/dev/shm")
    tier = Path(tempfile.mkdtemp(prefix="teachers-tier-", dir=memory if memory.is_dir() else house.root))
    budget = round(room * house.costs.bytes)
    slot: dict[str, Any] = {"slot_gb": budget / 1e9}
    if host_tier:
        slot |= {"host_gb": 2 * len(house.folders) * house.costs.bytes / 1e9, "host_folder": tier}
    throttle = [] if link_bytes_per_s is None else ["--link-bytes-per-s", f"{link_bytes_per_s:.0f}"]
    host = load("server", "embedded")(
        ServerConfig(device="cpu", threads=1, args=throttle),
        name=name,
        model=next(iter(house.folders.values())),
        vocab_size=house.shape.vocab,
        folder=house.root / "logs",
        index=0,
        weight_version="",
        run_key=None,
        slot=slot,
    )
    try:
        yield Served(house, host.start(), budget)
    finally:
        host.stop()
        shutil.rmtree(tier, ignore_errors=True)


def sample_of(house: House, number: int, tokens: int, teacher: str) -> Sample:
    """A random sample of `tokens` tokens, the prompt's included. No two have one prompt."""
    random = np.random.default_rng(number)
    ids = random.integers(0, house.shape.vocab, tokens).astype(np.int32)
    answer = tokens - PROMPT_TOKENS
    return Sample(
        id=f"sample-{number}",
        ordinal=number,
        domain="random",
        teachers={teacher: 1.0},
        prompt_ids=ids[:PROMPT_TOKENS],
        response_ids=ids[PROMPT_TOKENS:],
        logprobs=np.zeros(answer, np.float32),
        versions=np.zeros(answer, np.int32),
        finish_reason="stop",
    )


def requests_of(house: House, tokens: int, length: int, teacher: str) -> list[ScoreRequest]:
    """Samples of `length` tokens that are `tokens` together, as one server is asked for them."""
    random = np.random.default_rng(tokens)
    ids_NL = random.integers(0, house.shape.vocab, (max(1, tokens // length), length)).astype(np.int32)
    return [
        ScoreRequest(f"request-{number}", ids_L, length - PROMPT_TOKENS, teacher=teacher)
        for number, ids_L in enumerate(ids_NL)
    ]


def forget_pages(files: Sequence[Path]) -> None:
    """Take the files out of the page cache: the next reader goes to the disk."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
