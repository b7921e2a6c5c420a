"""Two tokenizers aligned by bytes, and the loss over their common spans. Legend: S student's tokens."""

from __future__ import annotations

from typing import Any

import torch

from distill.objectives.alignment import align
from distill.objectives.corrections import NoCorrection
from distill.objectives.reductions import row_weights
from distill.objectives.span_kl import SpanKL
from tests.builders_sampled import conditioned, sampled_rows
from tests.golden.objectives.data import PRECISIONS, Case
from tests.golden.objectives.runner import Evaluate, Mismatch


def byte_span_alignment(case: Case, precision: str) -> dict[str, Any]:
    student, teacher = (
        [bytes.fromhex(token) for token in case.inputs[f"{side}_bytes_hex"]] for side in ("student", "teacher")
    )
    found = align(student, teacher)
    student_sums = found.student_sums(case.inputs["student_logp"])
    teacher_sums = found.teacher_sums(case.inputs["teacher_logp"])

    leaf_S = case.tensor("student_logp", precision).requires_grad_()
    rows = sampled_rows(
        leaf_S,
        teacher_logp_N=torch.from_numpy(found.teacher_on_student(case.inputs["teacher_logp"])).to(leaf_S),
        sample_N=torch.zeros(len(leaf_S), dtype=torch.int64),
        span_N=torch.from_numpy(found.student_span).long(),
    )
    gradients = {}
    for form in ("k2", "advantage"):
        objective = SpanKL(form=form, importance=NoCorrection())
        loss_S, _ = objective(conditioned(objective, rows, leaf_S))
        # a mean over spans: the sample counts as many of them as it has
        (weight,) = row_weights("token_mean", loss_tokens=[found.spans], domains=[""], trajectories=[""])
        loss = weight * loss_S.sum()
        gradients[form] = (loss.detach(), torch.autograd.grad(loss, leaf_S, retain_graph=True)[0])
    loss, gradient_S = gradients["k2"]
    rtol, atol = case.tol[precision]
    if not torch.allclose(gradient_S, gradients["advantage"][1], rtol=rtol, atol=atol):
        raise Mismatch("k1 as an advantage and k2 as a loss have different gradients")
    assert gradient_S.dtype == PRECISIONS[precision]
    return {
        "n_spans": found.spans,
        "span_bytes": found.span_bytes,
        "student_span": found.student_span,
        "teacher_span": found.teacher_span,
        "student_unaligned": found.student_unaligned,
        "teacher_unaligned": found.teacher_unaligned,
        "student_textless": found.student_textless,
        "teacher_textless": found.teacher_textless,
        "span_student_logp": student_sums,
        "span_teacher_logp": teacher_sums,
        "span_k1": student_sums - teacher_sums,
        "loss_k2_mean_over_spans": loss,
        "grad_student_logp_k2": gradient_S,
        "aligned_student_fraction": found.aligned_student_fraction,
    }


KINDS: dict[str, Evaluate] = {"byte_span_alignment": byte_span_alignment}
