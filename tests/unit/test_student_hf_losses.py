"""What a step of the Hugging Face student is a mean of: masks, reductions, mixtures, outcomes, coupled tokens.

Legend: R response tokens of one sample, V common vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from distill.config.models import ObjectiveConfig
from distill.errors import ServiceError, StudentError, TeacherError
from distill.idle_steps import IdleSteps, is_idle
from distill.objectives import build_objective
from distill.objectives.divergence import JSD, ForwardKL, ReverseKL
from distill.objectives.policy_gradient import PolicyGradient
from distill.types import Batch, ScoredSample, StepResult
from students.hf.backend import HFStudent
from tests.builders_student import VOCAB, make_batch, student_config, weights_of, write_student

FULL = ReverseKL().spec
SAMPLED = PolicyGradient().spec


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_student(tmp_path / "model")


def start(model: Path, rules: dict[str, Any] | None = None, **changes: Any) -> HFStudent:
    config = ObjectiveConfig.model_validate(rules or {})
    return HFStudent(student_config(model, **changes), seed=0, total_steps=20, vocab_size=VOCAB, rules=config)


def learn(model: Path, batch: Batch, objective: Any, rules: dict[str, Any] | None = None, **changes: Any) -> StepResult:
    return start(model, rules, **changes).step(batch, objective)


def changed(batch: Batch, **changes: Callable[[ScoredSample], Any]) -> Batch:
    """`batch` with fields of its samples set to what functions of the scored samples give."""
    samples = [
        dataclasses.replace(
            item, sample=dataclasses.replace(item.sample, **{name: of(item) for name, of in changes.items()})
        )
        for item in batch.samples
    ]
    return Batch(batch.version, tuple(samples))


def sums_of_kl(model: Path, batch: Batch) -> list[float]:
    """For each sample the sum over its trained tokens and teachers of weight * KL(p || q), computed alone."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sums: list[float] = []
    for item in batch.samples:
        sample = item.sample
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))
        with torch.no_grad():
            log_p_RV = network(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1, :VOCAB].log_softmax(-1)
        mask_R = np.ones(len(sample.response_ids)) if sample.loss_mask is None else sample.loss_mask
        total = 0.0
        for scores, weight in zip(item.scores, sample.teachers.values(), strict=True):
            assert scores.full_logprobs is not None
            kl_R = (log_p_RV.exp() * (log_p_RV - torch.from_numpy(scores.full_logprobs))).sum(-1)
            total += weight * float((kl_R * torch.from_numpy(mask_R)).sum())
        sums.append(total)
    return sums


def every_second(item: ScoredSample) -> np.ndarray[Any, np.dtype[np.int8]]:
    return (np.arange(len(item.sample.response_ids)) % 2).astype(np.int8)


@pytest.mark.parametrize("packing", [True, False])
def test_tokens_that_the_student_did_not_write_carry_no_loss(model: Path, packing: bool) -> None:
    batch = changed(make_batch(FULL, count=9, teachers=({"math": 1.0}, {"code": 0.5})), loss_mask=every_second)
    trained = sum(item.sample.loss_tokens for item in batch.samples)
    assert min(item.sample.loss_tokens for item in batch.samples) == 0
    result = learn(model, batch, ReverseKL(), packing=packing, micro_batch_tokens=30)
    assert result.tokens == trained
    assert result.loss == pytest.approx(sum(sums_of_kl(model, batch)) / trained, rel=1e-5)
    assert sum(result.token_share.values()) == pytest.approx(1.0)


def test_what_the_objective_measures_besides_the_kl_is_told_per_teacher(model: Path) -> None:
    batch = make_batch(SAMPLED, count=6, teachers=({"math": 1.0}, {"code": 0.5}))
    far = changed(batch, logprobs=lambda item: np.full_like(item.sample.logprobs, -20.0))
    told = learn(model, far, PolicyGradient()).objective
    assert set(told) == {"importance_weight", "gated_low", "gated_high"}
    assert told["gated_high"] == {"math": 1.0, "code": 1.0}, "every ratio is far above the band"
    assert told["importance_weight"] == {"math": 0.0, "code": 0.0}


