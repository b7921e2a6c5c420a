"""Values, metrics, errors and refusals of the divergences. Legend: N rows, V common vocabulary, K top-k."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.errors import ConfigError, StudentError, TeacherError
from distill.objectives.divergence import JSD, ForwardKL, ReverseKL, SkewKL, TotalVariation
from distill.objectives.formulas import Pair, jsd, smooth
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import Place
from tests.builders_objectives import gradient, random_logits, rows_for

TOPK: dict[str, Any] = {"support": "teacher_topk", "k": 3}
UNION: dict[str, Any] = {"support": "union", "k": 3}
OBJECTIVES: list[Any] = [
    ReverseKL(),
    ForwardKL(),
    JSD(),
    SkewKL(),
    TotalVariation(),
    ReverseKL(**TOPK),
    ForwardKL(**UNION),
    PolicyGradient(),
]
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{type(o).__name__}-{o.spec.signal}")


@pytest.mark.parametrize("kind", [ReverseKL, ForwardKL, JSD, SkewKL, TotalVariation])
@pytest.mark.parametrize("support", ["teacher_topk", "student_topk", "union"])
@pytest.mark.parametrize("form", ["tail", "renormalised"])
def test_a_top_k_of_the_whole_vocabulary_is_the_full_divergence(
    kind: Callable[..., Any], support: str, form: str
) -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    full_N, full_metrics = kind()(rows_for(kind(), student_NV, teacher_NV))
    whole = kind(support=support, k=9, form=form)
    topk_N, topk_metrics = whole(rows_for(whole, student_NV, teacher_NV))
    torch.testing.assert_close(topk_N, full_N)
    torch.testing.assert_close(topk_metrics["kl"], full_metrics["kl"])
    torch.testing.assert_close(
        gradient(whole, student_NV, teacher_NV), gradient(kind(), student_NV, teacher_NV), rtol=1e-9, atol=1e-12
    )


def test_a_tail_that_a_teacher_rounded_is_nothing_where_the_ids_are_the_whole_vocabulary() -> None:
    """In one row of a union only; the other one needs its tail."""
    student_NV, teacher_NV = random_logits(0, (2, 4)), random_logits(1, (2, 4))
    whole_NK = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]])
    log_q_NV = teacher_NV.log_softmax(-1)
    rows = rows_for(
        ForwardKL(support="union", k=2),
        student_NV,
        teacher_NV,
        topk_ids_NK=whole_NK,
        topk_logp_NK=torch.stack([log_q_NV[0], log_q_NV[1].where(torch.arange(4) < 2, -torch.inf)]),
        log_tail_N=torch.stack([torch.tensor(-20.0, dtype=torch.float64), log_q_NV[1, 2:].logsumexp(-1)]),
    )
    loss_N, _ = ForwardKL(support="union", k=2)(rows)
    full_N, _ = ForwardKL()(rows_for(ForwardKL(), student_NV, teacher_NV))
    torch.testing.assert_close(loss_N[0], full_N[0])
    assert 0 < float(loss_N[1]) < float(full_N[1])


def values_of(objective: Any, student_NV: Tensor, teacher_NV: Tensor, **changes: Any) -> tuple[Tensor, Any]:
    return objective(rows_for(objective, student_NV, teacher_NV, **changes))


def test_metrics_carry_no_gradient_and_say_what_they_should() -> None:
    student_NV, teacher_NV = random_logits(0).requires_grad_(), random_logits(1)
    log_p, log_q = student_NV.detach().log_softmax(-1), teacher_NV.log_softmax(-1)
    _, metrics = values_of(JSD(), student_NV, teacher_NV)
    torch.testing.assert_close(metrics["kl"], (log_p.exp() * (log_p - log_q)).sum(-1))
    gap_N = (log_p.exp() * log_p).sum(-1) - (log_q.exp() * log_q).sum(-1)
    torch.testing.assert_close(metrics["entropy_gap"], gap_N)
    assert not any(values.requires_grad for values in metrics.values())


def test_the_overlap_of_two_top_ks_is_what_they_share() -> None:
    student_NV = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0], [4.0, 3.0, 2.0, 1.0, 0.0]])
    teacher_NV = torch.tensor([[9.0, 8.0, 0.0, 1.0, 7.0], [0.0, 1.0, 9.0, 8.0, 7.0]])
    for settings in (TOPK, UNION):
        _, metrics = values_of(ReverseKL(**settings), student_NV, teacher_NV)
        torch.testing.assert_close(metrics["overlap"], torch.tensor([2 / 3, 1 / 3]))
    assert set(values_of(ReverseKL(support="student_topk", k=3), student_NV, teacher_NV)[1]) == {"kl"}


def test_the_metric_kl_of_a_truncated_sum_is_the_corrected_one() -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    cut_N, metrics = values_of(ReverseKL(**TOPK, form="truncated"), student_NV, teacher_NV)
    corrected_N, _ = values_of(ReverseKL(**TOPK, form="corrected"), student_NV, teacher_NV)
    torch.testing.assert_close(metrics["kl"], corrected_N)
    assert bool((cut_N < corrected_N).any())


def test_the_direction_of_a_kl_is_what_its_name_says() -> None:
    student_NV, teacher_NV = torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.9, 0.1]]).log()
    reverse = 0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.1)
    forward = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    for objective in (ReverseKL(), SkewKL(direction="reverse", alpha=0.0), JSD(beta=1.0)):
        assert float(values_of(objective, student_NV, teacher_NV)[0]) == pytest.approx(reverse)
    for objective in (ForwardKL(), SkewKL(alpha=0.0), JSD(beta=0.0)):
        assert float(values_of(objective, student_NV, teacher_NV)[0]) == pytest.approx(forward)
    assert float(values_of(TotalVariation(), student_NV, teacher_NV)[0]) == pytest.approx(0.3)


VARIATIONS: list[Any] = [
    TotalVariation(),
    TotalVariation(support="teacher_topk", k=8),
    TotalVariation(support="student_topk", k=8, form="renormalised"),
]


def rest_of(log_q_NK: Tensor) -> Tensor:
    """The log tail as a client has it that knows the top k alone."""
    return torch.log1p(-log_q_NK.double().exp().sum(-1)).to(log_q_NK.dtype)


@pytest.mark.parametrize("objective", VARIATIONS, ids=repr)
@pytest.mark.parametrize(("vocab", "scale"), [(64, 1.0), (1000, 3.0), (50_000, 5.0)])
def test_rounding_alone_is_no_total_variation_to_learn_from(objective: Any, vocab: int, scale: float) -> None:
    """The teacher is the student, by another way of computing it: nothing but the last digits differ."""
    student_NV = random_logits(3, (16, vocab), scale=scale).float()
    rows = rows_for(objective, student_NV.requires_grad_(), student_NV.detach().double())
    signal: dict[str, Tensor] = {}
    if rows.topk_logp_NK is None:
        assert rows.full_logp_NV is not None
        signal["full_logp_NV"] = rows.full_logp_NV.float()
    else:
        signal["topk_logp_NK"] = rows.topk_logp_NK.float()
        signal["log_tail_N"] = rest_of(signal["topk_logp_NK"])
    loss_N, _ = objective(replace(rows, **signal))
    assert 0 < float(loss_N.detach().max()) < 1e-5, "they do differ"
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), student_NV)
    assert bool((gradient_NV == 0).all())


@pytest.mark.parametrize("objective", VARIATIONS, ids=repr)
def test_a_total_variation_of_a_tenth_of_a_percent_is_learnt_from(objective: Any) -> None:
    teacher_NV = random_logits(4, (6, 40), scale=1.0).float()
    nudge_NV = 1e-3 * torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0)
    found_NV = gradient(objective, teacher_NV + nudge_NV, teacher_NV)
    exact_NV = gradient(objective, (teacher_NV + nudge_NV).double(), teacher_NV.double())
    torch.testing.assert_close(found_NV.double(), exact_NV, rtol=1e-4, atol=1e-6)
    assert float(found_NV.abs().amax(-1).min()) > 1e-2


@pytest.mark.parametrize(("near_0", "end"), [(True, ForwardKL()), (False, ReverseKL())])
def test_a_scaled_jsd_runs_from_one_kl_to_the_other(near_0: bool, end: Any) -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    end_N, _ = values_of(end, student_NV, teacher_NV)
    pair = Pair.of(student_NV.log_softmax(-1), teacher_NV.log_softmax(-1))
    limit_N, _ = jsd(pair, beta=1e-8 if near_0 else 1 - 1e-8, scaled=True)
    torch.testing.assert_close(limit_N, end_N, rtol=1e-4, atol=0)
    # as near as a configuration may come
    beta = 1e-6 if near_0 else 1 - 1e-6
    torch.testing.assert_close(
        values_of(JSD(beta=beta, scaled=True), student_NV, teacher_NV)[0], end_N, rtol=2e-4, atol=0
    )
    assert float(values_of(JSD(beta=beta), student_NV, teacher_NV)[0].max()) < 1e-4


def test_smoothing_mixes_in_the_uniform_distribution_and_leaves_the_metric_alone() -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    mixed_NV = 0.95 * teacher_NV.softmax(-1) + 0.05 / 9
    torch.testing.assert_close(smooth(teacher_NV.log_softmax(-1), 0.05).exp(), mixed_NV)
    loss_N, metrics = values_of(ReverseKL(teacher_smoothing=0.05), student_NV, teacher_NV)
    torch.testing.assert_close(loss_N, values_of(ReverseKL(), student_NV, mixed_NV.log())[0])
    torch.testing.assert_close(metrics["kl"], values_of(ReverseKL(), student_NV, teacher_NV)[0])


def test_a_student_sure_to_nine_digits_has_a_bounded_tail_gradient() -> None:
    student_NV = torch.tensor([[25.0, 1.0, 0.0, -1.0]])
    grad_NV = gradient(ReverseKL(**TOPK), student_NV, torch.tensor([[2.0, 1.0, 0.5, -3.0]]))
    assert float(grad_NV.abs().max()) < 1.0


def test_a_tail_mass_of_1e_minus_30_has_all_its_digits_in_float32() -> None:
    student_NV = torch.tensor([[80.0, 10.0, 9.0, 8.0]])
    teacher_NV = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    one = ForwardKL(support="student_topk", k=1)
    narrow_N, wide_N = (values_of(one, s, t)[0] for s, t in ((student_NV, teacher_NV), (student_NV.double(),) * 2))
    tail = float(student_NV.double().softmax(-1)[0, 1:].sum())
    q = float(teacher_NV.double().softmax(-1)[0, 0])
    want = q * math.log(q / (1 - tail)) + (1 - q) * (math.log1p(-q) - math.log(tail))
    assert float(narrow_N) == pytest.approx(want, rel=1e-6)
    assert float(wide_N) == pytest.approx(0.0, abs=1e-12)


def describe(row: int) -> Place:
    return Place(f"sample s{row}", sample_id=f"s{row}", teacher="math")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5], ids=["nan", "inf", "positive"])
@every_objective
def test_a_broken_teacher_row_is_an_error_that_names_it(objective: Any, bad: float) -> None:
    rows = rows_for(objective, random_logits(0), random_logits(1), describe=describe)
    for signal in (rows.full_logp_NV, rows.topk_logp_NK, rows.teacher_logp_N):
        if signal is not None:
            signal[3] = bad
    with pytest.raises(TeacherError, match=r"sample s3: the teacher's .* holds NaN, \+inf or a value above 0"):
        objective(rows)


def test_a_broken_tail_is_an_error() -> None:
    tail_N = torch.full((5,), -3.0, dtype=torch.float64)
    tail_N[2] = math.nan
    with pytest.raises(TeacherError, match=r"row 2: the teacher's log_tail"):
        values_of(ReverseKL(**TOPK), random_logits(0), random_logits(1), log_tail_N=tail_N)


STUDENT_TOPK: dict[str, Any] = {"support": "student_topk", "k": 3}
TOP_K_FORMS = [
    ForwardKL(**support, form=form)
    for support in (TOPK, UNION, STUDENT_TOPK)
    for form in ("tail", "renormalised", "truncated", "corrected")
]
every_form = pytest.mark.parametrize("objective", TOP_K_FORMS, ids=lambda o: f"{o.support}-{o.form}")


@every_form
@pytest.mark.parametrize(
    ("member", "damage", "said"),
    [
        ("topk_logp_NK", -60.0, "probabilities and its tail add up to .*, not 1"),
        ("topk_logp_NK", -math.inf, "probabilities and its tail add up to .*, not 1"),
        ("topk_logp_NK", 5.0, "holds NaN|add up to"),
        ("log_tail_N", math.nan, "log_tail holds NaN"),
        ("teacher_logp_N", math.nan, "teacher_logp holds NaN"),
    ],
)
def test_every_form_of_a_top_k_is_given_a_distribution(objective: Any, member: str, damage: float, said: str) -> None:
    rows = rows_for(objective, random_logits(0), random_logits(1), describe=describe)
    getattr(rows, member)[3] += damage
    with pytest.raises(TeacherError, match=rf"sample s3: the teacher's .*({said})") as caught:
        objective(rows)
    assert (caught.value.sample_id, caught.value.teacher) == ("s3", "math")


@every_form
def test_a_top_k_without_any_probability_is_the_teachers_fault(objective: Any) -> None:
    """Although with a tail of 1 it adds up. What the student chose may have none, unless it must be renormalised."""
    rows = rows_for(objective, random_logits(0), random_logits(1), describe=describe)
    assert rows.topk_logp_NK is not None and rows.log_tail_N is not None
    rows.topk_logp_NK[3], rows.log_tail_N[3] = -math.inf, 0.0
    if objective.support == "student_topk" and objective.form != "renormalised":
        assert bool(objective(rows)[0].isfinite().all())
        return
    with pytest.raises(TeacherError, match="sample s3: the teacher gives probability 0 to every token of its top-k"):
        objective(rows)


def test_the_ids_of_a_whole_vocabulary_must_add_up_to_1_by_themselves() -> None:
    objective = ForwardKL(support="student_topk", k=9)
    rows = rows_for(objective, random_logits(0), random_logits(1))
    assert rows.topk_logp_NK is not None
    rows.topk_logp_NK[3] -= math.log(2)
    with pytest.raises(TeacherError, match=r"row 3: .* its tail add up to 0.5, not 1"):
        objective(rows)


@pytest.mark.parametrize("objective", [ReverseKL(), ForwardKL(), JSD(), SkewKL(), TotalVariation()], ids=repr)
def test_a_broken_score_of_the_sampled_token_is_an_error_where_it_is_not_compared_too(objective: Any) -> None:
    rows = rows_for(objective, random_logits(0), random_logits(1), describe=describe)
    rows.teacher_logp_N[3] = math.nan
    with pytest.raises(TeacherError, match="sample s3: the teacher's teacher_logp holds NaN"):
        objective(rows)


@pytest.mark.parametrize("objective", [ReverseKL(), ForwardKL(), JSD(), SkewKL(), TotalVariation()], ids=repr)
@pytest.mark.parametrize(("mass", "said"), [(0.0, "add up to 0, not 1"), (0.5, "add up to 0.5, not 1")])
def test_a_teacher_row_that_is_no_distribution_is_an_error(objective: Any, mass: float, said: str) -> None:
    """All of its mass may stand in padded columns, for example."""
    log_q_NV = random_logits(1).log_softmax(-1)
    log_q_NV[3] += math.log(mass) if mass else -math.inf
    with pytest.raises(TeacherError, match=rf"row 3: the teacher's probabilities {said}"):
        values_of(objective, random_logits(0), random_logits(1), full_logp_NV=log_q_NV)


def test_top_k_scores_that_are_no_distribution_are_an_error() -> None:
    rows = rows_for(ReverseKL(**TOPK), random_logits(0), random_logits(1))
    assert rows.log_tail_N is not None and rows.topk_logp_NK is not None
    with pytest.raises(TeacherError, match=r"row 0: the teacher's probabilities and its tail add up to .*, not 1"):
        ReverseKL(**TOPK)(replace(rows, log_tail_N=torch.zeros_like(rows.log_tail_N)))
    with pytest.raises(TeacherError, match=r"row 0: the teacher's top-k probabilities add up to 3, more than 1"):
        ReverseKL(**TOPK)(replace(rows, topk_logp_NK=torch.zeros_like(rows.topk_logp_NK)))


def test_half_precision_on_the_wire_is_a_distribution_too() -> None:
    """The worst case: a flat teacher over a large vocabulary, all of whose log-probabilities round to one side."""
    log_q_NV = torch.full((1, 50_200), -math.log(50_200)).half()
    assert abs(float(log_q_NV.double().exp().sum()) - 1) > 1e-3
    loss_N, _ = values_of(ReverseKL(), torch.zeros(1, 50_200), torch.zeros(1, 50_200), full_logp_NV=log_q_NV)
    assert float(loss_N) == pytest.approx(0.0, abs=4e-3)


@pytest.mark.parametrize("objective", [ReverseKL(), JSD(beta=1.0), ReverseKL(**UNION, form="truncated")], ids=repr)
def test_a_teacher_zero_where_the_student_is_not_is_an_error_for_reverse_kl(objective: Any) -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    teacher_NV[4, student_NV[4].argmax()] = -math.inf
    with pytest.raises(TeacherError, match=r"row 4: .*q = 0 where p > 0"):
        values_of(objective, student_NV, teacher_NV)


def test_a_teacher_zero_is_infinite_where_the_students_probability_has_underflowed_too() -> None:
    student_NV = torch.tensor([[0.0, -500.0]])
    with pytest.raises(TeacherError, match="q = 0 where p > 0"):
        values_of(ReverseKL(), student_NV, torch.tensor([[0.0, -math.inf]]))
    _, metrics = values_of(JSD(), student_NV, torch.tensor([[0.0, -math.inf]]))
    assert float(metrics["kl"]) == math.inf


@pytest.mark.parametrize("objective", [ForwardKL(), ForwardKL(**TOPK), ForwardKL(**UNION)], ids=repr)
def test_a_student_zero_where_the_teacher_is_not_is_an_error_for_forward_kl(objective: Any) -> None:
    """The student's, although the teacher has a zero too, which forward KL does not mind."""
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    student_NV[1, teacher_NV[1].argmax()] = -math.inf
    teacher_NV[1, teacher_NV[1].argmin()] = -math.inf
    with pytest.raises(StudentError, match=r"row 1: .*p = 0 where q > 0"):
        values_of(objective, student_NV, teacher_NV)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
