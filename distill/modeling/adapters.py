"""LoRA adapters (arXiv 2106.09685) beside a model whose weights they do not touch.

An adapter adds scale * B (A x) to what some of the model's linear layers give. Several adapters of one model can be in
one batch: each is added in its own rows only. Like a piece of a skeleton, an adapter's tensors are views of a buffer of
exactly `nbytes`, from outside.

Read from peft's folders. Whatever changes the function in another way than plain LoRA on linear layers inside the
decoder is refused by its name.

Legend: I inputs and O outputs of a linear layer, R rank, T tokens of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distill.errors import ConfigError
from distill.modeling.adapter_settings import adapter_settings
from distill.modeling.alignment import aligned

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class _Pair:
    """What one linear layer gets."""

    module: str
    scale: float
    names: tuple[str, str]
    """Of A and B in the file."""
    shapes: tuple[tuple[int, int], tuple[int, int]]
    """(R, I) and (O, R)"""
    begins: tuple[int, int]
    """In the buffer."""


class LoraAdapter:
    """One adapter for models of one architecture. `build` reads all but its weights."""

    def __init__(self, folder: Path, pairs: Sequence[_Pair], nbytes: int, dtype: torch.dtype) -> None:
        self.folder = folder
        self.nbytes = nbytes
        """Of its buffer."""
        self.dtype = dtype
        self.total_params = sum(math.prod(shape) for pair in pairs for shape in pair.shapes)
        self._pairs = tuple(pairs)
        self._buffer: Tensor | None = None
        self._matrices: dict[str, tuple[Tensor, Tensor]] = {}

    @classmethod
    def build(cls, folder: Path, model: Any, dtype: torch.dtype) -> LoraAdapter:
        """The adapter of a peft folder for `model`, whose weights need not be in place; `dtype` is that of the model.

        Raises ConfigError for anything but plain LoRA, and for tensors that do not fit the model.
        """
        settings = adapter_settings(folder)
        shapes = _shapes(folder / WEIGHTS)
        pairs: list[_Pair] = []
        end = 0
        for module in dict.fromkeys(_module_of(folder, name) for name in shapes):
            pair = _pair(folder, module, shapes, settings, model, end, dtype.itemsize)
            pairs.append(pair)
            end = aligned(pair.begins[1] + math.prod(pair.shapes[1]) * dtype.itemsize)
        if not pairs:
            raise ConfigError(f"{folder}/{WEIGHTS}: there is no tensor in it")
        return cls(folder, pairs, end, dtype)

    @property
    def sources(self) -> dict[str, tuple[int, int]]:
        """Tensors of the file: name -> shape."""
        return {name: shape for pair in self._pairs for name, shape in zip(pair.names, pair.shapes, strict=True)}

    @property
    def modules(self) -> tuple[str, ...]:
        """Linear layers that it adds to."""
        return tuple(pair.module for pair in self._pairs)

    @property
    def attached(self) -> bool:
        return self._buffer is not None

    def attach(self, buffer: Tensor) -> None:
        """Make its tensors views of `buffer`, uint8 of `nbytes` on the model's device. Nothing is copied."""
        views = self.views(buffer)
        self._matrices = {pair.module: (views[pair.names[0]], views[pair.names[1]]) for pair in self._pairs}
        self._buffer = buffer

    def detach(self) -> None:
        self._matrices = {}
        self._buffer = None

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Its tensors in `buffer`, by their names in the file."""
        if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (self.nbytes,) or not buffer.is_contiguous():
            raise ValueError(f"{self.folder}: a buffer of shape {tuple(buffer.shape)}; it needs ({self.nbytes},) uint8")
        views: dict[str, Tensor] = {}
        for pair in self._pairs:
            for name, shape, begin in zip(pair.names, pair.shapes, pair.begins, strict=True):
                piece = buffer[begin : begin + math.prod(shape) * self.dtype.itemsize]
                views[name] = piece.view(self.dtype).view(shape)
        return views

    def read(self, source: Mapping[str, Tensor]) -> None:
        """Fill the attached buffer from tensors that are named as in the file, with the cast."""
        assert self._buffer is not None
        self.fill(self._buffer, source)

    def fill(self, buffer: Tensor, source: Mapping[str, Tensor]) -> None:
        """Fill a buffer, attached or not. Raises ConfigError for tensors other than `build` saw."""
        with torch.inference_mode():
            for name, view in self.views(buffer).items():
                tensor = source.get(name)
                if tensor is None or tensor.shape != view.shape:
                    found = "nothing" if tensor is None else tuple(tensor.shape)
                    raise ConfigError(f"{self.folder}: {name} should have shape {tuple(view.shape)}; found {found}")
                view.copy_(tensor, non_blocking=tensor.is_pinned())

    def hooks(self, model: Any, rows: slice | None) -> list[Any]:
        """Add it to the model's layers from now on, in rows `rows` of (1, T, I) or in all. `remove()` ends each."""
        if not self.attached:
            raise ValueError(f"{self.folder}: no buffer is attached")
        return [
            model.get_submodule(pair.module).register_forward_hook(
                _adding(*self._matrices[pair.module], pair.scale, rows)
            )
            for pair in self._pairs
        ]


@contextmanager
def applied(model: Any, parts: Sequence[tuple[LoraAdapter, slice | None]]) -> Generator[None]:
    """Inside, the model computes the rows of each part with that part's adapter, and all others as it is."""
    hooks: list[Any] = []
    try:
        for adapter, rows in parts:
            hooks += adapter.hooks(model, rows)
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adding(a_RI: Tensor, b_OR: Tensor, scale: float, rows: slice | None) -> Any:
    def add(_module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        chosen = (..., slice(None) if rows is None else rows, slice(None))
        more = torch.nn.functional.linear(torch.nn.functional.linear(args[0][chosen], a_RI), b_OR)
        output[chosen] += scale * more
        return output

    return add


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _module_of(folder: Path, name: str) -> str:
    match = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight", name)
    if match is None:
        raise ConfigError(
            f"{folder}/{WEIGHTS}: {name} is not part of a plain LoRA adapter",
            fix="merge the adapter into its base and name the merged folder",
        )
    return match[1]


def _pair(
    folder: Path,
    module: str,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    model: Any,
    begin: int,
    itemsize: int,
) -> _Pair:
    linear = _linear(folder, module, model)
    names = f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"
    rank = _of_pattern(settings.get("rank_pattern"), module, settings["r"])
    alpha = _of_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
    wanted = (rank, linear.in_features), (linear.out_features, rank)
    for name, shape in zip(names, wanted, strict=True):
        if shapes.get(name) != shape:
            raise ConfigError(f"{folder}/{WEIGHTS}: {name} should have shape {shape}; found {shapes.get(name)}")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return _Pair(module, scale, names, wanted, (begin, aligned(begin + math.prod(wanted[0]) * itemsize)))


def _linear(folder: Path, module: str, model: Any) -> Any:
    """The linear layer of this name inside one of the decoder's layers."""
    try:
        found = model.get_submodule(module)
    except AttributeError:
        found = None
    if not isinstance(found, torch.nn.Linear) or ".layers." not in f".{module}":
        kind = "not there" if found is None else f"a {type(found).__name__} outside of the decoder's linear layers"
        raise ConfigError(
            f"{folder}/{WEIGHTS}: it adapts {module}, which in {type(model).__name__} is {kind}",
            fix="merge the adapter into its base and name the merged folder",
        )
    return found


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The value of the first pattern that fits the end of the module's name, as peft looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
