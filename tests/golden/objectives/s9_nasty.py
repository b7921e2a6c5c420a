"""Numerically nasty rows, refusals, and a vocabulary as large as real ones.

The kinds of other sets stand here too; sampled-token kinds are those of set 3.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.config.compose import load_config
from distill.errors import DistillError
from distill.objectives.corrections import NoCorrection
from distill.objectives.divergence import JSD, ReverseKL
from distill.objectives.fused import logp_and_tail, logp_at
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import TokenRows
from distill.objectives.sampled import ESTIMATORS
from distill.objectives.sampled_kl import SampledKL
from distill.protocols import Objective
from tests.builders_config import settings, write_yaml
from tests.builders_sampled import sampled_rows
from tests.golden.objectives import s1_divergence, s2_topk
from tests.golden.objectives.data import PRECISIONS, Case
from tests.golden.objectives.models import full_rows, rows_for
from tests.golden.objectives.runner import Evaluate, Mismatch
from tests.golden.objectives.s1_divergence import objective_of

UINT32 = np.uint64(0xFFFFFFFF)


def planted(case: Case, side: str) -> NDArray[np.float32]:
    """The logits (rows,) that FORMAT.md section 11 generates, for `s` (student) or `t` (teacher)."""
    params = case.params
    a, b, m = (np.uint64(params[name + ("" if side == "s" else "2")]) for name in ("a", "b", "m"))
    v = np.arange(params["Vs" if side == "s" else "Vt"], dtype=np.uint64)
    h = (v * a + b) & UINT32
    h = ((h ^ (h >> np.uint64(15))) * m) & UINT32
    z = ((h >> np.uint64(16)) % np.uint64(256)).astype(np.float32) / 16 - 8
    for index, peak in params[f"peaks_{side}"]:
        z[index] = peak
    z[params["V"] :] = params["pad_value_student" if side == "s" else "pad_value_teacher"]
    return z


def big_objective(name: str) -> Objective:
    """What a key of the data asks for."""
    if name.startswith("topk8_"):
        _, support, form, direction = name.split("_")
        form = "renormalised" if form == "renorm" else form
        return objective_of(direction, {"beta": 0.5}, support=s2_topk.SUPPORTS[support], k=8, form=form)
    for parameter in ("beta", "alpha"):
        kind, found, value = name.partition(f"_{parameter}")
        if found:
            return objective_of(kind, {parameter: float(value)})
    return objective_of(name, {})


def big_vocab(case: Case, precision: str) -> dict[str, Any]:
    """One row, each divergence in turn."""
    vocab, temperature = case.params["V"], case.params["temperature"]
    student_1V, teacher_1V = (
        torch.from_numpy(planted(case, side))[None, :vocab].to(PRECISIONS[precision]) / temperature for side in "st"
    )
    supports = _top8(student_1V, teacher_1V)
    got = _scalars(case, student_1V, teacher_1V, supports)
    for name, want in case.expect.items():
        if not isinstance(want, dict):
            continue
        objective = big_objective(name)
        ids = supports[name.split("_")[1]] if name.startswith("topk8_") else None
        leaf = student_1V.clone().requires_grad_()
        value_1, _ = objective(rows_for(objective, leaf, teacher_1V, ids))
        (gradient_1V,) = torch.autograd.grad(value_1.sum(), leaf)
        got[name] = _numbers(case, value_1, gradient_1V[0] / temperature)
    return got


def _top8(student_1V: Tensor, teacher_1V: Tensor) -> dict[str, Tensor]:
    ids = {"student": student_1V.topk(8).indices, "teacher": teacher_1V.topk(8).indices}
    return ids | {"union": torch.cat(list(ids.values()), -1).unique()[None]}


def _scalars(case: Case, student_1V: Tensor, teacher_1V: Tensor, supports: dict[str, Tensor]) -> dict[str, Any]:
    y = case.expect["y"]
    token_11 = torch.tensor([[y]])
    got: dict[str, Any] = {
        "y": y,
        "logp_y": logp_at(student_1V, token_11),
        "logq_y": logp_at(teacher_1V, token_11),
        # log p(y) = z(y) - lse
        "lse_student": student_1V[0, y] - logp_at(student_1V, token_11),
        "lse_teacher": teacher_1V[0, y] - logp_at(teacher_1V, token_11),
    }
    for name, ids_1K in supports.items():
        got[f"topk8_{name}_student_log_tail"] = logp_and_tail(student_1V, ids_1K)[1]
        got[f"topk8_{name}_teacher_log_tail"] = logp_and_tail(teacher_1V, ids_1K)[1]
    # against the uniform distribution, whose entropy is known, the gap is an entropy
    flat_1V = torch.zeros_like(student_1V)
    for name, logits_1V in (("student", student_1V), ("teacher", teacher_1V)):
        gap_1 = ReverseKL()(full_rows(flat_1V, logits_1V))[1]["entropy_gap"]
        got[f"entropy_{name}"] = gap_1 + float(np.log(case.params["V"]))
    return got


def _numbers(case: Case, value_1: Tensor, gradient_V: Tensor) -> dict[str, Any]:
    """The gradient of a vocabulary, in a few numbers."""
    wide_V = gradient_V.double()
    probe_V = ((torch.arange(len(wide_V)) % 7) - 3).double() / 3.0
    return {
        "value": value_1,
        "grad_l1": wide_V.abs().sum(),
        "grad_l2": wide_V.norm(),
        "grad_dot_probe": wide_V @ probe_V,
        "grad_at": wide_V[case.params["probe_ids"]],
    }


def config(case: Case, precision: str) -> dict[str, Any]:
    """A configuration that must be refused: by its section, by the objective, or when it meets the vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        load_config(write_yaml(Path(folder), settings()), [f"rollout.temperature={case.params['temperature']}"])
    if "beta" in case.params:
        JSD(beta=case.params["beta"])
    if "k" in case.params:
        objective = ReverseKL(support="teacher_topk", k=case.params["k"])
        student_NV = case.tensor("student_logits", precision).flatten(0, -2)[:, : case.params["V"]]
        ids_NK = student_NV.argsort(-1, descending=True)[:, : objective.spec.k]
        objective(rows_for(objective, student_NV, student_NV, ids_NK))
    return {}