@every_objective
def test_broken_logits_of_the_student_are_an_error(objective: Any, bad: float) -> None:
    rows = rows_for(objective, random_logits(0), random_logits(1))
    rows.student_logits_NV[2, 1] = bad
    with pytest.raises(StudentError, match=r"row 2: the student's logits hold NaN"):
        objective(rows)


def test_a_signal_that_the_teacher_did_not_give_is_an_error() -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    with pytest.raises(TeacherError, match="no full_logp"):
        values_of(ReverseKL(), student_NV, teacher_NV, full_logp_NV=None)
    with pytest.raises(TeacherError, match="no log_tail"):
        values_of(ReverseKL(**TOPK), student_NV, teacher_NV, log_tail_N=None)
    with pytest.raises(TeacherError, match=r"the teacher's rows are \(5, 8\), the student's \(5, 9\)"):
        values_of(ReverseKL(), student_NV, teacher_NV, full_logp_NV=random_logits(1, (5, 8)).log_softmax(-1))


@pytest.mark.parametrize("ids", [[1, 1, 2], [1, 2, 9], [-1, 2, 3], [-2, 2, 3]])
def test_top_k_ids_that_repeat_or_leave_the_vocabulary_are_an_error(ids: list[int]) -> None:
    """An empty slot is for unions only."""
    ids_NK = torch.tensor([[0, 1, 2]] * 4 + [ids])
    with pytest.raises(TeacherError, match=r"row 4: .*an id twice, or one outside"):
        values_of(ReverseKL(**TOPK), random_logits(0), random_logits(1), topk_ids_NK=ids_NK)


