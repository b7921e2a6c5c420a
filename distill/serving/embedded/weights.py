"""Weights from disk into a running model, and digests of what it holds.

`prepare` may run on any thread and touches nothing; `Prepared.apply` runs between two decode steps.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from distill.errors import ConfigError, MissingDependency
from distill.modeling.naming import function_of, live_tensors, tied_names
from distill.serving.embedded.served import Limits, ServedModel, check_folder, load_model, some, stop_ids, weight_files


def octets(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row-major, on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():  # torch cannot view an empty tensor as bytes
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def checksums(served: ServedModel) -> dict[str, str]:
    """xxh3-64 of the bytes of each tensor as the server holds it: 16 hex digits."""
    return {name: xxhash.xxh3_64_hexdigest(octets(tensor)) for name, tensor in live_tensors(served.model).items()}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Weights that were checked and can be made live."""

    folder: Path
    tensors: Mapping[str, Tensor]
    """For the present model; memory-mapped. Empty when there is a replacement."""
    limits: Limits
    replacement: ServedModel | None = None
    """A model of another shape, to take the place of the present one."""

    def apply(self, served: ServedModel) -> ServedModel:
        """Make them live in `served`, or hand out the model that replaces it."""
        if self.replacement is not None:
            return self.replacement
        live = live_tensors(served.model)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                live[name].copy_(tensor)
        served.folder, served.limits = self.folder, self.limits
        served.vocab_size = served.counted_rows(self.folder, self.limits)
        served.stop_ids = stop_ids(self.folder) or served.stop_ids
        return served


def load(folder: Path, base: Path | None, limits: Limits) -> ServedModel:
    """A model from its folder; for a LoRA adapter, from the base with the adapter merged."""
    if _is_adapter(folder):
        return ServedModel(*_merged(folder, base, limits), limits)
    return ServedModel.load(folder, limits)


def prepare(served: ServedModel, folder: Path, base: Path | None, limits: Limits) -> Prepared:
    """Open and check the weights of `folder`, which will be served within `limits`.

    Raises ConfigError and leaves everything as it was if they do not fit.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    if _is_adapter(folder):
        model, base = _merged(folder, base, limits)
        if function_of(model.config) != function_of(served.config):
            raise ConfigError(f"{folder}: its base {base} is not the architecture that this server holds")
        served.counted_rows(folder, limits)
        return Prepared(folder, live_tensors(model, named_by=served.model), limits)
    check_folder(folder, limits)
    if _function_of(folder) != function_of(served.config):
        return Prepared(folder, {}, limits, replacement=ServedModel.load(folder, limits))
    served.counted_rows(folder, limits)
    found = _open(folder)
    wanted, aliases = live_tensors(served.model), tied_names(served.model)
    for alias, name in aliases.items():
        if (tensor := found.pop(alias, None)) is not None:
            found.setdefault(name, tensor)
    if missing := set(wanted) - set(found):
        # A folder may name its tensors otherwise than the one that the model is from, as older releases did;
        # transformers knows how to convert them, and says what is missing otherwise.
        found = live_tensors(load_model(folder, limits), named_by=served.model)
        assert not missing - set(found)
    elif strays := sorted(set(found) - set(wanted)):
        raise ConfigError(f"{folder}: the model has no place for {some(strays)}")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise ConfigError(
                f"{folder}: {name} has shape {tuple(found[name].shape)}, the model needs {tuple(tensor.shape)}"
            )
        if found[name].is_floating_point() != tensor.is_floating_point():
            raise ConfigError(f"{folder}: {name} is {found[name].dtype}, which cannot become {tensor.dtype}")
    return Prepared(folder, found, limits)


def _open(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder, memory-mapped: nothing is read before it is copied."""
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for file in weight_files(folder):
            try:
                opened = stack.enter_context(safe_open(file, "pt"))
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file}: cannot be read: {error}") from error
    return tensors


def _function_of(folder: Path) -> dict[str, Any]:
    try:
        return function_of(AutoConfig.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json: {str(error).partition(chr(10))[0]}") from error


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _merged(adapter: Path, base: Path | None, limits: Limits) -> tuple[Any, Path]:
    """The base model with a LoRA adapter added into its weights, and the folder of the base."""
    if base is None:
        named = json.loads((adapter / "adapter_config.json").read_text()).get("base_model_name_or_path")
        raise ConfigError(f"{adapter}: an adapter (over {named}) needs its base", fix='give the folder as "base"')
    try:
        peft: Any = importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise MissingDependency(f"{adapter}: LoRA adapters need the package 'peft'", fix="pip install peft") from error
    return peft.PeftModel.from_pretrained(load_model(base, limits), adapter).merge_and_unload(), base
