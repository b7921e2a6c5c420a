"""How fast the link, the disk and the device of a slot are, before a run has measured them: given, measured here in
about a second, or assumed where the device is not this machine's processor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill.config import ServerConfig
from distill.errors import EnvironmentFault
from distill.serving.launch import has_gpu
from distill.teacher_manager import CUDA, Rates

GIVEN, MEASURED, ASSUMED = "given", "measured here", "assumed"
_COPY_BYTES = 64_000_000
_READ_BYTES = 256_000_000
"""Of a file, at most."""
_BLOCK_BYTES = 16_000_000
_SPELL_S = 0.3
"""How long each is measured, from the second try on."""
_GEMM_TIMEOUT_S = 60.0
_GEMM = """
import time, numpy
a = numpy.ones((768, 768), numpy.float32)
out, fastest, until = a @ a, 1e9, time.perf_counter() + 0.4
while time.perf_counter() < until:
    begin = time.perf_counter()
    numpy.matmul(a, a, out)
    fastest = min(fastest, time.perf_counter() - begin)
print(2 * 768**3 / fastest)
"""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True, slots=True)
class Speed:
    """A rate a second, and where it comes from."""

    value: float
    """Bytes, or floating-point operations, a second."""
    source: str
    """given, measured here or assumed."""
    how: str


@dataclass(frozen=True, slots=True)
class Speeds:
    link: Speed
    disk: Speed
    device: Speed

    def rates(self) -> Rates:
        return Rates(*(max(1, round(each.value)) for each in (self.device, self.link, self.disk)))


@dataclass(frozen=True, slots=True)
class GivenSpeeds:
    """What the command line says; None is to be found out."""

    link_bytes: float | None = None
    disk_bytes: float | None = None
    device_flops: float | None = None


def find_speeds(given: GivenSpeeds, server: ServerConfig, file: Path) -> Speeds:
    """`file`: weights of a teacher, to read from. Raises EnvironmentFault where something cannot be measured."""
    processor = on_processor(server)
    threads = f"{server.threads} thread{'s' if server.threads > 1 else ''}"
    return Speeds(
        link=_speed(
            given.link_bytes, processor, _copy_rate, CUDA.link_bytes, "copy of a 64 MB buffer", "pinned memory"
        ),
        disk=_speed(
            given.disk_bytes, True, lambda: _read_rate(file), 0, f"read of {file.name}, past the page cache", ""
        ),
        device=_speed(
            given.device_flops,
            processor,
            lambda: _gemm_rate(server.threads),
            CUDA.device_flops,
            f"float32 GEMM in numpy, {threads}: the most that a forward pass can reach",
            "a large GPU at half its peak",
        ),
    )


def on_processor(server: ServerConfig) -> bool:
    """The slots compute on the processor of a machine like this one."""
    return server.device == "cpu" or (server.device == "auto" and not has_gpu())


def _speed(
    given: float | None, here: bool, measure: Callable[[], float], otherwise: int, how: str, belief: str
) -> Speed:
    if given is not None:
        return Speed(given, GIVEN, "command line")
    return Speed(measure(), MEASURED, how) if here else Speed(otherwise, ASSUMED, belief)


def _copy_rate() -> float:
    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    np.copyto(target, source)  # maps the pages
    return _COPY_BYTES / _fastest(lambda: np.copyto(target, source))


def _read_rate(file: Path) -> float:
    """Of the file's beginning, from the disk where the system can be told to forget what it has read."""
    room = np.empty(_BLOCK_BYTES, np.uint8)
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            advise: Any = getattr(os, "posix_fadvise", None)
            if advise is not None:
                advise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            done = 0
            while done < _READ_BYTES and time.perf_counter() < begin + _SPELL_S:
                count = os.preadv(descriptor, [room.data], done)
                if not count:
                    break
                done += count
            return max(1, done) / (time.perf_counter() - begin)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise EnvironmentFault(f"{file}: cannot be read: {error.strerror}", fix="give --disk-gb-per-s") from error


def _gemm_rate(threads: int) -> float:
    """In a process of its own: how many threads numpy uses is settled when it is imported."""
    environment = os.environ | dict.fromkeys(_THREADS, str(threads))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _GEMM],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_GEMM_TIMEOUT_S,
            check=True,
        )
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EnvironmentFault(
            f"the speed of this processor cannot be measured: {error}", fix="give --device-tflops"
        ) from error


def _fastest(work: Callable[[], None]) -> float:
    """Seconds: others may use the machine, and only ever make it slower."""
    fastest, until = float("inf"), time.perf_counter() + _SPELL_S
    while time.perf_counter() < until:
        begin = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - begin)
    return fastest
