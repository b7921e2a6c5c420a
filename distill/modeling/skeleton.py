"""A decoder without weights: the transformers module of a config.json whose tensors are views of buffers from outside.

The tensors come in pieces, in the order of the forward pass: "embeddings", "layer 0" …, "head" (final norm and the
output matrix; the embedding serves as that where the two are tied, and is listed once). A piece is attached to a buffer
of exactly `Piece.nbytes` bytes, filled there from tensors named as in a checkpoint, and detached again. Persistent
buffers are part of the pieces like parameters; constants that are computed from the config, such as rotary frequencies,
belong to the skeleton.

A skeleton is used by one thread at a time. Building one takes a few milliseconds a layer, so `give_back` keeps it for
the next `build` of an equal config. `build` may run on any thread while others compute.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from distill.errors import ConfigError
from distill.modeling.alignment import aligned
from distill.modeling.naming import Weightless, Window, function_of, tied_names, windows

_KEPT = 4
"""Idle skeletons of one config that are kept."""


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor of the model in its piece's buffer."""

    name: str
    """In the model's state dict."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors that come and go together."""

    index: int
    label: str
    params: tuple[Param, ...]
    nbytes: int
    """Of its buffer; a multiple of ALIGNMENT."""


class Skeleton:
    """A model of one architecture, its pieces, and which of them are attached.

    `model`: the transformers module. `config`: its config. `dtype`, `device`: of what is attached. `pieces`: those of
    the module's docstring. `nbytes`: of all pieces. `layers`: number of decoder layers. `total_params`: tied ones once.
    `active_params`: those that one token passes through, all of them but for a mixture of experts.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device, where: str = "config.json") -> None:
        """`build` is the way to get one. Raises ConfigError for a model that is built otherwise."""
        self.dtype = dtype
        self.device = device
        self._key = _key(config, dtype, device)
        self.model: Any = _without_weights(config, where)
        self.config: Any = self.model.config
        self.config.dtype = dtype
        base = _decoder(self.model, where)
        base.embed_tokens.padding_idx = None  # matters to gradients only, and refuses matrices of fewer rows
        self.decoder_layers: Any = base.layers
        """Modules, in order."""
        self.final_norm: Any = base.norm
        self.layers = len(base.layers)
        self._tied = tied_names(self.model)
        parts = windows(self.model)
        if parts is None:
            raise ConfigError(f"{where}: {type(self.model).__name__} computes its weights from what files hold")
        self._windows = parts
        self.pieces = _pieces(self.model, self.layers, self._tied, dtype, where)
        self.nbytes = sum(piece.nbytes for piece in self.pieces)
        self.total_params, self.active_params = _count(self.model, config, self._tied)
        self._buffers: dict[int, Tensor] = {}
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:
                    setattr(module, name, buffer.to(device))
        self._empty = {param.name: self._tensor(param.name) for piece in self.pieces for param in piece.params}

    # --- life ---------------------------------------------------------------------------------------------------------

    @classmethod
    def build(cls, folder: Path, *, dtype: torch.dtype, device: torch.device) -> Skeleton:
        """The skeleton for `folder`/config.json; one that was given back, where there is one. No weights are read.

        Raises ConfigError if the model is not a decoder whose hidden states come from embeddings, layers, a norm and a
        head, or if it is not known how its files name its weights.
        """
        config = read_config(folder)
        with _POOL_LOCK:
            kept = _POOL.get(_key(config, dtype, device))
            if kept:
                return kept.pop()
        return cls(config, dtype=dtype, device=device, where=f"{folder}/config.json")

    def give_back(self) -> None:
        """Detach everything, and keep the module for a later `build` of an equal config. Do not use it afterwards."""
        self.detach_all()
        with _POOL_LOCK:
            kept = _POOL.setdefault(self._key, [])
            if len(kept) < _KEPT:
                kept.append(self)

    # --- pieces -------------------------------------------------------------------------------------------------------

    @property
    def embeddings(self) -> Piece:
        return self.pieces[0]

    @property
    def head(self) -> Piece:
        return self.pieces[-1]

    @property
    def tied(self) -> bool:
        """The output matrix is the embedding."""
        return self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight

    @property
    def attached(self) -> frozenset[int]:
        return frozenset(self._buffers)

    @property
    def complete(self) -> bool:
        """All pieces are attached."""
        return len(self._buffers) == len(self.pieces)

    @property
    def aliases(self) -> dict[str, str]:
        """Names that files may have for a tied tensor -> the name in `sources`."""
        return dict(self._tied)

    def sources(self, index: int) -> dict[str, tuple[int, ...]]:
        """Tensors of a checkpoint that make up the piece: name there -> shape."""
        return {window.name: window.shape for window, _ in self._parts(index)}

    def attach(self, index: int, buffer: Tensor) -> None:
        """Make the piece's tensors views of `buffer`, uint8 of `Piece.nbytes` on the device. Nothing is copied."""
        for name, tensor in self.views(index, buffer).items():
            self._put(name, tensor)
        self._buffers[index] = buffer

    def detach(self, index: int) -> None:
        """Let go of the piece's buffer; the model cannot run until another is attached."""
        if self._buffers.pop(index, None) is not None:
            for param in self.pieces[index].params:
                self._put(param.name, self._empty[param.name])

    def detach_all(self) -> None:
        for index in list(self._buffers):
            self.detach(index)
        self.put_embedding_rows(None)

    def put_embedding_rows(self, rows_UD: Tensor | None) -> None:
        """Let the embedding consist of these rows alone, of which input ids then are numbers; None takes them away.
        For a forward pass that is to go without the whole matrix."""
        (param,) = self.embeddings.params
        self._put(param.name, self._empty[param.name] if rows_UD is None else rows_UD)

    def views(self, index: int, buffer: Tensor) -> dict[str, Tensor]:
        """The piece's tensors in `buffer`, by their names in the model, without attaching them."""
        piece = self.pieces[index]
        if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (piece.nbytes,) or not buffer.is_contiguous():
            raise ValueError(
                f"{piece.label}: a buffer of shape {tuple(buffer.shape)} and {buffer.dtype}; "
                f"it needs ({piece.nbytes},) and torch.uint8, contiguous"
            )
        return {
            param.name: buffer[param.begin : param.begin + param.nbytes].view(param.dtype).view(param.shape)
            for param in piece.params
        }

    def read(self, index: int, source: Mapping[str, Tensor]) -> None:
        """Fill an attached piece from tensors named as in a checkpoint, cast to the piece's dtype."""
        self.fill(index, self._buffers[index], source)

    def fill(self, index: int, buffer: Tensor, source: Mapping[str, Tensor]) -> None:
        """Fill a buffer of the piece, attached or not. Blocks until it is filled, except from pinned memory to CUDA:
        there the copies are queued on the thread's current stream.

        Raises ConfigError for a tensor that is missing, or has another shape or kind than the model needs.
        """
        views = self.views(index, buffer)
        by_name = {alias: name for name, alias in self._tied.items()}
        with torch.inference_mode():  # in which buffers of any thread may be written to
            for window, param in self._parts(index):
                tensor = source.get(window.name)
                if tensor is None and window.name in by_name:
                    tensor = source.get(by_name[window.name])
                _check(self.pieces[index], window, tensor, param.dtype)
                assert tensor is not None
                window.of(views[param.name]).copy_(tensor, non_blocking=tensor.is_pinned())

    def _parts(self, index: int) -> Iterator[tuple[Window, Param]]:
        for param in self.pieces[index].params:
            for window in self._windows[param.name]:
                yield window, param

    def _tensor(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        return getattr(self.model.get_submodule(path), leaf)

    def _put(self, name: str, tensor: Tensor) -> None:
        """Set a tensor of the model, and whatever is tied to it."""
        aliases = [alias for alias, saved in self._tied.items() if saved == name]
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
            return
        kept: Any = tensor if isinstance(tensor, torch.nn.Parameter) else _parameter(tensor)
        for full in (name, *aliases):
            path, _, leaf = full.rpartition(".")
            self.model.get_submodule(path)._parameters[leaf] = kept


def read_config(folder: Path) -> Any:
    """The transformers config of a folder. Raises ConfigError where there is none, or it is not known."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json: {str(error).partition(chr(10))[0]}") from error


_POOL: dict[str, list[Skeleton]] = {}
_POOL_LOCK = threading.Lock()


def _key(config: Any, dtype: torch.dtype, device: torch.device) -> str:
    kind = type(config).__name__
    return json.dumps([kind, str(dtype), str(device), function_of(config)], sort_keys=True, default=str)


def _parameter(tensor: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _without_weights(config: Any, where: str) -> Any:
    """The module of a config. The default dtype of torch belongs to the whole process, so it is left as it is."""
    config = copy.deepcopy(config)
    config.dtype = torch.get_default_dtype()
    transformers.utils.logging.set_verbosity_error()
    try:
        with Weightless():
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where}: {str(error).partition(chr(10))[0]}") from error
    return model.eval().requires_grad_(False)


def _decoder(model: Any, where: str) -> Any:
    """The part of the model that makes hidden states, after a look at what it is made of."""
    base = model.base_model
    kind = type(model).__name__
    if base is model:
        raise ConfigError(f"{where}: {kind} does not keep its decoder apart from its head")
    parts = dict(base.named_children())
    lacking = [name for name in ("embed_tokens", "layers", "norm") if parts.pop(name, None) is None]
    if lacking:
        raise ConfigError(
            f"{where}: {kind} has no {', '.join(lacking)}; it has {', '.join(dict(base.named_children()))}"
        )
    outside = {name: part for name, part in model.named_children() if part is not base}
    if model.get_output_embeddings() is not outside.pop("lm_head", None):
        raise ConfigError(f"{where}: {kind} has no lm_head")
    unknown = [name for name, part in [*parts.items(), *outside.items()] if part.state_dict()]
    unknown += [name for name, _ in [*base.named_parameters(recurse=False), *model.named_parameters(recurse=False)]]
    if unknown:
        raise ConfigError(f"{where}: what {kind} does with {', '.join(unknown)} is not known here")
    if any(not buffer.is_meta and buffer.device.type != "cpu" for buffer in model.buffers()):
        raise ConfigError(f"{where}: {kind} puts its constants on a device of its own")
    stored = set(model.state_dict())
    if lost := [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in stored]:
        raise ConfigError(f"{where}: {kind} does not say what {', '.join(lost)} hold")
    return base


def _pieces(model: Any, layers: int, tied: Mapping[str, str], dtype: torch.dtype, where: str) -> tuple[Piece, ...]:
    prefix = f"{model.base_model_prefix}."
    names: list[list[str]] = [[] for _ in range(layers + 2)]
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name in state:
        inside = name.removeprefix(prefix)
        if name.startswith(prefix) and inside.startswith("embed_tokens."):
            names[0].append(name)
        elif name.startswith(prefix) and inside.startswith("layers."):
            names[1 + int(inside.split(".")[1])].append(name)
        else:
            names[-1].append(name)
    kept_whole = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept_whole |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if kept_whole and dtype != torch.float32:
        raise ConfigError(f"{where}: {', '.join(sorted(kept_whole))} must stay in float32", fix="serve it in float32")
    labels = ["embeddings", *(f"layer {index}" for index in range(layers)), "head"]
    return tuple(
        _piece(index, label, {name: state[name] for name in chosen}, dtype)
        for index, (label, chosen) in enumerate(zip(labels, names, strict=True))
    )


def _piece(index: int, label: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Piece:
    params: list[Param] = []
    end = 0
    for name, tensor in tensors.items():
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * kind.itemsize
        params.append(Param(name, tuple(tensor.shape), kind, end, nbytes))
        end = aligned(end + nbytes)
    return Piece(index, label, tuple(params), end)


def _count(model: Any, config: Any, tied: Mapping[str, str]) -> tuple[int, int]:
    """Parameters in total, and those that one token passes through."""
    total = active = 0
    chosen = getattr(config, "num_experts_per_tok", None)
    for name, parameter in model.named_parameters():
        if name in tied:
            continue
        total += parameter.numel()
        experts = parameter.shape[0] if ".experts." in name and parameter.dim() == 3 and chosen else None
        active += parameter.numel() if experts is None else parameter.numel() // experts * min(chosen, experts)
    return total, active


def _check(piece: Piece, window: Window, tensor: Tensor | None, dtype: torch.dtype) -> None:
    if tensor is None:
        raise ConfigError(f"{piece.label}: the weights lack {window.name}")
    if tuple(tensor.shape) != window.shape:
        raise ConfigError(
            f"{window.name} has shape {tuple(tensor.shape)}, the model needs {window.shape}",
        )
    if tensor.is_floating_point() != dtype.is_floating_point:
        raise ConfigError(f"{window.name} is {tensor.dtype}, which cannot become {dtype}")
