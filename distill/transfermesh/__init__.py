"""TransferMesh: weights from a trainer to every inference engine, as one version, checked where they are used.

A `Publisher` sends; a `Receiver` in each engine gives the tensors to a `Loader`. Shared memory on the same host, TCP
otherwise; both ends prove that they hold the run's key; a version becomes live only after every receiver recomputed
its digest from what it had loaded. Usable on its own: numpy, msgspec and xxhash are all it needs.
"""

from __future__ import annotations

from distill.transfermesh.digest import model_digest, tensor_digest
from distill.transfermesh.endpoint import Endpoint, host_id
from distill.transfermesh.loader import Loader, MemoryLoader
from distill.transfermesh.manifest import Manifest, TensorSpec
from distill.transfermesh.publisher import Publisher, PublishReport
from distill.transfermesh.receiver import Receiver

__all__ = [
    "Endpoint",
    "Loader",
    "Manifest",
    "MemoryLoader",
    "PublishReport",
    "Publisher",
    "Receiver",
    "TensorSpec",
    "host_id",
    "model_digest",
    "tensor_digest",
]
