"""The chunked head and loss against the plain computation: values, gradients, metrics, memory and errors.

Legend: N rows of a micro-batch, n rows of one teacher, V common vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill.errors import StudentError, TeacherError
from distill.objectives.divergence import JSD, ForwardKL, ReverseKL
from distill.objectives.head_loss import TeacherHead, TeacherLogits, TeacherPart, head_loss, sampled_logp
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import Place, TokenRows

V, PADDED, D, N = 11, 13, 4, 9
OBJECTIVES = [
    ReverseKL(),
    ForwardKL(),
    JSD(beta=0.3),
    ReverseKL(support="teacher_topk", k=3),
    PolicyGradient(advantage_clip=None),
]
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
SOFTCAP = 3.0
OVERLAPPING = {"math": [0, 1, 2, 5, 6, 8], "code": [2, 3, 4, 5, 8], "style": [5, 6]}
"""Rows that no teacher scored (7), one, two and three did; in runs and apart."""


def softcap(logits: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(logits / SOFTCAP)


@dataclass
class Inputs:
    """A head with two padded rows, and leaves to differentiate."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden_ND, self.weight_VD, self.bias_V) if x is not None]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True, rows: int = N, seed: int = 0) -> Inputs:
    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=source, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    source = generator(seed)
    return Inputs(draw(rows, D), draw(PADDED, D), draw(PADDED) if bias else None)


def teacher_part(teacher: str, index: Sequence[int], *, seed: int, dtype: torch.dtype = torch.float64) -> TeacherPart:
    """A teacher's rows with every signal, and weights that differ from row to row."""
    source = generator(seed)
    count = len(index)
    logp_nV = (2 * torch.randn(count, V, generator=source, dtype=torch.float64)).log_softmax(-1).to(dtype)
    tokens_n = torch.randint(V, (count,), generator=source)
    top = logp_nV.topk(3, -1)
    rows = TokenRows(
        student_logits_NV=torch.empty(count, 0, dtype=dtype),
        tokens_N=tokens_n,
        behaviour_logp_N=torch.full((count,), -2.0, dtype=dtype),
        teacher_logp_N=logp_nV.gather(-1, tokens_n[:, None])[:, 0],
        topk_ids_NK=top.indices,
        topk_logp_NK=top.values,
        log_tail_N=torch.log1p(-top.values.exp().sum(-1)),
        full_logp_NV=logp_nV,
        describe=lambda row: Place(f"teacher {teacher}, row {row} of the micro-batch's row {index[row]}"),
    )
    weights_n = torch.rand(count, generator=source, dtype=torch.float64).to(dtype)
    return TeacherPart(teacher, rows, torch.tensor(index, dtype=torch.int64), weights_n)


def overlapping(dtype: torch.dtype = torch.float64) -> list[TeacherPart]:
    return [
        teacher_part(name, index, seed=seed, dtype=dtype) for seed, (name, index) in enumerate(OVERLAPPING.items(), 1)
    ]


def naive(given: Inputs, parts: Sequence[TeacherPart], objective: Any, transform: Any = None) -> tuple[Tensor, Any]:
    """The same with all logits at once."""
    logits_NV = given.hidden_ND @ given.weight_VD[:V].T
    if given.bias_V is not None:
        logits_NV = logits_NV + given.bias_V[:V]
    if transform is not None:
        logits_NV = transform(logits_NV)
    loss, metrics = logits_NV.new_zeros(()), {}
    for part in parts:
        loss_n, metrics[part.teacher] = objective(replace(part.rows, student_logits_NV=logits_NV[part.index_n]))
        loss = loss + (part.weights_n * loss_n).sum()
    return loss, metrics


def chunked(given: Inputs, parts: Sequence[TeacherPart], objective: Any, chunk: int, **more: Any) -> tuple[Tensor, Any]:
    return head_loss(
        given.hidden_ND,
        given.weight_VD,
        given.bias_V,
        parts,
        objective,
        vocab_size=V,
        chunk_tokens=chunk,
        **more,
    )


