"""Estimators from the sampled token: every token of a row is sampled in turn, so expectations are exact.

Legend: V common vocabulary, W columns of the raw logits. Row y is about token y having been sampled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.corrections import IcePop, ImportanceSampling, NoCorrection, TruncatedImportanceSampling
from distill.objectives.divergence import ForwardKL, ReverseKL
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import TokenRows
from distill.objectives.sampled import ESTIMATORS, token_logp
from distill.objectives.sampled_kl import SampledKL
from tests.golden.objectives.data import Case
from tests.golden.objectives.models import cut, full_rows, logits, loss_and_gradient
from tests.golden.objectives.runner import Evaluate, Mismatch

CLAIMS = {"rkl": "KL(p || q) in", "fkl": "KL(q || p) in", "neither": "neither"}
"""How a contract begins that promises what the data say."""


def plain(**settings: Any) -> PolicyGradient:
    return PolicyGradient(advantage_clip=None, **({"importance": NoCorrection()} | settings))


def by_token(case: Case, precision: str, loss_of: Any, behaviour: str = "student_logits") -> tuple[Tensor, Tensor]:
    """Loss (V,) and its gradient (V, W) with respect to the raw logits, for each sampled token."""
    raw_VW = case.tensor("student_logits", precision).reshape(1, -1).repeat(case.params["V"], 1).requires_grad_()
    loss_V = loss_of(token_rows(case, precision, cut(case, raw_VW), behaviour))
    (grad_VW,) = torch.autograd.grad(loss_V.sum(), raw_VW)
    assert loss_V.dtype == grad_VW.dtype == raw_VW.dtype
    return loss_V.detach(), grad_VW


def token_rows(case: Case, precision: str, student_VV: Tensor, behaviour: str = "student_logits") -> TokenRows:
    vocab = case.params["V"]
    mu_V = logits(case, behaviour, precision).log_softmax(-1)[0]
    teacher_VV = logits(case, "teacher_logits", precision).expand(vocab, vocab)
    return full_rows(student_VV, teacher_VV, torch.arange(vocab), behaviour_logp_N=mu_V)


def expectation(case: Case, precision: str, grad_VW: Tensor, under: str = "student_logits") -> Tensor:
    return (logits(case, under, precision).softmax(-1)[0][:, None] * grad_VW).sum(0)


def exact(case: Case, precision: str) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, objective in (("rkl", ReverseKL()), ("fkl", ForwardKL())):
        teacher_NV = logits(case, "teacher_logits", precision)
        got = loss_and_gradient(case, precision, lambda s, o=objective, t=teacher_NV: o(full_rows(s, t))[0])
        result |= {name: got["value"], f"grad_{name}": got["grad_student_logits"].flatten()}
    return result


def cosine(one: Tensor, other: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0)


def judged(case: Case, precision: str, grad_VW: Tensor) -> dict[str, Any]:
    """The expected gradient, held against what the case says that it equals."""
    expected, truth = expectation(case, precision, grad_VW), exact(case, precision)
    claim = case.params["expected_gradient_equals"]
    got: dict[str, Any] = {
        "grad_by_token": grad_VW,
        "expected_grad": expected,
        "cosine_to_rkl": cosine(expected, truth["grad_rkl"]),
        "cosine_to_fkl": cosine(expected, truth["grad_fkl"]),
        "norm_ratio_to_rkl": expected.norm() / truth["grad_rkl"].norm(),
    }
    if claim == "neither":
        if max(float(got["cosine_to_rkl"]), float(got["cosine_to_fkl"])) > 0.9999:
            raise Mismatch("the expected gradient is that of a KL")
        return got
    aim = torch.zeros_like(expected) if claim == "zero" else truth[f"grad_{claim}"]
    rtol, atol = case.tol[precision]
    got["max_abs_diff_to_claim"] = (expected - aim).abs().max()
    if not torch.allclose(expected, aim, rtol=rtol, atol=atol):
        raise Mismatch(f"the expected gradient is not {claim}")
    return got


def claim_refused(build: Any, what: str) -> None:
    try:
        build()
    except ConfigError:
        return
    raise Mismatch(f"{what} is not refused")


def claim_contract(case: Case, optimises: str) -> None:
    if not optimises.startswith(CLAIMS[case.params["expected_gradient_equals"]]):
        raise Mismatch(f"the contract says {optimises!r}")


def k1_loss(rows: TokenRows) -> Tensor:
    return ESTIMATORS["k1"](token_logp(rows), rows.teacher_logp_N)


def loss_of_estimator(estimator: str) -> Any:
    if estimator == "k1":
        return k1_loss
    return lambda rows: SampledKL(estimator=estimator, importance=NoCorrection())(rows)[0]


def estimator_value(case: Case, precision: str) -> dict[str, Tensor]:
    value_V, _ = by_token(case, precision, loss_of_estimator(case.params["estimator"]))
    return {"value_by_token": value_V, "expected_value": expectation(case, precision, value_V[:, None])}


def estimator_as_loss(case: Case, precision: str) -> dict[str, Any]:
    estimator = case.params["estimator"]
    if estimator == "k1":
        claim_refused(lambda: SampledKL(estimator="k1"), "k1 as a loss")
    else:
        claim_contract(case, SampledKL(estimator=estimator, importance=NoCorrection()).contract.optimises)
    value_V, grad_VW = by_token(case, precision, loss_of_estimator(estimator))
    return judged(case, precision, grad_VW) | {"value_by_token": value_V}


def estimator_as_pg(case: Case, precision: str) -> dict[str, Any]:
    estimator = case.params["estimator"]
    got: dict[str, Any] = {}
    if estimator in ESTIMATORS:
        objective = plain(estimator=estimator)
        claim_contract(case, objective.contract.optimises)
        _, grad_VW = by_token(case, precision, lambda rows: objective(rows)[0])
    else:
        advantage_V = odd_advantage(case, precision)
        got["advantage"] = advantage_V[0]
        _, grad_VW = by_token(case, precision, lambda rows: plain().loss(rows, token_logp(rows), advantage_V)[0])
    return got | judged(case, precision, grad_VW)


def odd_advantage(case: Case, precision: str) -> Tensor:
    """(V,) the advantage of each token where it is none of the product's: with a baseline, or the same for all."""
    estimator, kl = case.params["estimator"], exact(case, precision)["rkl"]
    student_VV = logits(case, "student_logits", precision).expand(case.params["V"], -1)
    if estimator == "k1_minus_kl":
        rows = token_rows(case, precision, student_VV)
        return plain().advantage(rows, rows.behaviour_logp_N) + kl
    claim_refused(lambda: plain(estimator=estimator), f"{estimator} as an advantage")
    # of a top-k the data give the number and not the k; any constant must do
    constant = -kl if estimator == "full_kl" else kl.new_tensor(case.expect["advantage"])
    return constant.expand(len(student_VV))


