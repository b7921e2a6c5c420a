"""What a receiver does with the weights that arrive: the Loader seam, and a loader that keeps them in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from distill.transfermesh.digest import Octets, model_digest, tensor_digest
from distill.transfermesh.manifest import Manifest


class Loader(Protocol):
    """Takes one version at a time: begin, load each tensor once, digest, then commit or abort.

    All calls of one update come from one thread of the receiver. Any exception refuses or ends the update: its text
    reaches the publisher as the reason, and `abort` follows. Until `commit`, whoever uses the model sees the old one.
    """

    def begin(self, manifest: Manifest) -> None:
        """Make room for this version. Raise if it cannot be loaded here (names, dtypes or shapes that do not fit)."""
        ...

    def load(self, name: str, data: Octets) -> None:
        """Stage one tensor. `data` is 1-D, 64-byte aligned, and valid only during the call: copy it."""
        ...

    def digest(self) -> str:
        """`model_digest` of what is staged, computed from the staged memory rather than from what came in."""
        ...

    def commit(self, version: int) -> str:
        """Make the staged version live and return the `model_digest` of the live tensors."""
        ...

    def abort(self) -> None:
        """Drop what is staged, if anything. May be called at any time, also twice."""
        ...


class MemoryLoader:
    """Keeps two copies in numpy arrays: the live one and the one that is being loaded. Commit swaps them."""

    def __init__(self) -> None:
        self.version = -1
        """Version of the live tensors; -1 before the first commit."""
        self._live: dict[str, Octets] = {}
        self._staged: dict[str, Octets] = {}
        self._spare: dict[str, Octets] = {}

    @property
    def tensors(self) -> Mapping[str, Octets]:
        """The live tensors' bytes by name."""
        return self._live

    def begin(self, manifest: Manifest) -> None:
        spare, self._spare = self._spare, {}
        self._staged = {spec.name: _reuse(spare.get(spec.name), spec.nbytes) for spec in manifest.tensors}

    def load(self, name: str, data: Octets) -> None:
        self._staged[name][:] = data

    def digest(self) -> str:
        return _digest_of(self._staged)

    def commit(self, version: int) -> str:
        self._live, self._staged, self._spare = self._staged, {}, self._live
        self.version = version
        return _digest_of(self._live)

    def abort(self) -> None:
        if self._staged:
            self._spare, self._staged = self._staged, {}


def _reuse(spare: Octets | None, nbytes: int) -> Octets:
    """A buffer of an earlier version where it fits: fresh memory costs a page fault for every 4 KiB."""
    return spare if spare is not None and spare.nbytes == nbytes else np.zeros(nbytes, np.uint8)


def _digest_of(tensors: Mapping[str, Octets]) -> str:
    return model_digest({name: tensor_digest(data) for name, data in tensors.items()})
