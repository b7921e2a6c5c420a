"""What holds of every divergence, whatever the numbers. Legend: N rows, V common vocabulary, K top-k."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distill.objectives import fused
from distill.objectives.divergence import JSD, ForwardKL, ReverseKL, SkewKL, TotalVariation
from distill.types import Support
from tests.builders_objectives import gradient, random_logits, rows_for

FULL: list[Any] = [
    ReverseKL(),
    ForwardKL(),
    JSD(beta=0.3),
    JSD(beta=0.0),
    JSD(beta=1.0),
    JSD(beta=0.1, scaled=True),
    SkewKL(),
    SkewKL(direction="reverse", alpha=0.3),
    TotalVariation(),
]
SMOOTHED: list[Any] = [ReverseKL(teacher_smoothing=0.1), JSD(teacher_smoothing=0.1)]
BOUNDED: list[Any] = [
    *(kind(support=support, k=3) for kind in (ReverseKL, ForwardKL) for support in Support),
    ReverseKL(support="teacher_topk", k=3, form="renormalised"),
    ForwardKL(support="student_topk", k=3, form="renormalised"),
    ReverseKL(support="union", k=3, form="corrected"),
    ForwardKL(support="teacher_topk", k=3, form="corrected"),
    JSD(support="union", k=3),
    JSD(support="union", k=3, form="renormalised", scaled=True, beta=0.3),
    SkewKL(support="union", k=2),
    TotalVariation(support="student_topk", k=2, form="renormalised"),
    TotalVariation(support="teacher_topk", k=3),
]
TRUNCATED: list[Any] = [
    ReverseKL(support="teacher_topk", k=3, form="truncated"),
    ForwardKL(support="union", k=3, form="truncated"),
]
ALL = [*FULL, *SMOOTHED, *BOUNDED, *TRUNCATED]

quick = settings(deadline=None, max_examples=10)
seeds = st.integers(0, 2**32)


def name(objective: Any) -> str:
    shown = {key: value for key, value in vars(objective).items() if value not in ("full", 0, "tail", 0.0)}
    return f"{type(objective).__name__}-{'-'.join(str(value) for value in shown.values())}"


def each(objectives: list[Any]) -> Any:
    return pytest.mark.parametrize("objective", objectives, ids=name)


@each([*FULL, *SMOOTHED, *BOUNDED])
@quick
@given(seed=seeds, scale=st.floats(0.01, 20))
def test_a_divergence_is_never_negative(objective: Any, seed: int, scale: float) -> None:
    loss_N, metrics = objective(rows_for(objective, random_logits(seed, scale=scale), random_logits(seed + 1)))
    assert loss_N.shape == (5,)
    assert bool((loss_N >= -1e-12).all())
    assert bool((metrics["kl"] >= -1e-12).all())


@each([*FULL, *BOUNDED])
@quick
@given(seed=seeds, shift=st.floats(-50, 50))
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(objective: Any, seed: int, shift: float) -> None:
    teacher_NV = random_logits(seed)
    loss_N, metrics = objective(rows_for(objective, teacher_NV + shift, teacher_NV))
    for values in (loss_N, metrics["kl"], gradient(objective, teacher_NV + shift, teacher_NV)):
        torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=1e-10)


@each(TRUNCATED)
def test_a_truncated_sum_pulls_a_student_away_from_its_teacher(objective: Any) -> None:
    """What its contract warns of, and why `tail` is the default."""
    teacher_NV = random_logits(0)
    assert float(gradient(objective, teacher_NV, teacher_NV).abs().max()) > 1e-2


@each(ALL)
@quick
@given(seed=seeds)
def test_the_written_gradient_is_the_slope_of_the_value(objective: Any, seed: int) -> None:
    student_NV, teacher_NV = random_logits(seed), random_logits(seed + 1)
    direction_NV, step = random_logits(seed + 2, scale=1.0), 1e-5
    # a step may move a token into the student's top-k: the ids stay those of the middle
    rows = rows_for(objective, student_NV, teacher_NV)

    def value(moved_NV: Tensor) -> Tensor:
        return objective(rows.cut(slice(None), moved_NV))[0].sum()

    slope = (value(student_NV + step * direction_NV) - value(student_NV - step * direction_NV)) / (2 * step)
    written = (gradient(objective, student_NV, teacher_NV) * direction_NV).sum()
    torch.testing.assert_close(written, slope, rtol=1e-5, atol=1e-6)


@each(ALL)
@quick
@given(seed=seeds, order=st.permutations(range(5)))
def test_the_order_of_rows_and_how_they_are_cut_change_nothing(objective: Any, seed: int, order: list[int]) -> None:
    student_NV, teacher_NV = random_logits(seed), random_logits(seed + 1)
    loss_N, _ = objective(rows_for(objective, student_NV, teacher_NV))
    grad_NV = gradient(objective, student_NV, teacher_NV)
    for some in (order[:2], order[2:]):
        loss_n, _ = objective(rows_for(objective, student_NV[some], teacher_NV[some]))
        torch.testing.assert_close(loss_n, loss_N[some], rtol=1e-12, atol=1e-12)
        grad_nV = gradient(objective, student_NV[some], teacher_NV[some])
        torch.testing.assert_close(grad_nV, grad_NV[some], rtol=1e-12, atol=1e-12)


@each([*FULL, *BOUNDED, *TRUNCATED])
def test_columns_that_neither_model_allows_change_nothing(objective: Any) -> None:
    student_NV, teacher_NV = random_logits(0), random_logits(1)
    padded = [torch.nn.functional.pad(logits, (0, 2), value=-torch.inf) for logits in (student_NV, teacher_NV)]
    loss_N, _ = objective(rows_for(objective, student_NV, teacher_NV))
    torch.testing.assert_close(objective(rows_for(objective, *padded))[0], loss_N, rtol=1e-12, atol=1e-12)
    grad_NV = gradient(objective, *padded)
    torch.testing.assert_close(grad_NV[:, :-2], gradient(objective, student_NV, teacher_NV), rtol=1e-12, atol=1e-12)
    assert not grad_NV[:, -2:].any()


@each(ALL)
@quick
@given(seed=seeds, count=st.integers(1, 40))
def test_the_size_of_the_blocks_changes_nothing(objective: Any, seed: int, count: int) -> None:
    student_NV, teacher_NV = random_logits(seed, (7, 9)), random_logits(seed + 1, (7, 9))
    with pytest.MonkeyPatch.context() as patch:
        losses, grads = [], []
        for elements in (count, 10**6):
            patch.setitem(fused.BLOCK_ELEMENTS, "cpu", elements)
            losses.append(objective(rows_for(objective, student_NV, teacher_NV))[0])
            grads.append(gradient(objective, student_NV, teacher_NV))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-13, atol=1e-13)


@each(ALL)
@quick
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    seed=seeds,
    temperature=st.sampled_from([1.0, 0.05]),
)
def test_values_and_gradients_are_finite_in_every_dtype(
    objective: Any, dtype: torch.dtype, seed: int, temperature: float
) -> None:
    """Half precision is for inputs only: it is computed with in float32."""
    student_NV = (random_logits(seed) / temperature).to(dtype)
    teacher_NV = (random_logits(seed + 1) / temperature).to(fused.compute_dtype(student_NV))
    loss_N, metrics = objective(rows_for(objective, student_NV, teacher_NV))
    assert loss_N.dtype == fused.compute_dtype(student_NV)
    grad_NV = gradient(objective, student_NV, teacher_NV)
    assert grad_NV.dtype == dtype
    for values in (loss_N, grad_NV, *metrics.values()):
        assert bool(values.isfinite().all())


@each([o for o in ALL if not isinstance(o, ForwardKL)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_ten_thousand_give_finite_values_and_gradients(objective: Any, dtype: torch.dtype) -> None:
    student_NV = torch.tensor([[1e4, -1e4, 0.0, 1.0, 2.0], [0.0, 1e4, 1e4, -1e4, 3.0]], dtype=dtype)
    teacher_NV = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [1e4, 1e4, 0.0, 1.0, -1e4]], dtype=dtype)
    loss_N, _ = objective(rows_for(objective, student_NV, teacher_NV))
    assert loss_N.dtype == dtype
    assert bool(loss_N.isfinite().all())
    assert bool(gradient(objective, student_NV, teacher_NV).isfinite().all())


@each([o for o in [*FULL, *BOUNDED] if not isinstance(o, ReverseKL | TotalVariation) and o != JSD(beta=1.0)])
@quick
@given(seed=seeds, token=st.integers(0, 8))
def test_a_teacher_zero_is_fine_for_the_divergences_that_stay_finite(objective: Any, seed: int, token: int) -> None:
    teacher_NV = random_logits(seed + 1)
    teacher_NV[4, token] = -torch.inf
    student_NV = random_logits(seed)
    assert bool(objective(rows_for(objective, student_NV, teacher_NV))[0].isfinite().all())
    assert bool(gradient(objective, student_NV, teacher_NV).isfinite().all())


@each(FULL)
def test_float32_agrees_with_float64(objective: Any) -> None:
    student_NV, teacher_NV = random_logits(3, (4, 501), scale=5.0), random_logits(4, (4, 501), scale=5.0)
    for wide, narrow in (
        (
            objective(rows_for(objective, student_NV, teacher_NV))[0],
            objective(rows_for(objective, student_NV.float(), teacher_NV.float()))[0],
        ),
        (gradient(objective, student_NV, teacher_NV), gradient(objective, student_NV.float(), teacher_NV.float())),
    ):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-6)


class WideTensors(TorchDispatchMode):
    """Counts the new tensors of at least `elements` elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.names = elements, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            # what works in place, or only looks at memory that is there, makes no new tensor
            is_new = isinstance(tensor, Tensor) and not func.is_view and not func._schema.is_mutable
            if is_new and tensor.numel() >= self.elements:
                self.names.append(str(func))
        return result