def expected_pg_under_mu(case: Case, precision: str) -> dict[str, Tensor]:
    params, truth = case.params, exact(case, precision)["grad_rkl"]
    reference = "sampler" if params.get("advantage") == "log q - log mu" else "student"
    corrections: dict[str, Any] = {"full_weight": ImportanceSampling()}
    if "cap" in params:
        corrections |= {
            "no_weight": NoCorrection(),
            "tis": TruncatedImportanceSampling(cap=params["cap"]),
            "band": IcePop(low=params["lo"], high=params["hi"]),
        }
    got: dict[str, Tensor] = {}
    for name, importance in corrections.items():
        objective = plain(importance=importance, reference=reference)
        _, grad_VW = by_token(case, precision, lambda rows, o=objective: o(rows)[0], "behaviour_logits")
        got[name] = expectation(case, precision, grad_VW, "behaviour_logits")
        got[f"cosine_{name}"] = cosine(got[name], truth)
    return got


def batch_rows(case: Case, precision: str, student_NV: Tensor) -> TokenRows:
    return full_rows(student_NV, logits(case, "teacher_logits", precision), case.ints("tokens").flatten())


def estimator_batch(case: Case, precision: str) -> dict[str, Tensor]:
    estimator = case.params["estimator"]
    as_loss = loss_and_gradient(case, precision, lambda s: loss_of_estimator(estimator)(batch_rows(case, precision, s)))
    as_pg = loss_and_gradient(case, precision, lambda s: plain(estimator=estimator)(batch_rows(case, precision, s))[0])
    return {
        "value": as_loss["value"],
        "grad_as_loss": as_loss["grad_student_logits"],
        "grad_as_pg": as_pg["grad_student_logits"],
    }


def token_log_probs(case: Case, precision: str) -> dict[str, Tensor]:
    got = loss_and_gradient(case, precision, lambda s: token_logp(batch_rows(case, precision, s)))
    teacher = token_logp(batch_rows(case, precision, logits(case, "teacher_logits", precision)))
    return {
        "student_logp": got["value"],
        "teacher_logp": teacher,
        "grad_student_logp_wrt_logits": got["grad_student_logits"],
    }


def temperature_trap(case: Case, precision: str) -> dict[str, Tensor]:
    """The teacher's scores, which a server could be asked for at any temperature."""
    return {"right": token_log_probs(case, precision)["teacher_logp"]}


KINDS: dict[str, Evaluate] = {
    "exact_gradients": exact,
    "estimator_value": estimator_value,
    "estimator_as_loss": estimator_as_loss,
    "estimator_as_pg": estimator_as_pg,
    "expected_pg_under_mu": expected_pg_under_mu,
    "estimator_batch": estimator_batch,
    "token_log_probs": token_log_probs,
    "temperature_trap": temperature_trap,
}
