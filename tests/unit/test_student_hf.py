"""The Hugging Face student: its loss, its errors, its learning rate, its checkpoints, its worker."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from distill.config.models import MeshConfig, ObjectiveConfig, StudentConfig
from distill.errors import ConfigError, DistillError, EnvironmentFault, StudentError, TeacherError
from distill.objectives.divergence import JSD, ForwardKL, ReverseKL
from distill.objectives.head import Head
from distill.objectives.policy_gradient import PolicyGradient
from distill.transfermesh import MemoryLoader, Receiver
from distill.types import Batch, Sample, ScoredSample, SignalSpec, TeacherScores
from students.hf.backend import HFStudent
from students.hf.batching import Lesson, split
from students.hf.optim import lr_at
from students.worker import StudentWorker
from tests.builders_student import VOCAB, make_batch, planted_scores, student_config, weights_of, write_student
from tests.builders_student import start_student as start

FULL = ReverseKL().spec
SAMPLED = PolicyGradient().spec


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_student(tmp_path / "model")


def replace_scores(batch: Batch, index: int, **changes: Any) -> Batch:
    """`batch` with changed scores of the first teacher of one sample."""
    samples = list(batch.samples)
    item = samples[index]
    samples[index] = ScoredSample(item.sample, (dataclasses.replace(item.scores[0], **changes), *item.scores[1:]))
    return Batch(batch.version, tuple(samples))


def naive_loss(model: Path, batch: Batch) -> float:
    """Token mean of weighted KL(p || q): each sample alone, unpadded, every position through the head."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = 0.0
    for item in batch.samples:
        ids = torch.from_numpy(np.concatenate([item.sample.prompt_ids, item.sample.response_ids]).astype(np.int64))
        with torch.no_grad():
            logits = network(ids[None]).logits[0, len(item.sample.prompt_ids) - 1 : -1, :VOCAB]
        for scores, weight in zip(item.scores, item.sample.teachers.values(), strict=True):
            assert scores.full_logprobs is not None
            log_p, log_q = logits.log_softmax(-1), torch.from_numpy(scores.full_logprobs)
            total += weight * float((log_p.exp() * (log_p - log_q)).sum())
    return total / batch.response_tokens


MIXED = ({"math": 1.0}, {"code": 0.8, "style": 0.2}, {"style": 2.0})


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 60, 8192])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_is_the_token_mean_over_the_batch_however_it_is_split(
    model: Path, micro_batch_tokens: int, checkpointing: bool
) -> None:
    batch = make_batch(FULL, teachers=MIXED, count=9)
    whole = start(model, micro_batch_tokens=8192).step(batch, ReverseKL())
    student = start(model, micro_batch_tokens=micro_batch_tokens, gradient_checkpointing=checkpointing)
    result = student.step(batch, ReverseKL())
    assert result.loss == pytest.approx(naive_loss(model, batch), rel=1e-5)
    assert result.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert result.kl == pytest.approx(whole.kl, rel=1e-5)
    assert result.token_share == whole.token_share


def test_the_loss_does_not_depend_on_the_order_of_the_samples(model: Path) -> None:
    batch = make_batch(FULL, teachers=MIXED, count=9)
    turned = Batch(0, batch.samples[::-1])
    one, other = (start(model).step(each, ReverseKL()) for each in (batch, turned))
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_a_teachers_share_and_kl_are_over_the_tokens_that_it_scored(model: Path) -> None:
    batch = make_batch(FULL, teachers=({"math": 1.0}, {"code": 0.5}), count=6)
    of_code = [item for item in batch.samples if "code" in item.sample.teachers]
    tokens = sum(len(item.sample.response_ids) for item in of_code)
    result = start(model).step(batch, ReverseKL())
    assert result.token_share["code"] == pytest.approx(tokens / batch.response_tokens)
    alone = start(model).step(Batch(0, tuple(of_code)), ReverseKL())
    assert result.kl["code"] == pytest.approx(alone.kl["code"], rel=1e-5)
    assert alone.loss == pytest.approx(0.5 * alone.kl["code"], rel=1e-5)


