"""What the student can learn with: bfloat16, LoRA, 8-bit moments, averaged weights; and the rows of unused tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from distill.errors import ConfigError, MissingDependency
from distill.objectives.divergence import JSD, ReverseKL
from distill.types import Batch
from students.hf import lora
from students.hf.backend import HFStudent
from tests.builders_student import HEAD_ROWS, VOCAB, make_batch, student_config, write_experts, write_student

FULL = ReverseKL().spec
LORA: dict[str, Any] = {"lora": {"r": 4, "alpha": 8.0, "dropout": 0.1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "lora": LORA,
    "lora in bfloat16 with an average": {**LORA, "dtype": "bfloat16", "ema_decay": 0.5},
    "8-bit moments": {"optimizer": "adamw_8bit"},
    "8-bit moments in bfloat16": {"optimizer": "adamw_8bit", "dtype": "bfloat16"},
    "average": {"ema_decay": 0.9},
}
each_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    # wide enough for matrices of 4096 elements, from which on moments are held in 8 bits
    return write_student(tmp_path / "model", hidden=64)


def start(model: Path, **changes: Any) -> HFStudent:
    if changes.get("optimizer") == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    if changes.get("lora"):
        pytest.importorskip("peft")
    return HFStudent(student_config(model, **changes), seed=0, total_steps=20, vocab_size=VOCAB)


def train(student: HFStudent, steps: int) -> HFStudent:
    for _ in range(steps):
        version = student.version
        student.step(make_batch(FULL, version=version, seed=version, count=8), JSD())
    return student


def weights_of(student: HFStudent) -> dict[str, tuple[str, bytes]]:
    return {name: (dtype, data.tobytes()) for name, dtype, _, data in student.weights()}


def exported(student: HFStudent, folder: Path) -> dict[str, torch.Tensor]:
    student.export(folder)
    return load_file(folder / "model.safetensors")


@each_setting
def test_a_resumed_student_goes_on_bit_for_bit(model: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    straight = train(start(model, **settings), 4)
    train(start(model, **settings), 2).save(tmp_path / "checkpoint")
    resumed = start(model, **settings)
    resumed.load(tmp_path / "checkpoint")
    train(resumed, 2)
    assert weights_of(resumed) == weights_of(straight)
    ours, theirs = exported(resumed, tmp_path / "a"), exported(straight, tmp_path / "b")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@each_setting
def test_a_checkpoint_is_a_folder_with_the_weights_that_the_servers_get(
    model: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    student = train(start(model, **settings), 2)
    student.save(tmp_path / "checkpoint")
    stored = load_file(tmp_path / "checkpoint/model.safetensors")
    dtype = settings.get("dtype", "float32")
    assert {name: (dtype, tensor.view(torch.uint8).numpy().tobytes()) for name, tensor in stored.items()} == weights_of(
        student
    )
    ids_1T = torch.tensor([[3, 5, 8, 13]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype="auto")
    assert str(loaded.dtype) == f"torch.{dtype}"
    live = AutoModelForCausalLM.from_config(loaded.config, dtype=loaded.dtype)
    live.load_state_dict({name: torch.frombuffer(bytearray(data), dtype=loaded.dtype).view(stored[name].shape)
                          for name, (_, data) in weights_of(student).items()})  # fmt: skip
    with torch.no_grad():
        assert torch.equal(loaded(ids_1T).logits, live.eval()(ids_1T).logits)


@each_setting
def test_training_brings_it_closer_to_its_teacher(model: Path, settings: dict[str, Any]) -> None:
    student = start(model, **settings)
    held_out = make_batch(FULL, seed=1000, count=16)
    before = student.evaluate(held_out, JSD())["math"]
    assert train(student, 12).evaluate(held_out, JSD())["math"] < 0.95 * before


# --- bfloat16


def test_small_steps_add_up_in_the_masters_although_bfloat16_would_lose_them(model: Path) -> None:
    student = start(model, dtype="bfloat16", lr=1e-6, warmup_steps=0, eps=1e-8)
    named = student._trained.parameters.named
    first = {name: tensor.detach().clone() for name, tensor in named.items()}
    train(student, 3)
    weight = "model.layers.0.mlp.up_proj.weight"
    moved = (named[weight].detach() - first[weight]).abs()
    assert named[weight].dtype == torch.float32
    assert 1e-6 < float(moved.median()) < 4e-6
    live: torch.Tensor = student._trained.model.get_parameter(weight)
    assert live.dtype == torch.bfloat16
    assert torch.equal(live, named[weight].to(torch.bfloat16))


def test_a_bfloat16_student_computes_almost_what_a_float32_one_does(model: Path) -> None:
    batch = make_batch(FULL, count=12)
    exact, rounded = (start(model, dtype=dtype).step(batch, JSD()) for dtype in ("float32", "bfloat16"))
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)


def test_gradients_of_many_micro_batches_add_up_in_float32(model: Path) -> None:
    batch = make_batch(FULL, count=40)
    one, many = (start(model, dtype="bfloat16", micro_batch_tokens=n).step(batch, JSD()) for n in (8192, 1))
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=0.02)


@pytest.mark.skipif(not (find_spec("bitsandbytes") and find_spec("peft")), reason="both are extras")
def test_packages_that_lack_what_no_student_uses_say_nothing_of_it(model: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.unit.test_student_hf_settings import *; "
        "config = student_config(Path(sys.argv[1]), optimizer='adamw_8bit', **LORA); "
        "HFStudent(config, seed=0, total_steps=20, vocab_size=VOCAB); assert 'bitsandbytes' in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(model)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gemm_4bit" not in done.stdout + done.stderr


# --- LoRA


def test_only_adapters_learn_and_they_start_as_nothing(model: Path) -> None:
    student = start(model, **LORA)
    assert weights_of(student) == weights_of(start(model))
    assert all("lora_" in name for name in student._trained.parameters.named)
    before = weights_of(student)
    after = weights_of(train(student, 2))
    different = {name for name in before if before[name] != after[name]}
    assert different == {name for name in before if "_proj" in name}


def test_an_adapter_alone_can_be_exported_and_gives_the_same_logits(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    student = train(start(model, lora={**LORA["lora"], "export": "adapter"}), 3)
    student.save(tmp_path / "merged")
    student.export(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    ids_1T = torch.tensor([[3, 5, 8, 13]])
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        plain = base(ids_1T).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids_1T).logits
        torch.testing.assert_close(adapted, whole(ids_1T).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(adapted, plain, atol=1e-2)


def test_adapters_do_not_go_on_over_another_base(model: Path, tmp_path: Path) -> None:
    train(start(model, **LORA), 2).save(tmp_path / "checkpoint")
    other = start(write_student(tmp_path / "other", hidden=64, seed=5), **LORA)
    before = weights_of(other)
    with pytest.raises(ConfigError, match="is not the base that they were trained on"):
        other.load(tmp_path / "checkpoint")
    assert weights_of(other) == before
    assert other.version == 0


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["no_such_layer"], "'no_such_layer' fits no layer of LlamaForCausalLM"),
        (["q_proj", "v_porj"], "'v_porj' fits no layer of LlamaForCausalLM(.|\n)*did you mean 'v_proj'"),
        (["q_proj", "proj"], "'proj' fits no layer"),
        (".*no_such_layer", "cannot have adapters with targets .*no_such_layer"),
        (["lm_head"], "the embeddings and the head"),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_refused(model: Path, targets: str | list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(model, lora={"targets": targets})


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_adapters_of_fused_experts_are_in_the_export(kind: str, export: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    source = write_experts(tmp_path / "model", kind)
    student = start(source, lora={"r": 4, "export": export})
    before = weights_of(student)
    after = weights_of(train(student, 3))
    assert after.keys() == load_file(source / "model.safetensors").keys()
    layers = {name for name in before if ".layers." in name and "norm" not in name}
    assert {name for name in before if before[name] != after[name]} == layers
    assert len([name for name in layers if ".experts." in name]) == 18, "2 layers of 3 experts of 3 matrices"

    student.export(tmp_path / "out")
    reloaded: Any = AutoModelForCausalLM.from_pretrained(source if export == "adapter" else tmp_path / "out")
    if export == "adapter":
        reloaded = peft.PeftModel.from_pretrained(reloaded, tmp_path / "out")
    live = student._trained.model.eval()
    live.set_attn_implementation("eager")  # packed attention is told where samples end
    ids_BT = torch.tensor([[3, 5, 8, 13, 21, 4], [7, 7, 9, 2, 11, 6]])
    with torch.no_grad():
        logits, expected = (each.eval()(ids_BT, use_cache=False).logits[..., :VOCAB] for each in (live, reloaded))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_adapters_of_fused_experts_resume(tmp_path: Path) -> None:
    source = write_experts(tmp_path / "model", "mixtral")
    student = train(start(source, lora={"r": 4}), 2)
    student.save(tmp_path / "checkpoint")
    resumed = start(source, lora={"r": 4})
    resumed.load(tmp_path / "checkpoint")
    assert weights_of(train(resumed, 2)) == weights_of(train(student, 2))


def test_fused_experts_without_dropout_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"student\.lora\.dropout=0"):
        start(write_experts(tmp_path / "model", "mixtral"), **LORA)


def test_an_adapter_that_the_merge_does_not_know_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    # DoRA's magnitudes scale a weight beside what the factors add to it
    monkeypatch.setattr(
        lora, "_peft_config", lambda config: peft.LoraConfig(r=config.r, target_modules=["q_proj"], use_dora=True)
    )
    with pytest.raises(ConfigError, match=r"adapters of model\.layers\.0\.self_attn\.q_proj \(2 such") as raised:
        start(model, **LORA)
    assert "lora_magnitude_vector" in str(raised.value)


@pytest.mark.parametrize(("package", "settings"), [("peft", LORA), ("bitsandbytes.optim", {"optimizer": "adamw_8bit"})])
def test_a_missing_package_is_named_with_what_to_install(
    model: Path, package: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match="pip install"):
        HFStudent(student_config(model, **settings), seed=0, total_steps=1, vocab_size=VOCAB)


# --- 8-bit moments


def test_moments_take_a_byte_each_and_training_goes_almost_as_with_whole_ones(model: Path) -> None:
    small, exact = start(model, optimizer="adamw_8bit"), start(model)
    held_out = make_batch(FULL, seed=1000, count=16)
    reached = [train(student, 10).evaluate(held_out, JSD())["math"] for student in (small, exact)]
    assert reached[0] == pytest.approx(reached[1], rel=0.1)
    parameter = small._trained.parameters.named["model.layers.0.mlp.up_proj.weight"]
    state = small._trained.optimizer.state[parameter]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8


# --- averaged weights


def test_the_export_holds_the_average_and_the_servers_get_the_raw_weights(model: Path, tmp_path: Path) -> None:
    student = start(model, ema_decay=0.75)
    name = "model.layers.1.self_attn.q_proj.weight"
    average = load_file(model / "model.safetensors")[name]
    for _ in range(3):
        train(student, 1)
        raw = student._trained.parameters.named[name].detach()
        average = 0.75 * average + 0.25 * raw
    before = weights_of(student)
    torch.testing.assert_close(exported(student, tmp_path / "out")[name], average, rtol=1e-5, atol=1e-6)
    assert weights_of(student) == before
    assert not torch.allclose(average, raw, atol=1e-4)


# --- a checkpoint under other settings


@pytest.mark.parametrize(
    ("saved", "loading", "message"),
    [
        ({"ema_decay": 0.9}, {}, "it has average weights"),
        ({}, {"ema_decay": 0.9}, "it has no average weights"),
        ({"dtype": "bfloat16"}, {}, "other names or shapes|it has master weights"),
        ({}, LORA, "it has no master weights"),
        (LORA, {"lora": {"r": 8}}, "float32 weights .* do not fit"),
        ({"optimizer": "adamw_8bit"}, {}, "of another student.optimizer"),
        ({}, {"optimizer": "adamw_8bit"}, "of another student.optimizer"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_and_changes_nothing(
    model: Path, saved: dict[str, Any], loading: dict[str, Any], message: str, tmp_path: Path
) -> None:
    train(start(model, **saved), 1).save(tmp_path / "checkpoint")
    student = start(model, **loading)
    before = weights_of(student)
    with pytest.raises(ConfigError, match=message):
        student.load(tmp_path / "checkpoint")
    assert weights_of(student) == before
    assert student.version == 0


# --- rows of the vocabulary


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"optimizer": "adamw_8bit"}], ids=["float32", "bfloat16", "8-bit"]
)
def test_rows_beyond_the_vocabulary_never_change(tmp_path: Path, tied: bool, settings: dict[str, Any]) -> None:
    model = write_student(tmp_path / "model", tied=tied, hidden=128)
    student = start(model, weight_decay=10.0, ema_decay=0.5, **settings)
    first = exported(student, tmp_path / "before")
    last = exported(train(student, 3), tmp_path / "after")
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        assert first[name].shape[0] == HEAD_ROWS
        assert torch.equal(first[name][VOCAB:], last[name][VOCAB:])
        assert not torch.equal(first[name][:VOCAB], last[name][:VOCAB])


def test_an_end_token_that_also_pads_is_learnt_like_any_other(tmp_path: Path) -> None:
    model = write_student(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": 2, "eos_token_id": 2}))
    batch = make_batch(FULL, count=4)
    for item in batch.samples:
        item.sample.prompt_ids[-1] = item.sample.response_ids[-1] = 2
    student = start(model)
    seen: dict[str, torch.Tensor] = {}

    def note(*_args: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in student._trained.parameters.named.items() if p.grad is not None})

    student._trained.optimizer.register_step_pre_hook(note)
    assert student.step(batch, ReverseKL()).tokens == batch.response_tokens
    assert float(seen["model.embed_tokens.weight"][2].abs().max()) > 0
    assert float(seen["lm_head.weight"][2].abs().max()) > 0


def test_tied_weights_and_the_generation_config_survive_every_export(tmp_path: Path) -> None:
    model = write_student(tmp_path / "model", tied=True)
    GenerationConfig(eos_token_id=[2, 5], pad_token_id=0, bos_token_id=1, max_new_tokens=7).save_pretrained(model)
    student = train(start(model), 1)
    student.save(tmp_path / "checkpoint")
    assert "lm_head.weight" not in load_file(tmp_path / "checkpoint/model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.generation_config.eos_token_id == [2, 5]
    assert loaded.generation_config.max_new_tokens == 7


def test_a_step_only_reads_its_batch(model: Path) -> None:
    """A batch may come from shared memory, whose arrays cannot be written."""
    batch = make_batch(FULL)
    for item in batch.samples:
        full = item.scores[0].full_logprobs
        assert full is not None
        for array in (full, item.sample.prompt_ids, item.sample.response_ids, item.sample.logprobs):
            array.setflags(write=False)
    copy = [np.array(item.scores[0].full_logprobs) for item in batch.samples]
    start(model).step(Batch(0, batch.samples), ReverseKL())
    for item, before in zip(batch.samples, copy, strict=True):
        np.testing.assert_array_equal(item.scores[0].full_logprobs, before)
