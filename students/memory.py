"""How much memory this process has needed."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory_bytes() -> int:
    """Most memory held so far: of the CUDA devices that this process uses, or of the process where it uses none."""
    if torch.cuda.is_initialized():
        return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
