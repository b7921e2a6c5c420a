"""adapter_config.json of a LoRA adapter, and which of them are plain enough to be computed beside their base. No torch:
it is read before a run too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distill.errors import ConfigError

CONFIG = "adapter_config.json"
_UNDERSTOOD = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "bias"})
_OF_TRAINING = frozenset({
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "auto_mapping", "peft_version", "megatron_core",
    "megatron_config", "eva_config", "runtime_config", "qalora_group_size", "loftq_config", "lora_ga_config",
})  # fmt: skip
"""Keys that say which layers have an adapter, as the file's tensors do, or how it was trained."""
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")
"""`init_lora_weights` that leave the base as it is; others write to it before training begins."""


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Raises ConfigError for an adapter that changes the function in another way than plain LoRA does."""
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/{CONFIG}: {error}") from error
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{folder}/{CONFIG}: peft_type is {settings.get('peft_type')}; LORA is known here")
    other = {key for key, value in settings.items() if value and key not in _UNDERSTOOD | _OF_TRAINING}
    if settings.get("init_lora_weights") in _PLAIN_BEGINNINGS:
        other.discard("init_lora_weights")
    if settings.get("bias", "none") != "none":
        other.add("bias")
    if other:
        listed = ", ".join(f"{key}={json.dumps(settings[key])}" for key in sorted(other))
        raise ConfigError(
            f"{folder}/{CONFIG}: {listed}",
            why="only plain LoRA is computed beside its base; this adapter changes the function in another way",
            fix="merge it into its base and name the merged folder",
        )
    return settings
