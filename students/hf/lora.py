"""LoRA students (arXiv 2106.09685): small adapters learn, the base stays. Through peft.

What others see are whole weights under their usual names, adapters merged in: servers need no LoRA support. A
checkpoint keeps the adapters themselves beside, because merging rounds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from distill.config.models import LoraConfig
from distill.errors import ConfigError, MissingDependency
from distill.registry import did_you_mean
from students.hf.parallel import whole
from students.hf.quiet import quiet_bitsandbytes
from students.hf.shards import WeightNames

ADAPTER = "default"
"""peft's name of the one adapter."""
_FACTORS = ("lora_A", "lora_B")
"""What an adapter is made of, and all that its delta is computed from."""


def adapt(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put fresh adapters beside the target layers, in place; only they learn. They start as zero.

    Raises MissingDependency, and ConfigError for targets that the model does not have, that are its head, or whose
    adapters could not be merged.
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
    if not isinstance(config.targets, str):
        _require_layers(model, config.targets)
    try:
        with warnings.catch_warnings():
            # of the ranks for fused experts, which it does use: it looks for them among modules alone
            warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")
            peft.inject_adapter_in_model(_peft_config(config), model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(
            f"student.lora: {type(model).__name__} cannot have adapters with targets {config.targets}",
            why=str(error).splitlines()[0],
            fix="give ends of names such as q_proj, a regular expression of whole names, or all-linear; "
            "experts that are one tensor need student.lora.dropout=0",
        ) from error
    if hasattr(model.get_output_embeddings(), "base_layer") or hasattr(model.get_input_embeddings(), "base_layer"):
        raise ConfigError(
            "student.lora.targets: the embeddings and the head cannot have adapters",
            why="the loss is computed in chunks from the head's own weight",
            fix="leave them out of student.lora.targets; all-linear does",
        )
    _require_all_merged(model)


def _require_layers(model: PreTrainedModel, targets: list[str]) -> None:
    """Each target must fit a layer of the model, or of its files: experts that were fused still have names there.
    Raises ConfigError; peft would ignore one that fits nothing beside another that does."""
    modules = {name for name, module in model.named_modules() if hasattr(module, "weight")}
    files = {each.name.rpartition(".")[0] for each in WeightNames(model, model.state_dict().items(), None).stored}
    layers = {f".{name}" for name in modules | files}
    for target in targets:
        if not any(layer.endswith(f".{target}") for layer in layers):
            raise ConfigError(
                f"student.lora.targets: {target!r} fits no layer of {type(model).__name__}",
                why="a target is the end of a layer's name, from a dot on",
                fix=did_you_mean(target, {layer.rpartition(".")[2] for layer in layers}),
            )


def _require_all_merged(model: PreTrainedModel) -> None:
    """Whatever learns must be in what `merged` gives. Raises ConfigError for a kind of adapter that is not known here:
    its learning would be lost in everything that is published."""
    adapters = _adapters(model)
    weights = {_plain(name) for name in model.state_dict()}
    merged_ones = {
        f"{name}.{factor}.{ADAPTER}.weight"
        for weight, (name, _) in adapters.items()
        if weight in weights
        for factor in _FACTORS
    }
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if strays := sorted(learning - merged_ones):
        layers = sorted({_plain(name.partition(".lora_")[0]) for name in strays})
        raise ConfigError(
            f"student.lora.targets: the adapters of {layers[0]} ({len(layers)} such layers) cannot be merged",
            why=f"{strays[0]} is no part of an adapter that adds to one weight, as those of linear layers do",
            fix="name the other layers in student.lora.targets, such as [q_proj, k_proj, v_proj, o_proj]",
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


def _adapters(model: PreTrainedModel) -> dict[str, tuple[str, Any]]:
    """Weight, as the model without adapters calls it -> name and module of the peft layer that knows its delta.

    A layer that is several tensors, such as fused experts, is wrapped once for each, one wrapper inside the other.
    """
    return {
        f"{_plain(name)}.{getattr(module, 'parameter_name', 'weight')}": (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "base_layer")
    }


def _plain(name: str) -> str:
    """The name of a tensor or module in the model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


@torch.no_grad()
def merged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The state of a model as if it had never had adapters: its usual names, adapters added to the weights.

    Merged weights are fresh memory, one at a time; all others are the model's own.
    """
    adapters = _adapters(model)
    for full_name, tensor in model.state_dict().items():
        if _of_adapter(full_name):
            continue
        name = _plain(full_name)
        if name in adapters:
            _, layer = adapters[name]
            tensor = (tensor.float() + _delta(layer, tensor).float()).to(tensor.dtype)
        yield name, tensor


def _delta(layer: Any, weight: Tensor) -> Tensor:
    """What an adapter adds to `weight`, spread as that is. Collective."""
    if not isinstance(weight, DTensor):
        return layer.get_delta_weight(ADAPTER)
    # peft takes the factors of fused experts apart, which a tensor that is spread over ranks does not allow
    holders = [getattr(layer, factor)[ADAPTER] for factor in _FACTORS]
    spread = [holder.weight for holder in holders]
    try:
        for holder in holders:
            holder.weight = nn.Parameter(whole(holder.weight), requires_grad=False)
        delta = layer.get_delta_weight(ADAPTER)
    finally:
        for holder, own in zip(holders, spread, strict=True):
            holder.weight = own
    everywhere = DTensor.from_local(delta, weight.device_mesh, [Replicate()], run_check=False)
    return everywhere.redistribute(placements=weight.placements)


def _of_adapter(name: str) -> bool:
    return any(f".{factor}.{ADAPTER}." in name for factor in _FACTORS)


def adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters alone, named as in peft's files: behind its wrapper's prefix, without their own name. Collective."""
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": whole(tensor).cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if _of_adapter(name)
    }


def write_adapter(state: dict[str, Tensor], config: LoraConfig, base: Path, folder: Path) -> None:
    """Write an adapter as peft does: adapter_config.json and adapter_model.safetensors. `base`: what it belongs to."""
    settings = _peft_config(config)
    settings.base_model_name_or_path = str(base)
    settings.inference_mode = True
    settings.save_pretrained(folder)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
