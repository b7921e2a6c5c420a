"""Teachers with layers, small enough to size by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.builders_config import HIDDEN, LETTERS, weights, write_run

LAYERS = 4
ROWS = 3 + len(LETTERS)
TEACHER_BYTES = 2 * 448 + 64 + LAYERS * 1024
"""Of float32: embedding and head of 13 x 8 (416, padded to 448), norm (32, padded to 64), layers of 32 x 8."""
TEACHER_PARAMS = 2 * ROWS * HIDDEN + HIDDEN + LAYERS * 32 * HIDDEN


def add_layers(folder: Path, layers: int = LAYERS) -> None:
    more = {f"model.layers.{index}.mlp.weight": np.zeros((32, HIDDEN), np.float32) for index in range(layers)}
    ends = {name: tensor for name, tensor in weights(ROWS).items() if ".layers." not in name}
    norm = {"model.norm.weight": np.ones(HIDDEN, np.float32)}
    save_file(ends | norm | more, folder / "model.safetensors")


def write_layered_run(folder: Path, **changes: Any) -> Path:
    """The run of `write_run` whose models have layers."""
    path = write_run(folder, **changes)
    for name in ("base", "experts/math", "experts/code"):
        add_layers(folder / name)
    return path
