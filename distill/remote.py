"""The student and the model servers as the controller sees them: objects in Ray actors, each call with a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from distill.cluster import Remote
from distill.errors import ServiceError
from distill.protocols import PublishResult, ServerAddress
from distill.types import Batch, StepResult

STEP_DEADLINE_S = 3600.0
SAVE_DEADLINE_S = 1800.0


class RemoteStudent:
    """Implements `StudentHandle` over a `students.worker:StudentWorker` in an actor, which runs one call at a time."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def step(self, batch: Batch) -> StepResult:
        return await self._remote.call("step", batch, deadline_s=STEP_DEADLINE_S)

    async def evaluate(self, batch: Batch) -> dict[str, float]:
        return await self._remote.call("evaluate", batch, deadline_s=STEP_DEADLINE_S)

    async def publish(self, receivers: Sequence[ServerAddress]) -> PublishResult:
        endpoints = [server.mesh for server in receivers]
        return await self._remote.call("publish", endpoints, deadline_s=STEP_DEADLINE_S)

    async def save(self, folder: Path) -> None:
        await self._remote.call("save", folder, deadline_s=SAVE_DEADLINE_S)

    async def load(self, folder: Path) -> None:
        await self._remote.call("load", folder, deadline_s=SAVE_DEADLINE_S)

    async def export(self, folder: Path) -> None:
        await self._remote.call("export", folder, deadline_s=SAVE_DEADLINE_S)


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
