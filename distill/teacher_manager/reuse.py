"""Answers that a teacher gave before, from the score cache: what is left to ask, and keeping what comes back.

Weights are known by their digest, which takes reading all files once. That is done for a teacher as soon as there may
be scores of it: an earlier process left some, or this one has just got its first, and then the gate has read the files.
A cache that keeps samples waiting is given up; it can cost time, and never a score.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from distill.errors import TeacherError
from distill.teacher_manager.catalogue import Catalogue
from distill.teacher_manager.score_cache import ScoreCache, ScoreKey, joined, split
from distill.teacher_manager.spans import EventSink
from distill.teacher_manager.teachers import Teacher
from distill.types import ScoreRequest, SignalSpec, TeacherScores

_LONGEST_S = 10.0
"""Of one look into the cache, or of one sample's way into it."""
_CLOSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Recall:
    """A request as the cache knows it."""

    teacher: str
    request: ScoreRequest
    left: ScoreRequest | None
    """What is to be asked; None: all of it was found."""
    found: TeacherScores | None = None


@dataclass(slots=True)
class Hits:
    """Counts since the start, of teachers that share slots."""

    requests: int = 0
    whole: int = 0
    """Requests that nobody had to be asked for."""
    tokens: int = 0
    """Response tokens."""
    found: int = 0


class Reuse:
    """The scores of a run's teachers in a cache. Without a cache nothing is found, kept or counted."""

    def __init__(
        self,
        catalogue: Catalogue,
        cache: ScoreCache | None = None,
        *,
        spec: SignalSpec,
        vocab_size: int,
        tokenizers: Mapping[str, str] = MappingProxyType({}),
        numerics: str = "",
        largest_bytes: int = 2**62,
        digest_s: float = 600.0,
        on_event: EventSink = lambda level, message: None,
    ) -> None:
        """`tokenizers`: teacher -> fingerprint of what its token ids are of. `numerics`: see ScoreKey. A sample whose
        scores take more than `largest_bytes` is not kept: it would push out all others, and copying it takes time.
        `digest_s`: longest wait for a teacher's files to be read."""
        self.hits = Hits()
        self._catalogue = catalogue
        self._cache = cache
        self._spec = spec
        self._vocab_size = vocab_size
        self._tokenizers = tokenizers
        self._numerics = numerics
        self._largest_bytes = largest_bytes
        self._digest_s = digest_s
        self._event = on_event
        self._earlier = cache is not None and cache.stats().disk_bytes > 0
        """A process before this one left scores, of any teacher."""
        self._kept: set[int] = set()
        """Items of which there are scores of this process."""
        self._digests: dict[int, asyncio.Task[str]] = {}
        """By item."""

    async def find(self, teacher: str, request: ScoreRequest) -> Recall:
        """What is known of the request. Of a teacher elsewhere that is nothing: its weights are not known."""
        item = self._catalogue.item_of.get(teacher)
        if self._cache is None or item is None:
            return Recall(teacher, request, request)
        rows, found = 0, None
        if self._earlier or item in self._kept:
            key = await self._key(teacher, item, request)
            if key is not None:
                rows, found = await self._found(self._cache, key, request)
        self.hits.requests += 1
        self.hits.whole += rows == request.response_len
        self.hits.tokens += request.response_len
        self.hits.found += rows
        return Recall(teacher, request, split(request, rows), found)

    async def keep(self, recall: Recall, fresh: TeacherScores) -> TeacherScores:
        """All rows of the request, those that were asked for being `fresh`."""
        scores = joined(recall.found, fresh)
        item = self._catalogue.item_of.get(recall.teacher)
        if self._cache is None or item is None or _size(scores) > self._largest_bytes:
            return scores
        key = await self._key(recall.teacher, item, recall.request)
        if key is not None:
            await self._put(self._cache, key, recall.request, scores)
            self._kept.add(item)
        return scores

    async def close(self) -> None:
        """Leave the scores to the next process, where there is a disk for them."""
        for task in self._digests.values():
            task.cancel()
        if self._cache is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._cache.close()
        except TimeoutError:
            self._event("warning", f"score cache: it was not written within {_CLOSE_S:.0f} s; what is left is lost")

    async def _found(self, cache: ScoreCache, key: ScoreKey, request: ScoreRequest) -> tuple[int, TeacherScores | None]:
        try:
            async with asyncio.timeout(_LONGEST_S):
                return await cache.find(key, request)
        except TimeoutError:
            self._give_up()
            return 0, None

    async def _put(self, cache: ScoreCache, key: ScoreKey, request: ScoreRequest, scores: TeacherScores) -> None:
        try:
            async with asyncio.timeout(_LONGEST_S):
                await cache.put(key, request, scores)
        except TimeoutError:
            self._give_up()

    def _give_up(self) -> None:
        if self._cache is not None:
            self._event(
                "warning", f"score cache: its disk kept a sample waiting for {_LONGEST_S:.0f} s; not used any more"
            )
        self._cache = None

    async def _key(self, teacher: str, item: int, request: ScoreRequest) -> ScoreKey | None:
        """None when the files cannot be read, which is for whoever loads them to say."""
        found = self._catalogue.items[item]
        try:
            own = await self._digest(item, found.files)
            base = "" if found.base is None else await self._digest(found.base, self._catalogue.items[found.base].files)
        except (TeacherError, OSError, TimeoutError):
            self._digests.pop(item, None)
            return None
        return ScoreKey(
            weights=base or own,
            adapter=own if base else "",
            tokenizer=self._tokenizers.get(teacher, ""),
            spec=self._spec,
            vocab_size=found.files.vocab_size or self._vocab_size,
            temperature=request.temperature,
            numerics=self._numerics,
        )

    async def _digest(self, item: int, files: Teacher) -> str:
        """Read once, in a thread; who waits for it does not wait longer than the others."""
        if item not in self._digests:
            self._digests[item] = asyncio.create_task(asyncio.to_thread(lambda: files.digest))
        async with asyncio.timeout(self._digest_s):
            return await asyncio.shield(self._digests[item])


def _size(scores: TeacherScores) -> int:
    """Bytes of all arrays."""
    members = (getattr(scores, each.name) for each in dataclasses.fields(scores))
    return sum(array.nbytes for array in members if isinstance(array, np.ndarray))
