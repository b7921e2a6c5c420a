"""How tensors lie in a buffer of a device. No torch: who plans with sizes reads it too."""

from __future__ import annotations

ALIGNMENT = 64
"""Bytes: each tensor begins at a multiple of it. Vector instructions and copies want it, and sums then round alike
wherever the buffer lies."""


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
