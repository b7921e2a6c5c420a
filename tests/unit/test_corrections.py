"""Off-policy corrections. Legend: N tokens."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill.config.models import ObjectiveConfig
from distill.errors import ConfigError, StudentError
from distill.objectives import build_objective
from distill.objectives.correction import Correction
from distill.objectives.corrections import (
    SAO,
    Clamp,
    DecoupledPPO,
    IcePop,
    IcePopPPO,
    ImportanceSampling,
    NoCorrection,
    ProbabilityDifference,
    ProbabilityDifferenceOneSided,
    SequenceGeometricMask,
    SequenceGeometricMaskTIS,
    SequenceGeometricTruncation,
    TruncatedImportanceSampling,
)
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import Place
from tests.builders_sampled import loss_of, one_row, random_rows, sampled_rows

quick = settings(deadline=None, max_examples=25)
EVERY: list[Any] = [
    NoCorrection(),
    ImportanceSampling(),
    TruncatedImportanceSampling(),
    Clamp(),
    SAO(),
    SAO(variant="surrogate"),
    SAO(variant="through"),
    IcePop(),
    IcePopPPO(),
    SequenceGeometricMask(),
    SequenceGeometricMaskTIS(),
    SequenceGeometricTruncation(),
    ProbabilityDifference(),
    ProbabilityDifferenceOneSided(),
    DecoupledPPO(),
    DecoupledPPO(cap=2.0),
    DecoupledPPO(alpha=0.3),
]
UNBOUNDED = (ImportanceSampling, ProbabilityDifference, ProbabilityDifferenceOneSided, DecoupledPPO)
BOUNDED = [*(one for one in EVERY if not isinstance(one, UNBOUNDED)), DecoupledPPO(cap=2.0)]
"""Those that no ratio can make infinite."""


def objective_with(importance: Correction) -> PolicyGradient:
    return PolicyGradient(importance=importance, advantage_clip=None)  # pyright: ignore[reportArgumentType]


def gradient(importance: Correction, leaf_N: Tensor, rows: Any) -> Tensor:
    loss_N = loss_of(objective_with(importance), rows, leaf_N)
    (grad_N,) = torch.autograd.grad(loss_N.sum(), leaf_N, retain_graph=True)
    return grad_N


@pytest.mark.parametrize("importance", [one for one in EVERY if one != SAO(variant="through")], ids=repr)
@quick
@given(seed=st.integers(0, 2**32 - 10), counts=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_tokens_of_the_present_student_have_the_plain_policy_gradient(
    importance: Correction, seed: int, counts: list[int]
) -> None:
    leaf_N, rows = random_rows(seed, counts)
    on_policy = sampled_rows(leaf_N, teacher_logp_N=rows.teacher_logp_N, sample_N=rows.sample_N)
    want_N = rows.teacher_logp_N - leaf_N.detach()
    torch.testing.assert_close(gradient(importance, leaf_N, on_policy), -want_N, rtol=1e-9, atol=1e-12)


def test_the_gradient_through_the_weight_is_said_to_optimise_something_else() -> None:
    through = objective_with(SAO(variant="through"))
    assert through.contract.optimises.startswith("neither")
    leaf_N = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    rows = sampled_rows(leaf_N, teacher_logp_N=torch.tensor([-0.2], dtype=torch.float64))
    (grad_N,) = torch.autograd.grad(through(rows)[0].sum(), leaf_N)
    assert float(grad_N) == pytest.approx(-0.3 * (1 + -0.5))
    assert objective_with(SAO()).contract.optimises.startswith("KL(p || q)")


@pytest.mark.parametrize("importance", BOUNDED, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("gap", [-2000.0, -100.0, 100.0, 2000.0])
def test_no_ratio_however_far_makes_a_loss_or_a_gradient_that_is_no_number(
    importance: Correction, dtype: torch.dtype, sign: float, gap: float
) -> None:
    """A token of the batch was sampled with a probability e^100 or e^2000 times too small or too large."""
    leaf_N = torch.tensor([-1.0 if gap > 0 else -1.0 + gap / 25, -1.0], dtype=dtype).requires_grad_()
    behaviour_N = torch.tensor([min(float(leaf_N[0].detach()) - gap, 0.0), -1.1], dtype=dtype)
    rows = sampled_rows(
        leaf_N,
        behaviour_logp_N=behaviour_N,
        advantage_N=torch.tensor([sign, sign], dtype=dtype),
        sample_N=torch.tensor([0, 1]),
    )
    assert bool(gradient(importance, leaf_N, rows).isfinite().all())


def test_a_ratio_that_overflows_harms_no_token_that_a_probability_has_left_out() -> None:
    rising = {"log_p": -1.0, "log_mu": -900.0}
    one_row_N = one_row(**rising, log_q=-0.5)
    loss_1, metrics = objective_with(ProbabilityDifference(kl_tau=0.0))(one_row_N)
    assert (float(loss_1), float(metrics["gated_high"])) == (0.0, 1.0)
    with pytest.raises(StudentError, match="row 0"):
        objective_with(ProbabilityDifference())(one_row(**rising, log_q=-3.0))
    with pytest.raises(StudentError, match="row 0"):
        objective_with(ProbabilityDifferenceOneSided())(one_row_N)


@pytest.mark.parametrize("importance", [ImportanceSampling(), DecoupledPPO()], ids=repr)
def test_a_ratio_that_nothing_bounds_is_an_error_of_the_weight_when_it_overflows(importance: Correction) -> None:
    place = Place("sample s, teacher t, response token 7", "s", "t")
    rows = replace(one_row(log_p=-1.0, log_mu=-900.0, log_q=-0.5), describe=lambda _row: place)
    with pytest.raises(StudentError) as caught:
        objective_with(importance)(rows)
    error = caught.value
    assert error.what == (
        "sample s, teacher t, response token 7: the importance weight p/mu of the sampled token overflows: log p is -1 "
        "and log mu -900, so the log ratio is 899"
    )
    assert "no bound" in error.why and "objective.importance=tis" in error.fix and "diverge" not in str(error)
    assert (error.sample_id, error.teacher) == ("s", "t")


def test_the_error_of_an_overflowing_weight_warns_of_nothing_else() -> None:
    row = one_row(log_p=-1.0, log_mu=-900.0, log_q=-0.5)
    row = replace(row, student_logits_NV=row.student_logits_NV.requires_grad_())
    with warnings.catch_warnings(), pytest.raises(StudentError, match=r"the importance weight p/mu .* overflows"):
        warnings.simplefilter("error")
        objective_with(ImportanceSampling())(row)


def test_a_sample_is_left_out_whole_where_its_mean_ratio_is_out_of_the_band() -> None:
    logp_N = torch.full((5,), -1.0, dtype=torch.float64)
    behaviour_N = logp_N - torch.tensor([0.3, -0.3, 0.0, 0.5, 0.1], dtype=torch.float64)
    rows = sampled_rows(logp_N, behaviour_logp_N=behaviour_N, sample_N=torch.tensor([0, 0, 0, 1, 1]))
    objective = objective_with(SequenceGeometricMask(low=0.9, high=1.1))
    assert objective.condition(rows, logp_N).gate_N.tolist() == [1, 1, 1, 0, 0]
    capped = objective_with(SequenceGeometricTruncation(cap=1.2)).condition(rows, logp_N).gate_N
    assert capped.tolist() == pytest.approx([1, 1, 1, 1.2, 1.2])


def test_the_interpolated_proximal_policy_is_mu_at_0_and_the_student_at_1() -> None:
    leaf_N, rows = random_rows(5, [6])
    advantage_N = rows.teacher_logp_N - leaf_N.detach()
    ratio_N = (leaf_N.detach() - rows.behaviour_logp_N).exp()
    at_student = gradient(DecoupledPPO(alpha=1.0), leaf_N, rows)
    torch.testing.assert_close(at_student, -ratio_N * advantage_N)
    torch.testing.assert_close(at_student, gradient(DecoupledPPO(), leaf_N, rows))
    clipped_N = ((ratio_N > 1.2) & (advantage_N > 0)) | ((ratio_N < 0.8) & (advantage_N < 0))
    want_N = (-ratio_N * advantage_N).masked_fill(clipped_N, 0.0)
    torch.testing.assert_close(gradient(DecoupledPPO(alpha=0.0), leaf_N, rows), want_N)


def test_a_given_proximal_policy_is_what_ppo_clips_against() -> None:
    rows = one_row(log_p=-1.0, log_mu=-1.2, log_q=-0.5, prox_logp_N=torch.tensor([-1.1], dtype=torch.float64))
    loss_1, _ = objective_with(DecoupledPPO())(rows)
    assert float(loss_1) == pytest.approx(-math.exp(0.1) * math.exp(0.1) * 0.5)
    far = one_row(log_p=-1.0, log_mu=-1.2, log_q=-0.5, prox_logp_N=torch.tensor([-2.0], dtype=torch.float64))
    assert float(objective_with(DecoupledPPO())(far)[0]) == pytest.approx(-math.exp(-0.8) * 1.2 * 0.5)


@pytest.mark.parametrize("importance", EVERY, ids=repr)
def test_every_correction_can_be_asked_for_by_its_name_and_settings(importance: Any) -> None:
    written = {"name": "policy_gradient", "advantage_clip": None, "importance": vars(importance)}
    assert build_objective(ObjectiveConfig.model_validate(written)) == objective_with(importance)
    by_name = build_objective(ObjectiveConfig(name="policy_gradient", importance=importance.name))  # pyright: ignore[reportCallIssue]
    assert getattr(by_name, "importance") == type(importance)()  # noqa: B009


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        ("tsi", "objective.importance: there is no 'tsi'\n  fix: did you mean 'tis'?"),
        ({"cap": 2.0}, "objective.importance must be a name, or a mapping of `name` and settings, and is {'cap': 2.0}"),
        (5, "objective.importance must be a name, or a mapping of `name` and settings, and is 5"),
        (
            {"name": "tis", "low": 0.5},
            "unknown key objective.importance.low\n  fix: keys of objective.importance: name, cap",
        ),
        (
            {"name": "sao", "eps_hgh": 3},
            "unknown key objective.importance.eps_hgh\n  fix: did you mean objective.importance.eps_high?",
        ),
        ({"name": "tis", "cap": "2"}, "objective.importance.cap must be a number, and is '2'"),
        ({"name": "tis", "cap": True}, "objective.importance.cap must be a number, and is true"),
        ({"name": "tis", "cap": math.inf}, "objective.importance.cap must be a finite number, and is inf"),
        ({"name": "decoupled_ppo", "cap": False}, "objective.importance.cap must be a number, and is false"),
        ({"name": "sao", "variant": "both"}, "objective.importance.variant must be one of 'detached', 'through' or"),
        ({"name": "tis", "cap": 0.5}, "objective.importance.cap (tis): must be at least 1"),
        ({"name": "decoupled_ppo", "alpha": 2}, "objective.importance.alpha (decoupled_ppo): must be between 0 and 1"),
    ],
)
def test_a_correction_that_is_written_wrongly_is_refused_with_its_key(importance: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_objective(ObjectiveConfig.model_validate({"name": "policy_gradient", "importance": importance}))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: IcePop(low=1.5),
        lambda: IcePop(low=1.0, high=1.0),
        lambda: IcePop(low=math.nan),
        lambda: Clamp(high=0.9),
        lambda: SequenceGeometricMask(low=1.01, high=1.1),
        lambda: IcePopPPO(low=2.0, high=3.0),
        lambda: SAO(eps_low=0.0),
        lambda: SAO(eps_high=-1.0),
        lambda: TruncatedImportanceSampling(cap=0.9),
        lambda: SequenceGeometricTruncation(cap=math.nan),
        lambda: DecoupledPPO(eps=0.0),
        lambda: DecoupledPPO(cap=0.5),
        lambda: ProbabilityDifference(high=0.0),
        lambda: ProbabilityDifference(kl_tau=-1.0),
    ],
)
def test_bounds_that_leave_out_the_present_students_own_tokens_are_refused(build: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"objective\.importance"):
        build()
