"""A step of the Hugging Face student with objectives that couple tokens, masks, rewards and reductions.

Its loss and gradient are held against a sum over single samples, each computed on its own from the model's logits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from distill.config.models import ObjectiveConfig
from distill.idle_steps import is_idle
from distill.objectives import build_objective
from distill.objectives.outcome import outcome_advantages
from distill.objectives.reductions import row_weights
from distill.objectives.rows import TokenRows
from distill.types import Batch, ScoredSample, TeacherScores
from students.hf.backend import HFStudent
from tests.builders_sampled import loss_of
from tests.builders_student import VOCAB, make_batch, student_config, write_student

SECTIONS: list[dict[str, Any]] = [
    {"name": "sampled_kl", "estimator": "k3", "reduction": "seq_mean"},
    {"name": "policy_gradient", "discount": 0.9, "return_normalisation": "length", "reduction": "segment_mean"},
    {"name": "policy_gradient", "iw_gain": 0.5, "outcome": {"weight": 0.5}, "reduction": "domain_balanced"},
    {"name": "policy_gradient", "outcome": {"gae_lambda": 0.75}, "reduction": "segment_token"},
    {"name": "policy_gradient", "importance": "seq_geo_trunc", "reduction": "segment_token"},
    {"name": "span_kl", "outcome": {"mix": "loss", "baseline": "batch"}},
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_student(tmp_path_factory.mktemp("student"))


def batch_for(objective: Any) -> Batch:
    """Two prompts of three samples, one or two teachers, two domains, a trajectory of two segments, masked tokens."""
    batch = make_batch(objective.spec, teachers=({"a": 1.0}, {"a": 0.5, "b": 1.5}), domains=("x", "y", "y"))
    items: list[ScoredSample] = []
    for index, item in enumerate(batch.samples):
        sample = item.sample
        mask = np.ones(len(sample.response_ids), np.int8)
        mask[1:3] = 0
        changed = replace(
            sample,
            prompt_ids=batch.samples[index % 2].sample.prompt_ids,
            logprobs=sample.logprobs + np.float32(0.1 * index - 0.2),
            loss_mask=mask if index != 3 else None,
            reward=0.5 if index in (0, 4) else float(index % 3),
            trajectory="t" if index in (0, 4) else "",
        )
        items.append(ScoredSample(changed, item.scores))
    return Batch(batch.version, tuple(items))


def expected(model: Any, batch: Batch, config: ObjectiveConfig, objective: Any) -> Tensor:
    samples = [item.sample for item in batch.samples]
    weights = row_weights(
        config.reduction,
        loss_tokens=[sample.loss_tokens for sample in samples],
        domains=[sample.domain for sample in samples],
        trajectories=[sample.trajectory for sample in samples],
    )
    outcomes = [np.zeros(sample.loss_tokens) for sample in samples]
    if config.outcome is not None:
        outcomes = outcome_advantages(samples, config.outcome)
    total = torch.zeros(())
    for item, weight, outcome in zip(batch.samples, weights, outcomes, strict=True):
        for scores, teacher_weight in zip(item.scores, item.sample.teachers.values(), strict=True):
            rows, logp_N = rows_of(model, item, scores, outcome)
            total = total + weight * teacher_weight * loss_of(objective, rows, logp_N).sum()
    return total


def rows_of(model: Any, item: ScoredSample, scores: TeacherScores, outcome: np.ndarray) -> tuple[TokenRows, Tensor]:
    sample = item.sample
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))
    trained = np.flatnonzero(np.ones(len(sample.response_ids)) if sample.loss_mask is None else sample.loss_mask)
    logits_NV = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 + trained, :VOCAB]
    tokens_N = torch.from_numpy(sample.response_ids[trained].astype(np.int64))
    rows = TokenRows(
        student_logits_NV=logits_NV,
        tokens_N=tokens_N,
        behaviour_logp_N=torch.from_numpy(sample.logprobs[trained]),
        teacher_logp_N=torch.from_numpy(scores.logprobs[trained]),
        sample_N=torch.zeros(len(trained), dtype=torch.int64),
        outcome_N=torch.from_numpy(outcome.astype(np.float32)),
    )
    return rows, logits_NV.detach().log_softmax(-1).gather(-1, tokens_N[:, None])[:, 0]


@pytest.mark.parametrize("micro_batch_tokens", [8, 8192])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section['name']}-{len(str(section))}")
def test_a_step_is_the_sum_over_samples_however_they_are_put_together(
    section: dict[str, Any], micro_batch_tokens: int, model_folder: Path
) -> None:
    config = ObjectiveConfig.model_validate(section)
    objective = build_objective(config)
    batch = batch_for(objective)
    settings = student_config(
        model_folder, micro_batch_tokens=micro_batch_tokens, max_grad_norm=1e9, head_chunk_tokens=3
    )
    student = HFStudent(settings, seed=0, total_steps=5, vocab_size=VOCAB, rules=config)
    step = student.step(batch, objective)

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loss = expected(model, batch, config, objective)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert step.tokens == sum(item.sample.loss_tokens for item in batch.samples)


@pytest.mark.parametrize(
    "importance", ["icepop", "sao", "seq_geo_mask", {"name": "prob_diff_refkl", "kl_tau": 0.0}, "icepop_ppo"], ids=str
)
@pytest.mark.parametrize("outcome", [None, {"baseline": "batch"}], ids=["teachers", "rewards too"])
def test_a_step_of_which_the_correction_leaves_out_every_token_is_known_as_idle(
    model_folder: Path, importance: Any, outcome: Any
) -> None:
    rules = ObjectiveConfig.model_validate({"name": "policy_gradient", "importance": importance, "outcome": outcome})
    objective = build_objective(rules)
    student = HFStudent(student_config(model_folder), seed=0, total_steps=4, vocab_size=VOCAB, rules=rules)
    batch = batch_for(objective)
    # as if greedily written: mu = 1, far from this student of random weights
    certain = [replace(each.sample, logprobs=np.zeros_like(each.sample.logprobs)) for each in batch.samples]
    greedy = tuple(ScoredSample(sample, each.scores) for sample, each in zip(certain, batch.samples, strict=True))
    assert is_idle(student.step(Batch(0, greedy), objective))
    rest = replace(batch_for(objective), version=1)
    assert not is_idle(student.step(rest, objective)) or importance == "seq_geo_mask", "its band is narrow"
