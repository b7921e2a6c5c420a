"""The policy gradient and the sampled-token losses: advantages, returns, refusals, and what they optimise.

Legend: N tokens, V vocabulary, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill.errors import ConfigError, StudentError, TeacherError
from distill.objectives.corrections import (
    IcePop,
    NoCorrection,
    SequenceGeometricMask,
    TruncatedImportanceSampling,
)
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import Place, TokenRows
from distill.objectives.sampled_kl import SampledKL
from tests.builders_sampled import loss_of, of_samples, one_row, random_rows, sampled_rows

quick = settings(deadline=None, max_examples=25)
PLAIN: dict[str, Any] = {"importance": NoCorrection(), "advantage_clip": None}


@pytest.mark.parametrize(
    ("importance", "ratio", "weight"),
    [
        (NoCorrection(), 100.0, 1.0),
        (TruncatedImportanceSampling(), 1.5, 1.5),
        (TruncatedImportanceSampling(), 100.0, 2.0),
        (TruncatedImportanceSampling(cap=5.0), 4.0, 4.0),
        (IcePop(), 1.5, 1.5),
        (IcePop(), 2.5, 0.0),
        (IcePop(), 0.4, 0.0),
        (IcePop(high=3.0), 2.5, 2.5),
    ],
)
def test_the_importance_weight_is_gated_as_named(importance: Any, ratio: float, weight: float) -> None:
    log_p = -2.0
    rows = one_row(log_p=log_p, log_mu=log_p - math.log(ratio), log_q=-1.0)
    loss_1, metrics = PolicyGradient(importance=importance)(rows)
    assert float(loss_1) == pytest.approx(-weight * 1.0 * log_p)
    assert float(metrics["kl"]) == pytest.approx(-1.0)
    assert float(metrics["importance_weight"]) == pytest.approx(weight)
    gated = {"gated_low": float(weight == 0 and ratio < 1), "gated_high": float(weight == 0 and ratio > 1)}
    assert {name: float(metrics[name]) for name in gated} == gated


def test_the_default_keeps_what_is_near_the_sampler_and_clips_the_advantage() -> None:
    assert PolicyGradient().importance == IcePop(low=0.5, high=2.0)
    assert PolicyGradient().advantage_clip == 5.0


def test_the_advantage_is_clipped_on_both_sides_and_a_ratio_that_overflows_stays_finite() -> None:
    assert float(PolicyGradient()(one_row(log_p=-2.0, log_mu=-2.0, log_q=-40.0))[0]) == pytest.approx(-5.0 * 2.0)
    far = one_row(log_p=-2.0, log_mu=-2000.0, log_q=-1.0)
    assert float(PolicyGradient(importance=TruncatedImportanceSampling())(far)[0]) == pytest.approx(2.0 * 2.0)
    assert float(PolicyGradient()(far)[0]) == 0.0


@pytest.mark.parametrize("objective", [PolicyGradient(), SampledKL(), PolicyGradient(**PLAIN, reference="sampler")])
@pytest.mark.parametrize("log_mu", [math.nan, -math.inf, 0.5])
def test_a_sampled_token_without_a_probability_is_an_error(objective: Any, log_mu: float) -> None:
    with pytest.raises(StudentError, match=f"row 0: the log-probability of the sampled token is {log_mu}"):
        objective(one_row(log_p=-2.0, log_mu=log_mu, log_q=-1.0))


def test_a_correction_that_reads_no_sampler_wants_none() -> None:
    assert float(PolicyGradient(**PLAIN)(one_row(log_p=-2.0, log_mu=math.nan, log_q=-1.0))[0]) == pytest.approx(2.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_teacher_that_gives_the_token_no_probability_is_refused_without_a_clip(estimator: str) -> None:
    rows = one_row(log_p=-2.0, log_mu=-2.0, log_q=-math.inf)
    with pytest.raises(TeacherError, match="row 0: the teacher gives probability 0 to the sampled token"):
        PolicyGradient(**PLAIN, estimator=estimator)(rows)
    assert float(PolicyGradient(estimator=estimator, advantage_clip=3.0)(rows)[0]) == pytest.approx(-6.0)


@pytest.mark.parametrize("objective", [SampledKL(), PolicyGradient(advantage_clip=None, discount=1.0)])
def test_the_row_of_a_zero_of_the_teacher_is_named_also_where_a_return_spreads_it(objective: Any) -> None:
    leaf_N, rows = random_rows(0, [4, 3])
    rows.teacher_logp_N[5] = -math.inf
    named = TokenRows(**{**vars(rows), "describe": lambda row: Place(f"sample s{row}", f"s{row}", "t")})
    with pytest.raises(TeacherError, match="sample s5: the teacher gives probability 0") as caught:
        loss_of(objective, named, leaf_N)
    assert (caught.value.sample_id, caught.value.teacher) == ("s5", "t")


def test_a_k3_that_overflows_is_an_error_that_names_the_row() -> None:
    logp_N = torch.tensor([-1.0, -95.0])
    rows = sampled_rows(logp_N, teacher_logp_N=torch.tensor([-1.0, -0.1]))
    with pytest.raises(StudentError, match="row 1"):
        SampledKL(estimator="k3")(rows)


def test_the_power_advantage_is_bounded_and_its_limit_is_the_log_ratio() -> None:
    rows = one_row(log_p=-2.0, log_mu=-2.0, log_q=-0.5)
    want = (math.exp(-0.5) ** 0.5 - math.exp(-2.0) ** 0.5) / 0.5
    assert float(PolicyGradient(**PLAIN, power=0.5)(rows)[0]) == pytest.approx(want * 2.0)
    assert float(PolicyGradient(**PLAIN, power=1e-9)(rows)[0]) == pytest.approx(1.5 * 2.0, rel=1e-6)
    nothing = one_row(log_p=-2.0, log_mu=-2.0, log_q=-math.inf)
    assert float(PolicyGradient(**PLAIN, power=0.5)(nothing)[0]) == pytest.approx(-math.exp(-1.0) / 0.5 * 2.0)


def test_an_advantage_against_the_sampler_uses_mu() -> None:
    rows = one_row(log_p=-2.0, log_mu=-3.0, log_q=-1.0)
    assert float(PolicyGradient(**PLAIN, reference="sampler")(rows)[0]) == pytest.approx(2.0 * 2.0)


def test_a_discounted_return_adds_up_what_follows_in_the_same_sample() -> None:
    logp_N = torch.full((5,), -1.0, dtype=torch.float64)
    teacher_N = logp_N + torch.tensor([0.5, -0.2, 0.3, 0.9, -0.4], dtype=torch.float64)
    rows = sampled_rows(logp_N, teacher_logp_N=teacher_N, sample_N=torch.tensor([0, 0, 0, 7, 7]))
    half = PolicyGradient(**PLAIN, discount=0.5).condition(rows, logp_N).advantage_N
    assert half.tolist() == pytest.approx([0.5 - 0.1 + 0.075, -0.2 + 0.15, 0.3, 0.9 - 0.2, -0.4])
    mean = PolicyGradient(**PLAIN, discount=1.0, return_normalisation="length").condition(rows, logp_N).advantage_N
    assert mean.tolist() == pytest.approx([0.6 / 3, 0.1 / 2, 0.3, 0.5 / 2, -0.4])


def test_early_tokens_weigh_more_with_a_gain() -> None:
    logp_N = torch.full((4,), -1.0, dtype=torch.float64)
    teacher_N = logp_N + torch.tensor([0.2, -0.2, 0.6, 0.0], dtype=torch.float64)
    rows = sampled_rows(logp_N, teacher_logp_N=teacher_N, sample_N=torch.tensor([0, 0, 0, 1]))
    weighted = PolicyGradient(**PLAIN, iw_gain=0.5).condition(rows, logp_N).advantage_N
    assert weighted.tolist() == pytest.approx([0.2 * 1.5, -0.2 * 1.4, 0.6 * 1.3, 0.0])


COUPLED = [
    PolicyGradient(discount=0.9),
    PolicyGradient(discount=1.0, return_normalisation="length"),
    PolicyGradient(iw_gain=0.5),
    PolicyGradient(importance=SequenceGeometricMask(low=0.9, high=1.1)),
]
EVERY = [*COUPLED, PolicyGradient(), PolicyGradient(power=0.5), SampledKL(), SampledKL(estimator="k3")]


@pytest.mark.parametrize("objective", EVERY, ids=repr)
def test_it_says_whether_tokens_of_a_sample_depend_on_one_another(objective: Any) -> None:
    assert objective.contract.couples_tokens == (objective in COUPLED)


@pytest.mark.parametrize("objective", EVERY, ids=repr)
@quick
@given(seed=st.integers(0, 2**32 - 10), counts=st.lists(st.integers(1, 6), min_size=1, max_size=6), data=st.data())
def test_samples_may_be_split_into_micro_batches_in_any_order(
    objective: Any, seed: int, counts: list[int], data: st.DataObject
) -> None:
    leaf_N, rows = random_rows(seed, counts)
    whole_N = loss_of(objective, rows, leaf_N)
    (whole_grad_N,) = torch.autograd.grad(whole_N.sum(), leaf_N, retain_graph=True)
    order = data.draw(st.permutations(range(len(counts))))
    at = data.draw(st.integers(0, len(counts)))
    parts_N, total_grad_N = torch.zeros_like(whole_N), torch.zeros_like(whole_grad_N)
    for samples in (order[:at], order[at:]):
        keep, part = of_samples(rows, list(samples))
        part_N = loss_of(objective, part, leaf_N[keep])
        parts_N[keep] = part_N.detach()
        total_grad_N += torch.autograd.grad(part_N.sum(), leaf_N, retain_graph=True)[0]
    torch.testing.assert_close(parts_N, whole_N.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(total_grad_N, whole_grad_N, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("objective", COUPLED, ids=repr)
def test_rows_that_were_conditioned_may_be_cut_into_chunks(objective: Any) -> None:
    leaf_N, rows = random_rows(3, [5, 1, 4])
    ready = objective.condition(rows, leaf_N.detach())
    whole_N, _ = objective(ready)
    chunks = [slice(start, start + 3) for start in range(0, 10, 3)]
    cut_N = torch.cat([objective(ready.cut(chunk, ready.student_logits_NV[chunk]))[0] for chunk in chunks])
    torch.testing.assert_close(cut_N, whole_N)


def logits(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_the_power_advantage_has_the_gradient_of_the_density_power_divergence(power: float) -> None:
    vocab = 7
    student_V, log_q_V = logits(0, (vocab,)).requires_grad_(), logits(1, (vocab,)).log_softmax(-1)
    log_p_V = student_V.log_softmax(-1)
    rows = TokenRows(
        student_logits_NV=student_V.expand(vocab, vocab),
        tokens_N=torch.arange(vocab),
        behaviour_logp_N=log_p_V.detach(),
        teacher_logp_N=log_q_V,
    )
    loss_V, _ = PolicyGradient(**PLAIN, power=power)(rows)
    (expected_V,) = torch.autograd.grad((log_p_V.detach().exp() * loss_V).sum(), student_V, retain_graph=True)
    p_V, q_V = log_p_V.exp(), log_q_V.exp()
    terms_V = p_V ** (1 + power) - (1 + power) * p_V * q_V**power + power * q_V ** (1 + power)
    (exact_V,) = torch.autograd.grad(terms_V.sum() / (power * (1 + power)), student_V)
    torch.testing.assert_close(expected_V, exact_V)
    assert PolicyGradient(power=power).contract.optimises.startswith("the density power divergence of p from q")


def test_undiscounted_returns_have_the_expected_gradient_of_the_kl_of_whole_answers() -> None:
    """Answers of two tokens from a vocabulary of three: the second row depends on the first token."""
    vocab = 3
    first_V, second_VV = logits(0, (vocab,)).requires_grad_(), logits(1, (vocab, vocab)).requires_grad_()
    teacher = logits(2, (vocab,)).log_softmax(-1), logits(3, (vocab, vocab)).log_softmax(-1)
    log_p_VV = first_V.log_softmax(-1)[:, None] + second_VV.log_softmax(-1)
    log_q_VV = teacher[0][:, None] + teacher[1]
    exact = torch.autograd.grad((log_p_VV.exp() * (log_p_VV - log_q_VV)).sum(), (first_V, second_VV), retain_graph=True)

    objective = PolicyGradient(**PLAIN, discount=1.0)
    total = first_V.new_zeros(())
    for a, b in product(range(vocab), repeat=2):
        rows_NV = torch.stack([first_V, second_VV[a]])
        tokens_N = torch.tensor([a, b])
        logp_N = rows_NV.log_softmax(-1).gather(-1, tokens_N[:, None])[:, 0]
        rows = TokenRows(
            student_logits_NV=rows_NV,
            tokens_N=tokens_N,
            behaviour_logp_N=logp_N.detach(),
            teacher_logp_N=torch.stack([teacher[0][a], teacher[1][a, b]]),
            sample_N=torch.zeros(2, dtype=torch.int64),
        )
        total = total + log_p_VV[a, b].detach().exp() * loss_of(objective, rows, logp_N).sum()
    for got, want in zip(torch.autograd.grad(total, (first_V, second_VV)), exact, strict=True):
        torch.testing.assert_close(got, want)
    assert objective.contract.optimises.startswith("KL(p || q) of whole answers")


def test_half_precision_logits_are_computed_with_in_float32() -> None:
    student_NV, teacher_NV = logits(0, (4, 9)).bfloat16(), logits(1, (4, 9)).float()
    tokens_N = torch.arange(4)
    rows = TokenRows(
        student_logits_NV=student_NV.requires_grad_(),
        tokens_N=tokens_N,
        behaviour_logp_N=student_NV.detach().float().log_softmax(-1).gather(-1, tokens_N[:, None])[:, 0],
        teacher_logp_N=teacher_NV.log_softmax(-1).gather(-1, tokens_N[:, None])[:, 0],
    )
    exact = TokenRows(**{**vars(rows), "student_logits_NV": student_NV.detach().float()})
    for objective in (PolicyGradient(), SampledKL()):
        loss_N, _ = objective(rows)
        assert loss_N.dtype == torch.float32
        torch.testing.assert_close(loss_N.detach(), objective(exact)[0], rtol=1e-5, atol=1e-5)


def test_no_tensor_as_wide_as_the_vocabulary_is_kept_beside_the_logits() -> None:
    student_NV = logits(0, (3, 50)).requires_grad_()
    rows = TokenRows(
        student_logits_NV=student_NV,
        tokens_N=torch.tensor([1, 2, 3]),
        behaviour_logp_N=student_NV.detach().log_softmax(-1)[:, 0],
        teacher_logp_N=torch.full((3,), -1.0, dtype=torch.float64),
    )
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        PolicyGradient(**PLAIN)(rows)
    assert kept.count((3, 50)) == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SampledKL(estimator="k1"), "k1 as a loss optimises nothing"),
        (lambda: SampledKL(estimator="k4"), "there is no 'k4'"),
        (lambda: PolicyGradient(estimator="full_kl"), "its expected gradient is zero"),
        (lambda: PolicyGradient(estimator="k2", power=0.5), "objective.power: has no effect with estimator=k2"),
        (lambda: PolicyGradient(power=1.5), "objective.power: must be between 0 and 1"),
        (lambda: PolicyGradient(discount=-0.1), "objective.discount: must be between 0 and 1"),
        (lambda: PolicyGradient(discount=math.nan), "objective.discount: must be between 0 and 1"),
        (lambda: PolicyGradient(iw_gain=math.inf), "objective.iw_gain: must be between 0 and 1e+06"),
        (lambda: PolicyGradient(return_normalisation="length"), "return_normalisation: has no effect with discount=0"),
        (lambda: PolicyGradient(discount=0.5, iw_gain=0.5), "cannot be combined"),
        (lambda: PolicyGradient(advantage_clip=0.0), "objective.advantage_clip: must be between 1e-06 and 1e+06"),
    ],
)
def test_settings_that_are_wrong_ignored_or_teach_nothing_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)
