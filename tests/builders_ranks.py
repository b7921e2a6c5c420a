"""Real processes as the ranks of a student, told what to do from the test's own process."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distill.config.models import ObjectiveConfig
from distill.errors import DistillError
from distill.protocols import RankPlace
from students import ranks

HOST = "127.0.0.1"
DEADLINE_S = 120.0


class Ranks:
    """`count` processes that have met. One job at a time, the same on all of them."""

    def __init__(self, count: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count), daemon=True)
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)
        address = self._receive(0)
        for pipe in self._pipes:
            pipe.send(address)

    def do(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What `job(*args)` returned on each rank; the DistillError in its place where it raised one."""
        self.begin(job, *args)
        return [self.answer(rank) for rank in range(len(self._pipes))]

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        for pipe in self._pipes:
            pipe.send((job, args))

    def answer(self, rank: int) -> Any:
        answer = self._receive(rank)
        assert not isinstance(answer, str), answer
        return answer[0]

    def _receive(self, rank: int) -> Any:
        assert self._pipes[rank].poll(DEADLINE_S), f"rank {rank} said nothing for {DEADLINE_S} s"
        return self._pipes[rank].recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, count: int) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        pipe.send(ranks.listen(HOST, count))
    ranks.join(RankPlace(rank, count, pipe.recv(), HOST, rank), cuda=False)
    while True:
        job, args = pipe.recv()
        try:
            pipe.send((job(*args),))
        except DistillError as error:
            pipe.send((error,))
        except Exception:  # noqa: BLE001 (the test shows it)
            pipe.send(traceback.format_exc())


def add_up(times: int) -> int:
    """Talk to the other ranks `times` times; every rank adds one each time."""
    total = torch.zeros((), dtype=torch.int64)
    with ranks.lost_contact_is_a_fault("step"):
        for _ in range(times):
            one = torch.ones((), dtype=torch.int64)
            dist.all_reduce(one)
            total += one
    return int(total)


def start_student(model: Path, rules: ObjectiveConfig | None = None, **changes: Any) -> Any:
    """An HFStudent. Its class is imported here: processes that only talk start in a fraction of the time."""
    from students.hf.backend import HFStudent
    from tests.builders_student import VOCAB, student_config

    return HFStudent(student_config(model, **changes), seed=0, total_steps=20, vocab_size=VOCAB, rules=rules)