@every_objective
@pytest.mark.parametrize("chunk", [1, 2, 3, N, 100])
@pytest.mark.parametrize("transform", [None, softcap], ids=["plain", "softcap"])
def test_any_chunk_size_gives_the_loss_metrics_and_gradients_of_all_rows_at_once(
    objective: Any, chunk: int, transform: Any
) -> None:
    given, parts = inputs(), overlapping()
    loss, metrics = chunked(given, parts, objective, chunk, logits_transform=transform)
    want, want_metrics = naive(given, parts, objective, transform)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics, want_metrics, rtol=1e-12, atol=1e-12)
    got_grads = torch.autograd.grad(loss, given.leaves)
    torch.testing.assert_close(got_grads, torch.autograd.grad(want, given.leaves), rtol=1e-10, atol=1e-12)
    assert not got_grads[0][7].any(), "no teacher scored row 7"


@every_objective
def test_float32_inputs_give_the_float64_result_to_float32s_precision(objective: Any) -> None:
    exact = inputs()
    given = Inputs(*(x.detach().float().requires_grad_() for x in exact.leaves))
    loss, _ = chunked(given, overlapping(torch.float32), objective, 2)
    want, _ = naive(exact, overlapping(), objective)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(want, exact.leaves)
    for got, right in zip(torch.autograd.grad(loss, given.leaves), wanted, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_get_gradients_of_their_dtype_that_no_sum_over_chunks_has_rounded(
    dtype: torch.dtype,
) -> None:
    rows = 300
    given = inputs(dtype, rows=rows)
    part = teacher_part("math", range(rows), seed=1, dtype=torch.float32)
    # as small as in a mean over many tokens: nothing of it may be lost to float16's range
    part = replace(part, weights_n=part.weights_n * 1e-6)
    exact = Inputs(*(x.detach().double().requires_grad_() for x in given.leaves))
    loss, _ = chunked(given, [part], ReverseKL(), 1)
    want, _ = naive(exact, [part], ReverseKL())
    torch.testing.assert_close(loss.double(), want, rtol=1e-2, atol=0)
    (hidden, weight, bias) = torch.autograd.grad(loss * 2.0**20, given.leaves)
    wanted = torch.autograd.grad(want * 2.0**20, exact.leaves)
    assert (hidden.dtype, weight.dtype, bias.dtype) == (dtype, dtype, dtype)
    # in bfloat16 the sums of 300 one-row chunks would be off by far more than the one rounding at the end
    for got, right in zip((weight, bias), wanted[1:], strict=True):
        assert float((got.double() - right).norm() / right.norm()) < 1e-2


def test_the_gradient_of_every_input_is_what_finite_differences_give() -> None:
    given, parts, step = inputs(), overlapping(), 1e-6
    loss, _ = chunked(given, parts, JSD(), 2, logits_transform=softcap)
    for leaf, gradient in zip(given.leaves, torch.autograd.grad(3.0 * loss, given.leaves), strict=True):
        slopes = torch.zeros_like(gradient)
        with torch.no_grad():
            for place in range(leaf.numel()):
                flat = leaf.view(-1)
                ends = []
                for offset in (step, -2 * step):
                    flat[place] += offset
                    ends.append(3.0 * chunked(given, parts, JSD(), 2, logits_transform=softcap)[0])
                flat[place] += step
                slopes.view(-1)[place] = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close(gradient, slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bias", [False, True])
def test_padded_rows_of_the_head_get_a_gradient_of_exactly_zero(bias: bool) -> None:
    given = inputs(torch.float32, bias=bias)
    chunked(given, overlapping(torch.float32), ReverseKL(), 4)[0].backward()
    for leaf in given.leaves[1:]:
        assert leaf.grad is not None
        assert leaf.grad[:V].all()
        assert not leaf.grad[V:].any()


def test_only_what_requires_a_gradient_gets_one() -> None:
    given = inputs(bias=False)
    given.weight_VD.requires_grad_(False)
    loss, _ = chunked(given, overlapping(), ReverseKL(), 4)
    loss.backward()
    assert given.hidden_ND.grad is not None
    assert given.weight_VD.grad is None


def test_the_gradients_are_handed_out_without_a_copy() -> None:
    given = inputs()
    loss, _ = chunked(given, overlapping(), ReverseKL(), 4)
    ready = loss.grad_fn.gradients  # pyright: ignore[reportOptionalMemberAccess]
    pointers = [gradient.data_ptr() for gradient in ready]
    del ready
    loss.backward()
    assert [leaf.grad.data_ptr() for leaf in given.leaves] == pointers  # pyright: ignore[reportOptionalMemberAccess]


def test_a_full_signal_may_come_as_the_teachers_logits_or_hidden_states_and_head() -> None:
    given = inputs()
    teacher = inputs(seed=5)
    parts = overlapping()
    with torch.no_grad():
        teacher_NV = softcap(teacher.hidden_ND @ teacher.weight_VD.T + teacher.bias_V)
    plain, as_logits, as_head = [], [], []
    for part in parts:
        bare = replace(part, rows=replace(part.rows, full_logp_NV=None))
        logits_nV = teacher_NV[part.index_n]
        logp_nV = logits_nV[:, :V].log_softmax(-1)
        plain.append(replace(part, rows=replace(part.rows, full_logp_NV=logp_nV)))
        as_logits.append(replace(bare, full=TeacherLogits(logits_nV)))
        head = TeacherHead(teacher.hidden_ND.detach()[part.index_n], teacher.weight_VD, teacher.bias_V, softcap)
        as_head.append(replace(bare, full=head))
    want = torch.autograd.grad(chunked(given, plain, ReverseKL(), 2)[0], given.leaves)
    for parts in (as_logits, as_head):
        loss, _ = chunked(given, parts, ReverseKL(), 2)
        torch.testing.assert_close(torch.autograd.grad(loss, given.leaves), want, rtol=1e-12, atol=1e-12)
    assert teacher.weight_VD.grad is None


def test_teachers_can_be_combined_row_by_row_before_the_loss() -> None:
    seen: list[int] = []

    def arithmetic(rows: Sequence[TokenRows], weights: Sequence[Tensor]) -> tuple[TokenRows, Tensor]:
        seen.append(len(rows))
        total_C = torch.stack(list(weights)).sum(0)
        q_CV = sum(w[:, None] * one.full_logp_NV.exp() for one, w in zip(rows, weights, strict=True))  # type: ignore
        return replace(rows[0], full_logp_NV=(q_CV / total_C[:, None]).log()), total_C

    given, parts = inputs(), overlapping()
    loss, metrics = chunked(given, parts, ReverseKL(), 2, combine=arithmetic)
    logits_NV = given.hidden_ND @ given.weight_VD[:V].T + given.bias_V[:V]  # type: ignore
    weight_N, q_NV = torch.zeros(N, dtype=torch.float64), torch.zeros(N, V, dtype=torch.float64)
    for part in parts:
        weight_N[part.index_n] += part.weights_n
        q_NV[part.index_n] += part.weights_n[:, None] * part.rows.full_logp_NV.exp()  # type: ignore
    logp_NV = logits_NV.log_softmax(-1)
    scored_N = weight_N > 0
    log_q_NV = (q_NV / weight_N[:, None])[scored_N].log()
    kl_N = (logp_NV[scored_N].exp() * (logp_NV[scored_N] - log_q_NV)).sum(-1)
    want = (weight_N[scored_N] * kl_N).sum()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    got_grads = torch.autograd.grad(loss, given.leaves)
    torch.testing.assert_close(got_grads, torch.autograd.grad(want, given.leaves), rtol=1e-10, atol=1e-12)
    assert set(seen) == {1, 2, 3}
    assert metrics["style"]["kl"].shape == (2,)


@every_objective
def test_without_gradients_the_values_are_the_same_and_nothing_is_differentiated(objective: Any) -> None:
    given, parts = inputs(), overlapping()
    want, want_metrics = chunked(given, parts, objective, 2, logits_transform=softcap)
    with torch.no_grad():
        loss, metrics = chunked(given, parts, objective, 2, logits_transform=softcap)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics, want_metrics, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_first_pass_gives_the_log_probability_of_each_token(chunk: int) -> None:
    given = inputs()
    tokens_N = torch.arange(N)
    got_N = sampled_logp(
        given.hidden_ND,
        given.weight_VD,
        given.bias_V,
        tokens_N,
        vocab_size=V,
        chunk_tokens=chunk,
        logits_transform=softcap,
    )
    logits_NV = softcap(given.hidden_ND @ given.weight_VD[:V].T + given.bias_V[:V])  # type: ignore
    torch.testing.assert_close(got_N, logits_NV.log_softmax(-1)[range(N), tokens_N].detach())
    assert not got_N.requires_grad


def test_a_micro_batch_that_nobody_scored_has_no_loss_and_no_gradient() -> None:
    given = inputs()
    for parts in ([], [teacher_part("math", [], seed=1)]):
        loss, _ = chunked(given, parts, ReverseKL(), 4)
        assert float(loss.detach()) == 0.0
        assert not any(bool(grad.any()) for grad in torch.autograd.grad(loss, given.leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_decides_in_what_the_head_multiplies_and_nothing_else(dtype: torch.dtype) -> None:
    given, parts = inputs(dtype), overlapping(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss, metrics = chunked(given, parts, ReverseKL(), 4)
    assert loss.dtype == torch.float32
    low = Inputs(*(x.detach().bfloat16() for x in (given.hidden_ND, given.weight_VD)), given.bias_V)
    torch.testing.assert_close(loss, chunked(low, parts, ReverseKL(), 4)[0].to(loss.dtype))
    loss.backward()
    assert [leaf.grad.dtype for leaf in given.leaves] == [dtype] * 3  # pyright: ignore[reportOptionalMemberAccess]
    assert metrics["math"]["kl"].dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *made, 0)
        return result


@every_objective
def test_no_operation_makes_a_tensor_of_more_rows_than_a_chunk_has(objective: Any) -> None:
    wide, hidden, count, chunk = 200, 2, 64, 4
    source = generator(0)
    given = [torch.randn(shape, generator=source).requires_grad_() for shape in ((count, hidden), (wide, hidden))]
    teacher_NV = torch.randn(count, wide, generator=source)
    logp_NV = teacher_NV.log_softmax(-1)
    top = logp_NV.topk(3, -1)
    tokens_N = torch.randint(wide, (count,), generator=source)
    rows = TokenRows(
        student_logits_NV=torch.empty(count, 0),
        tokens_N=tokens_N,
        behaviour_logp_N=torch.full((count,), -5.0),
        teacher_logp_N=logp_NV[range(count), tokens_N],
        topk_ids_NK=top.indices,
        topk_logp_NK=top.values,
        log_tail_N=torch.log1p(-top.values.exp().sum(-1)),
    )
    part = TeacherPart("math", rows, torch.arange(count), torch.ones(count), full=TeacherLogits(teacher_NV))
    largest = LargestTensor()
    with largest:
        loss, _ = head_loss(*given, None, [part], objective, vocab_size=wide, chunk_tokens=chunk)
        loss.backward()
        sampled_logp(*given, None, tokens_N, vocab_size=wide, chunk_tokens=chunk)
    assert largest.elements == chunk * wide


def test_an_error_in_a_later_chunk_names_the_row_as_its_teacher_counts_it() -> None:
    given, parts = inputs(), overlapping()
    code = parts[1]
    broken_nV = code.rows.full_logp_NV.clone()  # type: ignore
    broken_nV[3] = torch.nan
    parts[1] = replace(code, rows=replace(code.rows, full_logp_NV=broken_nV))
    for chunk in (1, 2, 100):
        with pytest.raises(TeacherError, match="teacher code, row 3 of the micro-batch's row 5"):
            chunked(given, parts, ReverseKL(), chunk)
    with torch.no_grad():
        given.hidden_ND[4] = torch.nan
    with pytest.raises(StudentError, match="teacher code, row 2 of the micro-batch's row 4"):
        chunked(given, overlapping(), ReverseKL(), 1)


def test_differentiating_a_second_time_is_refused() -> None:
    given = inputs()
    loss, _ = chunked(given, overlapping(), ReverseKL(), 4)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        loss.backward()
