"""Hidden states of a packed batch, from weights that are all there or that come layer by layer.

Both run the model's own forward; `stream` differs from `hidden` only in that each layer finds its weights in one of two
buffers, which a worker thread fills while the layer before it computes. Nothing of a layer, its keys and values
included, outlives it: the device holds two layers and the batch. The numbers are the same bit for bit.

Legend: N rows that are asked for, D hidden size, U different ids, V rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.modeling.adapters import LoraAdapter, applied
from distill.modeling.packed import PackedBatch
from distill.modeling.packed_attention import NAME, CannotPack, built_otherwise
from distill.modeling.skeleton import Skeleton


class Feed(Protocol):
    """Where `stream` gets weights from. Called on a worker thread, one call at a time."""

    def fill(self, index: int, buffer: Tensor) -> None:
        """Put piece `index` of the skeleton into `buffer`, uint8 of its size; see `Skeleton.fill`."""
        ...

    def rows(self, ids_U: Tensor) -> Tensor:
        """(U, D) rows of the embedding, in the skeleton's dtype and on its device. `ids_U` is on the host."""
        ...


class TensorFeed:
    """Weights from tensors that are named as in a checkpoint: views of host memory, or of a mapped file.

    With pinned memory and a CUDA device the copies run beside the computation; this half has not been run on hardware.
    """

    def __init__(self, skeleton: Skeleton, source: Mapping[str, Tensor]) -> None:
        self._skeleton = skeleton
        self._source = source

    def fill(self, index: int, buffer: Tensor) -> None:
        self._skeleton.fill(index, buffer, self._source)

    def rows(self, ids_U: Tensor) -> Tensor:
        (name,) = self._skeleton.sources(0)
        names = [name, *(alias for alias, saved in self._skeleton.aliases.items() if saved == name)]
        matrix_VD = next((self._source[each] for each in names if each in self._source), None)
        if matrix_VD is None:
            raise ConfigError(f"embeddings: the weights lack {name}")
        return matrix_VD[ids_U].to(self._skeleton.device, self._skeleton.dtype)


@contextmanager
def packed_attention_of(model: Any) -> Generator[None]:
    """Inside, the model's attention is that of `distill.modeling.packed_attention`. For the thread that owns it."""
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def hidden(model: Any, batch: PackedBatch, adapters: Mapping[Any, LoraAdapter] | None = None) -> Tensor:
    """(N, D) final hidden states of the rows that the batch asks for. All weights of the model are in place.

    `adapters`: those of the batch's owners; an owner that is not there is computed with the model as it is.
    Raises CannotPack where the model's attention asks for more than packing does; `packed_attention.pack` tells before.
    """
    parts = [(adapter, batch.spans[owner]) for owner, adapter in (adapters or {}).items() if owner in batch.spans]
    with applied(model, parts):
        return _run(model, batch, batch.input_ids)


def why_no_stream(skeleton: Skeleton) -> str | None:
    """Why a model of this architecture cannot be streamed, or None. For its attention, `stream` has the last word."""
    return built_otherwise(skeleton.model)


def stream_bytes(skeleton: Skeleton) -> int:
    """Bytes on the device that `stream` needs for weights: two layers, or the head, which comes when they are through.

    A batch's own rows of the embedding are beside that, like its hidden states.
    """
    return max(2 * _layer_bytes(skeleton), _head_bytes(skeleton))


def stream(skeleton: Skeleton, batch: PackedBatch, feed: Feed, room: Tensor) -> Tensor:
    """(N, D) as `hidden`, through a skeleton that nothing is attached to.

    `room`: uint8 of `stream_bytes(skeleton)` on the device. Afterwards the head is attached in it, so that logits can
    be computed; `Skeleton.detach_all` ends that. Raises ConfigError for a model that cannot be packed, and whatever the
    feed raises, with nothing attached. A feed has to end by itself: while it may write, the room cannot be given back.
    """
    if reason := why_no_stream(skeleton):
        raise ConfigError(f"it cannot be streamed: {reason}")
    if skeleton.attached:
        raise ValueError(f"{len(skeleton.attached)} pieces are attached; a stream needs a skeleton of its own")
    if room.dtype != torch.uint8 or len(room) != stream_bytes(skeleton):
        raise ValueError(f"a room of {len(room)} {room.dtype}; the stream needs {stream_bytes(skeleton)} bytes")
    ids_U, places_T = np.unique(batch.ids_T, return_inverse=True)
    with _Conveyor(skeleton, feed, room) as conveyor:
        conveyor.put_embeddings(torch.from_numpy(ids_U))
        places_1T = torch.from_numpy(places_T.reshape(1, -1)).to(batch.device)
        try:
            return _run(skeleton.model, batch, places_1T)
        except CannotPack as error:
            raise ConfigError(f"it cannot be streamed: {error}") from error


