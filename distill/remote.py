"""The student and the model servers as the controller sees them: objects in Ray actors, each call with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.cluster import Cluster, Remote, Shared
from distill.errors import DistillError, PeerFault, ServiceError, StudentError
from distill.protocols import ModelServer, PublishResult, RankPlace, ServerAddress
from distill.types import Batch, StepResult

STEP_DEADLINE_S = 3600.0
SAVE_DEADLINE_S = 1800.0
CLOSE_DEADLINE_S = 10.0
PEERS_DEADLINE_S = 10.0
"""How long the other ranks may take to say why they stopped, once one has: the first to speak is often not the one that
has the reason. What hangs then is waiting for a rank that is gone."""
LOOPBACK = "127.0.0.1"


class RemoteStudent:
    """Implements `StudentHandle` over a `students.worker:StudentWorker` in an actor, or in one a rank.

    An actor runs one call at a time, and every call goes to all ranks. They work and fail together: once one has died
    or is lost to the others, the others are ended too.

    Weights go by the mesh to servers that have a receiver. Others (SGLang as it is, servers of somebody else) are
    told to load them from `spool`, a folder that they must be able to read.
    """

    def __init__(
        self, ranks: Sequence[Remote], *, spool: Path, connect: Callable[[ServerAddress], ModelServer]
    ) -> None:
        self._ranks = ranks
        self._spool = spool
        self._connect = connect

    async def pids(self) -> list[int]:
        """The process of each rank."""
        return await asyncio.gather(*(rank.pid() for rank in self._ranks))

    async def step(self, batch: Batch) -> StepResult:
        results: list[StepResult] = await self._all("step", self._shared(batch), deadline_s=STEP_DEADLINE_S)
        return replace(results[0], peak_memory_bytes=max(result.peak_memory_bytes for result in results))

    async def evaluate(self, batch: Batch) -> dict[str, float]:
        return (await self._all("evaluate", self._shared(batch), deadline_s=STEP_DEADLINE_S))[0]

    async def publish(self, receivers: Sequence[ServerAddress]) -> PublishResult:
        endpoints = [server.mesh for server in receivers if server.mesh is not None]
        result: PublishResult = (await self._all("publish", endpoints, deadline_s=STEP_DEADLINE_S))[0]
        without = [server for server in receivers if server.mesh is None]
        return await self._publish_by_disk(without, result) if without else result

    def _shared(self, batch: Batch) -> Any:
        """With several ranks the batch is put into shared memory once, not once for each."""
        return Shared.put(batch) if len(self._ranks) > 1 else batch

    async def _all(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        """Call a method on every rank. Raises the error of the rank that has the reason."""
        calls = [asyncio.ensure_future(rank.call(method, *args, deadline_s=deadline_s)) for rank in self._ranks]
        return await together(calls, self._ranks)

    async def _publish_by_disk(self, servers: Sequence[ServerAddress], result: PublishResult) -> PublishResult:
        started = time.monotonic()
        folder = self._spool / str(result.version)
        await self.export(folder)
        try:
            reasons = await asyncio.gather(*(self._load(server, folder, result.version) for server in servers))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        failed = {server.name: reason for server, reason in zip(servers, reasons, strict=True) if reason}
        loaded = tuple(server.name for server in servers if server.name not in failed)
        return replace(
            result,
            seconds=result.seconds + time.monotonic() - started,
            committed=result.committed + loaded,
            failed={**result.failed, **failed},
            transports={**result.transports, **dict.fromkeys(loaded, "disk")},
        )

    async def _load(self, server: ServerAddress, folder: Path, version: int) -> str:
        """Why the server did not take the weights; empty when it did."""
        client = self._connect(server)
        try:
            await client.load_weights(folder, str(version))
        except ServiceError as error:
            return error.what
        finally:
            await client.close()
        return ""

    async def save(self, folder: Path) -> None:
        await self._all("save", folder, deadline_s=SAVE_DEADLINE_S)

    async def load(self, folder: Path) -> None:
        await self._all("load", folder, deadline_s=SAVE_DEADLINE_S)

    async def export(self, folder: Path) -> None:
        await self._all("export", folder, deadline_s=SAVE_DEADLINE_S)

    async def close(self) -> None:
        """Free its shared memory and end it. A student that is dead already left that to the next start."""
        with contextlib.suppress(ServiceError):
            await self._ranks[0].call("close", deadline_s=CLOSE_DEADLINE_S)
        for rank in self._ranks:
            rank.kill()


async def together(calls: Sequence[asyncio.Future[Any]], ranks: Sequence[Remote]) -> list[Any]:
    """The results of one call a rank. Raises one error for all that fail, from the rank that has the reason.

    The others get a short while to end what they do. If one does not, or if a rank has died, all are ended: those that
    are left can do nothing without it.
    """
    try:
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            more, waiting = await asyncio.wait(waiting, timeout=PEERS_DEADLINE_S)
            done |= more
    finally:
        for call in calls:
            call.cancel()
    errors = [error for call in calls if call in done and (error := call.exception()) is not None]
    if not errors:
        return [call.result() for call in calls]
    if waiting or all(isinstance(error, PeerFault) for error in errors):
        for rank in ranks:
            rank.kill()
    raise min(errors, key=_how_far_from_the_reason)


def _how_far_from_the_reason(error: BaseException) -> tuple[bool, bool]:
    """A rank that was stopped by another is not the reason; what is no error of ours may be the echo of a death."""
    return isinstance(error, PeerFault), not isinstance(error, DistillError)


async def start_student(
    cluster: Cluster,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ranks: int,
    fix: str,
    env: Mapping[str, str],
    deadline_s: float,
) -> list[Remote]:
    """A `students.worker:StudentWorker` in an actor; with several ranks in as many, which have met.

    Raises what a constructor raises, or StudentError past the deadline or when a process died.
    """
    names = ["student"] if ranks == 1 else [f"student rank {rank}" for rank in range(ranks)]
    actors = [cluster.actor(name, failure=StudentError, fix=fix, env=env) for name in names]
    try:
        places: Sequence[RankPlace | None] = [None]
        if ranks > 1:
            places = await _places(actors, on_loopback=cluster.on_this_machine, deadline_s=deadline_s)
        making = [
            asyncio.ensure_future(
                actor.make("students.worker:StudentWorker", args, {**kwargs, "place": place}, deadline_s)
            )
            for actor, place in zip(actors, places, strict=True)
        ]
        await together(making, actors)
    except BaseException:
        for actor in actors:
            actor.kill()
        raise
    return actors


async def _places(actors: Sequence[Remote], *, on_loopback: bool, deadline_s: float) -> list[RankPlace]:
    """Where each rank is; rank 0 listens from now on."""
    hosts = [LOOPBACK] * len(actors)
    if not on_loopback:
        hosts = await asyncio.gather(*(actor.host(deadline_s) for actor in actors))
    meet = await actors[0].run("students.ranks:listen", hosts[0], len(actors), deadline_s=deadline_s)
    return [
        RankPlace(rank, len(actors), meet, host, device=hosts[:rank].count(host)) for rank, host in enumerate(hosts)
    ]


class RemoteServer:
    """A launcher (`ServerHost`) in an actor."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    @property
    def name(self) -> str:
        return self.remote.name

    async def start(self, deadline_s: float) -> ServerAddress:
        return await self.remote.call("start", deadline_s=deadline_s)

    async def locate(self, deadline_s: float) -> ServerAddress:
        """Where the server is now; waits for a restart that is under way."""
        return await self.remote.call("address", deadline_s, deadline_s=deadline_s + 10)

    async def restart(self, incarnation: int) -> None:
        """End the program of this incarnation, which hangs: the next one is started."""
        await self.remote.call("restart", incarnation, deadline_s=30)

    async def stop(self) -> None:
        """End the server. One whose actor is dead has ended with it."""
        with contextlib.suppress(ServiceError):
            await self.remote.call("stop", deadline_s=30)
        self.remote.kill()
