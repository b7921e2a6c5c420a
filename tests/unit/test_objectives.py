"""Properties and refusals of the objectives. Legend: N rows, V common vocabulary, K top-k."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill.errors import ConfigError, StudentError, TeacherError
from distill.objectives.divergence import JSD, ForwardKL, ReverseKL
from distill.objectives.formulas import kl, log_outside, smooth
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import TokenRows

TOPK: dict[str, Any] = {"support": "teacher_topk", "k": 3}
DIVERGENCES = [
    ReverseKL(),
    ForwardKL(),
    JSD(beta=0.3),
    JSD(beta=0.0),
    JSD(beta=1.0),
    ReverseKL(teacher_smoothing=0.1),
    ReverseKL(**TOPK),
    ForwardKL(**TOPK),
    JSD(**TOPK),
    ReverseKL(**TOPK, tail=False),
    ForwardKL(**TOPK, tail=False),
]
quick = settings(deadline=None, max_examples=30)
every_divergence = pytest.mark.parametrize("objective", DIVERGENCES, ids=repr)
every_objective = pytest.mark.parametrize("objective", [*DIVERGENCES, PolicyGradient()], ids=repr)


def rows_from(student_NV: Tensor, teacher_NV: Tensor, *, k: int = 3, **changes: Any) -> TokenRows:
    """Rows with every signal, of a teacher whose logits are `teacher_NV`; token 0 was sampled."""
    logq_NV = teacher_NV.log_softmax(-1)
    top = logq_NV.topk(k, -1)
    count = len(student_NV)
    values = {
        "tokens_N": torch.zeros(count, dtype=torch.int64),
        "behaviour_logp_N": student_NV.detach().log_softmax(-1)[:, 0],
        "teacher_logp_N": logq_NV[:, 0],
        "full_logp_NV": logq_NV,
        "topk_ids_NK": top.indices,
        "topk_logp_NK": top.values,
        "log_tail_N": log_outside(teacher_NV, top.indices) if k < teacher_NV.shape[-1] else None,
    }
    return TokenRows(student_logits_NV=student_NV, **(values | changes))


def random_logits(seed: int, scale: float = 2.0, shape: tuple[int, int] = (5, 9)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def gradient(objective: Any, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    student_NV = student_NV.clone().requires_grad_()
    loss_N, _ = objective(rows_from(student_NV, teacher_NV))
    return torch.autograd.grad(loss_N.sum(), student_NV)[0]


@every_divergence
@quick
@given(seed=st.integers(0, 2**32), scale=st.floats(0.01, 20))
def test_a_divergence_is_never_negative(objective: Any, seed: int, scale: float) -> None:
    loss_N, metrics = objective(rows_from(random_logits(seed, scale), random_logits(seed + 1, scale)))
    assert loss_N.shape == (5,)
    assert bool((loss_N >= -1e-12).all())
    assert bool((metrics["kl"] >= -1e-12).all())


@pytest.mark.parametrize("objective", [o for o in DIVERGENCES if not getattr(o, "teacher_smoothing", 0)], ids=repr)
@quick
@given(seed=st.integers(0, 2**32), shift=st.floats(-50, 50))
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(objective: Any, seed: int, shift: float) -> None:
    teacher_NV = random_logits(seed)
    student_NV = (teacher_NV + shift).requires_grad_()
    loss_N, metrics = objective(rows_from(student_NV, teacher_NV))
    (grad_NV,) = torch.autograd.grad(loss_N.sum(), student_NV)
    for values in (loss_N.detach(), metrics["kl"], grad_NV):
        torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=1e-10)


@every_divergence
@quick
@given(seed=st.integers(0, 2**32))
def test_a_step_against_the_gradient_lowers_the_divergence(objective: Any, seed: int) -> None:
    student_NV, teacher_NV = random_logits(seed), random_logits(seed + 1)
    grad_NV = gradient(objective, student_NV, teacher_NV)
    before, _ = objective(rows_from(student_NV, teacher_NV))
    after, _ = objective(rows_from(student_NV - 1e-4 * grad_NV, teacher_NV))
    assert float(after.sum()) < float(before.sum())


@every_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_ten_thousand_give_finite_values_and_gradients(objective: Any, dtype: torch.dtype) -> None:
    student_NV = torch.tensor([[1e4, -1e4, 0.0, 1.0, 2.0], [0.0, 1e4, 1e4, -1e4, 3.0]], dtype=dtype)
    teacher_NV = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [1e4, 1e4, 0.0, 1.0, -1e4]], dtype=dtype)
    student_NV.requires_grad_()
    loss_N, _ = objective(rows_from(student_NV, teacher_NV))
    (grad_NV,) = torch.autograd.grad(loss_N.sum(), student_NV)
    assert loss_N.dtype == dtype
    assert bool(loss_N.isfinite().all())
    assert bool(grad_NV.isfinite().all())


@pytest.mark.parametrize("objective", [ReverseKL(), ForwardKL(), JSD(), ForwardKL(**TOPK), JSD(**TOPK)], ids=repr)
def test_columns_that_neither_model_allows_change_nothing(objective: Any) -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    padded = [torch.nn.functional.pad(logits, (0, 2), value=-torch.inf) for logits in (student_NV, teacher_NV)]
    torch.testing.assert_close(
        objective(rows_from(*padded))[0], objective(rows_from(student_NV, teacher_NV))[0], rtol=1e-12, atol=1e-12
    )
    grad_NV = gradient(objective, *padded)
    torch.testing.assert_close(grad_NV[:, :-2], gradient(objective, student_NV, teacher_NV), rtol=1e-12, atol=1e-12)
    assert not grad_NV[:, -2:].any()


@pytest.mark.parametrize("kind", [ReverseKL, ForwardKL, JSD])
def test_a_top_k_of_the_whole_vocabulary_is_the_full_divergence(kind: Callable[..., Any]) -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    full_N, full_metrics = kind()(rows_from(student_NV, teacher_NV))
    topk_N, topk_metrics = kind(support="teacher_topk", k=9)(rows_from(student_NV, teacher_NV, k=9))
    torch.testing.assert_close(topk_N, full_N)
    torch.testing.assert_close(topk_metrics["kl"], full_metrics["kl"])


def test_metrics_carry_no_gradient_and_say_what_they_should() -> None:
    student_NV = random_logits(0).requires_grad_()
    teacher_NV = random_logits(1)
    log_p, log_q = student_NV.detach().log_softmax(-1), teacher_NV.log_softmax(-1)
    _, metrics = JSD()(rows_from(student_NV, teacher_NV))
    torch.testing.assert_close(metrics["kl"], (log_p.exp() * (log_p - log_q)).sum(-1))
    gap_N = (log_p.exp() * log_p).sum(-1) - (log_q.exp() * log_q).sum(-1)
    torch.testing.assert_close(metrics["entropy_gap"], gap_N)
    assert not any(values.requires_grad for values in metrics.values())
    assert set(JSD(**TOPK)(rows_from(student_NV, teacher_NV))[1]) == {"kl"}


def test_the_direction_of_a_kl_is_what_its_name_says() -> None:
    student_NV, teacher_NV = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.9, 0.1]]).log()
    reverse = 0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.1)
    forward = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    assert float(ReverseKL()(rows_from(student_NV, teacher_NV, k=1))[0]) == pytest.approx(reverse)
    assert float(ForwardKL()(rows_from(student_NV, teacher_NV, k=1))[0]) == pytest.approx(forward)


def test_smoothing_mixes_in_the_uniform_distribution_and_leaves_the_metric_alone() -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    mixed_NV = 0.95 * teacher_NV.softmax(-1) + 0.05 / 9
    torch.testing.assert_close(smooth(teacher_NV.log_softmax(-1), 0.05).exp(), mixed_NV)
    loss_N, metrics = ReverseKL(teacher_smoothing=0.05)(rows_from(student_NV, teacher_NV))
    torch.testing.assert_close(loss_N, kl(student_NV.log_softmax(-1), mixed_NV.log()))
    torch.testing.assert_close(metrics["kl"], ReverseKL()(rows_from(student_NV, teacher_NV))[0])


def test_a_student_sure_to_nine_digits_has_a_bounded_tail_gradient() -> None:
    student_NV = torch.tensor([[25.0, 1.0, 0.0, -1.0]])
    grad_NV = gradient(ReverseKL(support="teacher_topk", k=3), student_NV, torch.tensor([[2.0, 1.0, 0.5, -3.0]]))
    assert float(grad_NV.abs().max()) < 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5], ids=["nan", "inf", "positive"])
@every_objective
def test_a_broken_teacher_row_is_an_error_that_names_it(objective: Any, bad: float) -> None:
    good = rows_from(random_logits(0), random_logits(1))
    for name in ("full_logp_NV", "topk_logp_NK", "teacher_logp_N"):
        getattr(good, name)[3] = bad
    rows = TokenRows(**{**vars(good), "describe": lambda row: f"sample s{row}"})
    with pytest.raises(TeacherError, match=r"sample s3: the teacher's .* holds NaN, \+inf or a value above 0"):
        objective(rows)


def test_a_broken_tail_is_an_error() -> None:
    tail_N = torch.zeros(5, dtype=torch.float64)
    tail_N[2] = math.nan
    with pytest.raises(TeacherError, match=r"row 2: the teacher's log_tail"):
        ReverseKL(**TOPK)(rows_from(random_logits(0), random_logits(1), log_tail_N=tail_N))


@pytest.mark.parametrize("objective", [ReverseKL(), JSD(beta=1.0)], ids=repr)
def test_a_teacher_zero_where_the_student_is_not_is_an_error_for_reverse_kl(objective: Any) -> None:
    teacher_NV = random_logits(1)
    teacher_NV[4, 2] = -math.inf
    with pytest.raises(TeacherError, match=r"row 4: .*q = 0 where p > 0"):
        objective(rows_from(random_logits(0), teacher_NV))


@pytest.mark.parametrize("objective", [ForwardKL(), JSD(), ReverseKL(teacher_smoothing=0.1)], ids=repr)
def test_a_teacher_zero_is_fine_for_the_divergences_that_stay_finite(objective: Any) -> None:
    teacher_NV = random_logits(1)
    teacher_NV[4, 2] = -math.inf
    assert bool(gradient(objective, random_logits(0), teacher_NV).isfinite().all())


def test_a_student_zero_where_the_teacher_is_not_is_an_error_for_forward_kl() -> None:
    student_NV = random_logits(0)
    student_NV[1, 2] = -math.inf
    with pytest.raises(StudentError, match=r"row 1: .*p = 0 where q > 0"):
        ForwardKL()(rows_from(student_NV, random_logits(1)))


@every_objective
def test_broken_logits_of_the_student_are_an_error(objective: Any) -> None:
    student_NV = random_logits(0)
    student_NV[2, 1] = math.nan
    with pytest.raises(StudentError, match=r"row 2: the student's logits hold NaN"):
        objective(rows_from(student_NV, random_logits(1)))


def test_a_signal_that_the_teacher_did_not_give_is_an_error() -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    with pytest.raises(TeacherError, match="no full_logp"):
        ReverseKL()(rows_from(student_NV, teacher_NV, full_logp_NV=None))
    with pytest.raises(TeacherError, match="no log_tail"):
        ReverseKL(**TOPK)(rows_from(student_NV, teacher_NV, log_tail_N=None))


def test_top_k_ids_that_repeat_or_leave_the_vocabulary_are_an_error() -> None:
    for ids in ([1, 1, 2], [1, 2, 9], [-1, 2, 3]):
        ids_NK = torch.tensor([[0, 1, 2]] * 4 + [ids])
        with pytest.raises(TeacherError, match=r"row 4: .*an id twice, or one outside"):
            ReverseKL(**TOPK)(rows_from(random_logits(0), random_logits(1), topk_ids_NK=ids_NK))


def test_a_top_k_of_another_size_than_asked_for_is_an_error() -> None:
    with pytest.raises(TeacherError, match=r"asked for \(5, 3\)"):
        ReverseKL(**TOPK)(rows_from(random_logits(0), random_logits(1), k=2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ReverseKL(support="student_topk", k=4), "student_topk is not available yet"),
        (lambda: ReverseKL(support="teacher_topkk", k=4), "no 'teacher_topkk'"),
        (lambda: ReverseKL(support="teacher_topk"), "objective.k: must be at least 1"),
        (lambda: ReverseKL(k=4), "objective.k: has no effect with support=full"),
        (lambda: JSD(tail=False), "objective.tail: has no effect with support=full"),
        (lambda: JSD(support="teacher_topk", k=1, tail=False), "optimises nothing"),
        (lambda: JSD(beta=1.5), "objective.beta: must be between 0 and 1"),
        (lambda: JSD(beta=math.nan), "objective.beta: must be between 0 and 1"),
        (lambda: ReverseKL(teacher_smoothing=1.0), "objective.teacher_smoothing"),
        (lambda: ReverseKL(**TOPK, teacher_smoothing=0.1), "needs the full vocabulary"),
        (lambda: PolicyGradient(importance="none", tis_cap=3.0), "objective.tis_cap: has no effect"),
        (lambda: PolicyGradient(importance="tis", band_low=0.1), "objective.band_low: has no effect"),
        (lambda: PolicyGradient(importance="tis", tis_cap=0.0), "objective.tis_cap: must be above 0"),
        (lambda: PolicyGradient(band_low=1.5), "must have 1 inside"),
        (lambda: PolicyGradient(advantage_clip=0.0), "objective.advantage_clip: must be above 0"),
    ],
)
def test_settings_that_are_wrong_ignored_or_teach_nothing_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)


def one_row(*, log_p: float, log_mu: float, log_q: float) -> TokenRows:
    """A row whose sampled token has probability p under the student, mu when it was sampled, q under the teacher."""
    p = math.exp(log_p)
    logits_1V = torch.tensor([[p, 1 - p]], dtype=torch.float64).log()
    single = {"behaviour_logp_N": log_mu, "teacher_logp_N": log_q}
    return TokenRows(
        student_logits_NV=logits_1V,
        tokens_N=torch.zeros(1, dtype=torch.int64),
        **{name: torch.tensor([value], dtype=torch.float64) for name, value in single.items()},
    )


@pytest.mark.parametrize(
    ("settings", "ratio", "weight"),
    [
        ({"importance": "none"}, 100.0, 1.0),
        ({"importance": "tis"}, 1.5, 1.5),
        ({"importance": "tis"}, 100.0, 2.0),
        ({"importance": "tis", "tis_cap": 5.0}, 4.0, 4.0),
        ({}, 1.5, 1.5),
        ({}, 2.5, 0.0),
        ({}, 0.4, 0.0),
        ({"band_high": 3.0}, 2.5, 2.5),
    ],
)
def test_the_importance_weight_is_gated_as_named(settings: dict[str, Any], ratio: float, weight: float) -> None:
    log_p = -2.0
    rows = one_row(log_p=log_p, log_mu=log_p - math.log(ratio), log_q=-1.0)
    loss_1, metrics = PolicyGradient(**settings)(rows)
    assert float(loss_1) == pytest.approx(-weight * 1.0 * log_p)
    assert float(metrics["kl"]) == pytest.approx(-1.0)


def test_the_advantage_is_clipped_on_both_sides_and_a_ratio_that_overflows_stays_finite() -> None:
    rows = one_row(log_p=-2.0, log_mu=-2.0, log_q=-40.0)
    assert float(PolicyGradient()(rows)[0]) == pytest.approx(-5.0 * 2.0)
    far = one_row(log_p=-2.0, log_mu=-2000.0, log_q=-1.0)
    assert float(PolicyGradient(importance="tis")(far)[0]) == pytest.approx(2.0 * 2.0)
    assert float(PolicyGradient()(far)[0]) == 0.0


def test_a_sampled_token_without_a_probability_is_an_error() -> None:
    with pytest.raises(StudentError, match="log-probability of the sampled token is nan"):
        PolicyGradient()(one_row(log_p=-2.0, log_mu=math.nan, log_q=-1.0))


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, distill.objectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
