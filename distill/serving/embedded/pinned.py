"""Host memory made fit for direct copies to CUDA. Not run on this hardware."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from distill.weights.host import Octets, Pin

log = logging.getLogger("distill.embedded")


def pin_for(device: torch.device) -> Pin | None:
    """How to pin mapped memory for copies to `device`; None where that says nothing, as on a CPU."""
    return _register if device.type == "cuda" else None


def _register(octets: Octets) -> Callable[[], None]:
    """cudaHostRegister of exactly these bytes: unlike `pin_memory`, nothing is copied and nothing rounded up."""
    runtime: Any = torch.cuda.cudart()
    address = octets.ctypes.data
    code = int(runtime.cudaHostRegister(address, octets.nbytes, 0))
    if code:  # the copy is slower then, and right all the same
        log.warning("%d bytes of host memory cannot be pinned: CUDA error %d", octets.nbytes, code)
        return lambda: None

    def undo() -> None:
        runtime.cudaHostUnregister(address)

    return undo
