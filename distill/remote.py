"""The student and the model servers as the controller sees them: objects in Ray actors, each call with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from distill.cluster import Remote
from distill.errors import ServiceError
from distill.protocols import ModelServer, PublishResult, ServerAddress
from distill.types import Batch, StepResult

STEP_DEADLINE_S = 3600.0
SAVE_DEADLINE_S = 1800.0
CLOSE_DEADLINE_S = 10.0


class RemoteStudent:
    """Implements `StudentHandle` over a `students.worker:StudentWorker` in an actor, which runs one call at a time.

    Weights go by the mesh to servers that have a receiver. Others (SGLang as it is, servers of somebody else) are
    told to load them from `spool`, a folder that they must be able to read.
    """

    def __init__(self, remote: Remote, *, spool: Path, connect: Callable[[ServerAddress], ModelServer]) -> None:
        self._remote = remote
        self._spool = spool
        self._connect = connect

    async def step(self, batch: Batch) -> StepResult:
        return await self._remote.call("step", batch, deadline_s=STEP_DEADLINE_S)

    async def evaluate(self, batch: Batch) -> dict[str, float]:
        return await self._remote.call("evaluate", batch, deadline_s=STEP_DEADLINE_S)

    async def publish(self, receivers: Sequence[ServerAddress]) -> PublishResult:
        endpoints = [server.mesh for server in receivers if server.mesh is not None]
        result: PublishResult = await self._remote.call("publish", endpoints, deadline_s=STEP_DEADLINE_S)
        without = [server for server in receivers if server.mesh is None]
        return await self._publish_by_disk(without, result) if without else result

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
        await self._remote.call("save", folder, deadline_s=SAVE_DEADLINE_S)

    async def load(self, folder: Path) -> None:
        await self._remote.call("load", folder, deadline_s=SAVE_DEADLINE_S)

    async def export(self, folder: Path) -> None:
        await self._remote.call("export", folder, deadline_s=SAVE_DEADLINE_S)

    async def close(self) -> None:
        """Free its shared memory and end it. A student that is dead already left that to the next start."""
        with contextlib.suppress(ServiceError):
            await self._remote.call("close", deadline_s=CLOSE_DEADLINE_S)
        self._remote.kill()


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

    async def stop(self) -> None:
        """End the server. One whose actor is dead has ended with it."""
        with contextlib.suppress(ServiceError):
            await self.remote.call("stop", deadline_s=30)
        self.remote.kill()
