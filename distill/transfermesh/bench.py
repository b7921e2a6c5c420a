"""How fast weights travel here: real receivers in child processes, every byte checked in each of them."""

from __future__ import annotations

import contextlib
import platform
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.errors import ConfigError
from distill.transfermesh.publisher import Publisher
from distill.transfermesh.serve import Child

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TENSOR_BYTES = 16 << 20
"""A layer's weight of a model of a few billion parameters; a bench of less than that has one tensor."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Sizes from `begin` to `end`, each `factor` times the last, over each transport."""

    begin: int = 1 << 20
    end: int = 64 << 20
    factor: int = 4
    transports: tuple[str, ...] = ("shm", "tcp")
    receivers: int = 2
    iterations: int = 5
    bucket_bytes: int = 64 << 20
    timeout_s: float = 120.0

    @property
    def sizes(self) -> list[int]:
        """Raises ConfigError for a range that never ends, or is empty."""
        if not (0 < self.begin <= self.end and self.factor > 1 and self.receivers > 0 and self.iterations > 0):
            raise ConfigError(
                f"cannot measure {self}", fix="0 < begin <= end, factor > 1, receivers and iterations > 0"
            )
        sizes = [self.begin]
        while sizes[-1] * self.factor <= self.end:
            sizes.append(sizes[-1] * self.factor)
        return sizes


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One line of the table. Times are of a whole publish: offer, transfer, load, digests, commit."""

    bytes: int
    transport: str
    receivers: int
    seconds_p50: float
    seconds_max: float
    gb_per_s: float
    """Per receiver: model bytes / 1e9 / seconds_p50."""
    wrong: int
    """Updates of a receiver that failed, or ended with another digest. Anything but 0 is a fault."""


def parse_size(text: str) -> int:
    """Bytes of "64M", "1G", "4096": powers of 1024. Raises ConfigError."""
    digits, unit = (text[:-1], text[-1].upper()) if text and not text[-1].isdigit() else (text, "")
    if not digits.isdigit() or unit not in _UNITS:
        raise ConfigError(f"{text!r} is not a size", fix="a whole number, optionally with K, M or G: 64M")
    return int(digits) * _UNITS[unit]


def bench(plan: BenchPlan) -> Iterator[BenchRow]:
    """Measure the plan line by line. Receivers live in child processes and are the same ones throughout."""
    sizes = plan.sizes
    key = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(key, f"receiver-{index}", timeout_s=plan.timeout_s))
            for index in range(plan.receivers)
        ]
        version = 0
        for transport in plan.transports:
            publisher = Publisher(key, transport=transport, bucket_bytes=plan.bucket_bytes, timeout_s=plan.timeout_s)
            stack.callback(publisher.close)
            for size in sizes:
                yield _measure(plan, publisher, transport, size, children, version)
                version += plan.iterations + 1


def _measure(
    plan: BenchPlan, publisher: Publisher, transport: str, size: int, children: Sequence[Child], version: int
) -> BenchRow:
    weights = _weights(size)
    seconds: list[float] = []
    wrong = 0
    for iteration in range(plan.iterations + 1):
        for _, _, _, array in weights:
            array += np.uint8(1)  # a receiver that kept the old bytes must not look right
        began = time.monotonic()
        report = publisher.publish(weights, version + iteration, [child.endpoint for child in children])
        wrong += len(report.failed)
        if iteration:  # the first one warms up: buffers are made, pages are touched
            seconds.append(time.monotonic() - began)
    p50 = statistics.median(seconds)
    return BenchRow(size, transport, plan.receivers, p50, max(seconds), size / 1e9 / p50, wrong)


def _weights(size: int) -> list[tuple[str, str, tuple[int, ...], NDArray[Any]]]:
    noise = np.random.default_rng(size)
    starts = range(0, size, _TENSOR_BYTES)
    lengths = [min(_TENSOR_BYTES, size - start) for start in starts]
    return [
        (f"layers.{index}.weight", "uint8", (length,), noise.integers(0, 256, length, np.uint8))
        for index, length in enumerate(lengths)
    ]


def table(rows: Sequence[BenchRow]) -> str:
    """The rows for a terminal."""
    lines = [
        f"{'size':>10} {'transport':>10} {'receivers':>9} {'p50 ms':>9} {'max ms':>9} {'GB/s/rcv':>9} {'#wrong':>6}"
    ]
    for row in rows:
        lines.append(
            f"{row.bytes:>10} {row.transport:>10} {row.receivers:>9} {row.seconds_p50 * 1e3:>9.1f} "
            f"{row.seconds_max * 1e3:>9.1f} {row.gb_per_s:>9.2f} {row.wrong:>6}"
        )
    return "\n".join(lines)


def as_json(plan: BenchPlan, rows: Sequence[BenchRow]) -> dict[str, Any]:
    """What `--json` writes: the plan, the machine and the rows."""
    machine = {"node": platform.node(), "machine": platform.machine(), "kernel": platform.release()}
    return {"plan": asdict(plan), "machine": machine, "rows": [asdict(row) for row in rows]}
