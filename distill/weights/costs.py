"""What a weight object takes on a device, from the headers of its files and its config alone: no weights, no torch.

A device keeps each tensor at a multiple of ALIGNMENT bytes, experts of a layer fused, tied matrices once. What is said
here is what a server says that registers the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import ConfigError
from distill.modeling.adapter_settings import CONFIG as ADAPTER_CONFIG
from distill.modeling.alignment import aligned
from distill.protocols import WeightCosts
from distill.weights.files import StoredTensor, stored_tensors

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_FUSED: dict[str, str] = dict.fromkeys(("w1.weight", "w3.weight", "gate_proj.weight", "up_proj.weight"), "gate_up")
"""Two matrices of each expert lie in one tensor of the device."""


def costs_of(folder: Path, held_dtype: str | None, base: Path | None = None) -> WeightCosts:
    """Of a whole model, or of a LoRA adapter over `base`, whose number of layers it has.

    `held_dtype`: what the device holds floats as, in safetensors' spelling (F32, BF16, F16); None: as they are stored.
    Raises ConfigError for a folder without weights, config or layers, TeacherError for files that are broken.
    """
    tensors = list(stored_tensors(folder).values())
    if is_adapter(folder):
        if base is None:
            raise ConfigError(f"{folder} is a LoRA adapter, and no base is named", fix="name the model under it")
        params = sum(tensor.elements for tensor in tensors)
        layers = _layers(base, list(stored_tensors(base).values()))
        return WeightCosts(_held(tensors, held_dtype), layers, params, params, None)
    config = _config(folder)
    pieces = _pieces(tensors, config)
    layers = _layers(folder, tensors)
    sizes = [_held(pieces.layers.get(index, ()), held_dtype) for index in range(layers)]
    embeddings, head = (_held(part, held_dtype) for part in (pieces.embeddings, pieces.head))
    kept = pieces.all
    return WeightCosts(
        bytes=sum(sizes) + embeddings + head,
        layers=layers,
        total_params=sum(tensor.elements for tensor in kept),
        active_params=_active(kept, _chosen(config)),
        stream_bytes=max(2 * max(sizes), head + (embeddings if pieces.tied else 0)),
    )


def costs_of_one(folder: Path, held_dtype: str | None) -> WeightCosts:
    """Of a whole model, of any structure, in a server that holds nothing else and streams nothing. Raises as
    `costs_of`."""
    tensors, config = list(stored_tensors(folder).values()), _config(folder)
    return WeightCosts(
        bytes=sum(tensor.nbytes_as(held_dtype) for tensor in tensors),
        layers=int(config.get("num_hidden_layers") or 1),
        total_params=sum(tensor.elements for tensor in tensors),
        active_params=_active(tensors, _chosen(config)),
        stream_bytes=None,
    )


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True, slots=True)
class _Pieces:
    embeddings: Sequence[StoredTensor]
    layers: Mapping[int, Sequence[StoredTensor]]
    head: Sequence[StoredTensor]
    """Everything else: the final norm, and the output matrix where it is not tied."""
    tied: bool

    @property
    def all(self) -> list[StoredTensor]:
        return [*self.embeddings, *(tensor for layer in self.layers.values() for tensor in layer), *self.head]


def _pieces(tensors: Sequence[StoredTensor], config: Mapping[str, Any]) -> _Pieces:
    """Of two matrices that are tied the embedding is kept, or the head where a file holds that alone."""
    embeddings = [tensor for tensor in tensors if tensor.name.endswith(_EMBEDDINGS)]
    matrices = [tensor for tensor in tensors if tensor.name.endswith(_HEADS)]
    tied = bool(config.get("tie_word_embeddings", not (embeddings and matrices)))
    layers: dict[int, list[StoredTensor]] = {}
    head = [] if tied else [*matrices]
    for tensor in tensors:
        match = _LAYER.search(tensor.name)
        if match:
            layers.setdefault(int(match[1]), []).append(tensor)
        elif tensor not in embeddings and tensor not in matrices:
            head.append(tensor)
    return _Pieces((embeddings or matrices) if tied else embeddings, layers, head, tied)


def _held(tensors: Sequence[StoredTensor], dtype: str | None) -> int:
    """Bytes on the device. Experts that a file keeps apart are one tensor there."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        match = _EXPERT.match(tensor.name)
        name = f"{match[1]}.{_FUSED.get(match[3], match[3])}" if match else tensor.name
        sizes[name] = sizes.get(name, 0) + tensor.nbytes_as(dtype)
    return sum(map(aligned, sizes.values()))


def _chosen(config: Mapping[str, Any]) -> int | None:
    """Experts of a layer that a token passes through; None where there are none to choose from."""
    return next((config[key] for key in _ROUTED if config.get(key)), None)


def _active(tensors: Sequence[StoredTensor], chosen: int | None) -> int:
    """Parameters that one token passes through: of the experts of a layer, the `chosen` ones."""
    if not chosen:
        return sum(tensor.elements for tensor in tensors)
    active = 0
    apart: dict[str, tuple[int, set[str]]] = {}
    for tensor in tensors:
        match = _EXPERT.match(tensor.name)
        if match:
            elements, experts = apart.get(match[1], (0, set[str]()))
            apart[match[1]] = elements + tensor.elements, experts | {match[2]}
        elif ".experts." in tensor.name and len(tensor.shape) == 3:
            active += tensor.elements // tensor.shape[0] * min(chosen, tensor.shape[0])
        else:
            active += tensor.elements
    return active + sum(elements // len(experts) * min(chosen, len(experts)) for elements, experts in apart.values())


def _layers(folder: Path, tensors: Sequence[StoredTensor]) -> int:
    found = [int(match[1]) for tensor in tensors if (match := _LAYER.search(tensor.name))]
    if not found:
        raise ConfigError(
            f"{folder}: none of its {len(tensors)} tensors belongs to a layer",
            why="weights are sized and streamed by layer: a decoder's tensors are named model.layers.N. ...",
            fix="give the folder that save_pretrained wrote",
        )
    return max(found) + 1


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        return {**config, **config.get("text_config", {})}
    except OSError as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}/config.json is not a JSON object: {error}") from error
