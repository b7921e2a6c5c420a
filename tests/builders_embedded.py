"""Tiny random models, and an embedded server inside the test process, for the tests of `distill.serving.embedded`."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import uvicorn
from numpy.typing import NDArray

from distill.serving.embedded.app import build_app
from distill.serving.embedded.engine import Engine
from distill.serving.embedded.http import Source, State
from distill.serving.embedded.jobs import Job, Result, Sampling, Wanted
from distill.serving.embedded.served import Limits, ServedModel

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

VOCAB = 61
CONTEXT = 128
EOS = 2
_CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
}
CPU32 = Limits(torch.device("cpu"), torch.float32)


def save_model(folder: Path, kind: str = "llama", *, seed: int = 0, rows: int = VOCAB, **extra: Any) -> Path:
    """Write a tiny random model. Its weights are large enough for peaked distributions."""
    settings: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    config = _CONFIGS[kind](**(settings | extra))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """The model of a folder as transformers itself loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_rows(model: Any, ids: Sequence[int], temperature: float = 1.0, vocab: int = VOCAB) -> NDArray[np.float32]:
    """(len(ids) - 1, vocab) log-probabilities: row t predicts ids[t + 1]."""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1, :vocab].float()
    return torch.log_softmax(logits / temperature, -1).numpy()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def job(
    ids: Sequence[int],
    new: int = 8,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    rid: str | None = None,
    stops: tuple[int, ...] = (),
    start: int = -1,
    top: int = 0,
    top_p: float = 1.0,
    top_k: int = -1,
    call: int = 0,
) -> Job:
    sampling = Sampling(new, temperature, top_p, top_k, stops, seed)
    name = rid or f"r{time.monotonic_ns()}"
    return Job(name, np.array(ids, np.int32), sampling, Wanted(start=start, output=True, top_k=top), call)


@contextmanager
def running_engine(
    folder: Path, *, max_batch_size: int = 16, limits: Limits = CPU32, reproducible: bool = False
) -> Iterator[Engine]:
    served = ServedModel.load(folder, limits)
    engine = Engine(served, max_batch_size=max_batch_size, version="v0", threads=1, reproducible=reproducible)
    engine.start()
    try:
        yield engine
    finally:
        assert engine.stop(30)


def finish(engine: Engine, *jobs: Job) -> list[Result]:
    engine.submit(jobs)
    return [wait(one.done) for one in jobs]


def wait(future: Future[Any]) -> Any:
    return future.result(60)


@dataclass
class Server:
    """A server in this process, and a plain HTTP client of it."""

    engine: Engine
    state: State
    port: int

    def call(self, method: str, path: str, body: Any = None, *, kind: str = "") -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            connection.request(method, path, raw, {"Content-Type": kind} if kind else {})
            reply = connection.getresponse()
            return reply.status, reply.read(), reply.headers.get("content-type", "")
        finally:
            connection.close()

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        status, raw, _ = self.call("POST", path, {} if body is None else body)
        return status, json.loads(raw) if raw else None

    def get(self, path: str) -> tuple[int, Any]:
        status, raw, _ = self.call("GET", path)
        return status, json.loads(raw) if raw else None

    def generate(self, ids: Any, **body: Any) -> Any:
        status, reply = self.post("/generate", {"input_ids": ids, **body})
        assert status == 200, reply
        return reply


@contextmanager
def running_server(folder: Path, *, max_batch_size: int = 16, limits: Limits = CPU32) -> Iterator[Server]:
    with running_engine(folder, max_batch_size=max_batch_size, limits=limits) as engine:
        state = State(engine, limits, Source(folder, "v0"))
        config = uvicorn.Config(build_app(state), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        try:
            yield Server(engine, state, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(30)
            listener.close()
