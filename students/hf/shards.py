"""The weights as Hugging Face files name them, without holding the whole model: one tensor, or one piece, at a time.

A weight that is spread over the ranks is a DTensor cut along its first dimension; all others are whole on every rank.

Legend: a piece is the box (offset, size) of a tensor that one rank holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from distill.errors import ConfigError
from distill.protocols import WeightShard
from students.hf.parallel import Alone, whole

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size), per dimension."""
_LAYER = re.compile(r"^(.*?\.\d+)\.")
"""The part of a name up to the number of its layer; what is stored together is of one layer."""


def piece(shape: Sequence[int], rank: int, ranks: int) -> Box:
    """The rows of a tensor that are rank `rank`'s: equal parts of the first dimension, as FSDP2 and torch.chunk cut it.

    The last ranks may have fewer rows, or none. A tensor without dimensions is rank 0's.
    """
    shape = tuple(shape)
    if not shape:
        return ((), ()) if rank == 0 else ((), (0,))
    rows = -(-shape[0] // ranks)
    begin = min(rank * rows, shape[0])
    return (begin, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - begin), *shape[1:])


def own_piece(tensor: Tensor, parallel: Alone) -> Box:
    """What this rank holds of a tensor; all of one that is not spread."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    box = piece(tensor.shape, parallel.rank, parallel.ranks)
    assert tensor.placements == (Shard(0),) and tuple(tensor.to_local().shape) == box[1], "FSDP2 cuts otherwise"
    return box


def local(tensor: Tensor) -> Tensor:
    """The memory of `own_piece`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_like(values: Tensor, like: Tensor) -> Tensor:
    """A tensor whose piece on this rank is `values`, spread as `like` is."""
    values = values.to(like.device)
    if not isinstance(like, DTensor):
        return values
    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def require_coverage(pieces: Mapping[str, tuple[tuple[int, ...], Sequence[Box]]], what: str) -> None:
    """Check that the boxes of each tensor (name -> its shape, boxes) hold every element exactly once.

    Raises ConfigError that names the tensor. `what` says whose pieces they are. Boxes without elements are allowed.
    """
    for name, (shape, boxes) in pieces.items():
        filled = [box for box in boxes if math.prod(box[1])]
        fault = next((_misplaced(box, shape) for box in filled if _misplaced(box, shape)), "")
        if not fault and any(_overlap(a, b) for index, a in enumerate(filled) for b in filled[:index]):
            fault = "pieces overlap"
        missing = math.prod(shape) - sum(math.prod(size) for _, size in filled)
        if not fault and missing:
            fault = f"{missing} of {math.prod(shape)} elements are in no piece"
        if fault:
            raise ConfigError(
                f"{what}: tensor {name} of shape {shape}: {fault}",
                why="every element must be there exactly once",
                fix="use another checkpoint, with the files of all of its ranks",
            )


def _misplaced(box: Box, shape: tuple[int, ...]) -> str:
    offset, size = box
    inside = len(offset) == len(size) == len(shape) and all(
        begin >= 0 and begin + length <= side for begin, length, side in zip(offset, size, shape, strict=True)
    )
    return "" if inside else f"the piece of size {size} at {offset} lies outside of it"


def _overlap(one: Box, other: Box) -> bool:
    return intersection(one, other) is not None


def intersection(one: Box, other: Box) -> Box | None:
    """The box that both hold, if any. Two tensors without dimensions are the same element."""
    begins = [max(a, b) for a, b in zip(one[0], other[0], strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
        return None
    return tuple(begins), tuple(end - begin for begin, end in zip(begins, ends, strict=True))


@dataclass(frozen=True)
class Stored:
    """One tensor of the files."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Group:
    """Tensors of the model that become tensors of the files together; `renamed`: one that stays as it is."""

    names: tuple[str, ...]
    stored: tuple[Stored, ...]
    renamed: bool


class WeightNames:
    """How the tensors of one model are stored in Hugging Face files: under other names, or split and merged (experts).

    Worked out once, on tensors without memory. `state`: name in the model -> tensor. `dtype`: what floating-point
    tensors are stored in; None: in their own.
    """

    def __init__(self, model: PreTrainedModel, state: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> None:
        self._model = model
        self._dtype = dtype
        self._groups: dict[str, _Group] = {}
        together: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state:
            ghost = torch.empty(tensor.shape, dtype=self._stored_dtype(tensor), device="meta")
            stored = self._convert({name: ghost}, alone=True)
            if len(stored) == 1 and next(iter(stored.values())) is ghost:
                self._add({name: ghost}, stored, renamed=True)
            else:
                layer = _LAYER.match(name)
                together.setdefault(layer[1] if layer else "", {})[name] = ghost
        for ghosts in together.values():
            self._add(ghosts, self._convert(ghosts), renamed=False)

    @property
    def stored(self) -> list[Stored]:
        """What files hold, in an order that is the same on every rank."""
        return [stored for group in dict.fromkeys(self._groups.values()) for stored in group.stored]

    def whole(self, state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor): not copied, unless spread, cast or converted. Collective."""
        waiting: dict[str, Tensor] = {}
        for name, tensor in state:
            group = self._groups[name]
            tensor = whole(self._cast(tensor.detach()))
            if group.renamed:
                yield group.stored[0].name, tensor
                continue
            waiting[name] = tensor
            if waiting.keys() >= set(group.names):
                yield from self._convert({each: waiting.pop(each) for each in group.names}).items()

    def pieces(self, state: Iterable[tuple[str, Tensor]], parallel: Alone) -> Iterator[WeightShard]:
        """What this rank sends: its piece of each tensor that is stored as it is; of those that are converted, which
        are gathered a layer at a time for that, every `ranks`-th. Collective."""
        waiting: dict[str, Tensor] = {}
        converted = 0
        for name, tensor in state:
            group = self._groups[name]
            tensor = self._cast(tensor.detach())
            if group.renamed:
                yield _shard(group.stored[0].name, tensor, parallel)
                continue
            waiting[name] = whole(tensor)
            if waiting.keys() >= set(group.names):
                for hf_name, value in self._convert({each: waiting.pop(each) for each in group.names}).items():
                    if converted % parallel.ranks == parallel.rank:
                        yield _shard(hf_name, value, Alone())
                    converted += 1

    def _add(self, ghosts: Mapping[str, Tensor], stored: Mapping[str, Tensor], *, renamed: bool) -> None:
        specs = tuple(Stored(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items())
        self._groups |= dict.fromkeys(ghosts, _Group(tuple(ghosts), specs, renamed))

    def _convert(self, state: dict[str, Tensor], *, alone: bool = False) -> dict[str, Tensor]:
        """`alone`: one tensor that may lack others which it is stored with; empty then."""
        try:
            return revert_weight_conversion(self._model, state)
        except (RuntimeError, ValueError, KeyError, IndexError):
            if alone:
                return {}
            raise

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._stored_dtype(tensor))

    def _stored_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor, flat; of one on the CPU without a copy, good until the next step."""
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shard(name: str, tensor: Tensor, parallel: Alone) -> WeightShard:
    if isinstance(tensor, DTensor):
        offset, size = own_piece(tensor, parallel)
        part: Any = tensor.to_local()
    else:
        offset, size = piece(tensor.shape, parallel.rank, parallel.ranks)
        part = tensor[offset[0] : offset[0] + size[0]] if tensor.ndim else tensor.reshape(-1)[: math.prod(size)]
    return WeightShard(name, dtype_name(tensor.dtype), tuple(tensor.shape), offset, size, as_bytes(part))
