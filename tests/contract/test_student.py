"""What every training backend must do, run over all that can start on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill import registry
from distill.errors import TeacherError
from distill.objectives.divergence import JSD, ReverseKL
from distill.objectives.policy_gradient import PolicyGradient
from tests.builders_student import HEAD_ROWS, VOCAB, make_batch, student_config, write_student

every_backend = pytest.mark.parametrize("backend", registry.names("student"))
OBJECTIVES = [JSD(), ReverseKL(support="teacher_topk", k=4), PolicyGradient()]


def start(backend: str, model: Path, **changes: Any) -> Any:
    kind = registry.load("student", backend)
    return kind(student_config(model, backend=backend, **changes), seed=0, total_steps=20, vocab_size=VOCAB)


def snapshot(student: Any) -> dict[str, bytes]:
    return {name: data.tobytes() for name, _, _, data in student.weights()}


@every_backend
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_a_step_raises_the_version_by_one_and_reports_every_teacher(
    backend: str, objective: Any, tmp_path: Path
) -> None:
    student = start(backend, write_student(tmp_path / "model"))
    batch = make_batch(objective.spec, teachers=({"math": 1.0}, {"code": 1.0}))
    result = student.step(batch, objective)
    assert student.version == result.version == 1
    assert result.tokens == batch.response_tokens
    assert result.kl.keys() == result.token_share.keys() == {"math", "code"}
    assert sum(result.token_share.values()) == pytest.approx(1.0)
    assert result.grad_norm > 0
    assert result.peak_memory_bytes > 0


@every_backend
def test_training_brings_the_student_closer_to_its_teacher(backend: str, tmp_path: Path) -> None:
    objective = JSD()
    student = start(backend, write_student(tmp_path / "model"))
    held_out = make_batch(objective.spec, seed=1000, count=16)
    before = student.evaluate(held_out, objective)["math"]
    for step in range(20):
        student.step(make_batch(objective.spec, version=step, seed=step, count=16), objective)
    assert student.evaluate(held_out, objective)["math"] < 0.8 * before


@every_backend
def test_evaluating_changes_nothing_and_answers_per_domain(backend: str, tmp_path: Path) -> None:
    objective = JSD()
    student = start(backend, write_student(tmp_path / "model"))
    before = snapshot(student)
    batch = make_batch(objective.spec, domains=("math", "code"))
    assert student.evaluate(batch, objective) == student.evaluate(batch, objective)
    assert set(student.evaluate(batch, objective)) == {"math", "code"}
    assert snapshot(student) == before
    assert student.version == 0


@every_backend
@pytest.mark.parametrize("tied", [False, True])
def test_its_weights_have_the_names_and_bytes_of_its_export(backend: str, tied: bool, tmp_path: Path) -> None:
    student = start(backend, write_student(tmp_path / "model", tied=tied))
    student.step(make_batch(JSD().spec), JSD())
    student.export(tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        exported = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    published = {name: (dtype, shape, data) for name, dtype, shape, data in student.weights()}
    assert published.keys() == exported.keys()
    for name, (dtype, shape, data) in published.items():
        assert data.dtype == np.uint8
        assert data.ndim == 1
        assert f"torch.{dtype}" == str(exported[name].dtype)
        assert shape == tuple(exported[name].shape)
        assert data.tobytes() == exported[name].numpy().tobytes()


@every_backend
def test_its_export_is_an_ordinary_folder_with_the_same_logits(backend: str, tmp_path: Path) -> None:
    source = write_student(tmp_path / "model")
    student = start(backend, source, lr=1e-4)
    student.step(make_batch(JSD().spec), JSD())
    student.export(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    ids = torch.tensor([[3, 5, 8, 13]])
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (source, tmp_path / "out")
        )
        student.export(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)(ids).logits
    assert after.shape == (1, 4, HEAD_ROWS)
    assert not torch.equal(before, after)
    assert torch.equal(after, again)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc").input_ids == [3, 4, 5]


@every_backend
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(backend: str, dropout: float, tmp_path: Path) -> None:
    objective = JSD()
    model = write_student(tmp_path / "model", dropout=dropout)
    batches = [make_batch(objective.spec, version=step, seed=step) for step in range(6)]
    straight = start(backend, model)
    whole = [straight.step(batch, objective) for batch in batches]
    first = start(backend, model)
    for batch in batches[:3]:
        first.step(batch, objective)
    first.save(tmp_path / "checkpoint")
    second = start(backend, model)
    second.load(tmp_path / "checkpoint")
    assert second.version == 3
    rest = [second.step(batch, objective) for batch in batches[3:]]
    assert [(r.loss, r.grad_norm, r.lr) for r in rest] == [(r.loss, r.grad_norm, r.lr) for r in whole[3:]]
    assert snapshot(second) == snapshot(straight)


@every_backend
def test_a_missing_score_row_is_an_error_that_names_sample_and_teacher(backend: str, tmp_path: Path) -> None:
    student = start(backend, write_student(tmp_path / "model"))
    batch = make_batch(JSD().spec, count=1, seed=3)
    scores = batch.samples[0].scores[0]
    short = type(scores)("math", scores.logprobs, full_logprobs=scores.full_logprobs[:-1])
    broken = type(batch)(0, (type(batch.samples[0])(batch.samples[0].sample, (short,)),))
    before = snapshot(student)
    with pytest.raises(TeacherError, match="sample v0-s0, teacher math: full_logprobs must have shape"):
        student.step(broken, JSD())
    assert snapshot(student) == before
    assert student.version == 0
