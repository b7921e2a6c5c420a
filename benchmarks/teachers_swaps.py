"""One swap and one visit at a time, straight from a teacher server: copies from each tier, speeds, streams."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import median
from benchmarks.teachers_house import SPEC, House, Served, forget_pages, requests_of, serve
from distill.protocols import WeightSource
from distill.serving.teacher_client import TeacherClient
from distill.teacher_manager import CanaryStore, Teacher
from distill.teacher_manager.gate import Gate


@dataclass(frozen=True)
class Speed:
    """Of scoring by a resident teacher: seconds = call_s + 2 * tokens * active parameters / flops_per_s."""

    flops_per_s: float
    call_s: float

    def seconds(self, tokens: int, active_params: int) -> float:
        return self.call_s + 2 * tokens * active_params / self.flops_per_s

    def mean(self, other: Speed) -> Speed:
        """Of the time in between."""
        return Speed(
            2 / (1 / self.flops_per_s + 1 / other.flops_per_s),
            (self.call_s + other.call_s) / 2,
        )


async def seconds_of(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def open_client(served: Served) -> TeacherClient:
    """A client with which all teachers are registered, and none is resident on its server."""
    client = served.client()
    for teacher in served.house.teachers():
        await client.register(teacher_source(teacher))
    for name in (await client.ledger()).residents:
        await client.release(name)
    return client


def teacher_source(teacher: Teacher) -> WeightSource:
    return WeightSource(teacher.name, teacher.folder, teacher.version)


async def swaps(house: House, tier: str, repeats: int) -> dict[str, Any]:
    """Seconds of each swap (release the one, load the other), `repeats` times over all teachers, from `tier`: host,
    page cache or disk. `read_bytes`: what the server's process had from storage meanwhile, of all swaps."""
    with serve(house, room=1, host_tier=tier == "host") as served:
        client = await open_client(served)
        try:
            resident = ""
            for name in house.names:  # every file is read once, and host memory filled
                await _swap(client, resident, name)
                resident = name
            seconds: list[float] = []
            read = served.storage_bytes()
            for _ in range(repeats):
                for name in house.names:
                    if tier == "disk":
                        forget_pages(house.files())
                    seconds.append(await seconds_of(partial(_swap, client, resident, name)))
                    resident = name
            return {"seconds": seconds, "read_bytes": served.storage_bytes() - read}
        finally:
            await client.close()


async def _swap(client: TeacherClient, old: str, new: str) -> None:
    if old:
        await client.release(old)
    await client.load(new)


async def checked_swaps(served: Served, canaries: Path, repeats: int) -> list[float]:
    """Seconds of swaps as a run does them: the digests of what is resident and the canary agree before it scores."""
    house, slot = served.house, served.slot()
    gate = Gate(CanaryStore(canaries), vocab_size=house.shape.vocab, atol=1e-4)
    teachers = house.teachers()
    seconds: list[float] = []
    try:
        await slot.open([teacher_source(teacher) for teacher in teachers], 60)
        for lap in range(repeats + 1):
            for teacher in teachers:
                took = await seconds_of(partial(slot.bring, teacher, gate, 60))
                if lap:  # the first one reads the files' digests and records the canaries
                    seconds.append(took)
                await slot.give_up(teacher.name, 60)
    finally:
        await slot.close()
    return seconds


async def speed(client: TeacherClient, house: House, length: int, sizes: tuple[int, int], repeats: int) -> Speed:
    """Of the server, from calls of two sizes in tokens to a resident teacher, which is released afterwards. They are
    to be the sizes that are of interest: large batches outgrow the caches of a processor."""
    name, (small, large) = house.names[0], sizes
    await client.load(name)
    took: dict[int, list[float]] = {small: [], large: []}
    for lap in range(repeats + 1):
        for tokens, seconds in took.items():
            requests = requests_of(house, tokens, length, name)
            once = await seconds_of(partial(client.score, requests, SPEC))
            if lap:  # the first call builds what later ones use
                seconds.append(once)
    await client.release(name)
    slope = (median(took[large]) - median(took[small])) / (large - small)
    return Speed(2 * house.costs.active_params / slope, max(0.0, median(took[small]) - slope * small))


async def visits(client: TeacherClient, house: House, how: str, tokens: int, length: int, repeats: int) -> list[float]:
    """Seconds of each visit of `tokens` tokens, `repeats` times over all teachers. `how`: resident (all are, which
    needs the room), swapped (nothing else runs beside a swap) or streamed."""
    if how == "resident":
        for name in house.names:
            await client.load(name)
    seconds: list[float] = []
    for lap in range(repeats + 1):
        for name in house.names:
            requests = requests_of(house, tokens, length, name)

            async def visit(name: str = name, requests: Any = requests) -> None:
                if how == "swapped":
                    await client.load(name)
                await client.score(requests, SPEC, stream=how == "streamed")
                if how == "swapped":
                    await client.release(name)

            took = await seconds_of(visit)
            if lap:
                seconds.append(took)
    if how == "resident":
        for name in house.names:
            await client.release(name)
    return seconds


async def choices(client: TeacherClient, house: House, points: list[int], length: int, repeats: int) -> dict[str, Any]:
    """On one teacher, in turns: seconds of a load, and by tokens of a resident visit and of a streamed one."""
    name = house.names[0]
    loads: list[float] = []
    resident: dict[int, list[float]] = {tokens: [] for tokens in points}
    streamed: dict[int, list[float]] = {tokens: [] for tokens in points}
    for lap in range(repeats + 1):
        load = await seconds_of(partial(client.load, name))
        asked = {tokens: requests_of(house, tokens, length, name) for tokens in points}
        visit = {n: await seconds_of(partial(client.score, asked[n], SPEC)) for n in points}
        await client.release(name)
        stream = {n: await seconds_of(partial(client.score, asked[n], SPEC, stream=True)) for n in points}
        if lap:
            loads.append(load)
            for tokens in points:
                resident[tokens].append(visit[tokens])
                streamed[tokens].append(stream[tokens])
    return {"load": loads, "resident": resident, "streamed": streamed}
