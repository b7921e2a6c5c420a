"""The Hugging Face model: loading it, its logits where they are needed, its weights by name, and its export.

Legend: B samples, T padded length, N response tokens, D hidden, V common vocabulary.
"""

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
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from distill.errors import ConfigError, EnvironmentFault

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


def load_model(folder: Path, vocab_size: int, device: torch.device) -> PreTrainedModel:
    """The model in `folder` with float32 weights. Only local files are read, and no code from the folder is run.

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
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
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
    return model.to(device)  # pyright: ignore[reportArgumentType]: its stub takes `self` for the device


def response_logits(model: PreTrainedModel, input_ids_BT: Tensor, rows_N: Tensor, vocab_size: int) -> Tensor:
    """Float32 logits (N, V) at the flattened positions `rows_N`, cut to the common vocabulary.

    The other positions never meet the head: a hook hands it only these hidden states, so that whatever the model does
    around its head (scaling, soft caps) still happens.
    """

    def only_these(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        (hidden_BTD,) = args
        return (hidden_BTD.flatten(0, 1).index_select(0, rows_N).unsqueeze(0),)

    head: Any = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(only_these)
    try:
        logits_1NV: Tensor = model(input_ids=input_ids_BT, use_cache=False).logits
    finally:
        hook.remove()
    return logits_1NV[0, :, :vocab_size].float()


def hf_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights under the names that `save_pretrained` gives them, tied ones once. Not copied, except where the file
    layout differs from the model's own (fused experts)."""
    tied: Any = model.all_tied_weights_keys
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return revert_weight_conversion(model, state)


def weight_bytes(model: PreTrainedModel) -> Iterator[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]:
    """(name, dtype name, shape, flat view of the bytes). On the CPU the views share the model's memory: they are good
    until the next step."""
    for name, tensor in hf_weights(model).items():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat


def write_model(model: PreTrainedModel, tokenizer: Path, folder: Path) -> None:
    """Write an ordinary Hugging Face folder: safetensors, config, generation config, and the tokenizer's own files."""
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
