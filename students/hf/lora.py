"""LoRA students (arXiv 2106.09685): small adapters learn, the base stays. Through peft.

What others see are whole weights under their usual names, adapters merged in: servers need no LoRA support. A
checkpoint keeps the adapters themselves beside, because merging rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from distill.config.models import LoraConfig
from distill.errors import ConfigError, MissingDependency
from students.hf.parallel import whole
from students.hf.quiet import quiet_bitsandbytes

ADAPTER = "default"
"""peft's name of the one adapter."""


def adapt(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put fresh adapters beside the target layers, in place; only they learn. They start as zero.

    Raises MissingDependency, and ConfigError for targets that the model does not have, or that are its head.
    """
    quiet_bitsandbytes()  # which peft imports
    try:
        import peft
    except ImportError as error:
        raise MissingDependency(
            "student.lora: needs peft, which cannot be imported",
            why=str(error),
            fix="pip install 'distill-engine[lora]'",
        ) from error
    try:
        peft.inject_adapter_in_model(_peft_config(config), model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(
            f"student.lora.targets: {config.targets} fit no layer of {type(model).__name__}",
            why=str(error).splitlines()[0],
            fix="give ends of names such as q_proj, or all-linear",
        ) from error
    if hasattr(model.get_output_embeddings(), "base_layer") or hasattr(model.get_input_embeddings(), "base_layer"):
        raise ConfigError(
            "student.lora.targets: the embeddings and the head cannot have adapters",
            why="the loss is computed in chunks from the head's own weight",
            fix="leave them out of student.lora.targets; all-linear does",
        )


def _peft_config(config: LoraConfig) -> Any:
    import peft

    return peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]: peft divides by it
        lora_dropout=config.dropout,
        target_modules=config.targets if isinstance(config.targets, str) else list(config.targets),
        task_type="CAUSAL_LM",
    )


@torch.no_grad()
def merged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The state of a model as if it had never had adapters: its usual names, adapters added to the weights.

    Merged weights are fresh memory, one at a time; all others are the model's own.
    """
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    for full_name, tensor in model.state_dict().items():
        owner = next((name for name in layers if full_name.startswith(f"{name}.")), None)
        if owner is None:
            yield full_name, tensor
            continue
        _, base, leaf = full_name.removeprefix(owner).rpartition("base_layer.")
        if not base:
            continue
        if leaf == "weight":
            delta = layers[owner].get_delta_weight(ADAPTER)
            tensor = (tensor.float() + delta.float()).to(tensor.dtype)
        yield f"{owner}.{leaf}", tensor


def adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters alone, named as in peft's files: behind its wrapper's prefix, without their own name. Collective."""
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": whole(tensor).cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if f".{ADAPTER}." in name
    }


def write_adapter(state: dict[str, Tensor], config: LoraConfig, base: Path, folder: Path) -> None:
    """Write an adapter as peft does: adapter_config.json and adapter_model.safetensors. `base`: what it belongs to."""
    settings = _peft_config(config)
    settings.base_model_name_or_path = str(base)
    settings.inference_mode = True
    settings.save_pretrained(folder)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