def test_masked_tokens_may_have_no_probability_and_no_scores(model: Path) -> None:
    batch = changed(make_batch(SAMPLED, count=4, seed=2), loss_mask=every_second)
    before = learn(model, batch, PolicyGradient()).loss
    for item in batch.samples:
        assert item.sample.loss_mask is not None
        item.sample.logprobs[item.sample.loss_mask == 0] = np.nan
        item.scores[0].logprobs[item.sample.loss_mask == 0] = np.nan
    assert learn(model, batch, PolicyGradient()).loss == before


def test_a_batch_without_a_trained_token_is_refused(model: Path) -> None:
    masked = changed(make_batch(FULL), loss_mask=lambda item: np.zeros(len(item.sample.response_ids), np.int8))
    with pytest.raises(StudentError, match="has no token to learn from"):
        learn(model, masked, ReverseKL())


REDUCED = {
    "token_mean": [1 / 12, 1 / 12, 1 / 12],
    "seq_mean": [1 / 9, 1 / 12, 1 / 15],
    "domain_balanced": [0.75 / 8, 0.25 / 4, 0.75 / 8],
    "segment_mean": [1 / 12, 1 / 8, 1 / 20],
    "segment_token": [0.5 / 8, 1 / 8, 0.5 / 8],
}
"""Factor of a token of samples of 3, 4 and 5 tokens; the first and the third are of one domain and one trajectory."""


@pytest.mark.parametrize("reduction", REDUCED)
@pytest.mark.parametrize("micro_batch_tokens", [1, 8192])
def test_a_reduction_is_over_the_whole_batch_however_it_is_split(
    model: Path, reduction: str, micro_batch_tokens: int
) -> None:
    lengths = iter((3, 4, 5))
    pool = make_batch(FULL, count=60, domains=("math",)).samples
    chosen = [next(each for each in pool if len(each.sample.response_ids) == length) for length in lengths]
    batch = Batch(0, tuple(chosen))
    domains, trajectories = (
        dict(zip(map(id, chosen), "aba", strict=True)),
        dict(zip(map(id, chosen), "xyx", strict=True)),
    )
    batch = changed(batch, domain=lambda item: domains[id(item)], trajectory=lambda item: trajectories[id(item)])
    rules: dict[str, Any] = {"reduction": reduction}
    if reduction == "domain_balanced":
        rules["domain_weights"] = {"a": 3.0, "b": 1.0}
    loss = learn(model, batch, ReverseKL(), rules, micro_batch_tokens=micro_batch_tokens).loss
    expected = sum(w * kl for w, kl in zip(REDUCED[reduction], sums_of_kl(model, batch), strict=True))
    assert loss == pytest.approx(expected, rel=1e-5)


def mixed(batch: Batch, mixture: str) -> Batch:
    """The same samples, scored by one teacher that is the mixture of theirs."""
    samples: list[ScoredSample] = []
    for item in batch.samples:
        weights = np.asarray(list(item.sample.teachers.values()))
        shares = (weights / weights.sum())[:, None, None]
        logp = np.stack([scores.full_logprobs for scores in item.scores if scores.full_logprobs is not None])
        mix = np.log((shares * np.exp(logp)).sum(0)) if mixture == "arithmetic" else (shares * logp).sum(0)
        mix = (mix - np.log(np.exp(mix).sum(-1, keepdims=True))).astype(np.float32)
        sampled = mix[np.arange(len(mix)), item.sample.response_ids]
        scores = dataclasses.replace(item.scores[0], teacher="mix", full_logprobs=mix, logprobs=sampled)
        sample = dataclasses.replace(item.sample, teachers={"mix": float(weights.sum())})
        samples.append(ScoredSample(sample, (scores,)))
    return Batch(batch.version, tuple(samples))


TEACHERS = ({"math": 1.0}, {"code": 0.8, "style": 0.2}, {"style": 2.0, "math": 1.0})


