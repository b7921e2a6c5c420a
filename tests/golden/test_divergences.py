"""The objectives against float64 reference numbers from an independent implementation, value and gradient.

The data hold logits before a temperature division; an objective gets logits / T, and the chain rule gives back the 1/T.
Legend: N rows, V common vocabulary, K support.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill.objectives.divergence import JSD, ForwardKL, ReverseKL
from distill.objectives.formulas import log_outside
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import TokenRows

DATA = Path(__file__).parent / "data" / "objectives"
PRECISIONS = {"f64": torch.float64, "f32": torch.float32}


@dataclass(frozen=True)
class Case:
    id: str
    kind: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Any]
    expect: Mapping[str, Any]
    tol: Mapping[str, tuple[float, float]]
    tags: frozenset[str]

    def logits(self, name: str, dtype: torch.dtype) -> Tensor:
        """(N, rows), cut to V and divided by the temperature."""
        raw = torch.from_numpy(np.asarray(self.inputs[name])).to(dtype)
        return raw.reshape(-1, raw.shape[-1])[:, : self.params["V"]] / self.params["temperature"]


@cache
def cases(name: str) -> tuple[Case, ...]:
    manifest = json.loads((DATA / f"{name}.json").read_text())
    arrays = np.load(DATA / manifest["arrays"])

    def value(entry: Any) -> Any:
        if isinstance(entry, str):
            return arrays[entry[1:]] if entry.startswith("@") else float(entry)
        return entry

    return tuple(
        Case(
            id=case["id"],
            kind=case["kind"],
            params=case["params"],
            inputs={key: value(entry) for key, entry in case["inputs"].items()},
            expect={key: value(entry) for key, entry in case["expect"].items()},
            tol={key: tuple(pair) for key, pair in case.get("tol", {}).items()},
            tags=frozenset(case.get("tags", [])),
        )
        for case in manifest["cases"]
    )


def select(name: str, wanted: Callable[[Case], bool]) -> list[Any]:
    return [
        pytest.param(case, precision, id=f"{case.id}-{precision}")
        for case in cases(name)
        if wanted(case)
        for precision in PRECISIONS
    ]


def check(got: Tensor, want: Any, tol: tuple[float, float]) -> None:
    rtol, atol = tol
    np.testing.assert_allclose(got.detach().double().numpy().reshape(np.shape(want)), want, rtol=rtol, atol=atol)


def rows_of(student_NV: Tensor, teacher_NV: Tensor, tokens_N: Tensor | None = None, **more: Any) -> TokenRows:
    tokens_N = torch.zeros(len(student_NV), dtype=torch.int64) if tokens_N is None else tokens_N
    logp_NV = teacher_NV.log_softmax(-1)
    defaults = {
        "behaviour_logp_N": torch.zeros(len(student_NV), dtype=student_NV.dtype),
        "teacher_logp_N": logp_NV.gather(-1, tokens_N[:, None])[:, 0],
        "full_logp_NV": logp_NV,
    }
    return TokenRows(student_logits_NV=student_NV, tokens_N=tokens_N, **(defaults | more))


def gradient(case: Case, dtype: torch.dtype, loss_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Loss (N,) and the gradient of its sum with respect to the raw student logits, padded columns included."""
    raw = torch.from_numpy(np.asarray(case.inputs["student_logits"])).to(dtype).requires_grad_()
    student_NV = raw.reshape(-1, raw.shape[-1])[:, : case.params["V"]] / case.params["temperature"]
    loss_N = loss_of(student_NV, case.logits("teacher_logits", dtype))
    (grad,) = torch.autograd.grad(loss_N.sum(), raw)
    assert loss_N.dtype == grad.dtype == dtype
    return loss_N, grad


def full_objective(case: Case) -> Any:
    kinds = {"fkl": ForwardKL, "rkl": ReverseKL}
    return JSD(beta=case.params["beta"]) if case.kind == "jsd" else kinds[case.kind]()


@pytest.mark.parametrize(("case", "precision"), select("s1_divergence", lambda c: c.kind in ("fkl", "rkl", "jsd")))
def test_a_full_divergence_has_the_reference_value_and_gradient(case: Case, precision: str) -> None:
    objective = full_objective(case)
    loss_N, grad = gradient(case, PRECISIONS[precision], lambda s, t: objective(rows_of(s, t))[0])
    check(loss_N, case.expect["value"], case.tol[precision])
    check(grad, case.expect["grad_student_logits"], case.tol[precision])


