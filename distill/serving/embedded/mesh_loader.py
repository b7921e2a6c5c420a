"""Weights from the mesh into a running model: `distill.transfermesh.loader.Loader` over torch.

Tensors are staged beside the live ones in the dtype in which they came, hashed there, and copied over in one go
between two decode steps. Tied weights come once and change once.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.errors import MeshError
from distill.modeling.naming import live_tensors
from distill.serving.embedded.engine import Engine
from distill.serving.embedded.jobs import Refusal
from distill.serving.embedded.served import some
from distill.serving.embedded.weights import octets
from distill.transfermesh.digest import model_digest, tensor_digest
from distill.transfermesh.manifest import Manifest

_COMMIT_DEADLINE_S = 120.0
"""A commit waits for the decode step under way, or for a scoring pass; minutes mean that something hangs."""


class TorchLoader:
    """Loads one version at a time into the engine's model. Called from the receiver's thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._staged: dict[str, Tensor] = {}

    def begin(self, manifest: Manifest) -> None:
        """Make room. Raises MeshError, naming them, for tensors that are missing, unknown or of another shape."""
        live = self._live()
        sent = {spec.name: spec for spec in manifest.tensors}
        if missing := sorted(set(live) - set(sent)):
            raise MeshError(f"the sent weights lack {some(missing)}", why="the model needs every tensor of a version")
        if unknown := sorted(set(sent) - set(live)):
            raise MeshError(f"the model has no tensor named {some(unknown)}")
        wrong = [
            f"{name} {tuple(sent[name].shape)} instead of {tuple(tensor.shape)}"
            for name, tensor in live.items()
            if tuple(sent[name].shape) != tuple(tensor.shape)
        ]
        if wrong:
            raise MeshError(f"other shapes: {some(wrong)}")
        staged: dict[str, Tensor] = {}
        for name, tensor in live.items():
            dtype = getattr(torch, sent[name].dtype, None)
            if not isinstance(dtype, torch.dtype) or dtype.is_floating_point != tensor.is_floating_point():
                raise MeshError(f"{name}: {sent[name].dtype} cannot become {tensor.dtype}")
            staged[name] = torch.empty(tensor.shape, dtype=dtype)
        self._staged = staged

    def load(self, name: str, data: NDArray[np.uint8]) -> None:
        """Stage the bytes of one tensor."""
        flat = self._staged[name].reshape(-1)
        if flat.numel():  # torch cannot view an empty tensor as bytes
            flat.view(torch.uint8).numpy()[:] = data

    def digest(self) -> str:
        """Digest of the staged tensors."""
        return model_digest({name: tensor_digest(octets(tensor)) for name, tensor in self._staged.items()})

    def commit(self, version: int) -> str:
        """Make the staged tensors live between two decode steps. Returns the digest of the live ones."""
        staged = self._staged
        future = self._engine.run_between_steps(lambda: self._go_live(version, staged))
        try:
            return future.result(_COMMIT_DEADLINE_S)
        except TimeoutError as error:
            raise MeshError(
                f"version {version}: the model did not come to rest in {_COMMIT_DEADLINE_S:.0f} s"
            ) from error
        finally:
            self._staged = {}

    def abort(self) -> None:
        """Drop what is staged."""
        self._staged = {}

    def _live(self) -> dict[str, Tensor]:
        try:
            served = self._engine.require_model()
        except Refusal as refusal:
            raise MeshError(refusal.message) from refusal
        return live_tensors(served.model)

    def _go_live(self, version: int, staged: dict[str, Tensor]) -> str:
        live = self._live()
        if staged is not self._staged:
            raise MeshError(f"version {version} came to its turn after it was given up")
        if {n: t.shape for n, t in staged.items()} != {n: t.shape for n, t in live.items()}:
            raise MeshError(f"the model was replaced while version {version} was on its way")
        for name, tensor in live.items():
            tensor.copy_(staged[name])
        self._engine.set_version(str(version))
        return model_digest({name: _digest_of_live(tensor, staged[name]) for name, tensor in live.items()})


def _digest_of_live(live: Tensor, staged: Tensor) -> str:
    """Digest of a live tensor. In another dtype it is that of the sent bytes, if the live ones are their rounding."""
    if live.dtype == staged.dtype:
        return tensor_digest(octets(live))
    held = torch.equal(live.cpu(), staged.to(live.dtype))
    return tensor_digest(octets(staged)) if held else "0" * 16
