"""The pieces that a score cache is made of: which rows of which tokens, as one packed buffer. Pure functions; no torch.

A row says something about one token after all tokens before it. A piece holds rows of one block of tokens. It is found
by the digest of the key and of all blocks before (a chain, so equal prefixes have equal digests whatever follows), and
inside its block the tokens themselves are compared: no row is ever taken for another token's, or for another prefix's.

Legend: N tokens of a request, R response tokens, r rows of a piece, b tokens of a piece's block up to its last row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from distill.packing import PackingError, pack, unpack
from distill.types import Ids, ScoreRequest, SignalSpec, TeacherScores

_MEMBERS = ("logprobs", "topk_ids", "topk_logprobs", "log_tail", "full_logprobs", "hidden")
"""The arrays of TeacherScores that have a row a token."""


@dataclass(frozen=True, slots=True)
class ScoreKey:
    """Everything that decides what a teacher says of given tokens. Scores under other keys are never mixed."""

    weights: str
    """Digest of the teacher's weights: of the base, where it is an adapter."""
    tokenizer: str
    """Fingerprint of the tokenizer that the token ids belong to."""
    spec: SignalSpec
    vocab_size: int
    temperature: float = 1.0
    adapter: str = ""
    """Digest of the adapter's weights."""
    numerics: str = ""
    """What rounds: the dtype of the server, and that of top-k rows on their way."""

    def digest(self, block_tokens: int) -> bytes:
        """16 bytes."""
        spec = (self.spec.signal.value, self.spec.k, self.spec.support.value)
        parts = (self.weights, self.adapter, self.tokenizer, spec, self.vocab_size, self.temperature, self.numerics)
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode((*parts, block_tokens)))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a cache looks at it."""

    chain: list[bytes]
    """For each block, the digest of the key and of all tokens before the block."""
    ids: Ids
    start: int
    """Position of the first response token."""
    row_digests: NDArray[np.uint64] | None
    """(R,) of the student's ids of each row, where they are asked about."""
    block_tokens: int

    @classmethod
    def of(cls, key: ScoreKey, request: ScoreRequest, block_tokens: int) -> Asked:
        ids = np.ascontiguousarray(request.input_ids, "<i4")
        chain = [key.digest(block_tokens)]
        for begin in range(0, len(ids) - block_tokens, block_tokens):
            chain.append(xxhash.xxh3_128_digest(chain[-1] + ids[begin : begin + block_tokens].tobytes()))
        digests: NDArray[np.uint64] | None = None
        if key.spec.student_k and request.student_ids is not None:
            rows = np.ascontiguousarray(request.student_ids, "<i4")
            digests = np.fromiter((xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows), np.uint64, len(rows))
        return cls(chain, ids, len(ids) - request.response_len, digests, block_tokens)

    def block(self, position: int) -> tuple[bytes, int, Ids]:
        """Where the row of the token at `position` is: the block's chain digest, its first position and its tokens."""
        number = position // self.block_tokens
        first = number * self.block_tokens
        return self.chain[number], first, self.ids[first : first + self.block_tokens]


@dataclass(frozen=True, slots=True)
class Rows:
    """What one piece holds."""

    ids: Ids
    """(b,) tokens of its block up to that of its last row."""
    first: int
    """Token of the block that its first row is about."""
    row_digests: NDArray[np.uint64] | None
    arrays: dict[str, NDArray[Any]]
    """Member of TeacherScores -> (r, ...)."""

    @property
    def count(self) -> int:
        return len(self.ids) - self.first

    def pack(self) -> bytes:
        arrays: dict[str, NDArray[Any]] = {"ids": self.ids, **self.arrays}
        if self.row_digests is not None:
            arrays["row_digests"] = self.row_digests.view(np.int64)
        return pack({"first": self.first}, arrays)

    @classmethod
    def unpack(cls, buffer: bytes) -> Rows:
        """Views of `buffer`. Raises PackingError for anything that `pack` did not make."""
        meta, arrays = unpack(buffer)
        try:
            ids, digests = arrays.pop("ids"), arrays.pop("row_digests", None)
            rows = cls(ids, meta["first"], None if digests is None else digests.view(np.uint64), arrays)
            whole = {len(array) for array in arrays.values()} == {rows.count}
        except (KeyError, TypeError) as error:
            raise PackingError(f"no piece of scores: {error}") from error
        if not whole or (digests is not None and len(digests) != rows.count):
            raise PackingError("a piece of scores whose arrays do not have the same rows")
        return rows

    def matching(self, asked: Asked, position: int) -> int:
        """How many rows from that of the token at `position` on are here."""
        _, block, ids = asked.block(position)
        begin = position - block
        if begin < self.first:
            return 0
        end = _common(self.ids, ids)
        if asked.row_digests is None or self.row_digests is None:
            both_lack_them = asked.row_digests is None and self.row_digests is None
            return max(0, end - begin) if both_lack_them else 0
        wanted = asked.row_digests[position - asked.start :][: max(0, end - begin)]
        return _common(self.row_digests[begin - self.first :], wanted)

    def part(self, block: int, position: int, count: int) -> dict[str, NDArray[Any]]:
        """`count` rows from that of the token at `position` on; `block` is the position of the block."""
        begin = position - block - self.first
        return {name: array[begin : begin + count] for name, array in self.arrays.items()}


def pieces(asked: Asked, scores: TeacherScores) -> Iterator[tuple[bytes, int, Rows]]:
    """The scores cut at the ends of blocks: chain digest, position of the first row, rows."""
    arrays = {name: array for name in _MEMBERS if (array := getattr(scores, name)) is not None}
    position, end = asked.start, len(asked.ids)
    while position < end:
        chain, block, ids = asked.block(position)
        rows = slice(position - asked.start, min(end, block + asked.block_tokens) - asked.start)
        digests = None if asked.row_digests is None else asked.row_digests[rows]
        yield chain, position, Rows(ids, position - block, digests, {name: a[rows] for name, a in arrays.items()})
        position = asked.start + rows.stop


def split(request: ScoreRequest, rows: int) -> ScoreRequest | None:
    """What is left to ask when the first `rows` rows were found; None when that is nothing."""
    left = request.response_len - rows
    if not left:
        return None
    ids = request.student_ids
    return replace(request, response_len=left, student_ids=None if ids is None else ids[rows:])


def joined(found: TeacherScores | None, fresh: TeacherScores | None) -> TeacherScores:
    """The rows that were found, then those that were asked for. At least one of the two is there."""
    parts = [part for part in (found, fresh) if part is not None]
    if len(parts) == 1:
        return parts[0]
    return together(parts[-1].teacher, [{name: getattr(part, name) for name in _MEMBERS} for part in parts])


def together(teacher: str, parts: Sequence[dict[str, Any]]) -> TeacherScores:
    """One after another, copied: nothing holds on to the memory of a piece."""
    present = [name for name in _MEMBERS if parts[0].get(name) is not None]
    return TeacherScores(teacher, **{name: np.concatenate([part[name] for part in parts]) for name in present})


def _common(left: NDArray[Any], right: NDArray[Any]) -> int:
    """How many elements are the same from the beginning."""
    count = min(len(left), len(right))
    differ = left[:count] != right[:count]
    return int(differ.argmax()) if differ.any() else count
