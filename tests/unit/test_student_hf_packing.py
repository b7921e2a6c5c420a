"""Samples laid end to end give what the same samples give alone, for every family of attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from distill.errors import ConfigError
from distill.modeling.packed_attention import Layout, pack
from distill.objectives.divergence import ReverseKL
from students.hf.backend import HFStudent
from students.hf.head import ReplacedHead, require_known_logits
from tests.builders_student import HEAD_ROWS, VOCAB, make_batch, student_config, write_student

FULL = ReverseKL().spec
SIZES: dict[str, Any] = {
    "vocab_size": HEAD_ROWS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": HEAD_ROWS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}


def gemma2(**changes: Any) -> PreTrainedModel:
    soft = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, **soft, **changes))


def qwen2_sliding() -> PreTrainedModel:
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **windows))


FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2 with a window": qwen2_sliding,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "gemma2 with window and caps": lambda: gemma2(sliding_window=4),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.5)),
}


def write_family(folder: Path, family: str) -> Path:
    write_student(folder)
    torch.manual_seed(1)
    FAMILIES[family]().save_pretrained(folder)
    return folder


def gradients(model: Path, **changes: Any) -> tuple[HFStudent, float, dict[str, torch.Tensor]]:
    """Loss of one step and the gradients that it was made of."""
    student = HFStudent(student_config(model, max_grad_norm=1e9, **changes), seed=0, total_steps=20, vocab_size=VOCAB)
    seen: dict[str, torch.Tensor] = {}

    def note(*_args: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in student._trained.parameters.named.items() if p.grad is not None})

    student._trained.optimizer.register_step_pre_hook(note)
    loss = student.step(
        make_batch(FULL, count=9, teachers=({"math": 1.0}, {"code": 0.8, "style": 0.2})), ReverseKL()
    ).loss
    return student, loss, seen


def require_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    scale = max(float(gradient.abs().max()) for gradient in one.values())
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_give_the_loss_and_gradients_of_padded_ones(family: str, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", family)
    packed, loss, mine = gradients(model, micro_batch_tokens=60)
    padded, same_loss, same = gradients(model, packing=False, micro_batch_tokens=8)
    assert packed.why_padded is None
    assert padded.why_padded == "student.packing is false"
    assert loss == pytest.approx(same_loss, rel=1e-5)
    require_equal(mine, same)


def test_recomputed_layers_see_the_same_packed_samples(tmp_path: Path) -> None:
    model = write_student(tmp_path / "model")
    _, loss, mine = gradients(model)
    _, same_loss, same = gradients(model, gradient_checkpointing=True)
    assert loss == same_loss
    require_equal(mine, same)


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(
        BloomConfig(vocab_size=HEAD_ROWS, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)
    )


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=HEAD_ROWS, hidden_size=32, num_hidden_layers=2))


@pytest.mark.parametrize(
    ("make", "why"),
    [(bloom, "does not go through transformers' interface"), (mamba, "carries a state along the row")],
)
def test_a_model_that_cannot_be_packed_is_padded_and_says_why(
    make: Callable[[], PreTrainedModel], why: str, tmp_path: Path
) -> None:
    model = write_student(tmp_path / "model")
    torch.manual_seed(1)
    make().save_pretrained(model)
    student, loss, _ = gradients(model, micro_batch_tokens=60)
    assert student.why_padded is not None
    assert why in student.why_padded
    assert loss == pytest.approx(gradients(model, packing=False, micro_batch_tokens=8)[1], rel=1e-5)


def test_attention_sinks_are_noticed_when_the_model_is_loaded(tmp_path: Path) -> None:
    small: Any = {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**small))
    before = model.config._attn_implementation
    assert pack(model, VOCAB) == "GptOssAttention wants s_aux"
    assert model.config._attn_implementation == before


def test_groups_hold_every_token_once_and_waste_little() -> None:
    layout = Layout((3, 17, 16, 4, 9, 1, 16), torch.device("cpu"))
    taken = torch.cat([group.gather_GL[group.real_GL] for group in layout.groups])
    assert sorted(taken.tolist()) == list(range(layout.tokens))
    assert torch.equal(taken[layout.restore], torch.arange(layout.tokens))
    for group in layout.groups:
        assert group.real_GL.sum(1).min() * 1.5 >= group.gather_GL.shape[1]
    assert layout.position_ids[0, :5].tolist() == [0, 1, 2, 0, 1]


def test_an_export_does_not_name_our_attention(tmp_path: Path) -> None:
    student, _, _ = gradients(write_student(tmp_path / "model"))
    student.export(tmp_path / "out")
    assert "packed" not in (tmp_path / "out/config.json").read_text()


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(tmp_path: Path) -> None:
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    original = model.forward

    def twice(**inputs: Any) -> Any:
        output = original(**inputs)
        output.logits = output.logits * 2
        return output

    model.forward = twice
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM does something to its logits that is not known here"):
        require_known_logits(model, ReplacedHead(model), VOCAB)


@pytest.mark.parametrize(("row", "refused"), [(3, True), (VOCAB, False)], ids=["a token's row", "a padded row"])
def test_weights_that_are_no_numbers_are_refused_where_they_count(row: int, refused: bool) -> None:
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    with torch.no_grad():
        model.get_output_embeddings().weight[row] = torch.nan
    refusal = pytest.raises(ConfigError, match="logits of Qwen2ForCausalLM hold NaN") if refused else nullcontext()
    with refusal:
        require_known_logits(model, ReplacedHead(model), VOCAB)
