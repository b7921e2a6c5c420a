"""The key/value cache against a plain model of it: every running row keeps exactly its own tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

from distill.serving.embedded.kv import KVCache

HEADS, SIZE = 2, 3


def states(values: np.ndarray) -> torch.Tensor:
    """(B, HEADS, T, SIZE) filled with one number a token."""
    return torch.from_numpy(values)[:, None, :, None].expand(-1, HEADS, -1, SIZE).float().contiguous()


class Model:
    """The cache under test beside lists of numbers."""

    def __init__(self, max_rows: int) -> None:
        self.kv = KVCache(max_rows)
        self.lists: list[list[float]] = []
        self.next = 1.0

    def fresh(self, count: int) -> list[float]:
        self.next += count
        return [self.next - count + i for i in range(count)]

    def append(self, lengths: list[int]) -> None:
        rows = [self.fresh(n) for n in lengths]
        width = max(lengths)
        values = np.full((len(rows), width), np.nan)
        for row, numbers in zip(values, rows, strict=True):
            row[width - len(numbers) :] = numbers
        cache = DynamicCache()
        keys = torch.nan_to_num(states(values), nan=-1.0)
        for layer in range(2):
            cache.update(keys + layer, -keys - layer, layer)
        self.kv.append(cache, np.array(lengths))
        self.lists += rows

    def step(self) -> None:
        mask = self.kv.step_mask()
        new = np.array([self.fresh(1) for _ in self.lists])
        seen = [self.kv.cache.update(states(new) + layer, -states(new) - layer, layer) for layer in range(2)]
        self.kv.advance()
        for numbers, one in zip(self.lists, new, strict=True):
            numbers.append(float(one[0]))
        for layer, (keys, values) in enumerate(seen):
            assert keys.shape == (len(self.lists), HEADS, mask.shape[1], SIZE)
            assert torch.isfinite(keys).all() and torch.isfinite(values).all()
            for row, numbers in enumerate(self.lists):
                held = keys[row, :, torch.from_numpy(mask[row])]
                assert torch.equal(held, torch.tensor(numbers)[None, :, None].expand_as(held) + layer)
                assert torch.equal(values[row, :, torch.from_numpy(mask[row])], -held)
        longest = max(map(len, self.lists))
        assert mask.shape[1] == longest, "the window is no wider than the longest row"

    def drop(self, row: int) -> None:
        self.kv.drop(row)
        self.lists[row] = self.lists[-1]
        self.lists.pop()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(1, 60), min_size=1, max_size=4)),
        st.tuples(st.just("step"), st.integers(1, 30)),
        st.tuples(st.just("drop"), st.integers(0, 100)),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_rows_keep_their_tokens_through_any_order_of_joining_writing_and_leaving(plan: list) -> None:
    model = Model(max_rows=9)
    for name, argument in plan:
        if name == "append" and len(model.lists) + len(argument) <= 9:
            model.append(argument)
        elif name == "step" and model.lists:
            for _ in range(argument):
                model.step()
        elif name == "drop" and model.lists:
            model.drop(argument % len(model.lists))
    if model.lists:
        model.step()


def test_clearing_gives_the_memory_back() -> None:
    model = Model(max_rows=4)
    model.append([5, 3])
    assert model.kv.nbytes > 0
    model.kv.clear()
    assert model.kv.nbytes == 0 and model.kv.rows == 0