def test_a_teacher_of_weight_zero_is_never_read(model: Path) -> None:
    batch = make_batch(FULL, teachers=({"broken": 0.0, "math": 1.0},))
    poisoned = replace_scores(batch, 0, full_logprobs=None, logprobs=np.full(99, np.nan, np.float32))
    assert set(start(model).step(poisoned, ReverseKL()).kl) == {"math"}


def test_only_trained_positions_reach_the_head_and_no_logits_outlive_a_chunk(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = start(model, head_chunk_tokens=5)
    hidden: list[int] = []
    chunks: list[int] = []
    original = Head.raw_logits

    def counting(head: Head, hidden_CD: torch.Tensor) -> torch.Tensor:
        logits_CV = original(head, hidden_CD)
        chunks.append(len(logits_CV))
        assert logits_CV.shape[1] == VOCAB
        return logits_CV

    monkeypatch.setattr(Head, "raw_logits", counting)
    student._trained.head._head.register_forward_pre_hook(lambda _m, args: hidden.append(args[0].shape[1]))
    batch = make_batch(FULL)
    student.step(batch, ReverseKL())
    assert hidden == [sum(len(item.sample.prompt_ids) + len(item.sample.response_ids) for item in batch.samples)]
    assert sum(chunks) == batch.response_tokens
    assert max(chunks) == 5


def test_two_students_with_one_seed_learn_the_same_bits(model: Path) -> None:
    students = [start(model), start(model)]
    for step in range(3):
        results = [student.step(make_batch(FULL, version=step, seed=step), JSD()) for student in students]
        assert results[0].loss == results[1].loss
    assert weights_of(students[0]) == weights_of(students[1])


def test_matrices_decay_but_not_the_embeddings(model: Path) -> None:
    trained = start(model, weight_decay=0.3)._trained
    decay = {id(p): group["weight_decay"] for group in trained.optimizer.param_groups for p in group["params"]}
    of = {name: decay[id(parameter)] for name, parameter in trained.parameters.named.items()}
    assert of["model.layers.0.mlp.up_proj.weight"] == 0.3
    assert of["model.embed_tokens.weight"] == of["lm_head.weight"] == of["model.norm.weight"] == 0.0


def test_clipping_bounds_the_step_but_reports_the_norm_before_it(model: Path) -> None:
    batch = make_batch(FULL)
    loose, tight = (start(model, max_grad_norm=norm).step(batch, ForwardKL()) for norm in (1e6, 1e-3))
    assert loose.grad_norm == pytest.approx(tight.grad_norm)
    assert loose.grad_norm > 1e-3


def test_the_weights_are_views_of_the_live_parameters(model: Path) -> None:
    student = start(model)
    views = {name: data for name, _, _, data in student.weights()}
    before = {name: data.tobytes() for name, data in views.items()}
    student.step(make_batch(FULL), JSD())
    assert views["model.embed_tokens.weight"].tobytes() != before["model.embed_tokens.weight"]


# --- refusals


def test_a_batch_for_another_version_is_refused(model: Path) -> None:
    with pytest.raises(StudentError, match="the batch is for weight version 5, the student has 0"):
        start(model).step(make_batch(FULL, version=5), JSD())


@pytest.mark.parametrize(
    ("spec", "objective", "changes", "message"),
    [
        (FULL, JSD(), {"full_logprobs": None}, "full_logprobs must have shape .* got nothing"),
        (FULL, JSD(), {"logprobs": np.zeros(50, np.float32)}, r"logprobs must have shape .* got shape \(50,\)"),
        (SignalSpec(ReverseKL(support="teacher_topk", k=4).spec.signal, 3), ReverseKL(support="teacher_topk", k=4), {},
         "topk_ids must have shape"),
        (FULL, JSD(), {"teacher": "code"}, r"scored by \['code'\], but its teachers are \['math'\]"),
    ],
)  # fmt: skip
def test_scores_of_the_wrong_shape_or_teacher_are_refused(
    model: Path, spec: SignalSpec, objective: Any, changes: dict[str, Any], message: str
) -> None:
    batch = replace_scores(make_batch(spec), 2, **changes)
    with pytest.raises(TeacherError, match=message):
        start(model).step(batch, objective)


def test_a_nan_score_names_its_sample_teacher_and_token_and_leaves_the_student_as_it_was(model: Path) -> None:
    batch = make_batch(FULL, teachers=({"math": 1.0}, {"code": 1.0}), count=8, seed=4)
    long = next(i for i, item in enumerate(batch.samples) if i % 2 and len(item.sample.response_ids) > 2)
    full = batch.samples[long].scores[0].full_logprobs
    assert full is not None
    broken = full.copy()
    broken[1, 7] = np.nan
    student = start(model, micro_batch_tokens=30)
    before = weights_of(student)
    with pytest.raises(TeacherError, match=f"sample v0-s{long}, teacher code, response token 1: .*NaN"):
        student.step(replace_scores(batch, long, full_logprobs=broken), ReverseKL())
    assert weights_of(student) == before
    assert student.version == 0
    assert student.step(batch, ReverseKL()).loss == start(model, micro_batch_tokens=30).step(batch, ReverseKL()).loss


@dataclasses.dataclass(frozen=True)
class _Exploding:
    """A finite loss whose gradient is not: sqrt at 0."""

    spec = SAMPLED
    contract = PolicyGradient().contract

    def __call__(self, rows: Any) -> tuple[Any, dict[str, Any]]:
        zero_N = (rows.student_logits_NV - rows.student_logits_NV.detach()).sum(-1)
        return zero_N.sqrt(), {"kl": zero_N.detach()}


def test_a_gradient_that_is_not_finite_names_the_samples_and_is_not_applied(model: Path) -> None:
    student = start(model)
    before = weights_of(student)
    with pytest.raises(StudentError, match=r"gradient's norm is nan after the samples v0-s0, .* and 2 more"):
        student.step(make_batch(SAMPLED, count=10), _Exploding())
    assert weights_of(student) == before
    assert student.version == 0


def test_a_response_token_outside_of_the_vocabulary_is_refused(model: Path) -> None:
    batch = make_batch(SAMPLED, count=1)
    batch.samples[0].sample.response_ids[0] = VOCAB
    with pytest.raises(StudentError, match="v0-s0: a response token lies outside"):
        start(model).step(batch, PolicyGradient())


def break_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def drop_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def misshape(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"intermediate_size": 64', '"intermediate_size": 65'))


@pytest.mark.parametrize(
    ("damage", "changes", "error", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), {}, ConfigError, "no Hugging Face model at"),
        (break_weights, {}, ConfigError, "cannot be loaded"),
        (drop_a_weight, {}, ConfigError, "lack model.norm.weight (1 in all)"),
        (misshape, {}, ConfigError, "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), {}, ConfigError, "cannot be loaded"),
        (lambda folder: None, {"device": "cuda:99"}, EnvironmentFault, "cuda:99 is not there"),
    ],
)
def test_a_model_or_device_that_cannot_be_used_is_named(
    model: Path,
    damage: Callable[[Path], None],
    changes: dict[str, Any],
    error: type[DistillError],
    message: str,
) -> None:
    damage(model)
    with pytest.raises(error) as caught:
        start(model, **changes)
    assert message in str(caught.value)


def test_a_head_smaller_than_the_tokenizer_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="has 32 rows, the tokenizer 33 tokens"):
        HFStudent(student_config(model), seed=0, total_steps=1, vocab_size=33)


