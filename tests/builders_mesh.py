"""Weights, loaders and processes for the tests of TransferMesh.

As a program (`python -m tests.builders_mesh`) it is a receiver that sends itself a signal at a chosen step, or a
publisher; the order comes as one JSON line on standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.transfermesh import Endpoint, Loader, Manifest, MemoryLoader, Publisher, Receiver
from distill.transfermesh.manifest import ITEM_BYTES

KEY = bytes(range(32))
Weights = list[tuple[str, str, tuple[int, ...], NDArray[Any]]]


def tensor(
    name: str, dtype: str, shape: tuple[int, ...], seed: int = 0
) -> tuple[str, str, tuple[int, ...], NDArray[Any]]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
    return name, dtype, shape, np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def model(seed: int = 0) -> Weights:
    """A little of everything: a matrix, a bfloat16 vector, a scalar, an empty tensor."""
    return [
        tensor("embed.weight", "float32", (50, 16), seed),
        tensor("norm.weight", "bfloat16", (33,), seed + 1),
        tensor("scale", "float32", (), seed + 2),
        tensor("experts.empty", "float16", (0, 8), seed + 3),
        tensor("head.weight", "bfloat16", (16, 50), seed + 4),
    ]


def same(loader: MemoryLoader, weights: Weights) -> bool:
    return list(loader.tensors) == [name for name, *_ in weights] and all(
        loader.tensors[name].tobytes() == data.tobytes() for name, _, _, data in weights
    )


@contextlib.contextmanager
def receivers(
    loaders: Mapping[str, Loader], *, key: bytes = KEY, timeout_s: float = 20.0, host: str = "127.0.0.1"
) -> Iterator[list[Receiver]]:
    started = [
        Receiver(key, loader, name=name, host=host, timeout_s=timeout_s).start() for name, loader in loaders.items()
    ]
    try:
        yield started
    finally:
        for receiver in started:
            receiver.close()


@contextlib.contextmanager
def publisher(
    transport: str = "auto", *, key: bytes = KEY, bucket_bytes: int = 1024, timeout_s: float = 20.0
) -> Iterator[Publisher]:
    made = Publisher(key, transport=transport, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    try:
        yield made
    finally:
        made.close()


def endpoints(started: Sequence[Receiver]) -> list[Endpoint]:
    return [receiver.endpoint for receiver in started]


class ScriptedLoader(MemoryLoader):
    """Calls a hook before the step of its name; the hook may raise, wait, or look around."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__()
        self.hooks = hooks
        self.aborts = 0

    def begin(self, manifest: Manifest) -> None:
        self.hooks.get("begin", _nothing)()
        super().begin(manifest)

    def load(self, name: str, data: NDArray[np.uint8]) -> None:
        self.hooks.get("load", _nothing)()
        super().load(name, data)

    def digest(self) -> str:
        self.hooks.get("digest", _nothing)()
        return super().digest()

    def commit(self, version: int) -> str:
        self.hooks.get("commit", _nothing)()
        return super().commit(version)

    def abort(self) -> None:
        self.aborts += 1
        super().abort()


class FlippingLoader(MemoryLoader):
    """Loses one bit of the first tensor while loading, as a wrong layout or a bad kernel would."""

    def load(self, name: str, data: NDArray[np.uint8]) -> None:
        super().load(name, data)
        if name == "embed.weight":
            self._staged[name][7] ^= 1


def _nothing() -> None:
    pass


class Pause:
    """A hook that waits at the step until it is released, and tells that it is there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.release.wait(60), "the test did not release the loader"


def _receive(order: dict[str, Any]) -> None:
    def strike() -> None:
        os.kill(os.getpid(), signal.Signals[order["signal"]])
        time.sleep(60)  # the signal may take a moment to reach this thread

    loader = ScriptedLoader(**({order["at"]: strike} if "at" in order else {}))
    receiver = Receiver(
        bytes.fromhex(order["key"]), loader, name=order["name"], host=order["host"], timeout_s=order["timeout_s"]
    )
    print(json.dumps(receiver.start().endpoint.to_dict()), flush=True)
    sys.stdin.read()


def _publish(order: dict[str, Any]) -> None:
    with publisher(order["transport"], key=bytes.fromhex(order["key"])) as made:
        made.publish(model(order["seed"]), order["version"], [Endpoint.from_dict(order["endpoint"])])


if __name__ == "__main__":
    task = json.loads(sys.stdin.readline())
    _publish(task) if "endpoint" in task else _receive(task)
