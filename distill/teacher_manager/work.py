"""What is to be done for whom: a sample to score or prompts to continue, by one teacher."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distill.types import GenerateRequest, ScoreRequest

T = TypeVar("T")
ELSEWHERE = -1
"""The item of a teacher that is in no slot."""


@dataclass(slots=True, eq=False)
class Work:
    """One teacher's part of a sample, or one call for it to write."""

    teacher: str
    item: int
    """The weight object that it needs."""
    sample: str
    tokens: int
    ordinal: int
    """Its place in a request: lowest first."""
    since: float
    """time.monotonic of its arrival."""
    score: ScoreRequest | None = None
    prompts: Sequence[GenerateRequest] = ()
    """Empty for a work that scores."""
    rollout: int | None = None
    """Under which it was announced."""
    job: int | None = None
    """Of the scheduling policy; None while it is held back."""
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    tries: int = 0
    alone: bool = False
    """It was in a call whose scores were refused: by itself it shows whether it was to blame."""
    doubted: bool = False
    """Its own scores were refused once."""

    @property
    def group(self) -> int:
        """The same number for works of the same prompt, which a server computes once; -1 for one that writes."""
        if self.score is None:
            return -1
        return zlib.crc32(self.score.input_ids[: -self.score.response_len].tobytes())

    @property
    def name(self) -> str:
        """For a message."""
        return f"a call of {len(self.prompts)} prompts to answer" if self.prompts else self.sample


def settle(work: Work, result: Any) -> None:
    if work.future.done():  # whoever asked may have gone away meanwhile
        return
    if isinstance(result, BaseException):
        work.future.set_exception(result)
    else:
        work.future.set_result(result)


def in_order(works: Iterable[Work]) -> list[Work]:
    return sorted(works, key=lambda work: (work.ordinal, work.sample))


def batches(items: Iterable[T], cost: Callable[[T], int], limit: int) -> list[list[T]]:
    """Consecutive items whose costs sum up to `limit` at most; an item that is larger goes alone."""
    found: list[list[T]] = []
    room = 0
    for item in items:
        if not found or cost(item) > room:
            found.append([])
            room = limit
        found[-1].append(item)
        room -= cost(item)
    return found


def cost_of_prompt(request: GenerateRequest) -> int:
    return len(request.input_ids) + request.max_new_tokens
