"""Divergences over a few tokens of the vocabulary.

The supports are inputs: they stand for the ids that come with a teacher's scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.divergence import ReverseKL
from distill.objectives.fused import logp_and_tail
from distill.objectives.topk import overlap, union_overlap
from distill.protocols import Objective
from tests.golden.objectives.data import Case
from tests.golden.objectives.models import full_rows, logits, loss_and_gradient, topk_rows
from tests.golden.objectives.runner import Evaluate, Mismatch
from tests.golden.objectives.s1_divergence import objective_of

SUPPORTS = {"teacher": "teacher_topk", "student": "student_topk", "union": "union", "given": "student_topk"}
"""Names of the data. Ids that somebody gave are, to an objective, like those of the student that wrote the sample."""


def supports(case: Case) -> Tensor:
    """(N, K)"""
    ids = case.ints("support_ids")
    return ids.reshape(-1, ids.shape[-1])


def form_of(case: Case) -> str:
    form = case.params["form"]
    return "renormalised" if form == "renorm" else form


def topk_objective(case: Case) -> Objective:
    support, k, form = SUPPORTS[case.params["support"]], case.params["k"], form_of(case)
    if k == 1 and form == "renormalised":
        claim_refused(case, support)
        # two slots a model, of which the data's support leaves all but one or two empty
        support, k = "union", 2
    return objective_of(case.params["direction"], case.params, support=support, k=k, form=form)


def claim_refused(case: Case, support: str) -> None:
    """One token renormalised teaches nothing; a configuration that asks for it must not come through."""
    try:
        objective_of(case.params["direction"], case.params, support=support, k=1, form="renormalised")
    except ConfigError:
        return
    raise Mismatch("the renormalised top 1 is not refused")


def topk_divergence(case: Case, precision: str) -> dict[str, Any]:
    objective, ids_NK = topk_objective(case), supports(case)
    teacher_NV = logits(case, "teacher_logits", precision)

    def loss_of(student_NV: Tensor) -> Tensor:
        return objective(topk_rows(student_NV, teacher_NV, ids_NK, objective.spec))[0]

    got: dict[str, Any] = loss_and_gradient(case, precision, loss_of)
    student_NV = logits(case, "student_logits", precision)
    got["student_log_tail"] = logp_and_tail(student_NV, ids_NK)[1]
    got["max_abs_grad"] = got["grad_student_logits"].abs().max()
    return got


def support_mass(case: Case, precision: str) -> dict[str, Any]:
    models = {name: logits(case, f"{name}_logits", precision) for name in ("student", "teacher")}
    ids_NK, k, got = supports(case), case.params["k"], dict[str, Any]()
    for name, logits_NV in models.items():
        logp_NK, log_tail_N = logp_and_tail(logits_NV, ids_NK)
        got[f"{name}_mass"] = logp_NK.exp().sum(-1)
        got[f"{name}_log_tail"] = log_tail_N
        got[f"{name}_logp_at_support"] = logp_NK
    if case.params["support"] == "union":
        got["overlap_ratio"] = union_overlap(ids_NK, k)
    else:
        other = {"teacher": "student", "student": "teacher"}[case.params["support"]]
        got["overlap_ratio"] = overlap(models[other], ids_NK)
    return got


def cosine_table(case: Case, precision: str) -> dict[str, float]:
    """Cosine of each form's gradient with that of full reverse KL; the supports stand in the group's other cases."""
    group = case.id.split("/")[0]
    teacher_NV = logits(case, "teacher_logits", precision)

    def gradient(loss_of: Any) -> Tensor:
        return loss_and_gradient(case, precision, loss_of)["grad_student_logits"].flatten()

    full = gradient(lambda student_NV: ReverseKL()(full_rows(student_NV, teacher_NV))[0])
    got: dict[str, float] = {}
    for name in case.expect:
        member = case.siblings[f"{group}/{name}_rkl"]
        objective, ids_NK = topk_objective(member), supports(member)
        mine = gradient(lambda s, o=objective, i=ids_NK: o(topk_rows(s, teacher_NV, i, o.spec))[0])
        got[name] = float(torch.nn.functional.cosine_similarity(mine, full, dim=0))
    return got


KINDS: dict[str, Evaluate] = {
    "topk_divergence": topk_divergence,
    "support_mass": support_mass,
    "cosine_table": cosine_table,
}
