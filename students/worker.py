"""What the student's process hosts: a training backend, its objective, and the way of its weights to the servers.

It knows nothing of the program that hosts it; in a run that is an actor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distill import registry
from distill.config.models import MeshConfig, ObjectiveConfig, StudentConfig
from distill.objectives import build_objective
from distill.protocols import PublishResult, StudentBackend
from distill.transfermesh import Endpoint, Publisher
from distill.types import Batch, StepResult
from students.memory import peak_memory_bytes


class StudentWorker:
    """Trains, evaluates, publishes and saves one student. One caller at a time."""

    def __init__(
        self,
        config: StudentConfig,
        objective: ObjectiveConfig,
        mesh: MeshConfig,
        *,
        seed: int,
        total_steps: int,
        vocab_size: int,
        run_key: str,
        threads: int,
    ) -> None:
        """`run_key`: the run's secret in hexadecimal digits. `threads`: CPU threads of this process, changed here.

        Raises ConfigError, MissingDependency or EnvironmentFault when the student cannot be built.
        """
        torch.set_num_threads(threads)
        self._objective = build_objective(objective)
        backend: Any = registry.load("student", config.backend)
        self._student: StudentBackend = backend(config, seed=seed, total_steps=total_steps, vocab_size=vocab_size)
        self._publisher = Publisher(
            key=bytes.fromhex(run_key),
            transport=mesh.transport,
            bucket_bytes=int(mesh.bucket_mb * 1e6),
            timeout_s=mesh.timeout_s,
        )

    def step(self, batch: Batch) -> StepResult:
        return self._student.step(batch, self._objective)

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Token mean of KL(p || q) per domain, without learning."""
        return self._student.evaluate(batch, self._objective)

    def publish(self, receivers: Sequence[Mapping[str, Any]]) -> PublishResult:
        """Send the present weights to `receivers` (each as `Endpoint.to_dict` gives it) as one version.

        A receiver that fails is reported in the result and does not hold up the others.
        """
        endpoints = [Endpoint.from_dict(receiver) for receiver in receivers]
        report = self._publisher.publish(self._student.weights(), self._student.version, endpoints)
        return PublishResult(
            version=report.version,
            digest=report.digest,
            bytes=report.nbytes,
            seconds=report.seconds,
            committed=tuple(report.committed),
            failed=dict(report.failed),
            transports=dict(report.transports),
        )

    def save(self, folder: Path) -> None:
        self._student.save(folder)

    def load(self, folder: Path) -> None:
        self._student.load(folder)

    def export(self, folder: Path) -> None:
        self._student.export(folder)

    def version(self) -> int:
        return self._student.version

    def pid(self) -> int:
        return os.getpid()

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes()

    def close(self) -> None:
        """Free the shared memory that carried weights. The worker can still train, and publish again."""
        self._publisher.close()