def estimator_scalars(case: Case, precision: str) -> dict[str, Any]:
    """Single tokens, as the objectives estimate from them; those whose mask is 0 have no row."""
    mask = case.inputs.get("loss_mask", np.ones(len(case.inputs["student_logp"])))
    live = torch.from_numpy(np.asarray(mask)).bool()
    leaf_N = case.tensor("student_logp", precision).requires_grad_()
    teacher_N = case.tensor("teacher_logp", precision)
    numbers = {name: estimate(leaf_N[live], teacher_N[live]) for name, estimate in ESTIMATORS.items()}
    (gradient_N,) = torch.autograd.grad(numbers["k3"].sum(), leaf_N)
    rows = sampled_rows(leaf_N.detach()[live], teacher_logp_N=teacher_N[live])
    got = {name: values.detach().double() for name, values in {**numbers, "k3_grad": gradient_N}.items()}
    for index in [] if precision == "f64" else case.params.get("fp32_overflow_at", []):
        claim_refused(rows.cut(slice(index, index + 1), rows.student_logits_NV[index : index + 1]))
        # refused, as the case allows, so there is nothing to compare
        for name in ("k3", "k3_grad"):
            got[name][index] = float(case.expect[name][index])
    if "k3" not in case.expect:
        loss_N, metrics = SampledKL(estimator="k3", importance=NoCorrection())(rows)
        got |= {"k1_live": metrics["kl"], "k3_live": loss_N, "sum_k1": metrics["kl"].sum(), "sum_k3": loss_N.sum()}
    return got


def claim_refused(rows: TokenRows) -> None:
    """k3 overflows float32 and is clamped nowhere: it must be an error."""
    try:
        SampledKL(estimator="k3", importance=NoCorrection())(rows)
    except DistillError:
        return
    raise Mismatch("k3 overflows, and is not refused")


def advantage_clip(case: Case, precision: str) -> dict[str, Tensor]:
    """The loss of a token is -A log p, so its gradient with respect to log p is -A."""
    leaf_N = case.tensor("student_logp", precision).requires_grad_()
    rows = sampled_rows(leaf_N, teacher_logp_N=case.tensor("teacher_logp", precision))
    objective = PolicyGradient(importance=NoCorrection(), advantage_clip=case.params["clip"])
    (gradient_N,) = torch.autograd.grad(objective(rows)[0].sum(), leaf_N)
    return {"advantage": -gradient_N}


KINDS: dict[str, Evaluate] = {
    **s1_divergence.KINDS,
    "topk_divergence": s2_topk.topk_divergence,
    "big_vocab": big_vocab,
    "config": config,
    "estimator_scalars": estimator_scalars,
    "advantage_clip": advantage_clip,
}
