"""What must agree before a server that has just loaded a teacher may score with it: the weights and a canary.

The weights: the server's digests of the tensors that it holds, against the file's. The canary: log-probabilities of a
fixed sequence, against those of the teacher's first activation. The weights catch a wrong, torn or stale load, the
canary what digests cannot see: stale buffers and caches, and weights that the server names differently.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distill.errors import TeacherError
from distill.protocols import TeacherServer
from distill.teacher_manager.teachers import Teacher
from distill.types import Floats, Ids, ScoreRequest, Signal, SignalSpec

SAMPLED = SignalSpec(Signal.SAMPLED)
CANARY_TOKENS = 16
CANARY_RESPONSE = 12
_STRIDE = 2_654_435_761
"""Knuth's multiplicative hash: spreads the ids over any vocabulary."""


def canary_ids(vocab_size: int) -> Ids:
    """The fixed sequence (CANARY_TOKENS,): it depends on the vocabulary's size alone."""
    return np.array([index * _STRIDE % vocab_size for index in range(1, CANARY_TOKENS + 1)], dtype=np.int32)


class CanaryStore:
    """Canary log-probabilities by weight digest, in a JSON file of the run's folder: a resumed run checks them too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, dict[str, Any]] = {}
        if path.is_file():
            try:
                self._records = dict(json.loads(path.read_text()))
            except ValueError as error:
                raise TeacherError(
                    f"{path}: cannot be read: {error}",
                    why="it holds what each teacher said at its first activation",
                    fix="delete it to record the teachers anew, if their files are as they were",
                ) from error

    def get(self, digest: str) -> Floats | None:
        record = self._records.get(digest)
        return None if record is None else np.array(record["logprobs"], dtype=np.float32)

    def put(self, digest: str, teacher: str, logprobs: Floats) -> None:
        self._records[digest] = {"teacher": teacher, "logprobs": [float(value) for value in logprobs]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_text(json.dumps(self._records, indent=1))
        fresh.replace(self._path)


class Gate:
    """Checks one activation. Raises TeacherError when the server does not hold what the teacher's files say."""

    def __init__(self, canaries: CanaryStore, *, vocab_size: int, atol: float) -> None:
        """`vocab_size`: of teachers that have none of their own."""
        self._canaries = canaries
        self._vocab_size = vocab_size
        self._atol = atol

    def canary(self, teacher: Teacher, spec: SignalSpec = SAMPLED) -> ScoreRequest:
        """The fixed sequence as a request. Where `spec` asks about tokens of the student's choice these are the first
        ones of the vocabulary: only the sampled tokens are compared."""
        ids = canary_ids(teacher.vocab_size or self._vocab_size)
        choice = np.tile(np.arange(spec.student_k, dtype=np.int32), (CANARY_RESPONSE, 1)) if spec.student_k else None
        return ScoreRequest(f"canary-{teacher.name}", ids, CANARY_RESPONSE, choice, teacher=teacher.name)

    async def check(self, server: TeacherServer, teacher: Teacher, slot: str, *, scores: bool = True) -> None:
        """The weights of a resident object and, where it scores, its canary."""
        held = await server.checksums(teacher.name)
        self._require(teacher, await asyncio.to_thread(teacher.differences, held), slot, "holds")
        if scores:
            (reply,) = await server.score([self.canary(teacher)], SAMPLED)
            await self.compare(teacher, slot, reply.logprobs)

    async def check_streamed(self, server: TeacherServer, teacher: Teacher, slot: str) -> None:
        """The weights that a batch was streamed through. The server lists what it read whole: one tensor may be
        missing, an embedding of which rows were enough."""
        held = await server.checksums(teacher.name)
        wrong = await asyncio.to_thread(teacher.differences, held)
        unread = [name for name in wrong if name not in held]
        self._require(teacher, wrong if len(unread) > 1 else [name for name in wrong if name in held], slot, "streamed")

    def _require(self, teacher: Teacher, wrong: Sequence[str], slot: str, did: str) -> None:
        if wrong:
            raise TeacherError(
                f"teacher {teacher.name}: {slot} {did} {len(wrong)} of {len(teacher.tensors)} tensors with other bytes "
                f"than {teacher.folder}, the first is {wrong[0]}",
                why="its scores would come from other weights than those of the teacher",
                fix="check that nothing rewrites the folder during a run; look at the server's log",
            )

    async def compare(self, teacher: Teacher, slot: str, found: Floats) -> None:
        """The canary's log-probabilities against those of the teacher's first time, which are remembered."""
        digest = await asyncio.to_thread(lambda: teacher.digest)  # the first time, this reads the files
        recorded = self._canaries.get(digest)
        if recorded is None:
            if not np.isfinite(found).all():
                raise TeacherError(
                    f"teacher {teacher.name}: its canary on {slot} is no number", fix="check its weights"
                )
            self._canaries.put(digest, teacher.name, found)
            return
        change = float(np.max(np.abs(found - recorded)))
        if not change <= self._atol:  # a NaN must not pass
            raise TeacherError(
                f"teacher {teacher.name}: its canary on {slot} moved by {change:.3g} nat, more than {self._atol:g}",
                why="the same weights gave other log-probabilities when first loaded: a cache or a buffer is stale",
                fix="restart the server; another dtype or device needs a larger teacher_manager.canary_atol",
            )