@pytest.mark.parametrize("mixture", ["arithmetic", "geometric"])
@pytest.mark.parametrize("objective", [JSD(), ForwardKL()], ids=["jsd", "forward_kl"])
def test_a_mixture_of_teachers_is_learnt_like_one_teacher(model: Path, mixture: str, objective: Any) -> None:
    batch = make_batch(FULL, count=9, teachers=TEACHERS)
    several = learn(model, batch, objective, {"mixture": mixture}, micro_batch_tokens=40)
    one = learn(model, mixed(batch, mixture), objective)
    assert several.loss == pytest.approx(one.loss, rel=1e-5)
    assert several.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert several.loss != pytest.approx(learn(model, batch, objective).loss, rel=1e-3)


@pytest.mark.parametrize(
    "objective",
    [PolicyGradient(discount=1.0, return_normalisation="length"), PolicyGradient(iw_gain=0.5)],
    ids=["returns", "front loading"],
)
def test_objectives_along_a_sample_see_the_mixture_of_its_teachers(model: Path, objective: PolicyGradient) -> None:
    batch = make_batch(FULL, count=9, teachers=TEACHERS)
    several = learn(model, batch, objective, {"mixture": "arithmetic"}, micro_batch_tokens=40)
    one = learn(model, mixed(batch, "arithmetic"), objective)
    assert several.loss == pytest.approx(one.loss, rel=1e-5)
    assert several.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


def test_returns_along_a_sample_do_not_depend_on_chunks_or_micro_batches(model: Path) -> None:
    batch = make_batch(SAMPLED, count=9, teachers=TEACHERS)
    whole = learn(model, batch, PolicyGradient(discount=0.9))
    for settings in ({"micro_batch_tokens": 1}, {"head_chunk_tokens": 3}, {"packing": False}):
        part = learn(model, batch, PolicyGradient(discount=0.9), **settings)
        assert part.loss == pytest.approx(whole.loss, rel=1e-5)
        assert part.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert whole.loss != pytest.approx(learn(model, batch, PolicyGradient()).loss, rel=1e-2)


def test_an_outcome_counts_beside_the_teachers(model: Path) -> None:
    rules: dict[str, Any] = {
        "name": "policy_gradient",
        "importance": "none",
        "outcome": {"mix": "advantage", "weight": 2.0, "teacher_weight": 0.0, "baseline": "none"},
    }
    objective = build_objective(ObjectiveConfig.model_validate(rules))
    batch = changed(make_batch(SAMPLED, count=6), reward=lambda item: float(item.sample.ordinal))
    loss = learn(model, batch, objective, rules).loss
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = 0.0
    for item in batch.samples:
        ids = torch.from_numpy(np.concatenate([item.sample.prompt_ids, item.sample.response_ids]).astype(np.int64))
        with torch.no_grad():
            logits_RV = network(ids[None]).logits[0, len(item.sample.prompt_ids) - 1 : -1, :VOCAB]
        log_p_R = logits_RV.log_softmax(-1).gather(-1, ids[-len(item.sample.response_ids) :, None])
        expected -= 2.0 * item.sample.ordinal * float(log_p_R.sum())
    assert loss == pytest.approx(expected / batch.response_tokens, rel=1e-5)
    assert set(start(model, rules).evaluate(make_batch(SAMPLED), objective)) == {"math"}
    with pytest.raises(StudentError, match="its reward is None"):
        learn(model, make_batch(SAMPLED), objective, rules)


# --- faults of one sample