# --- micro-batches and the learning rate


@settings(deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30), budget=st.integers(1, 200), packed=st.booleans())
def test_micro_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int, packed: bool) -> None:
    lessons = [Lesson(sample_of_length(index, size), 1.0) for index, size in enumerate(lengths)]
    parts = list(split(lessons, budget, packed=packed))
    assert sorted(lesson.item.sample.ordinal for part in parts for lesson in part) == list(range(len(lengths)))
    for part in parts:
        tokens = [lesson.length for lesson in part]
        assert len(part) == 1 or (sum(tokens) if packed else len(part) * max(tokens)) <= budget
    longest = [max(lesson.length for lesson in part) for part in parts]
    assert longest == sorted(longest, reverse=True)


def sample_of_length(index: int, size: int) -> ScoredSample:
    sample = Sample(
        id=str(index),
        ordinal=index,
        domain="math",
        teachers={"math": 1.0},
        prompt_ids=np.ones(1, np.int32),
        response_ids=np.ones(size - 1, np.int32),
        logprobs=np.zeros(size - 1, np.float32),
        versions=np.zeros(size - 1, np.int32),
        finish_reason="stop",
    )
    return ScoredSample(sample, (planted_scores(sample, "math", SAMPLED),))


@pytest.mark.parametrize(
    # 10 steps rise and 100 fall: the last is 99 of 100 down. (1 + cos(0.99 pi)) / 2 = sin(0.005 pi)^2 = 0.000246720
    ("schedule", "middle", "last", "beyond"),
    [("constant", 1.0, 1.0, 1.0), ("linear", 0.55, 0.109, 0.1), ("cosine", 0.55, 0.100222048, 0.1)],
)
def test_the_learning_rate_warms_up_and_reaches_its_final_share_behind_the_last_step(
    schedule: str, middle: float, last: float, beyond: float
) -> None:
    settings = {"model": "m", "lr": 1.0, "warmup_steps": 10, "lr_schedule": schedule, "lr_final_ratio": 0.1}
    config = StudentConfig.model_validate(settings)
    rates = [lr_at(step, config, total_steps=110) for step in range(120)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(middle)
    assert rates[109] == pytest.approx(last, rel=1e-8)
    assert rates[110] == rates[119] == pytest.approx(beyond)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(("schedule", "last"), [("linear", 1 / 4), ("cosine", (1 - 0.5**0.5) / 2)])
def test_the_last_step_still_teaches_where_the_final_share_is_nothing(schedule: str, last: float) -> None:
    config = StudentConfig.model_validate({"model": "m", "lr": 1.0, "warmup_steps": 0, "lr_schedule": schedule})
    rates = [lr_at(step, config, total_steps=4) for step in range(4)]
    assert (rates[0], rates[2], rates[3]) == pytest.approx((1.0, 0.5, last))


def test_a_run_shorter_than_its_warm_up_still_has_a_learning_rate() -> None:
    config = StudentConfig.model_validate({"model": "m", "lr": 1.0, "warmup_steps": 10})
    assert [lr_at(step, config, total_steps=3) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])


