"""One student on one process or on several ranks: what a training step must know of it.

Every rank is given the whole batch and takes its share of the samples. Loss weights come from the whole batch, so the
gradients of the ranks are summed, not averaged, and a step is the same for any number of ranks, up to rounding.

A step on a rank, which must take part in as many collectives as every other rank:

    mine = parallel.share(batch.samples)
    reports = parallel.together(work)       # work:
        rounds = parallel.rounds(micro-batches of mine)
        for index in range(rounds):         # a rank that has no more runs one of zero loss
            with parallel.micro_step(last=index == rounds - 1):
                forward, backward           # a sample's fault is kept, with zero loss, and raised after the loop
    parallel.sum_gradients(parameters)
    norm = parallel.clip(parameters, max_norm)

Legend: R ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from distill.errors import DistillError, PeerFault
from distill.types import ScoredSample

T = TypeVar("T")
BUCKET_ELEMENTS = 1 << 24
"""Gradients summed in one collective, 64 MB of float32: enough to fill a link, little beside the model."""


class Alone:
    """One process: nobody to share with."""

    rank: int = 0
    ranks: int = 1

    def spread(self, model: PreTrainedModel, *, low_precision: bool) -> None:
        """Spread `model` over the ranks, in place: its parameters keep their names.

        `low_precision`: compute in bfloat16 with float32 parameters, if this way of spreading can (fsdp).
        """

    def share(self, samples: Sequence[ScoredSample]) -> tuple[ScoredSample, ...]:
        """The samples that this rank trains, in the order of the batch; may be empty."""
        return tuple(samples)

    def rounds(self, count: int) -> int:
        """How many micro-batches this rank must run, when it has `count`."""
        return count

    @contextlib.contextmanager
    def micro_step(self, *, last: bool) -> Generator[None]:
        """A forward and a backward pass. No gradient crosses ranks before the last one."""
        del last
        yield

    @contextlib.contextmanager
    def forward_only(self) -> Generator[None]:
        """Forward passes that no backward pass follows."""
        yield

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last backward pass: what each rank added to the gradients counts in all of them."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale the summed gradients to `max_norm` if they are above it. Returns the norm of the whole before that."""
        return float(whole(nn.utils.clip_grad_norm_(parameters, max_norm)))

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank: all results, by rank. It must return what msgpack can hold.

        When it raises a DistillError on one rank, that rank raises it, and the others PeerFault.
        """
        return [work()]


class _Several(Alone):
    """This process is one of several ranks. The process group exists already (`students.ranks.join`)."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self._device = device

    def share(self, samples: Sequence[ScoredSample]) -> tuple[ScoredSample, ...]:
        lengths = [len(item.sample.prompt_ids) + len(item.sample.response_ids) for item in samples]
        return tuple(samples[index] for index in balanced(lengths, self.ranks)[self.rank])

    def together(self, work: Callable[[], T]) -> list[T]:
        fault: DistillError | None = None
        result: T | None = None
        try:
            result = work()
        except DistillError as error:
            fault = error
        told = self._exchange((fault.what if fault else None, result))
        if fault is not None:
            raise fault
        for rank, (what, _) in enumerate(told):
            if what is not None:
                raise PeerFault(f"student rank {self.rank} stopped, because rank {rank} did: {what}")
        return [result for _, result in told]

    def _exchange(self, value: Any) -> list[Any]:
        """What each rank gave."""
        mine = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        sizes_R = torch.zeros(self.ranks, dtype=torch.int64)
        sizes_R[self.rank] = len(mine)
        dist.all_reduce(sizes_R)
        longest = int(sizes_R.max())
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(texts, nn.functional.pad(mine, (0, longest - len(mine))))
        return [
            msgspec.msgpack.decode(text[:size].numpy().tobytes())
            for text, size in zip(texts, sizes_R.tolist(), strict=True)
        ]


class Replicated(_Several):
    """Every rank holds the whole model and the whole optimiser; gradients are summed over the ranks (ddp).

    They are summed once a step, behind the last backward pass. Nothing hides the time that this takes, but it asks
    nothing of the model: any parameter may lack a gradient, or have its master beside it.
    """

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        for bucket in _buckets(learning):
            flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket])
            dist.all_reduce(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)


class Sharded(_Several):
    """Every rank holds a part of each weight, of its gradient and its moments (FSDP2).

    The parameters are float32 whatever the forward pass computes in. Each rank reads the whole model into host memory;
    its device gets it layer by layer, and keeps a part of each. Gradients of the micro-batches before the last are kept
    whole on each rank, in float32: that saves sending them, and costs the memory of one more model.
    """

    def spread(self, model: PreTrainedModel, *, low_precision: bool) -> None:
        mesh = init_device_mesh(self._device.type, (self.ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low_precision else None, reduce_dtype=torch.float32)
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # Embedding and head stay together, with the root: they may share one weight.
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
                # Which experts a rank's tokens reach differs from rank to rank; what is reduced must not. Every model
                # with its experts in one tensor is fine without, which older versions of torch lack.
                if hasattr(module, "set_reduce_scatter_unused_params"):
                    module.set_reduce_scatter_unused_params(True)
        self._model: Any = model

    def rounds(self, count: int) -> int:
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    @contextlib.contextmanager
    def micro_step(self, *, last: bool) -> Generator[None]:
        self._model.set_requires_gradient_sync(last)
        yield

    @contextlib.contextmanager
    def forward_only(self) -> Generator[None]:
        try:
            yield
        finally:
            self._model.reshard()  # the root keeps its weights whole after a forward pass, for the backward


def make_parallel(kind: Literal["fsdp", "ddp"] | None, ranks: int, device: torch.device) -> Alone:
    """How this process trains, as `StudentConfig.parallel` and `ranks` say."""
    if ranks == 1:
        return Alone()
    assert dist.is_initialized() and dist.get_world_size() == ranks, "ranks join before their student is built"
    return Replicated(device) if kind == "ddp" else Sharded(device)


def balanced(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the samples of each rank, rising, with about as many tokens each: the longest first, always to the
    rank that has the least. The same for every caller."""
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(share) for share in shares]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, as its class names them, inner ones first; empty where it names none."""
    names: Any = getattr(model, "_no_split_modules", None) or ()
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over the ranks; then every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Parameters of one dtype and at most `BUCKET_ELEMENTS` together, in order; a larger one is alone."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        elements = sum(each.numel() for each in bucket) + parameter.numel()
        if bucket and (elements > BUCKET_ELEMENTS or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