@each([*FULL, *SMOOTHED, *BOUNDED, *TRUNCATED])
def test_of_the_size_of_the_logits_there_is_one_gradient_and_nothing_else(objective: Any) -> None:
    student_NV, teacher_NV = (random_logits(seed, (16, 101)).float() for seed in (0, 1))
    rows = rows_for(objective, student_NV.requires_grad_(), teacher_NV)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused.BLOCK_ELEMENTS, "cpu", 101)
        with WideTensors(16 * 101) as wide:
            loss_N, _ = objective(rows)
            torch.autograd.grad(loss_N.sum(), student_NV)
    assert wide.names == ["aten.empty_like.default"]


@each([*FULL, *SMOOTHED])
def test_a_graph_that_is_kept_gives_the_same_gradient_twice(objective: Any) -> None:
    leaf_NV = random_logits(0).requires_grad_()
    loss_N, _ = objective(rows_for(objective, leaf_NV, random_logits(1)))
    once, again = (torch.autograd.grad(loss_N[2] * 3.0, leaf_NV, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)
    assert float(once[2].abs().max()) > 0
    assert not once[[0, 1, 3, 4]].any()


@each([*FULL[:1], *BOUNDED[:1], *BOUNDED[2:3]])
def test_no_rows_have_no_losses(objective: Any) -> None:
    loss_N, metrics = objective(rows_for(objective, random_logits(0, (0, 9)), random_logits(1, (0, 9))))
    assert loss_N.shape == (0,)
    assert all(values.shape == (0,) for values in metrics.values())
