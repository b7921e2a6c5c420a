"""The Hugging Face model: loading it, its weights by name, and its export."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from distill.errors import ConfigError, EnvironmentFault
from students.hf import lora
from students.hf.folder import drain, write_config, write_weights
from students.hf.shards import WeightNames, as_bytes, dtype_name

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def pick_device(name: str) -> torch.device:
    """The device called `name`; auto is CUDA where there is one. Raises EnvironmentFault for CUDA that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"student.device: {name} is not there",
            why=f"torch sees {torch.cuda.device_count()} CUDA devices",
            fix="student.device=auto takes what is there",
        )
    return device


def load_model(folder: Path, vocab_size: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model in `folder` with weights in `dtype`. Only local files are read, and no code from the folder is run.

    Raises ConfigError when the folder holds no causal language model that can be read, or one with less than
    `vocab_size` rows in its head.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"student.model: no Hugging Face model at {folder}",
            why="there is no config.json",
            fix="give the folder that holds config.json and the safetensors files",
        )
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        model, report = loaded
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: shapes that do not fit
        raise ConfigError(
            f"student.model: the model at {folder} cannot be loaded: {error}",
            fix="load it with transformers.AutoModelForCausalLM to see more",
        ) from error
    if report["missing_keys"]:
        raise ConfigError(
            f"student.model: the weights of {folder} lack {', '.join(sorted(report['missing_keys'])[:3])} "
            f"({len(report['missing_keys'])} in all)",
            why="transformers would fill them with random numbers",
            fix="check config.json, and that every safetensors file is there",
        )
    head = model.get_output_embeddings()
    if head is None or head.weight.shape[0] < vocab_size:
        rows = "no" if head is None else head.weight.shape[0]
        raise ConfigError(
            f"student.model: the head of {folder} has {rows} rows, the tokenizer {vocab_size} tokens",
            why="a token without a row can be neither written nor learnt",
        )
    # its row would get no gradient from being read, although a tokenizer may pad with an end token that means something
    embeddings: Any = model.get_input_embeddings()
    embeddings.padding_idx = None
    return model.to(device)  # pyright: ignore[reportArgumentType]: its stub takes `self` for the device


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Compute activations twice instead of keeping them all."""
    settings = {"use_reentrant": False}
    # later releases of transformers renamed the method, and warn of its old name
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def model_state(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors under its own names, tied ones once, adapters merged in."""
    tied: Any = model.all_tied_weights_keys
    return ((name, tensor) for name, tensor in lora.merged(model) if name not in tied)


def embedding_names(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that have a row a token: the embeddings and the head."""
    embeddings: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {id(module.weight) for module in embeddings}
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}


def weight_bytes(
    model: PreTrainedModel, names: WeightNames
) -> Iterator[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]:
    """(name, dtype name, shape, flat view of the bytes). On the CPU the views share the model's memory where they can:
    they are good until the next step. Collective."""
    for name, tensor in names.whole(model_state(model)):
        yield name, dtype_name(tensor.dtype), tuple(tensor.shape), as_bytes(tensor)


def write_model(model: PreTrainedModel, names: WeightNames, tokenizer: Path, folder: Path, *, first: bool) -> None:
    """Write an ordinary Hugging Face folder: safetensors, config, generation config, and the tokenizer's own files.

    Collective; only the `first` rank writes. No rank holds more than one gathered tensor (a layer, of fused experts).
    """
    tensors = names.whole(model_state(model))
    if not first:
        drain(tensors)
        return
    write_weights(folder, names.stored, tensors)
    write_config(model, dtype_name(names.stored[0].dtype), folder)
    copy_tokenizer(tokenizer, folder)


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
