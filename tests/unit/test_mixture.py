"""Several teachers as one. Legend: M teachers, N rows, V common vocabulary, K ids."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill.errors import ConfigError, TeacherError
from distill.objectives.divergence import ForwardKL, ReverseKL
from distill.objectives.mixture import combine, log_mixture, mix_rows
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import Place, TokenRows
from tests.builders_objectives import random_logits, rows_for

STUDENT_TOPK: dict[str, Any] = {"support": "student_topk", "k": 3}
quick = settings(deadline=None, max_examples=20)


def parts_for(objective: Any, student_NV: Tensor, count: int = 3, **changes: Any) -> list[TokenRows]:
    return [rows_for(objective, student_NV, random_logits(10 + i), **changes) for i in range(count)]


def gradient_of(objective: Any, rows: TokenRows) -> Tensor:
    leaf_NV = rows.student_logits_NV.clone().requires_grad_()
    return torch.autograd.grad(objective(replace(rows, student_logits_NV=leaf_NV))[0].sum(), leaf_NV)[0]


@pytest.mark.parametrize(("mixture", "objective"), [("geometric", ReverseKL()), ("arithmetic", ForwardKL())])
@quick
@given(seed=st.integers(0, 2**32), weights=st.lists(st.floats(0.01, 5), min_size=3, max_size=3))
def test_a_weighted_kl_has_the_gradient_of_the_kl_to_its_mixture(
    mixture: str, objective: Any, seed: int, weights: list[float]
) -> None:
    parts = parts_for(objective, random_logits(seed))
    mixed = mix_rows(mixture, parts, torch.tensor(weights, dtype=torch.float64))
    shares = [weight / sum(weights) for weight in weights]
    summed_NV = torch.stack([share * gradient_of(objective, part) for share, part in zip(shares, parts, strict=True)])
    torch.testing.assert_close(gradient_of(objective, mixed), summed_NV.sum(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mixture", ["arithmetic", "geometric"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_mixture_is_a_distribution_whose_weights_need_not_add_up_to_1(mixture: str, dtype: torch.dtype) -> None:
    log_q = [random_logits(i).log_softmax(-1).to(dtype) for i in range(3)]
    one_NV, _ = log_mixture(mixture, log_q, torch.tensor([0.5, 0.2, 0.3]))
    other_NV, _ = log_mixture(mixture, log_q, torch.tensor([5.0, 2.0, 3.0]))
    torch.testing.assert_close(one_NV, other_NV)
    torch.testing.assert_close(one_NV.exp().sum(-1), torch.ones_like(one_NV[:, 0]), rtol=0, atol=2e-3)
    assert one_NV.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_sampled_tokens_and_a_top_k_of_the_students_choice_mix_as_full_rows_do() -> None:
    student_NV, weights_M = random_logits(0), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    full = mix_rows("arithmetic", parts_for(ReverseKL(), student_NV), weights_M)
    assert full.full_logp_NV is not None
    sampled = mix_rows("arithmetic", parts_for(PolicyGradient(), student_NV), weights_M)
    torch.testing.assert_close(sampled.teacher_logp_N, full.teacher_logp_N)
    torch.testing.assert_close(full.teacher_logp_N, full.full_logp_NV[:, 0])
    topk = mix_rows("arithmetic", parts_for(ReverseKL(**STUDENT_TOPK), student_NV), weights_M)
    want = rows_for(ReverseKL(**STUDENT_TOPK), student_NV, full.full_logp_NV)
    torch.testing.assert_close(topk.topk_logp_NK, want.topk_logp_NK)
    torch.testing.assert_close(topk.log_tail_N, want.log_tail_N)


def test_weights_may_differ_from_row_to_row() -> None:
    parts = parts_for(ReverseKL(), random_logits(0), 2)
    weights_MN = torch.tensor([[1.0, 0.0, 0.5, 0.5, 0.5], [0.0, 1.0, 0.5, 0.5, 0.5]], dtype=torch.float64)
    for mixture in ("arithmetic", "geometric"):
        mixed_NV = mix_rows(mixture, parts, weights_MN).full_logp_NV
        assert mixed_NV is not None
        for row in (0, 1):
            torch.testing.assert_close(mixed_NV[row], parts[row].full_logp_NV[row])  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize("mixture", ["arithmetic", "geometric"])
def test_a_teacher_without_weight_is_never_read(mixture: str) -> None:
    parts = parts_for(ReverseKL(), random_logits(0))
    broken = [parts[0], replace(parts[1], full_logp_NV=None), parts[2]]
    got = mix_rows(mixture, broken, torch.tensor([1.0, 0.0, 1.0])).full_logp_NV
    torch.testing.assert_close(got, mix_rows(mixture, [parts[0], parts[2]], torch.ones(2)).full_logp_NV)


def test_what_the_head_combines_keeps_the_weight_of_the_row() -> None:
    parts = parts_for(ReverseKL(), random_logits(0), 2)
    row_weight_N = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    rows, weights_N = combine("geometric", parts, [0.25 * row_weight_N, 0.75 * row_weight_N])
    torch.testing.assert_close(weights_N, row_weight_N)
    want = mix_rows("geometric", parts, torch.tensor([1.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(rows.full_logp_NV, want.full_logp_NV)


def test_one_teacher_alone_is_its_own_mixture() -> None:
    (part,) = parts_for(ReverseKL(), random_logits(0), 1)
    for mixture in ("arithmetic", "geometric"):
        torch.testing.assert_close(mix_rows(mixture, [part], torch.tensor([0.3])).full_logp_NV, part.full_logp_NV)


def test_teachers_without_a_common_token_have_no_geometric_mixture() -> None:
    parts = parts_for(ReverseKL(), random_logits(0), 2)
    for part, gone in zip(parts, (slice(0, 4), slice(4, 9)), strict=True):
        assert part.full_logp_NV is not None
        part.full_logp_NV[2, gone] = -math.inf
        part.full_logp_NV[2] -= part.full_logp_NV[2].logsumexp(-1)
    with pytest.raises(TeacherError, match="row 2: no token has a probability with every teacher"):
        mix_rows("geometric", parts, torch.ones(2))
    assert mix_rows("arithmetic", parts, torch.ones(2)).full_logp_NV is not None


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -0.2], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_make_no_mixture_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"objective.mixture: the teachers' weights are"):
        mix_rows("arithmetic", parts_for(ReverseKL(), random_logits(0), 2), torch.tensor(weights))


def named_parts(objective: Any) -> list[TokenRows]:
    return [
        replace(part, describe=lambda row, name=name: Place(f"row {row}, teacher {name}", teacher=name))
        for part, name in zip(parts_for(objective, random_logits(0), 2), ("math", "code"), strict=True)
    ]


@pytest.mark.parametrize("mixture", ["arithmetic", "geometric"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda log_q_NV: log_q_NV - math.log(2), "add up to 0.5, not 1"),
        (lambda log_q_NV: log_q_NV - math.log(100), "add up to 0.01, not 1"),
        (lambda log_q_NV: 3 * log_q_NV - 20, "not 1"),
        (lambda log_q_NV: torch.full_like(log_q_NV, -math.inf), "add up to 0, not 1"),
    ],
    ids=["half", "a hundredth", "logits", "nothing"],
)
def test_each_teacher_of_a_mixture_must_give_a_distribution(mixture: str, damage: Any, said: str) -> None:
    """Normalising a geometric mixture would hide it."""
    math_part, code_part = named_parts(ReverseKL())
    assert code_part.full_logp_NV is not None
    code_part.full_logp_NV[3] = damage(code_part.full_logp_NV[3])
    with pytest.raises(TeacherError, match=f"row 3, teacher code: the teacher's probabilities .*{said}") as caught:
        mix_rows(mixture, [math_part, code_part], torch.ones(2))
    assert caught.value.teacher == "code"


def test_each_teacher_of_a_mixed_top_k_is_checked_by_itself() -> None:
    for member, damage, said in (
        ("topk_logp_NK", -1.0, "its tail add up to"),
        ("log_tail_N", math.nan, "log_tail holds NaN"),
        ("teacher_logp_N", math.nan, "teacher_logp holds NaN"),
    ):
        math_part, code_part = named_parts(ReverseKL(**STUDENT_TOPK))
        getattr(code_part, member)[3] += damage
        with pytest.raises(TeacherError, match=f"row 3, teacher code: the teacher's .*{said}"):
            mix_rows("arithmetic", [math_part, code_part], torch.ones(2))


def test_a_broken_teacher_of_a_mixture_is_named() -> None:
    parts = named_parts(ReverseKL())
    assert parts[1].full_logp_NV is not None
    parts[1].full_logp_NV[3, 1] = math.nan
    with pytest.raises(TeacherError, match="row 3, teacher code: the teacher's full_logp holds NaN"):
        mix_rows("arithmetic", parts, torch.ones(2))


def test_teachers_that_answered_for_other_ids_do_not_mix() -> None:
    parts = [rows_for(ReverseKL(support="teacher_topk", k=3), random_logits(0), random_logits(i)) for i in (1, 2)]
    with pytest.raises(TeacherError, match="teachers number 0 and 1 of a mixture answered for other ids"):
        mix_rows("arithmetic", parts, torch.ones(2))