def test_a_union_may_have_empty_slots_anywhere_but_not_everywhere() -> None:
    student_NV, teacher_NV, objective = random_logits(0), random_logits(1), ForwardKL(**UNION)
    rows = rows_for(objective, student_NV, teacher_NV)
    assert rows.topk_ids_NK is not None and rows.topk_logp_NK is not None
    assert bool((rows.topk_ids_NK == -1).any())
    backwards = replace(rows, topk_ids_NK=rows.topk_ids_NK.flip(-1), topk_logp_NK=rows.topk_logp_NK.flip(-1))
    torch.testing.assert_close(objective(backwards)[0], objective(rows)[0])
    with pytest.raises(TeacherError, match=r"row 0: the teacher's top-k has no token at all"):
        objective(replace(rows, topk_ids_NK=torch.full_like(rows.topk_ids_NK, -1)))


def test_a_top_k_of_another_size_than_asked_for_is_an_error() -> None:
    rows = rows_for(ReverseKL(support="teacher_topk", k=2), random_logits(0), random_logits(1))
    with pytest.raises(TeacherError, match=r"asked for \(5, 3\)"):
        ReverseKL(**TOPK)(rows)
    with pytest.raises(TeacherError, match=r"asked for \(5, 4\)"):
        ReverseKL(support="union", k=2)(rows)


