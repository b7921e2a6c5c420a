"""Scores that were computed once: a replayed sample is answered whole, a continued one asks for its new rows only.

Bounded by bytes in memory and on disk; the rows that were not used for the longest time go from memory to disk, and
from disk for good. What is on disk is found again by the next process. It belongs to one event loop; two tasks of that
loop may use it at the same time. No torch.

    rows, found = await cache.find(key, request)
    left = split(request, rows)
    if left is None:
        return found
    scores = joined(found, (await server.score([left], spec))[0])
    await cache.put(key, request, scores)
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from numpy.typing import NDArray

from distill.packing import PackingError
from distill.teacher_manager.score_index import Piece, PieceIndex, Place
from distill.teacher_manager.score_pieces import Asked, Rows, ScoreKey, joined, pieces, split, together
from distill.types import ScoreRequest, TeacherScores

__all__ = ["CacheStats", "ScoreCache", "ScoreKey", "joined", "split"]

T = TypeVar("T")
BLOCK_TOKENS = 128
BOOKKEEPING_BYTES = 400
"""What is counted for a piece beside its buffer: its entries in the indexes."""
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start, and bytes now."""

    requests: int = 0
    whole: int = 0
    """Requests all of whose rows were found."""
    tokens: int = 0
    """Response tokens asked for."""
    tokens_found: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    spilled: int = 0
    """Pieces that went from memory to disk."""
    dropped: int = 0
    """Pieces that were given up for want of room."""
    corrupt: int = 0
    """Files that were cut short, changed or gone."""
    late: int = 0
    """Reads and writes of files that missed their deadline or failed."""


