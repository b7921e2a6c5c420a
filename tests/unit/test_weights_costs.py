"""What weights take, from headers: by hand, and as the embedded server says it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from distill.errors import ConfigError
from distill.protocols import WeightCosts, WeightSource
from distill.serving.embedded.objects import open_object
from distill.serving.embedded.served import Limits
from distill.weights.costs import costs_of
from tests.builders_modeling import CPU, FAMILIES, write_model

SPELLING = {torch.float32: "F32", torch.bfloat16: "BF16"}
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.mlp.weight": (8, 8),
    "model.layers.0.norm.weight": (8,),
    "model.layers.1.mlp.weight": (8, 4),
    "model.norm.weight": (8,),
}


def write(folder: Path, shapes: dict[str, tuple[int, ...]], **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def registered(folder: Path, dtype: torch.dtype, base: Path | None = None) -> WeightCosts:
    limits = Limits(dtype=dtype, device=CPU, context_length=None)
    under = None if base is None else open_object(WeightSource("base", base, "1"), None, limits)
    return open_object(WeightSource("one", folder, "1", base="base" if base else None), under, limits).costs


def test_each_tensor_takes_a_multiple_of_64_bytes(tmp_path: Path) -> None:
    tied = costs_of(write(tmp_path / "tied", SHAPES, tie_word_embeddings=True), "F32")
    # embedding 320; layers 256 + 64 (32 padded) and 128; norm 64 (32 padded)
    assert tied == WeightCosts(
        bytes=320 + 320 + 128 + 64, layers=2, total_params=192, active_params=192, stream_bytes=640
    )
    half = costs_of(tmp_path / "tied", "BF16")
    # embedding 160 -> 192; layers 128 + 64 and 64; norm 64
    assert (half.bytes, half.stream_bytes) == (192 + 192 + 64 + 64, 384)


def test_a_large_head_decides_how_much_a_stream_needs(tmp_path: Path) -> None:
    shapes = SHAPES | {"model.embed_tokens.weight": (100, 8), "lm_head.weight": (100, 8)}
    untied = costs_of(write(tmp_path / "untied", shapes, tie_word_embeddings=False), "F32")
    assert untied.bytes == 3200 + 320 + 128 + 64 + 3200
    assert untied.stream_bytes == 3200 + 64
    tied = costs_of(write(tmp_path / "tied", shapes, tie_word_embeddings=True), "F32")
    assert tied.bytes == untied.bytes - 3200 and tied.stream_bytes == 3264
    unsaid = costs_of(write(tmp_path / "unsaid", shapes), "F32")
    assert unsaid == untied, "two matrices in the files, and nothing says that they are one"


def test_a_token_passes_through_the_experts_that_are_chosen_for_it(tmp_path: Path) -> None:
    experts = {f"model.layers.0.mlp.experts.{index}.w{part}.weight": (3, 5) for index in range(4) for part in (1, 2, 3)}
    costs = costs_of(write(tmp_path / "apart", SHAPES | experts, num_experts_per_tok=2), "F32")
    assert costs.total_params == 192 + 12 * 15 and costs.active_params == 192 + 6 * 15
    # w1 and w3 of all experts lie in one tensor, 480 -> 512 bytes, w2 in another, 240 -> 256
    assert costs.bytes == 832 + 512 + 256
    fused = {"model.layers.0.mlp.experts.gate_up_proj": (4, 6, 5), "model.layers.0.mlp.experts.down_proj": (4, 5, 3)}
    assert costs_of(write(tmp_path / "fused", SHAPES | fused, num_experts_per_tok=2), "F32") == costs


@pytest.mark.parametrize("dtype", SPELLING, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_says_the_same(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    # odd sizes, so that padding is not a multiple of itself
    folder = write_model(tmp_path / "model", family, vocab_size=67, intermediate_size=49)
    assert costs_of(folder, SPELLING[dtype]) == registered(folder, dtype)


@pytest.mark.parametrize("dtype", SPELLING, ids=str)
def test_the_server_says_the_same_of_an_adapter(dtype: torch.dtype, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "qwen3")
    module = "base_model.model.model.layers.1.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": np.ones((3, 32), np.float32),
        f"{module}.lora_B.weight": np.ones((32, 3), np.float32),
    }
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6}))
    costs = costs_of(folder, SPELLING[dtype], base)
    assert costs == registered(folder, dtype, base)
    assert costs == WeightCosts(768 if dtype == torch.float32 else 384, 3, 192, 192, None)
    with pytest.raises(ConfigError, match="no base is named"):
        costs_of(folder, "F32")


def test_a_folder_that_cannot_be_sized_is_refused(tmp_path: Path) -> None:
    flat = write(tmp_path / "flat", {"model.embed_tokens.weight": (4, 4)})
    with pytest.raises(ConfigError, match="none of its 1 tensors belongs to a layer"):
        costs_of(flat, "F32")
    (flat / "config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        costs_of(flat, "F32")
    (flat / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        costs_of(flat, "F32")
