"""Many sequences in one row without padding, where tokens that several of them begin with lie once.

Of a sequence of T tokens the first T - 1 are computed: the row of a token predicts the one after it, and the last token
predicts nothing that is there. Sequences that begin alike are packed as [prefix; rest of one; rest of the next; …], and
each rest attends to the prefix and to itself. Which sequences share, and what, depends on their ids alone.

Legend: N rows that are asked for, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.modeling.packed_attention import Layout

Ids = NDArray[np.integer]
Rows = NDArray[np.int64]
LEAST_SHARED = 8
"""Tokens that a common beginning must have to be computed once: a shorter one costs more in attention than it saves."""


@dataclass(frozen=True)
class PackedBatch:
    """Sequences in one row, and which rows are asked for."""

    ids_T: NDArray[np.int64]
    """The row: T tokens that are computed."""
    lengths: tuple[int, ...]
    """Of the samples in the row: prefixes, and what follows them."""
    prefixes: tuple[int, ...]
    """For each sample the index of its prefix, or -1."""
    rows: tuple[Rows, ...]
    """For each sequence, where its tokens but the last lie in the row."""
    starts: tuple[int, ...]
    """For each sequence, the first of its tokens whose row is asked for."""
    spans: dict[Hashable, slice]
    """For each owner, its part of the row."""
    device: torch.device

    @classmethod
    def of(
        cls,
        sequences: Sequence[Ids],
        starts: Sequence[int],
        *,
        owners: Sequence[Hashable] | None = None,
        device: torch.device | None = None,
        least_shared: int = LEAST_SHARED,
    ) -> PackedBatch:
        """Pack whole sequences of at least one token. Rows `starts[i]` to T - 2 of each are asked for.

        `owners`: what each is computed with, such as an adapter; only sequences of one owner share anything, and those
        of one owner lie together.
        """
        owners = [None] * len(sequences) if owners is None else owners
        heads = [np.asarray(sequence, np.int64)[:-1] for sequence in sequences]
        row = _Row()
        spans: dict[Hashable, slice] = {}
        for owner in dict.fromkeys(owners):
            begin = row.length
            members = [index for index, other in enumerate(owners) if other == owner]
            for group, shared in sharing([heads[index] for index in members], least_shared):
                row.add({members[index]: heads[members[index]] for index in group}, shared)
            spans[owner] = slice(begin, row.length)
        return cls(
            np.concatenate(row.parts) if row.parts else np.empty(0, np.int64),
            tuple(len(part) for part in row.parts),
            tuple(row.prefixes),
            tuple(row.places[index] for index in range(len(sequences))),
            tuple(starts),
            spans,
            device or torch.device("cpu"),
        )

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.ids_T)

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.lengths, self.device, self.prefixes)

    @cached_property
    def input_ids(self) -> Tensor:
        """(1, T)"""
        return torch.from_numpy(self.ids_T)[None].to(self.device)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows that are asked for of each sequence; together N."""
        return tuple(max(0, len(rows) - start) for rows, start in zip(self.rows, self.starts, strict=True))

    @cached_property
    def wanted_rows(self) -> Tensor:
        """(N,) the rows that are asked for, sequence after sequence."""
        chosen = [rows[start:] for rows, start in zip(self.rows, self.starts, strict=True)]
        return torch.from_numpy(np.concatenate([*chosen, np.empty(0, np.int64)])).to(self.device)


class _Row:
    """A row while it is put together."""

    def __init__(self) -> None:
        self.length = 0
        self.parts: list[NDArray[np.int64]] = []
        self.prefixes: list[int] = []
        self.places: dict[int, Rows] = {}

    def add(self, heads: dict[int, NDArray[np.int64]], shared: int) -> None:
        """Put in sequences of which the first `shared` tokens are the same."""
        prefix, before = -1, np.empty(0, np.int64)
        if shared:
            prefix = len(self.parts)
            before = self._put(next(iter(heads.values()))[:shared], -1)
        for index, head in heads.items():
            self.places[index] = np.concatenate([before, self._put(head[shared:], prefix)])

    def _put(self, ids: NDArray[np.int64], prefix: int) -> Rows:
        if len(ids):
            self.parts.append(ids)
            self.prefixes.append(prefix)
        self.length += len(ids)
        return np.arange(self.length - len(ids), self.length)


def sharing(sequences: Sequence[NDArray[np.int64]], least: int) -> list[tuple[list[int], int]]:
    """Groups of sequences, and how many tokens the members of each share: those that save the most tokens.

    Sequences are sorted, so that a group is a run of neighbours and shares the least that two neighbours in it share;
    the best way to cut the order into runs is found exactly. A group that shares nothing has one member.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">i8").tobytes())
    alike = np.asarray([_alike(sequences[a], sequences[b]) for a, b in pairwise(order)], np.int64)
    best = np.zeros(len(order) + 1, np.int64)
    begins = np.zeros(len(order) + 1, np.int64)
    for end in range(1, len(order) + 1):
        # a run from each begin < end - 1 to `end` shares the least of what lies between, and saves it for all but one
        shared = np.minimum.accumulate(alike[: end - 1][::-1])[::-1]
        saved = np.where(shared >= least, shared, -1) * np.arange(end - 1, 0, -1)
        total = best[:end] + np.append(saved, 0)
        begins[end] = end - 1 - int(np.argmax(total[::-1]))
        best[end] = total[begins[end]]
    groups: list[tuple[list[int], int]] = []
    end = len(order)
    while end:
        begin = int(begins[end])
        shared = int(alike[begin : end - 1].min()) if end - begin > 1 else 0
        groups.append((sorted(order[begin:end]), shared))
        end = begin
    return sorted(groups)


def _alike(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Tokens at the beginning that are the same."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
