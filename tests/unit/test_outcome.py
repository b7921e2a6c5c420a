"""Outcome rewards: their advantages, and their way into an objective. Legend: S samples, N tokens, V vocabulary."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.config.models import ObjectiveConfig, OutcomeConfig
from distill.errors import ConfigError, StudentError
from distill.objectives import build_objective
from distill.objectives.divergence import ReverseKL
from distill.objectives.outcome import group_advantage, outcome_advantages, skip_observation_gae
from distill.objectives.outcome_mix import AdvantageMix
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import TokenRows
from distill.protocols import Objective, SequenceObjective
from distill.types import Sample
from tests.builders import sample
from tests.builders_sampled import loss_of, of_samples, one_row, random_rows

quick = settings(deadline=None, max_examples=25)


def rewarded(ordinal: int, reward: float | None, *, prompt: int = 0, **changes: Any) -> Sample:
    return replace(sample(ordinal), prompt_ids=np.asarray([prompt], np.int32), reward=reward, **changes)


def advantages(samples: list[Sample], **outcome: Any) -> list[float]:
    """The one advantage that all tokens of a sample have."""
    of_tokens = outcome_advantages(samples, OutcomeConfig(**outcome))
    assert [len(values) for values in of_tokens] == [sample.loss_tokens for sample in samples]
    assert all((values == values[0]).all() for values in of_tokens)
    return [float(values[0]) for values in of_tokens]


def test_a_reward_is_compared_with_those_of_its_prompt() -> None:
    batch = [rewarded(0, 1.0), rewarded(1, 0.0, prompt=1), rewarded(2, 0.0), rewarded(3, 0.0, prompt=1)]
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert advantages(batch) == pytest.approx([half, 0.0, -half, 0.0])
    assert advantages(batch, use_std=False) == pytest.approx([0.5, 0.0, -0.5, 0.0])
    assert advantages(batch, baseline="batch", use_std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert advantages(batch, baseline="none") == [1.0, 0.0, 0.0, 0.0]


@quick
@given(rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=8), shift=st.floats(-3, 3), data=st.data())
def test_advantages_of_a_group_add_up_to_0_whatever_is_added_to_all_rewards(
    rewards: list[float], shift: float, data: st.DataObject
) -> None:
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    plain = group_advantage(np.asarray(rewards), groups, eps=0.1)
    moved = group_advantage(np.asarray(rewards) + shift, groups, eps=0.1)
    np.testing.assert_allclose(moved, plain, atol=1e-6)
    for group in set(groups):
        assert sum(a for a, g in zip(plain, groups, strict=True) if g == group) == pytest.approx(0.0, abs=1e-9)


def test_equal_rewards_teach_nothing_however_they_are_rounded() -> None:
    assert group_advantage(np.full(3, 0.1), [0, 0, 0], eps=1e-12).tolist() == [0.0, 0.0, 0.0]


def test_segments_of_a_trajectory_count_once_and_share_their_advantage() -> None:
    batch = [
        rewarded(5, 1.0, trajectory="t", prompt=9),
        rewarded(2, 1.0, trajectory="t"),
        rewarded(3, 0.0),
        rewarded(4, 0.5),
    ]
    assert advantages(batch, use_std=False) == pytest.approx([0.5, 0.5, -0.5, 0.0])
    with pytest.raises(StudentError, match="of trajectory t have the rewards 1 and 0"):
        advantages([rewarded(0, 1.0, trajectory="t"), rewarded(1, 0.0, trajectory="t")])


def test_an_outcome_counts_once_however_many_teachers_score_the_sample() -> None:
    batch = [rewarded(0, 1.0, teachers={"a": 0.5, "b": 1.5}), rewarded(1, 0.0)]
    assert advantages(batch, use_std=False) == pytest.approx([0.25, -0.5])


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_sample_without_a_reward_is_an_error_that_names_it(reward: float | None) -> None:
    with pytest.raises(StudentError, match=f"sample sample-00000003: its reward is {reward}") as caught:
        advantages([rewarded(2, 1.0), rewarded(3, reward)])
    assert caught.value.sample_id == "sample-00000003"


def objective(**section: Any) -> Objective:
    return build_objective(ObjectiveConfig.model_validate(section))


def test_an_outcome_is_added_to_the_advantage_after_the_teachers_is_clipped() -> None:
    mixed = objective(name="policy_gradient", outcome={"weight": 2.0, "teacher_weight": 0.5})
    rows = one_row(log_p=-2.0, log_mu=-2.0, log_q=-40.0, outcome_N=torch.tensor([3.0]))
    loss_1, metrics = mixed(rows)
    assert float(loss_1) == pytest.approx((2.0 * 3.0 + 0.5 * -5.0) * 2.0)
    assert float(metrics["kl"]) == pytest.approx(38.0)
    assert float(metrics["outcome_advantage"]) == 3.0


def test_teachers_without_weight_are_measured_and_not_learnt_from() -> None:
    mixed = AdvantageMix(objective=PolicyGradient(advantage_clip=None), teacher_weight=0.0)
    rows = one_row(log_p=-2.0, log_mu=-2.0, log_q=-math.inf, outcome_N=torch.tensor([1.0]))
    assert float(mixed(rows)[0]) == pytest.approx(2.0)


def test_a_loss_is_mixed_with_any_objective() -> None:
    student_NV = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    teacher_NV = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    logp_N = student_NV.log_softmax(-1)[:, 3]
    rows = TokenRows(
        student_logits_NV=student_NV,
        tokens_N=torch.tensor([3, 3]),
        behaviour_logp_N=logp_N - math.log(1.5),
        teacher_logp_N=teacher_NV[:, 3],
        full_logp_NV=teacher_NV,
        outcome_N=torch.tensor([1.0, -2.0]),
    )
    mixed = objective(name="reverse_kl", outcome={"mix": "loss", "teacher_share": 0.25})
    outcome_N = -1.5 * torch.tensor([1.0, -2.0]) * logp_N
    want_N = 0.75 * outcome_N + 0.25 * ReverseKL()(rows)[0]
    torch.testing.assert_close(mixed(rows)[0], want_N)
    of_outcome = {"outcome_advantage", "outcome_importance_weight", "outcome_gated_low", "outcome_gated_high"}
    assert set(mixed(rows)[1]) == {*ReverseKL()(rows)[1], *of_outcome}
    assert mixed(rows)[1]["outcome_advantage"].tolist() == [1.0, 2.0]
    assert mixed.spec == ReverseKL().spec


@pytest.mark.parametrize(("inner", "gated"), [("jsd", None), ("policy_gradient", 0.0)])
def test_what_the_correction_of_the_outcome_leaves_out_is_told_apart_from_the_objectives(
    inner: str, gated: float | None
) -> None:
    own = {} if gated is None else {"importance": "none"}
    mixed = objective(name=inner, **own, outcome={"mix": "loss"})
    student_NV = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64).log()
    rows = TokenRows(
        student_logits_NV=student_NV,
        tokens_N=torch.zeros(3, dtype=torch.int64),
        behaviour_logp_N=torch.tensor([0.05, 0.4, 1.0], dtype=torch.float64).log(),
        teacher_logp_N=student_NV[:, 0],
        full_logp_NV=student_NV,
        outcome_N=torch.ones(3),
    )
    _, metrics = mixed(rows)
    assert metrics["outcome_importance_weight"].tolist() == pytest.approx([0.0, 1.25, 0.5])
    assert metrics["outcome_gated_high"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["outcome_gated_low"].tolist() == [0.0, 0.0, 0.0]
    assert ("gated_high" in metrics) == (gated is not None)
    if gated is not None:
        assert metrics["gated_high"].tolist() == [gated] * 3


SEQUENCE = [
    {"name": "policy_gradient", "discount": 0.9, "outcome": {}},
    {"name": "policy_gradient", "importance": "seq_geo_trunc", "outcome": {"mix": "loss"}},
    {"name": "span_kl", "outcome": {"mix": "loss"}},
]


@pytest.mark.parametrize("section", SEQUENCE, ids=str)
def test_an_objective_over_whole_samples_stays_one_with_an_outcome(section: dict[str, Any]) -> None:
    mixed = objective(**section)
    assert isinstance(mixed, SequenceObjective) and mixed.contract.couples_tokens
    leaf_N, rows = random_rows(4, [3, 2, 4])
    rows = replace(rows, outcome_N=torch.tensor([1.0, -0.5, 0.25])[rows.sample_N])
    whole_N = loss_of(mixed, rows, leaf_N)
    for one in range(3):
        keep, part = of_samples(rows, [one])
        torch.testing.assert_close(loss_of(mixed, part, leaf_N[keep]), whole_N[keep])


@pytest.mark.parametrize("mix", ["advantage", "loss"])
def test_a_mixed_objective_travels_and_says_what_it_optimises(mix: str) -> None:
    mixed = objective(name="policy_gradient", outcome={"mix": mix})
    assert pickle.loads(pickle.dumps(mixed)) == mixed
    assert "times the loss of the outcome" in mixed.contract.optimises
    assert "KL(p || q)" in mixed.contract.optimises
    assert mixed.contract.depends_on_action


def test_rows_without_an_outcome_are_an_error() -> None:
    with pytest.raises(StudentError, match="row 0: no outcome beside its scores"):
        objective(name="policy_gradient", outcome={})(one_row(log_p=-2.0, log_mu=-2.0, log_q=-1.0))


def test_an_objective_without_an_advantage_takes_an_outcome_only_beside_its_loss() -> None:
    with pytest.raises(ConfigError, match=r"objective\.outcome\.mix: advantage needs"):
        objective(name="jsd", outcome={})


def test_gae_never_reads_what_the_student_did_not_write() -> None:
    mask = np.asarray([1, 0, 1, 0], np.int8)
    rewards, values = np.asarray([0.0, math.nan, 1.0, math.nan]), np.asarray([0.5, math.nan, 0.25, math.nan])
    advantage, returns = skip_observation_gae(rewards, values, mask, discount=1.0, trace=0.5, bootstrap=0.0)
    assert advantage.tolist() == pytest.approx([-0.25 + 0.5 * 0.75, 0.0, 0.75, 0.0])
    assert returns.tolist() == pytest.approx([0.625, 0.0, 1.0, 0.0])


def test_with_a_lambda_tokens_far_from_the_end_of_the_trajectory_get_less_and_observations_cost_nothing() -> None:
    def segment(ordinal: int, reward: float, mask: list[int], **changes: Any) -> Sample:
        tokens = np.arange(len(mask), dtype=np.int32)
        return rewarded(ordinal, reward, response_ids=tokens, loss_mask=np.asarray(mask, np.int8), **changes)

    batch = [
        segment(5, 1.0, [1, 1, 0], trajectory="t", prompt=9),
        segment(2, 1.0, [1, 0, 0, 1], trajectory="t", teachers={"a": 1.0, "b": 1.0}),
        segment(3, 0.0, [1, 1]),
        segment(4, 0.5, [1]),
    ]
    last, first, wrong, middle = outcome_advantages(batch, OutcomeConfig(use_std=False, gae_lambda=0.5))
    assert last.tolist() == pytest.approx([0.25, 0.5])
    assert first.tolist() == pytest.approx([0.5 * 0.0625, 0.5 * 0.125])  # two teachers: half each
    assert wrong.tolist() == pytest.approx([-0.25, -0.5])
    assert middle.tolist() == [0.0]
    only_the_last = outcome_advantages(batch, OutcomeConfig(use_std=False, gae_lambda=0.0))
    assert [values.tolist() for values in only_the_last] == [[0.0, 0.5], [0.0, 0.0], [0.0, -0.5], [0.0]]