def _run(model: Any, batch: PackedBatch, input_ids: Tensor) -> Tensor:
    if not batch.tokens:
        return torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=batch.device)
    with packed_attention_of(model), torch.no_grad():
        output = model.base_model(input_ids=input_ids, use_cache=False, **batch.layout.model_inputs)
    return output.last_hidden_state[0].index_select(0, batch.wanted_rows)


def _layer_bytes(skeleton: Skeleton) -> int:
    return max((piece.nbytes for piece in skeleton.pieces[1:-1]), default=0)


def _head_bytes(skeleton: Skeleton) -> int:
    return skeleton.head.nbytes + (skeleton.embeddings.nbytes if skeleton.tied else 0)


class _Conveyor:
    """Brings the pieces to the model while its forward runs: each module fetches its weights right before it computes.

    Layer i uses buffer i mod 2. When it begins, layer i - 1 is through and its buffer is free for layer i + 1, which is
    then fetched while layer i computes.
    """

    def __init__(self, skeleton: Skeleton, feed: Feed, room: Tensor) -> None:
        self._skeleton = skeleton
        self._feed = feed
        self._room = room
        # one thread for copies: the others compute
        self._worker = ThreadPoolExecutor(1, "weights", initializer=torch.set_num_threads, initargs=(1,))
        self._coming: Future[None] | None = None
        self._hooks: list[Any] = []
        self._copies = _Copies(skeleton.device)

    def __enter__(self) -> _Conveyor:
        layers = self._skeleton.decoder_layers
        for index, layer in enumerate(layers):
            self._hooks.append(layer.register_forward_pre_hook(self._before_layer(index)))
        self._hooks.append(self._skeleton.final_norm.register_forward_pre_hook(self._before_head))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._worker.shutdown(wait=True)  # nothing writes to the room from here on
        if kind is not None:
            self._skeleton.detach_all()

    def put_embeddings(self, ids_U: Tensor) -> None:
        """Let the embedding consist of the rows of these ids, and fetch the first layer."""
        self._copies.passed()  # whatever used the room before
        self._skeleton.put_embedding_rows(self._worker.submit(self._feed.rows, ids_U).result())
        self._fetch(0)

    def _before_layer(self, index: int) -> Callable[..., None]:
        def take(*_: Any) -> None:
            assert self._coming is not None
            self._coming.result()
            self._copies.arrived()
            if index:
                self._skeleton.detach(index)
            self._skeleton.attach(1 + index, self._buffer(index))
            self._copies.passed()
            if index + 1 < self._skeleton.layers:
                self._fetch(index + 1)

        return take

    def _before_head(self, *_: Any) -> None:
        """The layers are through: their room is the head's."""
        skeleton = self._skeleton
        skeleton.detach_all()
        skeleton.put_embedding_rows(None)
        self._copies.passed()
        pieces = [skeleton.head, *([skeleton.embeddings] if skeleton.tied else [])]
        begin = 0
        for piece in pieces:
            buffer = self._room[begin : begin + piece.nbytes]
            self._submit(piece.index, buffer).result()
            skeleton.attach(piece.index, buffer)
            begin += piece.nbytes
        self._copies.arrived()

    def _buffer(self, index: int) -> Tensor:
        begin = index % 2 * _layer_bytes(self._skeleton)
        return self._room[begin : begin + self._skeleton.pieces[1 + index].nbytes]

    def _fetch(self, index: int) -> None:
        self._coming = self._submit(1 + index, self._buffer(index))

    def _submit(self, index: int, buffer: Tensor) -> Future[None]:
        return self._worker.submit(self._copies.run, self._feed.fill, index, buffer)


class _Copies:
    """Order between copies and computation. On a CPU both are done when their call returns; on CUDA copies have a
    stream of their own, and events say when a buffer is full, and when it may be written over (not run on hardware)."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if cuda else None
        self._full: Any = torch.cuda.Event() if cuda else None
        self._free: Any = torch.cuda.Event() if cuda else None

    def run(self, fill: Callable[[int, Tensor], None], index: int, buffer: Tensor) -> None:
        """On the worker: fill a buffer once the computation that read it is through."""
        if self._stream is None:
            fill(index, buffer)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free)
            fill(index, buffer)
            self._full.record(self._stream)

    def arrived(self) -> None:
        """What is computed from here on waits for the copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._full)

    def passed(self) -> None:
        """Copies from here on wait for what is computed so far."""
        if self._stream is not None:
            self._free.record(torch.cuda.current_stream(self._device))
