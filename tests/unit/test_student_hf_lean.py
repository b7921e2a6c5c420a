"""Lean layers give what a model's own layers give, values and gradients, and keep less for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from distill.objectives import gemm
from distill.objectives.divergence import JSD, ReverseKL
from students.hf import lean_layers
from students.hf.backend import HFStudent
from students.hf.lean_layers import Linear, RMSNorm, SwigluDown, lean
from tests.builders_student import HEAD_ROWS, VOCAB, make_batch, start_student, write_student

SIZES: dict[str, Any] = {
    "vocab_size": HEAD_ROWS,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"packing": False},
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {"lora": {"r": 4, "alpha": 8.0}},
    "lora, attention only": {"lora": {"r": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}},
    "average": {"ema_decay": 0.5},
    "several micro-batches": {"micro_batch_tokens": 24},
}
onednn = pytest.mark.parametrize("by_onednn", [False, True], ids=["torch's products", "oneDNN's products"])


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whose products are used, for matrices of any size."""

    def set_to(by_onednn: bool) -> None:
        monkeypatch.setattr(gemm, "ONEDNN", by_onednn)
        monkeypatch.setattr(gemm, "SMALLEST", 1)

    return set_to


def write_family(family: str, folder: Path) -> Path:
    write_student(folder)  # for its tokenizer
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():  # norms that scale, and biases that add
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    return folder


def gradients(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of its product with fixed random numbers."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    result = run(*leaves)
    towards = torch.randn(result.shape, generator=torch.Generator().manual_seed(7)).to(result)
    return [result.detach(), *torch.autograd.grad(result, leaves, towards)]


def kept_bytes(run: Callable[[], object], weights: nn.Module) -> int:
    """What autograd keeps of `run` beside the weights."""
    sizes: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in weights.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    del result
    return sum(sizes.values())


def own_norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = LlamaRMSNorm(len(weight), eps=1e-5)
    return torch.func.functional_call(norm, {"weight": weight}, x)


def lean_norm(x: Tensor, weight: Tensor) -> Tensor:
    return RMSNorm.apply(x, weight, 1e-5)


def own_down(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.silu(gate) * up, weight, bias)


LAYERS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "norm": (own_norm, lean_norm, [(2, 9, 24), (24,)]),
    "norm of heads": (own_norm, lean_norm, [(2, 9, 4, 8), (8,)]),
    "mlp": (own_down, SwigluDown.apply, [(2, 9, 24), (2, 9, 24), (16, 24), (16,)]),
    "linear": (nn.functional.linear, Linear.apply, [(2, 9, 24), (16, 24), (16,)]),
}
each_layer = pytest.mark.parametrize("layer", LAYERS)


def inputs_of(layer: str) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(shape) for shape in LAYERS[layer][2]]


@each_layer
@onednn
def test_a_layer_gives_its_own_value_and_gradients(layer: str, by_onednn: bool, choose: Callable[[bool], None]) -> None:
    choose(by_onednn)
    own, ours, _ = LAYERS[layer]
    expected, got = gradients(own, *inputs_of(layer)), gradients(ours, *inputs_of(layer))
    if not by_onednn:
        assert torch.equal(got[0], expected[0])
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


