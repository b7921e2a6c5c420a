"""The key/value cache of all running rows: transformers' own cache interface over buffers that grow in place.

Rows end at the same column: row r occupies columns [starts[r], end), and the model sees columns [begin, end) with a
padding mask on the left. Adding a token writes one column; a new row is copied in once; a finished row is replaced by
the last one. `DynamicLayer` alone would copy the whole cache for every token.

Shape legend: B rows, H key/value heads, L columns, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


@dataclass(slots=True)
class _Window:
    """Which part of the buffers is alive: rows [0, rows), columns [begin, end)."""

    rows: int = 0
    begin: int = 0
    end: int = 0


class _WindowLayer(DynamicLayer):
    """One layer's window of its buffers (B, H, L, D)."""

    def __init__(self, window: _Window, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.window = window
        self.key_buffer = keys
        self.value_buffer = values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        window = self.window
        stop = window.end + key_states.shape[-2]
        self.key_buffer[: window.rows, :, window.end : stop] = key_states
        self.value_buffer[: window.rows, :, window.end : stop] = value_states
        return (
            self.key_buffer[: window.rows, :, window.begin : stop],
            self.value_buffer[: window.rows, :, window.begin : stop],
        )

    def get_seq_length(self, *args: Any) -> int:
        return self.window.end - self.window.begin


class KVCache:
    """Keys and values of at most `max_rows` running rows."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.starts: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self._window = _Window()
        self._layers: list[_WindowLayer] = []
        self.cache = DynamicCache()

    @property
    def rows(self) -> int:
        return self._window.rows

    @property
    def nbytes(self) -> int:
        return sum(layer.key_buffer.nbytes + layer.value_buffer.nbytes for layer in self._layers)

    def append(self, prefilled: DynamicCache, lengths: NDArray[np.int64]) -> None:
        """Take over the rows of a left-padded prefill; `lengths` are their true token counts."""
        window = self._window
        count, width = len(lengths), int(lengths.max())
        layers: list[Any] = prefilled.layers
        keys: list[tuple[Tensor, Tensor]] = [(layer.keys, layer.values) for layer in layers]
        self._make_room(keys, window.rows + count, max(window.end - window.begin, width), width > window.end)
        rows = slice(window.rows, window.rows + count)
        window.end = max(window.end, width)
        left = window.end - width
        for layer, (k, v) in zip(self._layers, keys, strict=True):
            for buffer, new in ((layer.key_buffer, k), (layer.value_buffer, v)):
                buffer[rows, :, :left] = 0  # masked, but 0 * NaN of an old row would not be 0
                buffer[rows, :, left : window.end] = new
        self.starts[rows] = window.end - lengths
        window.rows += count
        self._trim()

    def step_mask(self) -> NDArray[np.bool_]:
        """(B, L + 1) padding mask for one more token a row; makes room for it first."""
        window = self._window
        if window.end + 1 > self._layers[0].key_buffer.shape[2]:
            self._rebuild(self._layers[0].key_buffer.shape[0], window.end - window.begin)
        return np.arange(window.begin, window.end + 1) >= self.starts[: window.rows, None]

    def advance(self) -> None:
        """One column was written by the model."""
        self._window.end += 1

    def drop(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        window = self._window
        last = window.rows - 1
        if row != last:
            span = slice(int(self.starts[last]), window.end)
            left = slice(window.begin, int(self.starts[last]))
            for layer in self._layers:
                for buffer in (layer.key_buffer, layer.value_buffer):
                    buffer[row, :, left] = 0
                    buffer[row, :, span] = buffer[last, :, span]
            self.starts[row] = self.starts[last]
        window.rows = last
        self._trim()

    def clear(self) -> None:
        """Forget all rows and give the memory back."""
        self._window = _Window()
        self._layers = []
        self.cache = DynamicCache()

    def _trim(self) -> None:
        window = self._window
        if window.rows:
            window.begin = int(self.starts[: window.rows].min())
        else:
            window.begin = window.end = 0

    def _make_room(self, like: Sequence[tuple[Tensor, Tensor]], rows: int, width: int, too_far_left: bool) -> None:
        if not self._layers:
            shape = (min(self.max_rows, _grown(rows)), _grown(width))
            self._layers = [_WindowLayer(self._window, _buffer(k, *shape), _buffer(v, *shape)) for k, v in like]
            self.cache.layers.extend(self._layers)
            return
        have_rows = self._layers[0].key_buffer.shape[0]
        have_columns = self._layers[0].key_buffer.shape[2]
        if rows > have_rows or (too_far_left and (self._window.rows or width > have_columns)):
            self._rebuild(min(self.max_rows, max(have_rows, _grown(rows))), width)

    def _rebuild(self, rows: int, width: int) -> None:
        """New buffers whose live window ends at column `width`, with room to grow on the right."""
        window = self._window
        live = window.end - window.begin
        for layer in self._layers:
            for name in ("key_buffer", "value_buffer"):
                old: Tensor = getattr(layer, name)
                new = _buffer(old, rows, _grown(width))
                new[: window.rows, :, width - live : width] = old[: window.rows, :, window.begin : window.end]
                setattr(layer, name, new)
        self.starts[: window.rows] += (width - live) - window.begin
        window.begin, window.end = width - live, width


def _grown(size: int) -> int:
    return size + size // 2 + 32


def _buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    return torch.zeros((rows, like.shape[1], columns, like.shape[3]), dtype=like.dtype, device=like.device)
