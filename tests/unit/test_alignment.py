"""Two tokenizations of a text, and the loss over their spans. Legend: S, T tokens of a side, N response tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import ConfigError, TeacherError
from distill.objectives.alignment import Alignment, align
from distill.objectives.corrections import NoCorrection
from distill.objectives.rows import Place, TokenRows
from distill.objectives.sampled_kl import SampledKL
from distill.objectives.span_kl import SpanKL
from tests.builders_sampled import loss_of, of_samples, random_rows, sampled_rows

quick = settings(deadline=None, max_examples=60)
texts = st.text(alphabet="ab é漢🙂", max_size=20).map(str.encode)


def cuts(data: st.DataObject, text: bytes) -> list[bytes]:
    """The text in pieces, some of them empty."""
    at = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    return [text[start:end] for start, end in pairwise([0, *sorted(at), len(text)])]


@quick
@given(text=texts, data=st.data())
def test_spans_hold_the_same_bytes_on_both_sides_and_every_token_of_an_equal_text(
    text: bytes, data: st.DataObject
) -> None:
    student, teacher = cuts(data, text), cuts(data, text)
    found = align(student, teacher)
    assert not len(found.student_unaligned) and not len(found.teacher_unaligned)
    for side, span in ((student, found.student_span), (teacher, found.teacher_span)):
        for number, (start, end) in enumerate(found.span_bytes):
            members = [token for token, its in zip(side, span, strict=True) if its == number]
            assert b"".join(members) == text[start:end] and members
    if text:
        np.testing.assert_array_equal(found.span_bytes[:, 0], [0, *found.span_bytes[:-1, 1]])
        assert found.span_bytes[-1, 1] == len(text)


@quick
@given(text=texts, data=st.data())
def test_spans_cannot_be_split_any_further(text: bytes, data: st.DataObject) -> None:
    student, teacher = cuts(data, text), cuts(data, text)
    ends = [set(np.cumsum([len(token) for token in side]).tolist()) for side in (student, teacher)]
    assert set(align(student, teacher).span_bytes[:, 1].tolist()) == (ends[0] & ends[1]) - {0}


@quick
@given(text=texts, one=texts, other=texts, data=st.data())
def test_nothing_is_aligned_after_the_first_byte_that_differs(
    text: bytes, one: bytes, other: bytes, data: st.DataObject
) -> None:
    student, teacher = [*cuts(data, text), b"x" + one], [*cuts(data, text), b"y" + other]
    found = align(student, teacher)
    assert all(end <= len(text) for end in found.span_bytes[:, 1])
    assert len(student) - 1 in found.student_unaligned and len(teacher) - 1 in found.teacher_unaligned
    assert found.aligned_student_fraction < 1


@quick
@given(text=texts, data=st.data())
def test_log_probabilities_are_added_up_span_by_span_and_none_is_lost(text: bytes, data: st.DataObject) -> None:
    student, teacher = cuts(data, text), cuts(data, text)
    found = align(student, teacher)
    logp_S, logp_T = -np.arange(1.0, len(student) + 1), -np.arange(1.0, len(teacher) + 1)
    assert found.student_sums(logp_S).sum() == pytest.approx(logp_S[found.student_span >= 0].sum())
    assert found.teacher_sums(logp_T).sum() == pytest.approx(logp_T[found.teacher_span >= 0].sum())
    # what the rows carry adds up to the same, span by span
    carried_S = found.teacher_on_student(logp_T)
    np.testing.assert_allclose(found.student_sums(carried_S), found.teacher_sums(logp_T))
    assert not carried_S[found.student_span < 0].any()


def test_a_beginning_token_on_one_side_shifts_nothing() -> None:
    found = align([b"ab", b"c", b""], [b"", b"a", b"bc"])
    assert found.student_span.tolist() == [0, 0, -1] and found.teacher_span.tolist() == [-1, 0, 0]
    assert found.student_textless.tolist() == [2] and found.teacher_textless.tolist() == [0]
    assert found.aligned_student_fraction == pytest.approx(2 / 3)


def test_a_text_of_a_million_bytes_is_aligned_in_one_pass() -> None:
    found = align([b"abcd"] * 250_000, [b"ab", b"cd"] * 250_000)
    assert found.spans == 250_000 and found.aligned_student_fraction == 1.0


def test_log_probabilities_of_another_number_of_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="1 log-probabilities for 2 tokens"):
        align([b"a", b"b"], [b"ab"]).student_sums(np.zeros(1))


def rows_of(found: Alignment, student: list[float], teacher: list[float]) -> tuple[torch.Tensor, TokenRows]:
    leaf_N = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    rows = sampled_rows(
        leaf_N,
        teacher_logp_N=torch.from_numpy(found.teacher_on_student(np.asarray(teacher))),
        sample_N=torch.zeros(len(student), dtype=torch.int64),
        span_N=torch.from_numpy(found.student_span).long(),
    )
    return leaf_N, rows


def test_a_span_has_half_its_squared_gap_as_loss_and_the_gap_as_gradient_of_each_token() -> None:
    leaf_N, rows = rows_of(align([b"a", b"bc", b"d"], [b"ab", b"c", b"x"]), [-1.0, -0.5, -2.0], [-0.25, -0.75, -9.0])
    objective = SpanKL(importance=NoCorrection())
    ready = objective.condition(rows, leaf_N.detach())
    loss_N, metrics = objective(ready)
    assert float(loss_N.detach().sum()) == pytest.approx(0.5**2 / 2)
    assert torch.autograd.grad(loss_N.sum(), leaf_N, retain_graph=True)[0].tolist() == pytest.approx([-0.5, -0.5, 0.0])
    assert metrics["aligned"].tolist() == [1, 1, 0]
    assert metrics["kl"].tolist() == pytest.approx([-0.25, -0.25, 0.0])
    clipped = SpanKL(form="advantage", advantage_clip=0.1, importance=NoCorrection())
    (grad_N,) = torch.autograd.grad(loss_of(clipped, rows, leaf_N).sum(), leaf_N)
    assert grad_N.tolist() == pytest.approx([-0.1, -0.1, 0.0])


@quick
@given(seed=st.integers(0, 2**32 - 10), counts=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_without_spans_every_token_is_its_own_and_the_loss_is_k2(seed: int, counts: list[int]) -> None:
    leaf_N, rows = random_rows(seed, counts)
    torch.testing.assert_close(loss_of(SpanKL(), rows, leaf_N), loss_of(SampledKL(), rows, leaf_N))


@pytest.mark.parametrize("objective", [SpanKL(), SpanKL(form="advantage")], ids=repr)
def test_samples_with_the_same_span_numbers_do_not_mix_and_rows_may_be_cut(objective: Any) -> None:
    leaf_N, rows = random_rows(7, [4, 3, 5])
    span_N = torch.tensor([0, 0, 1, -1, 0, 1, 1, 0, -1, 1, 1, 2])
    rows = replace(rows, span_N=span_N)
    whole_N = loss_of(objective, rows, leaf_N)
    assert not whole_N[span_N < 0].any()
    for one in range(3):
        keep, part = of_samples(rows, [one])
        torch.testing.assert_close(loss_of(objective, part, leaf_N[keep]), whole_N[keep])
    ready = objective.condition(rows, leaf_N.detach())
    chunks = [slice(start, start + 5) for start in range(0, 12, 5)]
    cut_N = torch.cat([objective(ready.cut(chunk, ready.student_logits_NV[chunk]))[0] for chunk in chunks])
    torch.testing.assert_close(cut_N, whole_N)


def test_a_span_that_the_teacher_holds_impossible_is_an_error_that_names_a_row_of_it() -> None:
    leaf_N, rows = rows_of(align([b"a", b"b"], [b"a", b"b"]), [-1.0, -1.0], [-0.5, -math.inf])
    named = replace(rows, describe=lambda row: Place(f"sample s, token {row}", "s", "t"))
    with pytest.raises(TeacherError, match="sample s, token 1: the teacher gives probability 0"):
        loss_of(SpanKL(), named, leaf_N)


def test_a_clip_that_would_be_ignored_or_teach_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="advantage_clip: has no effect with form=k2"):
        SpanKL(advantage_clip=1.0)
    with pytest.raises(ConfigError, match="advantage_clip: must be between"):
        SpanKL(form="advantage", advantage_clip=0.0)
