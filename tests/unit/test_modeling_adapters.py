"""LoRA adapters beside their base give what peft gives after merging, each in its own samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.errors import ConfigError
from distill.modeling.adapters import LoraAdapter, applied
from distill.modeling.forward import hidden
from distill.modeling.packed import PackedBatch
from distill.modeling.skeleton import Skeleton
from tests.builders_modeling import (
    ADAPTERS,
    CPU,
    LINEAR,
    adapter_of,
    alone,
    merged,
    reference,
    resident,
    sequences_of,
    write_adapter,
    write_model,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base")


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_beside_its_base_gives_what_the_merged_model_gives(kind: str, base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, kind)
    model = resident(base).model
    adapter = adapter_of(folder, model)
    sequences = sequences_of(1)
    starts = [0] * len(sequences)
    batch = PackedBatch.of(sequences, starts, owners=["a"] * len(sequences))
    expected = alone(merged(base, folder), sequences, starts)
    assert float((expected - alone(model, sequences, starts)).abs().max()) > 0.1
    torch.testing.assert_close(hidden(model, batch, {"a": adapter}), expected, rtol=0, atol=1e-5)
    with applied(model, [(adapter, None)]):
        torch.testing.assert_close(alone(model, sequences, starts), expected, rtol=0, atol=1e-5)


def test_several_adapters_and_the_base_share_a_batch_each_in_its_own_samples(base: Path, tmp_path: Path) -> None:
    model = resident(base).model
    folders = {kind: write_adapter(tmp_path / kind, base, kind, seed) for seed, kind in enumerate(ADAPTERS)}
    adapters = {kind: adapter_of(folder, model) for kind, folder in folders.items()}
    models = {kind: merged(base, folder) for kind, folder in folders.items()} | {"": reference(base)}
    sequences = sequences_of(2, prompts=2, each=8)
    owners = [list(models)[index % 4] for index in range(len(sequences))]
    starts = [0] * len(sequences)
    batch = PackedBatch.of(sequences, starts, owners=owners)
    expected = torch.cat([alone(models[owner], [ids], [0]) for ids, owner in zip(sequences, owners, strict=True)])
    torch.testing.assert_close(hidden(model, batch, adapters), expected, rtol=0, atol=1e-5)
    plain = PackedBatch.of(sequences, starts)
    torch.testing.assert_close(hidden(model, plain), alone(models[""], sequences, starts), rtol=0, atol=1e-5)


def test_an_adapter_is_as_large_as_it_says_and_leaves_no_trace(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, "plain")
    skeleton = resident(base)
    adapter = adapter_of(folder, skeleton.model, torch.bfloat16)
    stored = load_file(folder / "adapter_model.safetensors")
    assert adapter.total_params == sum(tensor.numel() for tensor in stored.values())
    assert adapter.nbytes - 2 * adapter.total_params in range(64 * len(stored))
    assert adapter.sources == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    assert len(adapter.modules) == len(LINEAR) * skeleton.layers
    adapter.detach()
    assert not adapter.attached
    with pytest.raises(ValueError, match="no buffer is attached"), applied(skeleton.model, [(adapter, None)]):
        pass
    assert not any(module._forward_hooks for module in skeleton.model.modules())


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[Change, str]] = {
    "DoRA": (lambda config, _: config.update(use_dora=True), "use_dora=true"),
    "biases": (lambda config, _: config.update(bias="all"), 'bias="all"'),
    "whole modules": (lambda config, _: config.update(modules_to_save=["lm_head"]), "modules_to_save=.*lm_head"),
    "a base that is changed": (lambda config, _: config.update(init_lora_weights="pissa"), 'init_lora_weights="pissa"'),
    "something newer": (lambda config, _: config.update(use_new_thing=True), "use_new_thing=true"),
    "another method": (lambda config, _: config.update(peft_type="IA3"), "peft_type is IA3"),
    "the head": (
        lambda _, stored: stored.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}),
        "it adapts lm_head",
    ),
    "embeddings": (
        lambda _, stored: stored.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 61)}),
        "embed_tokens.lora_embedding_A is not part of a plain LoRA adapter",
    ),
    "magnitudes": (
        lambda _, stored: stored.update({f"{Q}.lora_magnitude_vector": torch.zeros(32)}),
        "lora_magnitude_vector is not part",
    ),
    "another architecture": (
        lambda _, stored: stored.update({f"{Q.replace('q_proj', 'w_pack')}.lora_A.weight": torch.zeros(4, 32)}),
        "w_pack, which in Qwen3ForCausalLM is not there",
    ),
    "another rank": (lambda config, _: config.update(r=5), r"should have shape \(5, 48\); found \(4, 48\)"),
    "half a pair": (lambda _, stored: stored.pop(f"{Q}.lora_B.weight"), r"should have shape .*found None"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_more_than_plain_lora_is_refused_by_its_name(what: str, base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, "plain")
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    change, message = REFUSED[what]
    change(config, stored)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(stored, folder / "adapter_model.safetensors")
    skeleton = Skeleton.build(base, dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match=message):
        LoraAdapter.build(folder, skeleton.model, torch.float32)


def test_weights_other_than_those_that_were_looked_at_are_refused(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, "plain")
    adapter = LoraAdapter.build(folder, Skeleton.build(base, dtype=torch.float32, device=CPU).model, torch.float32)
    stored = load_file(folder / "adapter_model.safetensors")
    buffer = torch.empty(adapter.nbytes, dtype=torch.uint8)
    name = f"{Q}.lora_A.weight"
    with pytest.raises(ConfigError, match=r"q_proj.lora_A.weight should have shape \(4, 32\); found \(3, 32\)"):
        adapter.fill(buffer, stored | {name: stored[name][:3]})
    with pytest.raises(ConfigError, match="found nothing"):
        adapter.fill(buffer, {key: tensor for key, tensor in stored.items() if key != name})


def test_samples_of_different_adapters_share_no_prefix() -> None:
    ids = np.arange(3, 40)
    batch = PackedBatch.of([ids, ids, ids, ids], [0] * 4, owners=["a", "b", "a", "b"])
    assert batch.spans == {"a": slice(0, 36), "b": slice(36, 72)}
    assert batch.rows[0].tolist() == batch.rows[2].tolist() == list(range(36))