# --- the worker


def test_a_worker_trains_and_its_weights_arrive_where_it_publishes_them(model: Path, tmp_path: Path) -> None:
    key = bytes(range(32))
    worker = StudentWorker(
        student_config(model),
        ObjectiveConfig.model_validate({"name": "jsd", "beta": 0.5}),
        MeshConfig.model_validate({"transport": "tcp", "timeout_s": 20}),
        seed=0,
        total_steps=4,
        vocab_size=VOCAB,
        run_key=key.hex(),
        threads=1,
    )
    loader = MemoryLoader()
    receiver = Receiver(key, loader, name="rollout-0").start()
    try:
        assert worker.step(make_batch(FULL)).version == worker.version() == 1
        result = worker.publish([receiver.endpoint.to_dict()])
    finally:
        worker.close()
        receiver.close()
    assert (result.version, result.committed, dict(result.failed)) == (1, ("rollout-0",), {})
    assert result.transports == {"rollout-0": "tcp"}
    worker.export(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert loader.tensors.keys() == exported.keys()
    assert all(loader.tensors[name].tobytes() == tensor.numpy().tobytes() for name, tensor in exported.items())
    assert result.bytes == sum(data.nbytes for data in loader.tensors.values())
    assert worker.pid() == os.getpid()
    assert worker.peak_memory_bytes() > 0
    assert set(worker.evaluate(make_batch(FULL))) == {"math"}
    worker.save(tmp_path / "checkpoint")
    worker.load(tmp_path / "checkpoint")
    assert worker.version() == 1


def test_the_builder_knows_scores_of_every_signal() -> None:
    """The tests above trust these teachers: their scores must agree with one another."""
    topk = ReverseKL(support="teacher_topk", k=4).spec
    sample = make_batch(FULL, count=1).samples[0].sample
    full, top, sampled = (planted_scores(sample, "math", spec) for spec in (FULL, topk, SAMPLED))
    assert isinstance(full, TeacherScores)
    assert full.full_logprobs is not None and top.topk_logprobs is not None and top.log_tail is not None
    np.testing.assert_allclose(np.exp(full.full_logprobs).sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.exp(top.topk_logprobs).sum(-1) + np.exp(top.log_tail), 1, rtol=1e-5)
    np.testing.assert_array_equal(sampled.logprobs, full.logprobs)
