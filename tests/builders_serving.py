"""A tiny random Llama on disk, what transformers says of it, and launchers for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distill.config.models import ServerConfig
from distill.registry import load

VOCAB = 61
CONTEXT = 128
EOS = 2


def save_tiny_llama(folder: Path, seed: int) -> Path:
    """A float32 model of 2 layers whose rows are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, seed: int) -> Path:
    """A LoRA adapter over a tiny Llama that changes its rows by much."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted: Any = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def save_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The adapter merged into its base, as peft does it."""
    from peft import PeftModel

    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(model, adapter)
    merged.merge_and_unload().save_pretrained(folder)
    return folder


def reference_logprobs(folder: Path, ids: np.ndarray) -> np.ndarray:
    """(N, V): row i is log p(next | ids[: i + 1]) as transformers computes it in float32."""
    return _rows(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids)


def reference_greedy(folder: Path, ids: np.ndarray, count: int) -> np.ndarray:
    """The `count` ids that transformers writes after `ids`, the likeliest one each time, past end tokens too."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    written = ids.astype(np.int64)
    for _ in range(count):
        written = np.append(written, _rows(model, written)[-1].argmax())
    return written[len(ids) :].astype(np.int32)


def _rows(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits_NV = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    return logits_NV.log_softmax(-1).numpy()


def launcher(program: str, model: Path, folder: Path, *, python: Path | None = None, **changes: Any) -> Any:
    """A launcher of one server for `model`, weights called v0; `changes` are fields of its configuration, or `index`,
    `attach_url` and `slot`."""
    index, attach_url, slot = changes.pop("index", 0), changes.pop("attach_url", None), changes.pop("slot", None)
    config = ServerConfig(
        program=program,
        device="cpu",
        start_timeout_s=240,
        python=python,
        args=["--skip-tokenizer-init"] if program == "sglang" else [],
    ).model_copy(update=changes)
    return load("server", program)(
        config,
        name=f"{program}-{index}",
        model=model,
        vocab_size=VOCAB,
        folder=folder,
        index=index,
        weight_version="v0",
        run_key="ab" * 32,
        attach_url=attach_url,
        slot=slot,
    )
