"""The device memory of a slot: a byte budget that is never passed, counted exactly."""

from __future__ import annotations

import contextlib
import mmap
import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distill.errors import EnvironmentFault


@dataclass(slots=True)
class _Piece:
    tensor: Tensor
    memory: mmap.mmap | None
    """The anonymous mapping under a tensor on the CPU."""


@dataclass(slots=True)
class _Owner:
    nbytes: int = 0
    pieces: list[_Piece] = field(default_factory=list[_Piece])


class Arena:
    """Gives out buffers of one device within `budget_bytes`. Used by any threads.

    On a CPU each buffer is an anonymous mapping of its own, so that its pages go back to the system at once; on CUDA a
    tensor of torch's caching allocator, which may round the last bytes up (not run on this hardware).
    """

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self.budget_bytes = budget_bytes
        self.device = device
        self._used = 0
        self._peak = 0
        self._owners: dict[str, _Owner] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def peak_bytes(self) -> int:
        """The most that was ever in use."""
        return self._peak

    @property
    def owners(self) -> dict[str, int]:
        """Owner -> bytes that it holds."""
        with self._lock:
            return {name: owner.nbytes for name, owner in self._owners.items()}

    def take(self, owner: str, nbytes: int) -> Tensor:
        """A uint8 buffer (nbytes,). Raises EnvironmentFault past the budget; nothing has changed then."""
        return self.take_all(owner, [nbytes])[0]

    def take_all(self, owner: str, sizes: list[int]) -> list[Tensor]:
        """Several buffers, or none: raises EnvironmentFault where they do not fit together. Contents are undefined."""
        wanted = sum(sizes)
        with self._lock:
            free = self.budget_bytes - self._used
            if wanted > free:
                raise EnvironmentFault(
                    f"{owner} needs {wanted} bytes ({wanted / 1e9:.3f} GB), {free} of {self.budget_bytes} are free",
                    why=f"held now: {', '.join(f'{n} {o.nbytes}' for n, o in self._owners.items()) or 'nothing'}",
                    fix="release another teacher first, or raise teacher_manager.slot_gb",
                )
            pieces = self._pieces(owner, sizes)
            entry = self._owners.setdefault(owner, _Owner())
            entry.pieces += pieces
            entry.nbytes += wanted
            self._used += wanted
            self._peak = max(self._peak, self._used)
        return [piece.tensor for piece in pieces]

    def give_back(self, owner: str) -> int:
        """Free everything of an owner, whoever still has a view of it; returns how many bytes that was."""
        with self._lock:
            entry = self._owners.pop(owner, None)
            if entry is None:
                return 0
            for piece in entry.pieces:
                if piece.memory is not None:
                    # the mapping itself ends with its last view; its pages go now
                    piece.memory.madvise(mmap.MADV_DONTNEED)
            self._used -= entry.nbytes
            return entry.nbytes

    def _pieces(self, owner: str, sizes: list[int]) -> list[_Piece]:
        pieces: list[_Piece] = []
        try:
            for nbytes in sizes:
                pieces.append(_mapped(nbytes) if self.device.type == "cpu" else self._on_device(nbytes))
        except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise EnvironmentFault(
                f"{owner} needs {sum(sizes)} bytes, within the budget of {self.budget_bytes}, and the device gave "
                f"{sum(piece.tensor.numel() for piece in pieces)}: {str(error).partition(chr(10))[0]}",
                fix="lower teacher_manager.slot_gb to what the device really has",
            ) from error
        return pieces

    def _on_device(self, nbytes: int) -> _Piece:
        return _Piece(torch.empty(nbytes, dtype=torch.uint8, device=self.device), None)


def _mapped(nbytes: int) -> _Piece:
    if not nbytes:  # the system maps no empty memory
        return _Piece(torch.empty(0, dtype=torch.uint8), None)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # the first touch of its pages costs a copy up to a third of its time
    return _Piece(torch.from_numpy(np.frombuffer(memory, np.uint8)), memory)