def test_more_tokens_than_the_vocabulary_has_are_an_error() -> None:
    rows = rows_for(ReverseKL(**TOPK), random_logits(0), random_logits(1))
    with pytest.raises(ConfigError, match=r"objective.k: 10 tokens are asked for, and the common vocabulary has 9"):
        ReverseKL(support="teacher_topk", k=10)(rows)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ReverseKL(support="teacher_topkk", k=4), "did you mean 'teacher_topk'"),
        (lambda: ReverseKL(**TOPK, form="tial"), "did you mean 'tail'"),
        (lambda: ReverseKL(support="teacher_topk"), "objective.k: must be at least 1"),
        (lambda: ReverseKL(k=4), "objective.k: has no effect with support=full"),
        (lambda: JSD(form="corrected"), "objective.form: has no effect with support=full"),
        (lambda: JSD(support="teacher_topk", k=1, form="renormalised"), "optimises nothing"),
        (lambda: ReverseKL(support="student_topk", k=1, form="renormalised"), "optimises nothing"),
        (lambda: ForwardKL(support="union", k=1, form="renormalised"), "wherever both models prefer the same token"),
        (lambda: JSD(**TOPK, form="truncated"), "truncated is defined for reverse_kl and forward_kl only"),
        (lambda: SkewKL(**UNION, form="corrected"), "corrected is defined for reverse_kl and forward_kl only"),
        (lambda: TotalVariation(**TOPK, form="corrected"), "corrected is defined for reverse_kl and forward_kl only"),
        (lambda: JSD(beta=1.5), "objective.beta: must be between 0 and 1"),
        (lambda: JSD(beta=math.nan), "objective.beta: must be between 0 and 1"),
        (lambda: SkewKL(alpha=1.0), "objective.alpha: must be at least 0 and at most 0.999999"),
        (lambda: SkewKL(direction="sideways"), "objective.direction: there is no 'sideways'"),  # pyright: ignore[reportArgumentType]
        (lambda: ReverseKL(teacher_smoothing=1.0), "objective.teacher_smoothing"),
        (lambda: ReverseKL(**TOPK, teacher_smoothing=0.1), "needs the full vocabulary"),
    ],
)
def test_settings_that_are_wrong_ignored_or_teach_nothing_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, distill.objectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