class ScoreCache:
    """See the module. A folder belongs to one process at a time."""

    def __init__(
        self,
        memory_bytes: int,
        folder: Path | None = None,
        disk_bytes: int = 0,
        *,
        block_tokens: int = BLOCK_TOKENS,
        deadline_s: float = 5.0,
    ) -> None:
        """`deadline_s`: longest wait for one file; a slower disk is as good as none. Raises OSError for `folder`."""
        self._memory_budget = memory_bytes
        self._disk_budget = disk_bytes if folder is not None else 0
        self._folder = folder
        self._block_tokens = block_tokens
        self._deadline_s = deadline_s
        self._index = PieceIndex()
        self._in_memory: OrderedDict[Piece, None] = OrderedDict()
        self._on_disk: OrderedDict[Piece, None] = OrderedDict()
        """Both: what was used last comes last."""
        self._memory_used = self._disk_used = 0
        self._writing = asyncio.Lock()
        self._stats = CacheStats()
        if folder is not None:
            self._reopen(folder)

    def stats(self) -> CacheStats:
        return replace(self._stats, memory_bytes=self._memory_used, disk_bytes=self._disk_used)

    async def find(self, key: ScoreKey, request: ScoreRequest) -> tuple[int, TeacherScores | None]:
        """How many of the request's first rows are known, and these rows; None for 0. A disk that is slow or broken is
        a miss, never an error."""
        asked = Asked.of(key, request, self._block_tokens)
        position, parts, used = asked.start, list[dict[str, NDArray[Any]]](), list[Piece]()
        while position < len(asked.ids):
            piece, rows, count = await self._best(asked, position)
            if piece is None or rows is None:
                break
            parts.append(rows.part(asked.block(position)[1], position, count))
            used.append(piece)
            position += count
        self._touch(used)
        found = position - asked.start
        self._count(
            requests=1,
            whole=int(found == request.response_len),
            tokens=request.response_len,
            tokens_found=found,
        )
        return (found, together(request.teacher, parts)) if found else (0, None)

    async def put(self, key: ScoreKey, request: ScoreRequest, scores: TeacherScores) -> None:
        """Keep the scores, one row a response token, as far as there is room."""
        assert len(scores.logprobs) == request.response_len, "a row for every response token"
        assert scores.spans is None, "scores on byte spans are made of others, which are to be kept"
        asked = Asked.of(key, request, self._block_tokens)
        async with self._writing:
            kept: list[Piece] = []
            for chain, position, rows in pieces(asked, scores):
                place = Place.of(chain, rows.ids, rows.first)
                piece = self._known(asked, place, position, rows) or await self._add(place, rows)
                if piece is not None:
                    kept.append(piece)
            self._touch(kept)

    async def close(self) -> None:
        """Put what is in memory on disk, newest first, as far as there is room: the next process finds it."""
        async with self._writing:
            room, newest = self._disk_budget - self._disk_used, list[Piece]()
            for piece in reversed(self._in_memory):
                room -= piece.nbytes - BOOKKEEPING_BYTES + _DIGEST_BYTES
                if room < 0:
                    break
                newest.append(piece)
            for piece in reversed(newest):  # the next process tells what is old by the files' times
                await self._spill(piece)
            for piece in list(self._in_memory):
                self._forget(piece)

    # --- finding -------------------------------------------------------------------------------------------------

    async def _best(self, asked: Asked, position: int) -> tuple[Piece | None, Rows | None, int]:
        """The piece with most rows from `position` on, and how many."""
        best: tuple[Piece | None, Rows | None, int] = (None, None, 0)
        chain, _, ids = asked.block(position)
        for piece in self._index.beginning_as(chain, ids):
            rows = await self._rows(piece)
            count = 0 if rows is None else rows.matching(asked, position)
            if count > best[2]:
                best = piece, rows, count
        return best

    async def _rows(self, piece: Piece) -> Rows | None:
        if piece.buffer is not None:
            return Rows.unpack(piece.buffer)
        assert self._folder is not None
        path = self._folder / piece.name
        try:
            content = await self._in_time(path.read_bytes)
            if len(content) != piece.nbytes:
                raise PackingError(f"{len(content)} bytes instead of {piece.nbytes}")
            buffer, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
            if xxhash.xxh3_64_digest(buffer) != digest:
                raise PackingError("other bytes than were written")
            return Rows.unpack(buffer)
        except TimeoutError:
            self._count(late=1)
        except (PackingError, OSError):
            if piece in self._on_disk:  # else it was given up while it was being read
                self._count(corrupt=1)
                self._forget(piece)
        return None

    def _touch(self, used: list[Piece]) -> None:
        """The beginning of a sample is used last: a tail without it would be of no use."""
        for piece in reversed(used):
            for order in (self._in_memory, self._on_disk):
                if piece in order:
                    order.move_to_end(piece)

    # --- keeping -------------------------------------------------------------------------------------------------

    def _known(self, asked: Asked, place: Place, position: int, rows: Rows) -> Piece | None:
        """The piece in memory that has all of these rows already. Pieces that have fewer of them are given up, and a
        file that has them, which may not be whole."""
        identity = _identity(place.chain, rows)
        for piece in self._index.beginning_as(place.chain, rows.ids):
            if piece.buffer is None:
                if piece.identity == identity:
                    self._forget(piece)
                continue
            known = Rows.unpack(piece.buffer)
            if known.matching(asked, position) >= rows.count:
                return piece
            first = position - rows.first + known.first
            if known.first >= rows.first and known.matching(asked, first) == known.count:
                self._forget(piece)
        return None

    async def _add(self, place: Place, rows: Rows) -> Piece | None:
        """A new piece in memory; None for one that is too large for that."""
        buffer = rows.pack()
        piece = Piece(place, _identity(place.chain, rows), len(buffer) + BOOKKEEPING_BYTES, buffer)
        if piece.nbytes > self._memory_budget:
            self._count(dropped=1)
            return None
        while self._memory_used + piece.nbytes > self._memory_budget:
            await self._spill(next(iter(self._in_memory)))
        self._index.add(piece)
        self._in_memory[piece] = None
        self._memory_used += piece.nbytes
        return piece

    async def _spill(self, piece: Piece) -> None:
        """Memory to disk, or to nowhere. It can be found in memory until the file is whole."""
        assert piece.buffer is not None
        size = len(piece.buffer) + _DIGEST_BYTES
        if self._folder is None or size > self._disk_budget:
            self._count(dropped=1)
            self._forget(piece)
            return
        while self._disk_used + size > self._disk_budget:
            self._count(dropped=1)
            self._forget(next(iter(self._on_disk)))
        written = await self._write(self._folder / piece.name, piece.buffer)
        self._forget_memory(piece)
        if not written:
            self._forget(piece)
            return
        piece.buffer, piece.nbytes = None, size
        self._on_disk[piece] = None
        self._disk_used += size
        self._count(spilled=1)

    async def _write(self, path: Path, buffer: bytes) -> bool:
        unfinished, given_up = path.with_suffix(".tmp"), threading.Event()
        try:
            await self._in_time(lambda: _write_file(unfinished, buffer, given_up))
            unfinished.replace(path)
            return True
        except (TimeoutError, OSError):
            self._count(late=1)
            return False
        finally:
            given_up.set()
            unfinished.unlink(missing_ok=True)

    def _forget(self, piece: Piece) -> None:
        """Give it up, wherever it is."""
        self._index.discard(piece)
        self._forget_memory(piece)
        if piece in self._on_disk:
            assert self._folder is not None
            del self._on_disk[piece]
            self._disk_used -= piece.nbytes
            (self._folder / piece.name).unlink(missing_ok=True)

    def _forget_memory(self, piece: Piece) -> None:
        if piece in self._in_memory:
            del self._in_memory[piece]
            self._memory_used -= piece.nbytes

    # --- files ---------------------------------------------------------------------------------------------------

    def _reopen(self, folder: Path) -> None:
        """Know again what an earlier process left, oldest first; remove what it did not finish or has no room now."""
        folder.mkdir(parents=True, exist_ok=True)
        with os.scandir(folder) as entries:
            found = sorted((entry.stat().st_mtime_ns, entry.name, entry.stat().st_size) for entry in entries)
        for _, name, size in found:
            piece = Piece.on_disk(name, size)
            if piece is None:
                if name.endswith(".tmp"):
                    (folder / name).unlink(missing_ok=True)
                continue
            self._index.add(piece)
            self._on_disk[piece] = None
            self._disk_used += size
        while self._disk_used > self._disk_budget:
            self._forget(next(iter(self._on_disk)))

    async def _in_time(self, work: Callable[[], T]) -> T:
        async with asyncio.timeout(self._deadline_s):
            return await asyncio.to_thread(work)

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + count for name, count in more.items()})


def _identity(chain: bytes, rows: Rows) -> bytes:
    hasher = xxhash.xxh3_128(chain + rows.first.to_bytes(4, "little") + rows.ids.tobytes())
    if rows.row_digests is not None:
        hasher.update(rows.row_digests.tobytes())
    return hasher.digest()


def _write_file(path: Path, buffer: bytes, given_up: threading.Event) -> None:
    with path.open("wb") as file:
        file.write(buffer)
        file.write(xxhash.xxh3_64_digest(buffer))
    if given_up.is_set():
        path.unlink(missing_ok=True)
