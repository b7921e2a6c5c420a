"""A skeleton takes its weights from buffers, piece by piece, and is then the model that transformers loads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from distill.errors import ConfigError
from distill.modeling.alignment import ALIGNMENT
from distill.modeling.naming import live_tensors
from distill.modeling.skeleton import Skeleton
from tests.builders_modeling import CPU, FAMILIES, VOCAB, fill, reference, resident, weights_of, write_model

IDS = torch.arange(3, 40)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_filled_skeleton_is_the_model_that_transformers_loads(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", family)
    skeleton = resident(folder, dtype)
    assert skeleton.complete
    torch.testing.assert_close(logits(skeleton.model), logits(reference(folder, dtype)), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_name_each_tensor_of_the_files_once_and_count_its_bytes(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family)
    skeleton = Skeleton.build(folder, dtype=torch.bfloat16, device=CPU)
    assert [piece.label for piece in skeleton.pieces] == ["embeddings", "layer 0", "layer 1", "layer 2", "head"]
    named = [(name, shape) for piece in skeleton.pieces for name, shape in skeleton.sources(piece.index).items()]
    assert dict(named) == {name: tuple(tensor.shape) for name, tensor in weights_of(folder).items()}
    assert len(named) == len(dict(named))
    for piece in skeleton.pieces:
        ends = [param.begin + param.nbytes for param in piece.params]
        assert [param.begin % ALIGNMENT for param in piece.params] == [0] * len(piece.params)
        assert all(begin.begin - end in range(ALIGNMENT) for begin, end in zip(piece.params[1:], ends, strict=False))
        assert piece.nbytes - ends[-1] in range(ALIGNMENT)
    assert skeleton.nbytes == sum(piece.nbytes for piece in skeleton.pieces)
    model = reference(folder)
    assert skeleton.total_params == sum(parameter.numel() for parameter in model.parameters())


def test_of_experts_only_the_chosen_ones_are_active(tmp_path: Path) -> None:
    skeleton = Skeleton.build(write_model(tmp_path / "model", "qwen3-moe"), dtype=torch.float32, device=CPU)
    in_experts = 3 * 4 * (3 * 16 * 32)  # layers, experts, gate and up and down
    assert skeleton.total_params - skeleton.active_params == in_experts // 2


PUBLISHED: dict[str, tuple[Any, float, float]] = {
    "Mixtral-8x7B": (transformers.MixtralConfig(), 46.703, 12.880),
    "Qwen3-30B-A3B": (
        transformers.Qwen3MoeConfig(
            vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
            num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        ),
        30.532,
        3.353,
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_large_models_have_the_sizes_that_are_published(model: str) -> None:
    config, total, active = PUBLISHED[model]
    skeleton = Skeleton(config, dtype=torch.bfloat16, device=CPU)
    assert round(skeleton.total_params / 1e9, 3) == total
    assert round(skeleton.active_params / 1e9, 3) == active
    assert skeleton.nbytes == 2 * skeleton.total_params


def test_nothing_is_allocated_for_weights_that_are_not_attached(folder: Path) -> None:
    skeleton = Skeleton(reference(folder).config, dtype=torch.float32, device=CPU)
    assert {parameter.device.type for parameter in skeleton.model.parameters()} == {"meta"}
    fill(skeleton, folder)
    skeleton.detach(1)
    assert not skeleton.complete
    left = {name for name, parameter in skeleton.model.named_parameters() if parameter.is_meta}
    assert left == {param.name for param in skeleton.pieces[1].params}


def test_attached_tensors_are_the_buffers_bytes(folder: Path) -> None:
    skeleton = Skeleton.build(folder, dtype=torch.float32, device=CPU)
    fill(skeleton, folder)
    buffer = torch.zeros(skeleton.pieces[2].nbytes, dtype=torch.uint8)
    skeleton.attach(2, buffer)
    assert skeleton.model.model.layers[1].mlp.up_proj.weight.abs().sum() == 0
    skeleton.read(2, weights_of(folder))
    torch.testing.assert_close(logits(skeleton.model), logits(reference(folder)), rtol=0, atol=0)
    for name, tensor in live_tensors(skeleton.model).items():
        assert torch.equal(tensor, weights_of(folder)[name]), name


def test_persistent_buffers_change_with_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = transformers.models.qwen3.modeling_qwen3.Qwen3MLP.__init__

    def with_state(self: Any, *args: Any) -> None:
        genuine(self, *args)
        self.register_buffer("shift", torch.zeros(32))
        self.register_buffer("uses", torch.zeros((), dtype=torch.int64))

    monkeypatch.setattr(transformers.models.qwen3.modeling_qwen3.Qwen3MLP, "__init__", with_state)
    skeleton = Skeleton(reference(folder).config, dtype=torch.bfloat16, device=CPU)
    state = {f"model.layers.{layer}.mlp.{name}" for layer in range(3) for name in ("shift", "uses")}
    assert state <= {name for piece in skeleton.pieces for name in skeleton.sources(piece.index)}
    weights = weights_of(folder) | {name: torch.tensor(7) for name in state if name.endswith("uses")}
    weights |= {name: torch.full((32,), 0.5) for name in state if name.endswith("shift")}
    skeleton.attach(1, torch.zeros(skeleton.pieces[1].nbytes, dtype=torch.uint8))
    skeleton.read(1, weights)
    mlp = skeleton.model.model.layers[0].mlp
    assert mlp.uses.item() == 7 and mlp.uses.dtype == torch.int64
    assert torch.equal(mlp.shift, torch.full((32,), 0.5, dtype=torch.bfloat16))


def test_a_skeleton_that_was_given_back_serves_the_next_model_of_its_config(folder: Path, tmp_path: Path) -> None:
    first = resident(folder)
    module = first.model
    first.give_back()
    assert not first.attached
    other = write_model(tmp_path / "other", seed=1)
    wider = write_model(tmp_path / "wider", intermediate_size=64)
    assert Skeleton.build(wider, dtype=torch.float32, device=CPU).model is not module
    assert Skeleton.build(other, dtype=torch.bfloat16, device=CPU).model is not module
    second = resident(other)
    assert second.model is module
    torch.testing.assert_close(logits(second.model), logits(reference(other)), rtol=0, atol=0)
    assert Skeleton.build(folder, dtype=torch.float32, device=CPU).model is not module


def test_files_may_name_a_tied_matrix_by_its_other_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3, tied")
    weights = weights_of(folder)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    skeleton = Skeleton.build(folder, dtype=torch.float32, device=CPU)
    for piece in skeleton.pieces:
        skeleton.attach(piece.index, torch.empty(piece.nbytes, dtype=torch.uint8))
        skeleton.read(piece.index, weights)
    torch.testing.assert_close(logits(skeleton.model), logits(reference(folder)), rtol=0, atol=0)


def test_weights_that_do_not_fit_are_refused_by_name(folder: Path) -> None:
    skeleton = Skeleton.build(folder, dtype=torch.float32, device=CPU)
    buffer = torch.empty(skeleton.pieces[1].nbytes, dtype=torch.uint8)
    name = "model.layers.0.mlp.up_proj.weight"
    weights = weights_of(folder)
    with pytest.raises(ConfigError, match=f"layer 0: the weights lack {name}"):
        skeleton.fill(1, buffer, {key: tensor for key, tensor in weights.items() if key != name})
    with pytest.raises(ConfigError, match=r"up_proj.weight has shape \(47, 32\), the model needs \(48, 32\)"):
        skeleton.fill(1, buffer, weights | {name: weights[name][:47]})
    with pytest.raises(ConfigError, match=r"is torch\.int64, which cannot become torch\.float32"):
        skeleton.fill(1, buffer, weights | {name: weights[name].long()})
    with pytest.raises(ValueError, match="it needs"):
        skeleton.attach(1, buffer[:-1])


def test_a_model_that_is_built_otherwise_is_refused(tmp_path: Path) -> None:
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2))
    gpt2.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no embed_tokens, layers, norm"):
        Skeleton.build(tmp_path / "gpt2", dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match=r"config\.json"):
        Skeleton.build(tmp_path, dtype=torch.float32, device=CPU)


def test_building_leaves_the_tensors_of_other_threads_alone(folder: Path) -> None:
    config = reference(folder).config
    wrong: list[str] = []
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            made = [torch.empty(2), torch.zeros(2), torch.nn.Linear(2, 2).weight, torch.ones(2)]
            wrong.extend(f"{each.device} {each.dtype}" for each in made if each.is_meta or each.dtype != torch.float32)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(5):
            Skeleton(config, dtype=torch.bfloat16, device=CPU)
    finally:
        done.set()
        thread.join(30)
    assert wrong == []
