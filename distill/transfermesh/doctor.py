"""What TransferMesh can use on this machine, found by trying it."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distill.errors import DistillError, MeshError
from distill.transfermesh.endpoint import SHM_DIR
from distill.transfermesh.loader import MemoryLoader
from distill.transfermesh.publisher import Publisher
from distill.transfermesh.receiver import Receiver
from distill.transfermesh.transports.shm import leaked

_INFINIBAND = Path("/sys/class/infiniband")
_GPU = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `ok` is None for what this version cannot use, whatever the machine has."""

    what: str
    ok: bool | None
    detail: str


def examine() -> list[Finding]:
    """Publish a small model over each transport, and look at what else is there."""
    return [
        _shm_space(),
        _tried("shm", lambda: _publish("shm", "127.0.0.1")),
        _tried("tcp 127.0.0.1", lambda: _publish("tcp", "127.0.0.1")),
        _tried("tcp ::1", lambda: _publish("tcp", "::1")),
        _leaks(),
        Finding("ucx", None, _absent("a UCX package is installed", "no UCX package is installed", _has("ucxx", "ucp"))),
        Finding("nccl", None, _absent("an NVIDIA driver is loaded", "no NVIDIA driver is loaded", _GPU.exists())),
        Finding("rdma", None, _absent("InfiniBand devices exist", "no InfiniBand device", _has_infiniband())),
    ]


def healthy(findings: list[Finding]) -> bool:
    """Weights can travel between processes of this machine by TCP at least; shared memory is an optimisation."""
    return any(finding.ok for finding in findings if finding.what.startswith("tcp"))


def _tried(what: str, attempt: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, attempt())
    except DistillError as error:
        return Finding(what, False, error.what)


def _publish(transport: str, host: str) -> str:
    key = secrets.token_bytes(32)
    receiver = Receiver(key, MemoryLoader(), host=host, timeout_s=10).start()
    publisher = Publisher(key, transport=transport, bucket_bytes=1 << 20, timeout_s=10)
    try:
        weights = [("probe", "uint8", (1 << 20,), np.arange(1 << 20, dtype=np.uint32).astype(np.uint8))]
        report = publisher.publish(weights, 0, [receiver.endpoint])
    finally:
        publisher.close()
        receiver.close()
    for reason in report.failed.values():
        raise MeshError(reason)
    return "1 MiB published, loaded, committed; digests agree"


def _shm_space() -> Finding:
    try:
        usage = shutil.disk_usage(SHM_DIR)
    except OSError as error:
        return Finding("shm size", False, f"{SHM_DIR}: {error}")
    detail = f"{SHM_DIR}: {usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f}; two buckets must fit"
    return Finding("shm size", usage.free > 0, detail)


def _leaks() -> Finding:
    paths = leaked()
    if not paths:
        return Finding("shm leaks", True, "no segment of a dead run")
    return Finding("shm leaks", True, f"{len(paths)} segments of dead runs; the next publisher removes them")


def _absent(there: str, missing: str, found: bool) -> str:
    return f"not part of this version, so it was not tried; {there if found else missing}"


def _has(*packages: str) -> bool:
    return any(importlib.util.find_spec(package) is not None for package in packages)


def _has_infiniband() -> bool:
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