def spoil(batch: Batch, **changes: Any) -> Batch:
    """The third sample with other fields."""
    samples = list(batch.samples)
    samples[2] = dataclasses.replace(samples[2], sample=dataclasses.replace(samples[2].sample, **changes))
    return Batch(batch.version, tuple(samples))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": np.asarray([3, VOCAB], np.int32)}, "a prompt token lies outside of the common vocabulary"),
        ({"response_ids": np.full(5, 3.0)}, "log-probabilities of shape|a response token lies outside"),
        ({"loss_mask": np.ones(99, np.int8)}, r"its loss mask has shape \(99,\)"),
        ({"teachers": {"math": float("nan")}}, "its teacher math has the weight nan"),
    ],
)
def test_a_sample_that_cannot_be_learnt_is_named(model: Path, changes: dict[str, Any], message: str) -> None:
    student = start(model)
    with pytest.raises(StudentError, match=f"sample v0-s2: .*({message})") as caught:
        student.step(spoil(make_batch(FULL), **changes), ReverseKL())
    assert caught.value.sample_id == "v0-s2"
    assert student.version == 0


def test_a_nan_probability_of_a_sampled_token_is_the_samples_fault(model: Path) -> None:
    batch = make_batch(FULL)
    batch.samples[2].sample.logprobs[-1] = np.nan
    with pytest.raises(StudentError, match="v0-s2: the log-probabilities of its tokens hold NaN") as caught:
        start(model).step(batch, ReverseKL())
    assert caught.value.sample_id == "v0-s2"


def test_scores_that_are_no_probabilities_blame_sample_and_teacher_so_that_the_rest_can_go_on(model: Path) -> None:
    batch = make_batch(FULL, teachers=({"math": 1.0}, {"code": 1.0}), count=8)
    full = batch.samples[3].scores[0].full_logprobs
    assert full is not None
    full[-1, 4] = np.inf
    student = start(model, micro_batch_tokens=30)
    with pytest.raises(TeacherError) as caught:
        student.step(batch, ReverseKL())
    fault: ServiceError = caught.value
    assert (fault.sample_id, fault.teacher) == ("v0-s3", "code")
    rest = Batch(0, tuple(item for item in batch.samples if item.sample.id != fault.sample_id))
    assert student.step(rest, ReverseKL()).loss == start(model, micro_batch_tokens=30).step(rest, ReverseKL()).loss


def test_ids_that_are_no_whole_numbers_are_refused(model: Path) -> None:
    objective = ReverseKL(support="teacher_topk", k=4)
    batch = make_batch(objective.spec)
    scores = batch.samples[1].scores[0]
    assert scores.topk_ids is not None
    broken = dataclasses.replace(scores, topk_ids=scores.topk_ids.astype(np.float32))
    samples = (batch.samples[0], dataclasses.replace(batch.samples[1], scores=(broken,)), *batch.samples[2:])
    with pytest.raises(TeacherError, match="sample v0-s1, teacher math: topk_ids holds float32"):
        start(model).step(Batch(0, samples), objective)


@pytest.mark.parametrize("mixture", ["weighted", "arithmetic"])
def test_a_domain_of_weight_0_is_left_out(model: Path, mixture: str) -> None:
    batch = changed(make_batch(FULL, count=6, teachers=({"math": 1.0, "code": 0.5},)), domain=lambda item: "kept")
    more = changed(make_batch(FULL, count=4, seed=9), domain=lambda item: "left", id=lambda item: f"x{item.sample.id}")
    rules = {"mixture": mixture, "reduction": "domain_balanced", "domain_weights": {"kept": 1.0, "left": 0.0}}
    both = Batch(batch.version, (*batch.samples, *more.samples))
    result = learn(model, both, ReverseKL(), rules)
    assert result.loss == pytest.approx(learn(model, batch, ReverseKL(), {"mixture": mixture}).loss, rel=1e-5)
    assert result.tokens == batch.response_tokens


def rewarded(rewards: list[float]) -> Callable[[Batch], Batch]:
    """One prompt, whose answers have these rewards."""

    def of(batch: Batch) -> Batch:
        prompt_ids = batch.samples[0].sample.prompt_ids
        values = iter(rewards)
        return changed(batch, reward=lambda _: next(values), prompt_ids=lambda _: prompt_ids)

    return of


def without_spans(batch: Batch) -> Batch:
    def scored(item: ScoredSample) -> ScoredSample:
        nowhere = np.full(len(item.sample.response_ids), -1, np.int32)
        return dataclasses.replace(item, scores=tuple(dataclasses.replace(each, spans=nowhere) for each in item.scores))

    return Batch(batch.version, tuple(scored(item) for item in batch.samples))