@each_layer
def test_blocks_of_rows_make_no_difference(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradients(LAYERS[layer][1], *inputs_of(layer))
    monkeypatch.setattr("distill.objectives.fused.BLOCK_ELEMENTS", {"cpu": 100, "cuda": 100})  # four rows and a rest
    for mine, theirs in zip(gradients(LAYERS[layer][1], *inputs_of(layer)), whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


@each_layer
def test_in_bfloat16_a_layer_is_as_near_to_the_truth_as_its_own(layer: str) -> None:
    own, ours, _ = LAYERS[layer]
    halves = [each.bfloat16() for each in inputs_of(layer)]
    truth = gradients(own, *[each.float() for each in halves])
    expected, got = gradients(own, *halves), gradients(ours, *halves)
    assert torch.equal(got[0], expected[0])
    for mine, theirs, true in zip(got, expected, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        rounding = float(true.abs().max()) * 2**-8  # half a unit in the last place of the largest
        assert float((mine.float() - true).abs().max()) <= float((theirs.float() - true).abs().max()) + rounding


def test_a_frozen_weight_gets_no_gradient_and_keeps_no_input() -> None:
    linear = nn.Linear(24, 16).requires_grad_(False)
    x = torch.randn(9, 24, requires_grad=True)
    run = partial(Linear.apply, x, linear.weight, linear.bias)
    assert kept_bytes(run, linear) == 0
    run().sum().backward()
    assert linear.weight.grad is None
    assert x.grad is not None
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(9, 24))


def test_an_mlp_keeps_its_input_and_two_tensors_of_its_width() -> None:
    mlp = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=80, num_attention_heads=2))
    x = torch.randn(1, 50, 24, requires_grad=True)
    inside, at_the_door = 50 * 80 * 4, 50 * 24 * 4
    assert kept_bytes(lambda: mlp(x), mlp) == at_the_door + 4 * inside
    assert kept_bytes(lambda: lean_layers._mlp_forward(mlp, x), mlp) == at_the_door + 2 * inside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_keeps_its_input_and_a_number_a_token(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(24).to(dtype)
    x = torch.randn(1, 50, 24, dtype=dtype, requires_grad=True)
    least = x.nbytes + 50 * 4
    assert kept_bytes(lambda: norm(x), norm) > 1.9 * least
    assert kept_bytes(lambda: lean_norm(x, norm.weight), norm) == least


@pytest.mark.parametrize("family", FAMILIES)
@onednn
def test_a_lean_model_gives_its_own_logits_and_gradients(
    family: str, by_onednn: bool, tmp_path: Path, choose: Callable[[bool], None]
) -> None:
    folder = write_family(family, tmp_path)
    ids = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(5))
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    choose(by_onednn)
    for leaned in (False, True):
        model = type(FAMILIES[family]()).from_pretrained(folder)
        if leaned:
            assert lean(model, VOCAB) is None
            assert any("forward" in vars(module) for module in model.modules())
        logits = model(input_ids=ids, use_cache=False).logits
        (logits.sin() * torch.arange(HEAD_ROWS)).mean().backward()
        found.append((logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (own_logits, own), (logits, ours) = found
    torch.testing.assert_close(logits, own_logits, rtol=1e-5, atol=1e-6 * float(own_logits.abs().max()))
    assert own.keys() == ours.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=2e-6 * float(gradient.abs().max()))


def train(model: Path, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], HFStudent]:
    student = start_student(model, **settings)
    losses = [student.step(make_batch(JSD().spec, version=step, seed=step), JSD()).loss for step in range(3)]
    dtype = getattr(torch, settings.get("dtype", "float32"))
    weights = {
        name: torch.frombuffer(bytearray(data.tobytes()), dtype=dtype).float() for name, _, _, data in student.weights()
    }
    return losses, weights, student


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_student_learns_the_same_with_lean_layers(settings: dict[str, Any], tmp_path: Path) -> None:
    if "lora" in settings:
        pytest.importorskip("peft")
    folder = write_family("qwen3", tmp_path)
    losses, weights, student = train(folder, settings)
    own_losses, own_weights, own = train(folder, settings | {"lean_layers": False})
    assert student.why_plain is None
    assert own.why_plain == "student.lean_layers is false"
    assert losses == pytest.approx(own_losses, rel=1e-5)
    assert own_weights.keys() == weights.keys()
    for name, weight in own_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


def test_a_student_in_bfloat16_learns_nearly_the_same_with_lean_layers(tmp_path: Path) -> None:
    folder = write_family("llama", tmp_path)
    losses, weights, student = train(folder, {"dtype": "bfloat16"})
    own_losses, own_weights, _ = train(folder, {"dtype": "bfloat16", "lean_layers": False})
    assert student.why_plain is None
    assert losses == pytest.approx(own_losses, rel=2e-2)
    for name, weight in own_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=2e-2, atol=2e-2)


def test_layers_of_other_models_stay_as_they_are(tmp_path: Path) -> None:
    write_student(tmp_path)
    GraniteForCausalLM(GraniteConfig(**SIZES)).save_pretrained(tmp_path)
    student = start_student(tmp_path)
    assert student.why_plain == "GraniteForCausalLM has no layer of Llama, Qwen2, Qwen3"
    student.step(make_batch(ReverseKL().spec), ReverseKL())


def test_an_mlp_with_another_activation_stays_as_it_is() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))
    assert lean(model, VOCAB) is None
    changed = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert "LlamaRMSNorm" in changed
    assert "LlamaMLP" not in changed


def test_a_model_whose_norm_does_something_else_keeps_its_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a later version of transformers might."""
    own = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, hidden_states: own(self, hidden_states) * 1.01)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    ids = torch.arange(6)[None]
    before = model(input_ids=ids, use_cache=False).logits
    reason = lean(model, VOCAB)
    assert reason is not None
    assert "differ by" in reason
    assert reason in caplog.text
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_by_onednn_is_the_product(turned: tuple[bool, bool], choose: Callable[[bool], None]) -> None:
    choose(True)
    torch.manual_seed(1)
    a, b = torch.randn(70, 50), torch.randn(50, 30)
    a, b = (x.T.contiguous().T if turn else x for x, turn in zip((a, b), turned, strict=True))
    for left, right in ((a, b), (a[3:], b[:, 2:]), (a[:, 4:], b[4:])):  # whole, and parts of wider matrices
        got = gemm.product(left, right)
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), left.double() @ right.double(), rtol=1e-5, atol=1e-5)


def test_a_product_of_half_precision_is_left_to_torch(choose: Callable[[bool], None]) -> None:
    choose(True)
    a, b = torch.randn(8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    assert not gemm.by_onednn(a)
    assert torch.equal(gemm.product(a, b), a @ b)