def topk_objective(case: Case, k: int) -> Any:
    settings = {"support": "teacher_topk", "k": k, "tail": case.params["form"] == "tail"}
    kinds = {"rkl": ReverseKL, "fkl": ForwardKL}
    if case.params["direction"] == "jsd":
        return JSD(beta=case.params["beta"], **settings)
    return kinds[case.params["direction"]](**settings)


def topk_loss(case: Case, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Row by row, because a union has another size in every row. Only a top-k signal reaches the objective."""
    losses: list[Tensor] = []
    supports = np.asarray(case.inputs["support_ids"]).reshape(len(student_NV), -1)
    for row, slots in enumerate(supports):
        ids_1K = torch.from_numpy(slots[slots >= 0].astype(np.int64))[None]
        teacher_1V = teacher_NV[row : row + 1]
        everything = ids_1K.shape[-1] == teacher_1V.shape[-1]
        signal = rows_of(
            student_NV[row : row + 1],
            teacher_1V,
            full_logp_NV=None,
            topk_ids_NK=ids_1K,
            topk_logp_NK=teacher_1V.log_softmax(-1).gather(-1, ids_1K),
            log_tail_N=teacher_1V.new_full((1,), -torch.inf) if everything else log_outside(teacher_1V, ids_1K),
        )
        losses.append(topk_objective(case, ids_1K.shape[-1])(signal)[0])
    return torch.cat(losses)


def has_bucket_form(case: Case) -> bool:
    """Any support: to the objective it is a list of ids. Renormalised single tokens are left out: they are refused."""
    if case.kind != "topk_divergence" or case.params["form"] not in ("tail", "renorm"):
        return False
    smallest = int((np.asarray(case.inputs["support_ids"]) >= 0).sum(-1).min())
    return case.params["form"] == "tail" or smallest >= 2


@pytest.mark.parametrize(("case", "precision"), select("s2_topk", has_bucket_form))
def test_a_topk_divergence_has_the_reference_value_and_gradient(case: Case, precision: str) -> None:
    loss_N, grad = gradient(case, PRECISIONS[precision], lambda s, t: topk_loss(case, s, t))
    check(loss_N, case.expect["value"], case.tol[precision])
    check(grad, case.expect["grad_student_logits"], case.tol[precision])


@pytest.mark.parametrize(("case", "precision"), select("s2_topk", lambda c: c.kind == "support_mass"))
def test_the_mass_outside_of_a_support_has_the_reference_value(case: Case, precision: str) -> None:
    student_NV = case.logits("student_logits", PRECISIONS[precision])
    supports = np.asarray(case.inputs["support_ids"]).reshape(len(student_NV), -1)
    want = np.asarray(case.expect["student_log_tail"]).reshape(-1)
    for row, slots in enumerate(supports):
        ids_1K = torch.from_numpy(slots[slots >= 0].astype(np.int64))[None]
        if ids_1K.shape[-1] < student_NV.shape[-1]:
            check(log_outside(student_NV[row : row + 1], ids_1K), want[row : row + 1], case.tol[precision])
        else:
            assert want[row] == -np.inf


def by_token(case: Case, dtype: torch.dtype, objective: PolicyGradient) -> tuple[Tensor, Tensor]:
    """Metric `kl` (V,) and gradients (V, rows): entry y is what the objective gives when token y was sampled."""
    raw = torch.from_numpy(np.asarray(case.inputs["student_logits"])).to(dtype).reshape(1, -1).requires_grad_()
    vocab = case.params["V"]
    student_VV = (raw[:, :vocab] / case.params["temperature"]).expand(vocab, vocab)
    teacher_VV = case.logits("teacher_logits", dtype).expand(vocab, vocab)
    tokens_V = torch.arange(vocab)
    mu = "behaviour_logits" if "behaviour_logits" in case.inputs else "student_logits"
    behaviour_V = case.logits(mu, dtype).log_softmax(-1)[0]
    loss_V, metrics = objective(rows_of(student_VV, teacher_VV, tokens_V, behaviour_logp_N=behaviour_V))
    grads = [torch.autograd.grad(loss, raw, retain_graph=True)[0][0] for loss in loss_V]
    return metrics["kl"], torch.stack(grads)


def expectation(case: Case, under: str, grad_VW: Tensor) -> Tensor:
    probability_V = case.logits(under, grad_VW.dtype).softmax(-1)[0]
    return (probability_V[:, None] * grad_VW).sum(0)


def is_k1_advantage(case: Case) -> bool:
    return case.kind == "estimator_as_pg" and case.params["estimator"] == "k1" and "advantage" not in case.expect


@pytest.mark.parametrize(("case", "precision"), select("s3_estimators", is_k1_advantage))
def test_the_expected_policy_gradient_is_that_of_reverse_kl(case: Case, precision: str) -> None:
    dtype = PRECISIONS[precision]
    _, grads = by_token(case, dtype, PolicyGradient(importance="none", advantage_clip=None))
    expected = expectation(case, "student_logits", grads)
    check(grads, np.asarray(case.expect["grad_by_token"]), case.tol[precision])
    check(expected, np.asarray(case.expect["expected_grad"]).reshape(-1), case.tol[precision])
    assert case.params["expected_gradient_equals"] == "rkl"
    exact = next(c for c in cases("s3_estimators") if c.id == f"{case.id.split('/')[0]}/exact")
    check(expected, np.asarray(exact.expect["grad_rkl"]).reshape(-1), case.tol[precision])


def is_weighted(case: Case) -> bool:
    return case.kind == "expected_pg_under_mu" and "advantage" not in case.params


@pytest.mark.parametrize(("case", "precision"), select("s3_estimators", is_weighted))
def test_the_expected_policy_gradient_under_another_sampler_has_the_reference_value(case: Case, precision: str) -> None:
    gates = {
        "no_weight": PolicyGradient(importance="none", advantage_clip=None),
        "full_weight": PolicyGradient(importance="tis", tis_cap=float("inf"), advantage_clip=None),
        "tis": PolicyGradient(importance="tis", tis_cap=case.params["cap"], advantage_clip=None),
        "band": PolicyGradient(band_low=case.params["lo"], band_high=case.params["hi"], advantage_clip=None),
    }
    for name, objective in gates.items():
        _, grads = by_token(case, PRECISIONS[precision], objective)
        expected = expectation(case, "behaviour_logits", grads)
        check(expected, np.asarray(case.expect[name]).reshape(-1), case.tol[precision])


def is_k1_value(case: Case) -> bool:
    return case.kind == "estimator_value" and case.params["estimator"] == "k1"


@pytest.mark.parametrize(("case", "precision"), select("s3_estimators", is_k1_value))
def test_the_kl_metric_of_sampled_tokens_is_k1(case: Case, precision: str) -> None:
    kl_V, _ = by_token(case, PRECISIONS[precision], PolicyGradient(importance="none"))
    check(kl_V, np.asarray(case.expect["value_by_token"]).reshape(-1), case.tol[precision])


def is_k1_batch(case: Case) -> bool:
    return case.kind == "estimator_batch" and case.params["estimator"] == "k1"


@pytest.mark.parametrize(("case", "precision"), select("s3_estimators", is_k1_batch))
def test_a_batch_of_sampled_tokens_has_the_reference_gradient(case: Case, precision: str) -> None:
    tokens_N = torch.from_numpy(np.asarray(case.inputs["tokens"]).reshape(-1))
    objective = PolicyGradient(importance="none", advantage_clip=None)
    loss_N, grad = gradient(case, PRECISIONS[precision], lambda s, t: objective(rows_of(s, t, tokens_N))[0])
    assert loss_N.shape == tokens_N.shape
    check(grad, case.expect["grad_as_pg"], case.tol[precision])


def test_the_selections_above_select_what_the_data_hold() -> None:
    """A filter that matches nothing passes silently; these are the counts of the data as shipped, in two precisions."""
    assert len(select("s1_divergence", lambda c: c.kind in ("fkl", "rkl", "jsd"))) == 2 * 35
    assert len(select("s2_topk", lambda c: c.kind == "support_mass")) == 2 * 36
    assert len(select("s2_topk", has_bucket_form)) == 2 * 148
    assert len(select("s2_topk", lambda c: has_bucket_form(c) and c.params["form"] == "tail")) == 2 * 85
    assert len(select("s3_estimators", is_k1_advantage)) == 2 * 3
    assert len(select("s3_estimators", is_weighted)) == 2 * 3
    assert len(select("s3_estimators", is_k1_value)) == 2 * 3
    assert len(select("s3_estimators", is_k1_batch)) == 2 * 1
