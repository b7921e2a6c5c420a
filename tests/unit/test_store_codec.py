"""Samples as bytes: what an older snapshot lacks is what a sample has by default."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from distill.packing import PackingError, pack, unpack
from distill.store.codec import Snapshot, decode, encode
from tests.builders import scored


def older(data: bytes) -> bytes:
    """As it was written before samples could have rewards and trajectories, and before any could be set aside."""
    meta, arrays = unpack(data)
    del meta["skipped"]
    for row in meta["samples"]:
        del row["reward"], row["trajectory"]
    return pack(meta, arrays)


def test_a_snapshot_from_before_rewards_and_quarantine_is_read() -> None:
    item = scored(4, k=3)
    back = decode(older(encode(Snapshot(4, [item], ()))))
    assert (back.first_ordinal, list(back.skipped)) == (4, [])
    (found,) = back.items
    for field in dataclasses.fields(found.sample):
        left, right = getattr(found.sample, field.name), getattr(item.sample, field.name)
        assert np.array_equal(left, right) if isinstance(right, np.ndarray) else left == right, field.name


def test_a_header_that_is_not_ours_is_refused() -> None:
    for meta in ({}, [], {"first_ordinal": 0, "samples": [{"id": "x"}]}, {"first_ordinal": 0, "samples": None}):
        with pytest.raises(PackingError, match="incomplete"):
            decode(pack(meta, {}))
