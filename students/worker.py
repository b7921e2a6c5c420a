"""What a process of the student hosts: a training backend, its objective, and the way of its weights to the servers.

A student of several ranks has one such process a rank. Every method is called on all of them with the same arguments,
and its result is rank 0's. It knows nothing of the program that hosts it; in a run that is an actor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distill import registry
from distill.config.models import MeshConfig, ObjectiveConfig, StudentConfig
from distill.errors import EnvironmentFault
from distill.objectives import build_objective
from distill.protocols import HeadFolder, PublishResult, RankPlace, StudentBackend
from distill.transfermesh import Endpoint, Publisher
from distill.types import Batch, StepResult
from students import ranks
from students.memory import peak_memory_bytes


class StudentWorker:
    """Trains, evaluates, publishes and saves one student, or one rank of it. One caller at a time.

    Whatever a rank says to the others has a deadline; one that loses them raises PeerFault.
    """

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
        place: RankPlace | None = None,
        teacher_heads: Mapping[str, HeadFolder] | None = None,
    ) -> None:
        """`run_key`: the run's secret in hexadecimal digits. `threads`: CPU threads of this process, changed here.
        `place`: of a student of several ranks, which this waits for. `teacher_heads`: of teachers whose full rows come
        as hidden states, where they do.

        Raises ConfigError, MissingDependency or EnvironmentFault when the student cannot be built.
        """
        torch.set_num_threads(threads)
        self._first = place is None or place.rank == 0
        if place is not None:
            config = _on_its_device(config, place)
            ranks.join(place, cuda=config.device.startswith("cuda"))
        self._objective = build_objective(objective)
        backend: Any = registry.load("student", config.backend)
        with ranks.lost_contact_is_a_fault("the start"):
            self._student: StudentBackend = backend(
                config,
                seed=seed,
                total_steps=total_steps,
                vocab_size=vocab_size,
                rules=objective,
                **({} if teacher_heads is None else {"teacher_heads": teacher_heads}),
            )
        self._publisher = Publisher(
            key=bytes.fromhex(run_key),
            transport=mesh.transport,
            bucket_bytes=int(mesh.bucket_mb * 1e6),
            timeout_s=mesh.timeout_s,
        )

    def step(self, batch: Batch) -> StepResult:
        with ranks.lost_contact_is_a_fault("step"):
            return self._student.step(batch, self._objective)

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Token mean of KL(p || q) per domain, without learning."""
        with ranks.lost_contact_is_a_fault("evaluate"):
            return self._student.evaluate(batch, self._objective)

    def publish(self, receivers: Sequence[Mapping[str, Any]]) -> PublishResult | None:
        """Send the present weights to `receivers` (each as `Endpoint.to_dict` gives it) as one version.

        Rank 0 sends; the others give it their pieces, and return None. A receiver that fails is reported in the result
        and does not hold up the others.
        """
        with ranks.lost_contact_is_a_fault("publish"):
            if not self._first:
                deque(self._student.weights(), maxlen=0)
                return None
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
        with ranks.lost_contact_is_a_fault("save"):
            self._student.save(folder)

    def load(self, folder: Path) -> None:
        with ranks.lost_contact_is_a_fault("load"):
            self._student.load(folder)

    def export(self, folder: Path) -> None:
        with ranks.lost_contact_is_a_fault("export"):
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


def _on_its_device(config: StudentConfig, place: RankPlace) -> StudentConfig:
    """Each rank of a machine has a device of its own there. Raises EnvironmentFault where there are too few."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return config.model_copy(update={"device": "cpu"})
    if place.device >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"student.ranks: rank {place.rank} is number {place.device + 1} on {place.host}, where torch sees "
            f"{torch.cuda.device_count()} CUDA devices",
            why="every rank needs a device of its own",
            fix="set student.ranks to the number of devices, or student.device=cpu",
        )
    return config.model_copy(update={"device": f"cuda:{place.device}"})