def weighing(weight: float) -> Callable[[Batch], Batch]:
    return lambda batch: changed(batch, teachers=lambda item: dict.fromkeys(item.sample.teachers, weight))


OUTCOME = {"name": "policy_gradient", "importance": "none", "outcome": {"teacher_weight": 0.0}}
LEFT = {"reduction": "domain_balanced", "domain_weights": {"math": 0.0, "code": 1.0}}


@pytest.mark.parametrize(
    ("rules", "with_fault", "reason"),
    [
        (OUTCOME, rewarded([1.0] * 6), "the advantage of every outcome is 0"),
        ({"name": "span_kl"}, without_spans, "tokens are aligned with nothing"),
        ({"name": "jsd"}, weighing(1e-50), "no other reason shows"),
        ({"name": "jsd"}, weighing(0.0), "the teachers of its samples all have the weight 0"),
        ({"name": "jsd", **LEFT}, weighing(1.0), "its samples all have the weight 0"),
    ],
)
def test_a_step_that_teaches_nothing_leaves_the_weights_and_is_told_with_its_reason(
    model: Path, rules: dict[str, Any], with_fault: Callable[[Batch], Batch], reason: str
) -> None:
    objective = build_objective(ObjectiveConfig.model_validate(rules))
    student = start(model, rules, weight_decay=0.1, warmup_steps=0)
    before = weights_of(student)
    result = student.step(with_fault(make_batch(objective.spec)), objective)
    assert (result.version, result.grad_norm, result.loss) == (1, 0.0, 0.0)
    assert weights_of(student) == before
    told: list[str] = []
    IdleSteps("", total_steps=2, on_event=lambda _, text: told.append(text)).take(result)
    assert len(told) == 1 and reason in told[0]


def test_rewards_that_differ_teach(model: Path) -> None:
    objective = build_objective(ObjectiveConfig.model_validate(OUTCOME))
    result = learn(model, rewarded([1.0, 0.0] * 3)(make_batch(objective.spec)), objective, OUTCOME)
    assert result.grad_norm > 0 and not is_idle(result)
    assert 0 < result.objective["outcome_advantage"]["math"] < 1


def test_a_student_that_equals_its_teacher_has_a_gradient_of_0_and_is_not_idle(model: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.nn.init.zeros_(network.lm_head.weight)  # every token is as probable as any other
    network.save_pretrained(model)
    uniform_V = torch.zeros(VOCAB).log_softmax(-1).numpy()

    def scored(item: ScoredSample) -> ScoredSample:
        full = np.tile(uniform_V, (len(item.sample.response_ids), 1))
        return dataclasses.replace(item, scores=(dataclasses.replace(item.scores[0], full_logprobs=full),))

    batch = Batch(0, tuple(scored(item) for item in make_batch(FULL).samples))
    result = learn(model, batch, ReverseKL())
    assert result.grad_norm == 0.0 and result.kl == {"math": pytest.approx(0.0, abs=1e-6)}
    assert not is_idle(result)


def test_on_answers_of_a_teacher_sampled_tokens_tell_its_kl_to_the_student(model: Path) -> None:
    batch = make_batch(SAMPLED, count=4)
    gaps = [item.scores[0].logprobs - score(model, item) for item in batch.samples]
    told = start(model).evaluate(batch, PolicyGradient())
    assert told == {"math": pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)}


def score(model: Path, item: ScoredSample) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The student's log p of the response tokens."""
    ids = torch.from_numpy(np.concatenate([item.sample.prompt_ids, item.sample.response_ids]).astype(np.int64))
    with torch.no_grad():
        logits_TV = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids[None]).logits[0, :, :VOCAB]
    start_at = len(item.sample.prompt_ids)
    return logits_TV.log_softmax(-1)[start_at - 1 : -1].gather(-1, ids[start_at:, None])[:, 0].numpy()
