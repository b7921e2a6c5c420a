"""Weights from files or host memory into buffers of the device: cast, counted against the link, digested on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from distill.errors import ConfigError, TeacherError
from distill.modeling.skeleton import Skeleton
from distill.weights.files import StoredTensor
from distill.weights.host import Octets
from distill.weights.link import Link
from distill.weights.origin import Origin

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class OriginTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each read when it is asked for. `digests` has those that were."""

    def __init__(self, tensors: Mapping[str, StoredTensor], origin: Origin) -> None:
        self.digests: dict[str, str] = {}
        self._tensors = tensors
        self._origin = origin

    def __getitem__(self, name: str) -> Tensor:
        stored = self._tensors[name]
        octets, self.digests[name] = self._origin.read(name)
        return as_tensor(octets, stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Feed:
    """What `distill.modeling.forward.stream` gets its weights from; also fills resident pieces."""

    def __init__(
        self,
        skeleton: Skeleton,
        tensors: Mapping[str, StoredTensor],
        origin: Origin,
        link: Link,
        known: dict[str, str],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`known`: digests of earlier copies. `check` is called before each piece, and may raise."""
        self.source = OriginTensors(tensors, origin)
        self._skeleton = skeleton
        self._tensors = tensors
        self._origin = origin
        self._link = link
        self._known = known
        self._check = check

    def fill(self, index: int, buffer: Tensor) -> None:
        """Put a piece into a buffer. Raises TeacherError for bytes that are not those of an earlier copy."""
        self._check()
        began = time.monotonic()
        self._skeleton.fill(index, buffer, self.source)
        check_digests(self._known, self.source.digests, self._tensors)
        self._link.carry(buffer.numel(), began=began)

    def rows(self, ids_U: Tensor) -> Tensor:
        """(U, D) rows of the embedding, in the skeleton's dtype and on its device."""
        stored = self._tensors[self._embedding()]
        width = stored.shape[1]
        row_bytes = stored.nbytes // stored.shape[0]
        began = time.monotonic()
        octets = self._origin.rows(stored.name, row_bytes, ids_U.numpy())
        rows_UD = _viewed(octets.reshape(-1), stored).view(len(ids_U), width)
        found = rows_UD.to(self._skeleton.device, self._skeleton.dtype)
        self._link.carry(found.nbytes, began=began)
        return found

    def _embedding(self) -> str:
        (name,) = self._skeleton.sources(0)
        names = [name, *(alias for alias, saved in self._skeleton.aliases.items() if saved == name)]
        found = next((each for each in names if each in self._tensors), None)
        if found is None:
            raise ConfigError(f"embeddings: the weights lack {name}")
        return found


def as_tensor(octets: Octets, stored: StoredTensor) -> Tensor:
    """Bytes as the tensor that they are; nothing is copied."""
    return _viewed(octets, stored).view(stored.shape)


def _viewed(octets: Octets, stored: StoredTensor) -> Tensor:
    dtype = _DTYPES.get(stored.dtype)
    if dtype is None:
        raise ConfigError(
            f"{stored.file}: tensor {stored.name!r} is {stored.dtype}, which is not served here",
            fix="save the weights as float32, bfloat16 or float16, or serve them with SGLang",
        )
    if not octets.size:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.require(octets, requirements="W")).view(dtype)


def check_digests(known: dict[str, str], found: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    """Compare with what earlier copies had, and remember what is new. Raises TeacherError, naming the tensor."""
    for name, digest in found.items():
        if known.setdefault(name, digest) != digest:
            raise TeacherError(
                f"{tensors[name].file}: tensor {name!r} has digest {digest}, and had {known[name]} before",
                why="the file was changed: scores before and after would come from two different teachers",
                fix="put the file back, or register the new weights under another version",
            )
