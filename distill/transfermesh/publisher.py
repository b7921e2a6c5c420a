"""The sending end: one version to all receivers at once, committed only where every digest agrees."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill import registry
from distill.errors import ConfigError, EnvironmentFault, MeshError
from distill.transfermesh.auth import check_key, dial, run_id
from distill.transfermesh.buckets import Bucket, cut
from distill.transfermesh.digest import Octets, model_digest, tensor_digest
from distill.transfermesh.endpoint import Endpoint, host_id
from distill.transfermesh.link import Link
from distill.transfermesh.manifest import Manifest, TensorSpec
from distill.transfermesh.round import Round
from distill.transfermesh.transports.base import Sender, TransportStats
from distill.transfermesh.wire import (
    CREDIT,
    MAX_BUCKET_BYTES,
    MIN_BUCKET_BYTES,
    Abort,
    Ack,
    Active,
    Commit,
    End,
    Offer,
    Ready,
    Staged,
)

Weights = Iterable[tuple[str, str, tuple[int, ...], NDArray[Any]]]
"""(name, dtype as torch spells it, shape, contiguous array of the tensor's bytes)."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of one version. A receiver is either in `committed` or, with the reason, in `failed`."""

    version: int
    digest: str
    """`model_digest` of the version, equal to that of the live tensors of every committed receiver."""
    nbytes: int
    seconds: float
    """stage_seconds + commit_seconds, and the digests and manifest before."""
    committed: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Receiver name -> reason. Fence it: what it holds may be the old version or, if it failed in commit, unknown."""
    transports: dict[str, str] = field(default_factory=dict[str, str])
    """Receiver name -> transport that was used for it."""
    stage_seconds: float = 0.0
    """Until every receiver had staged the version or was given up on."""
    commit_seconds: float = 0.0


class Publisher:
    """Sends weights to receivers. One publish at a time; its arrays must not change until it returns.

    `transport`: "auto" takes shared memory on the same host and TCP otherwise; or a name of the registry for all.
    `bucket_bytes`: how much is sent and checked at a time; the host's shared memory holds two of them.
    `timeout_s`: how long a receiver may take for one step (take a bucket, digest what it staged, commit) before it is
    given up on. Each publish opens its own connections, so receivers may come, go and move between two of them.
    """

    def __init__(
        self, key: bytes, *, transport: str = "auto", bucket_bytes: int = 64 << 20, timeout_s: float = 120.0
    ) -> None:
        self._key = check_key(key)
        if transport != "auto":
            registry.load("transport", transport)  # an unknown name is told here, not at the first update
        if not MIN_BUCKET_BYTES <= bucket_bytes <= MAX_BUCKET_BYTES:
            raise ConfigError(f"buckets of {bucket_bytes} bytes", fix=f"{MIN_BUCKET_BYTES} to {MAX_BUCKET_BYTES} bytes")
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._senders: dict[str, Sender] = {}
        self._lock = threading.Lock()

    def publish(self, weights: Weights, version: int, receivers: Sequence[Endpoint]) -> PublishReport:
        """Send `weights` as `version` to all `receivers`, in parallel. Failures of receivers are in the report.

        Raises MeshError for weights that are not a model or receivers with one name, EnvironmentFault when this host
        has no room for the buckets. Holds all of `weights` while it runs: it is iterated once, before the first byte.
        """
        names = [endpoint.name for endpoint in receivers]
        if len(set(names)) < len(names):
            raise MeshError(f"receivers must have different names: {', '.join(sorted(names))}")
        with self._lock:
            began = time.monotonic()
            manifest, arrays = _collect(weights, version)
            current = Round(manifest, cut(arrays, self._bucket_bytes), names)
            routes = self._routes(receivers, current.buckets)
            staged = self._run(current, arrays, receivers, routes)
            done = time.monotonic()
        return PublishReport(
            version=version,
            digest=current.digest.result(),
            nbytes=manifest.nbytes,
            seconds=done - began,
            committed=tuple(name for name in names if name not in current.failed),
            failed={name: current.failed[name] for name in names if name in current.failed},
            transports=routes,
            stage_seconds=staged - began,
            commit_seconds=done - staged,
        )

    @property
    def stats(self) -> dict[str, TransportStats]:
        """By transport, what was carried since this publisher was made."""
        return {name: sender.stats for name, sender in self._senders.items()}

    def close(self) -> None:
        """Free the shared memory. Waits for a publish that is under way."""
        with self._lock:
            for sender in self._senders.values():
                sender.close()
            self._senders.clear()

    def _routes(self, receivers: Sequence[Endpoint], buckets: Sequence[Bucket]) -> dict[str, str]:
        """Receiver name -> transport, each transport ready for its receivers."""
        here = host_id()
        routes: dict[str, str] = {}
        for endpoint in receivers:
            automatic = "shm" if endpoint.host_id == here else "tcp"
            routes[endpoint.name] = automatic if self._transport == "auto" else self._transport
        for transport in sorted(set(routes.values())):
            if transport not in self._senders:
                self._senders[transport] = registry.load("transport", transport).sender(
                    run_id(self._key), self._timeout_s
                )
            users = [name for name, used in routes.items() if used == transport]
            self._senders[transport].begin(users, max((bucket.nbytes for bucket in buckets), default=0))
        return routes

    def _run(
        self, current: Round, arrays: Sequence[Octets], receivers: Sequence[Endpoint], routes: dict[str, str]
    ) -> float:
        """Drive one thread a receiver through the round; returns the time at which all had staged or failed."""
        with ThreadPoolExecutor(max(1, len(receivers)), thread_name_prefix="mesh-publish") as pool:
            lanes: list[Future[None]] = []
            try:
                for endpoint in receivers:
                    sender = self._senders[routes[endpoint.name]]
                    lanes.append(pool.submit(self._lane, current, endpoint, routes[endpoint.name], sender))
                # Meanwhile: the first buckets are on their way.
                specs = current.manifest.tensors
                digests = {spec.name: tensor_digest(array) for spec, array in zip(specs, arrays, strict=True)}
                current.digest.set_result(model_digest(digests))
                current.wait_until_staged()
                staged = time.monotonic()
                current.decide(commit=True)
                for lane in lanes:
                    lane.result()  # raises what is not a receiver's failure but a fault of ours
            except BaseException:
                current.cancel()
                raise
        return staged

    def _lane(self, current: Round, endpoint: Endpoint, transport: str, sender: Sender) -> None:
        """One receiver's way through the round, on a thread of its own. Its failure is its own."""
        name = endpoint.name
        try:
            link = dial(endpoint, self._key, self._timeout_s)
            try:
                current.connected(name, link)
                self._update(current, link, name, transport, sender)
            finally:
                link.close()
        except (MeshError, EnvironmentFault, OSError) as error:
            current.fail(name, error.what if isinstance(error, MeshError | EnvironmentFault) else str(error))
        finally:
            sender.leave(name)
            current.settle(name)

    def _update(self, current: Round, link: Link, name: str, transport: str, sender: Sender) -> None:
        try:
            self._stage(current, link, name, transport, sender)
            sender.leave(name)
            current.settle(name)
            current.wait_for_decision(link)
        except MeshError as error:
            _say_abort(link, error.what)
            raise
        link.send(Commit(current.manifest.version))
        active = link.receive(Active)
        if active.version != current.manifest.version or active.digest != current.digest.result(0):
            raise MeshError(f"{name}: after commit it has version {active.version} with digest {active.digest} live")

    def _stage(self, current: Round, link: Link, name: str, transport: str, sender: Sender) -> None:
        link.send(Offer(transport, self._bucket_bytes, current.manifest))
        link.keep_alive_s = min(link.receive(Ready).patience_s, self._timeout_s) / 4
        flying: deque[int] = deque()
        for bucket in current.buckets:
            if len(flying) == CREDIT:
                _await_ack(link, name, flying, sender)
            sender.send(link, name, bucket)
            flying.append(bucket.seq)
        while flying:
            _await_ack(link, name, flying, sender)
        expected = current.wait_for_digest(link)
        link.send(End(expected, len(current.buckets)))
        staged = link.receive(Staged)
        if staged.digest != expected:
            raise MeshError(
                f"{name}: after loading it has digest {staged.digest}, not {expected}",
                why="its loader changed, lost or misplaced something",
            )


def _await_ack(link: Link, name: str, flying: deque[int], sender: Sender) -> None:
    due = flying.popleft()
    ack = link.receive(Ack)
    if ack.seq != due:
        raise MeshError(f"{name} acknowledged bucket {ack.seq} where {due} was due")
    sender.acked(name, due)


def _say_abort(link: Link, reason: str) -> None:
    try:
        link.send(Abort(reason))
    except MeshError:
        pass  # it is gone, or does not listen: closing the connection says the same


def _collect(weights: Weights, version: int) -> tuple[Manifest, list[Octets]]:
    """The manifest, and the tensors' bytes in its order."""
    specs: list[TensorSpec] = []
    arrays: list[Octets] = []
    for name, dtype, shape, array in weights:
        if not array.flags.c_contiguous:
            raise MeshError(f"tensor {name!r} is not contiguous", fix="pass np.ascontiguousarray of it")
        octets = array.reshape(-1).view(np.uint8)
        specs.append(TensorSpec(name, dtype, tuple(shape), octets.nbytes))
        arrays.append(octets)
    manifest = Manifest(version, tuple(specs))
    manifest.check()
    return manifest, arrays
