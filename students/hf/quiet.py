"""Notices of other packages that no user of a student can do anything about."""

from __future__ import annotations

import logging


def quiet_bitsandbytes() -> None:
    """Comes before it, or peft, is imported: on a CPU it warns that it lacks a kernel for 4-bit weights, of which a
    student has none."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
