"""Tiny random decoders and adapters in folders, and skeletons filled from them, for the tests of `distill.modeling`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file

from distill.modeling.adapters import LoraAdapter
from distill.modeling.skeleton import Skeleton

CPU = torch.device("cpu")
VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama, tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2, tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2 with a window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 8}),
    "qwen3, tied": (transformers.Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, EXPERTS),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2 with window and caps": (
        transformers.Gemma2Config,
        {
            "head_dim": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": True,
        },
    ),
}

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
    "rank-stabilised": {"r": 6, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "of several ranks": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["down_proj", "k_proj"],
        "rank_pattern": {"layers.1.mlp.down_proj": 5, "k_proj": 2},
        "alpha_pattern": {"layers.[02].mlp.down_proj": 9},
    },
}


def write_model(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A random model; norms and biases are random as well, so that each tensor matters."""
    kind, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(kind(**(SIZES | extra | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            assert parameter.abs().sum() > 0, name
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder as transformers itself loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def resident(folder: Path, dtype: torch.dtype = torch.float32) -> Skeleton:
    """A skeleton with all weights of the folder in place."""
    skeleton = Skeleton.build(folder, dtype=dtype, device=CPU)
    fill(skeleton, folder)
    return skeleton


def fill(skeleton: Skeleton, folder: Path) -> None:
    weights = weights_of(folder)
    for piece in skeleton.pieces:
        skeleton.attach(piece.index, torch.empty(piece.nbytes, dtype=torch.uint8))
        skeleton.read(piece.index, weights)


@torch.no_grad()
def alone(model: Any, sequences: Sequence[np.ndarray], starts: Sequence[int]) -> torch.Tensor:
    """(N, D) as a packed batch gives them, each sequence by the model's own forward."""
    rows = [
        model.base_model(input_ids=torch.from_numpy(ids[None].astype(np.int64)), use_cache=False)[0][0, start:-1]
        for ids, start in zip(sequences, starts, strict=True)
    ]
    return torch.cat(rows)


def sequences_of(seed: int, prompts: int = 3, each: int = 3) -> list[np.ndarray]:
    """Responses of different lengths to a few prompts, in a mixed order."""
    random = np.random.default_rng(seed)
    found = [
        np.concatenate([prompt, random.integers(3, VOCAB, random.integers(1, 14))])
        for prompt in (random.integers(3, VOCAB, random.integers(2, 22)) for _ in range(prompts))
        for _ in range(each)
    ]
    return [found[index].astype(np.int32) for index in random.permutation(len(found))]


def write_adapter(folder: Path, base: Path, kind: str | dict[str, Any], seed: int = 0) -> Path:
    """A random adapter of which no matrix is zero."""
    settings = ADAPTERS[kind] if isinstance(kind, str) else kind
    model: Any = peft.get_peft_model(reference(base), peft.LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def merged(base: Path, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(reference(base), folder).merge_and_unload().eval()


def adapter_of(folder: Path, model: Any, dtype: torch.dtype = torch.float32) -> LoraAdapter:
    adapter = LoraAdapter.build(folder, model, dtype)
    adapter.attach(torch.empty(adapter.nbytes, dtype=torch.uint8))
    adapter.read(load_file(folder / "adapter_model.safetensors"))
    return adapter
