"""Where a score cache keeps its pieces, so that a request meets only those that begin as it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from distill.types import Ids

SUFFIX = ".scores"


@dataclass(frozen=True, slots=True)
class Place:
    """Of a piece, and with `identity` the name of its file."""

    chain: bytes
    """Digest of the key and of all blocks before that of the piece."""
    first: int
    """Token of the block that its first row is about."""
    beginning: bytes
    """Digest of the block's tokens up to that one."""

    @classmethod
    def of(cls, chain: bytes, ids: Ids, first: int) -> Place:
        """`ids`: tokens of the block, more than `first` of them."""
        return cls(chain, first, xxhash.xxh3_64_digest(ids[: first + 1].tobytes()))


@dataclass(slots=True, eq=False)
class Piece:
    """Rows of one block, in memory or in a file."""

    place: Place
    identity: bytes
    """Digest of what it answers: two pieces with the same one are the same."""
    nbytes: int
    """That it is counted with where it is now."""
    buffer: bytes | None
    """None: it is on disk."""

    @property
    def name(self) -> str:
        place = self.place
        return f"{place.chain.hex()}-{place.first:x}-{place.beginning.hex()}-{self.identity.hex()}{SUFFIX}"

    @classmethod
    def on_disk(cls, name: str, size: int) -> Piece | None:
        """The piece in a file of this name; None for another file."""
        parts = name.removesuffix(SUFFIX).split("-")
        if not name.endswith(SUFFIX) or len(parts) != 4:
            return None
        chain, first, beginning, identity = parts
        try:
            place = Place(bytes.fromhex(chain), int(first, 16), bytes.fromhex(beginning))
            return cls(place, bytes.fromhex(identity), size, None)
        except ValueError:
            return None


class PieceIndex:
    """Thousands of short sequences share the chain digest of their first block. Inside a block pieces are found by the
    tokens up to their first row, one look for each place in the block at which any piece begins."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, dict[int, dict[bytes, list[Piece]]]] = {}
        """Chain -> first row -> digest of the beginning -> pieces."""

    def add(self, piece: Piece) -> None:
        place = piece.place
        firsts = self._blocks.setdefault(place.chain, {}).setdefault(place.first, {})
        firsts.setdefault(place.beginning, []).append(piece)

    def discard(self, piece: Piece) -> None:
        """Also one that is not there."""
        place = piece.place
        firsts = self._blocks.get(place.chain, {})
        beginnings = firsts.get(place.first, {})
        found = beginnings.get(place.beginning, [])
        if piece not in found:
            return
        found.remove(piece)
        if not found:
            del beginnings[place.beginning]
        if not beginnings:
            del firsts[place.first]
        if not firsts:
            del self._blocks[place.chain]

    def beginning_as(self, chain: bytes, ids: Ids) -> Iterator[Piece]:
        """The pieces of a block whose tokens up to their first row are those of `ids`. What is found may be discarded
        meanwhile."""
        firsts = self._blocks.get(chain, {})
        for first in [each for each in firsts if each < len(ids)]:
            place = Place.of(chain, ids, first)
            yield from list(firsts.get(first, {}).get(place.beginning, ()))
