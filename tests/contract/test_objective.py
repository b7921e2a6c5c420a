"""What every objective must be, run over all that the registry names. Legend: N rows, V common vocabulary."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from distill import registry
from distill.config.models import ObjectiveConfig
from distill.objectives import build_objective
from distill.objectives.formulas import kl, log_outside
from distill.objectives.rows import TokenRows
from distill.protocols import Objective
from distill.types import Signal

VOCAB = 7
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "reverse_kl": [{}, {"support": "teacher_topk", "k": 3}],
    "forward_kl": [{}, {"support": "teacher_topk", "k": 3}],
    "jsd": [{}, {"beta": 0.9}, {"support": "teacher_topk", "k": 3}],
    # exact in expectation: neither gate nor clip, with mu = p
    "policy_gradient": [{"importance": "none", "advantage_clip": None}, {}],
}
CASES = [
    pytest.param(build_objective(ObjectiveConfig.model_validate({"name": name, **options})), id=f"{name}-{options}")
    for name in registry.names("objective")
    for options in SETTINGS[name]
]
every_objective = pytest.mark.parametrize("objective", CASES)


def logits(seed: int, count: int = 4) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_for(objective: Objective, student_NV: Tensor, teacher_NV: Tensor, tokens_N: Tensor) -> TokenRows:
    """Rows that hold exactly the signal that the objective asks for, sampled on-policy."""
    logq_NV = teacher_NV.log_softmax(-1)
    signal: dict[str, Tensor] = {}
    if objective.spec.signal is Signal.FULL:
        signal["full_logp_NV"] = logq_NV
    if objective.spec.signal is Signal.TOPK:
        top = logq_NV.topk(objective.spec.k, -1)
        signal = {
            "topk_ids_NK": top.indices,
            "topk_logp_NK": top.values,
            "log_tail_N": log_outside(teacher_NV, top.indices),
        }
    return TokenRows(
        student_logits_NV=student_NV,
        tokens_N=tokens_N,
        behaviour_logp_N=student_NV.detach().log_softmax(-1).gather(-1, tokens_N[:, None])[:, 0],
        teacher_logp_N=logq_NV.gather(-1, tokens_N[:, None])[:, 0],
        **signal,
    )


def gradients(objective: Objective, student_NV: Tensor, teacher_NV: Tensor, tokens_N: Tensor) -> Tensor:
    student_NV = student_NV.clone().requires_grad_()
    loss_N, _ = objective(rows_for(objective, student_NV, teacher_NV, tokens_N))
    return torch.autograd.grad(loss_N.sum(), student_NV)[0]


@every_objective
def test_it_is_a_frozen_value_that_travels_between_processes(objective: Any) -> None:
    assert isinstance(objective, Objective)
    assert pickle.loads(pickle.dumps(objective)) == objective
    with pytest.raises(FrozenInstanceError):
        setattr(objective, fields(objective)[0].name, None)


@every_objective
def test_it_says_what_it_optimises_and_where_that_comes_from(objective: Any) -> None:
    assert objective.contract.optimises
    assert objective.contract.source
    assert (objective.spec.k > 0) == (objective.spec.signal is Signal.TOPK)


@every_objective
def test_it_returns_one_differentiable_loss_a_row_and_metrics_that_are_not(objective: Any) -> None:
    student_NV = logits(0).requires_grad_()
    loss_N, metrics = objective(rows_for(objective, student_NV, logits(1), torch.arange(4)))
    assert loss_N.shape == (4,)
    assert loss_N.requires_grad
    assert "kl" in metrics
    for values_N in metrics.values():
        assert values_N.shape == (4,)
        assert not values_N.requires_grad


@every_objective
def test_a_row_alone_is_worth_what_it_is_among_others(objective: Any) -> None:
    student_NV, teacher_NV, tokens_N = logits(0), logits(1), torch.arange(4)
    together_N, _ = objective(rows_for(objective, student_NV, teacher_NV, tokens_N))
    alone_N = [
        objective(rows_for(objective, student_NV[n : n + 1], teacher_NV[n : n + 1], tokens_N[n : n + 1]))[0]
        for n in range(4)
    ]
    torch.testing.assert_close(torch.cat(alone_N), together_N)


@every_objective
def test_its_gradient_depends_on_the_teacher(objective: Any) -> None:
    tokens_N = torch.arange(4)
    one, other = (gradients(objective, logits(0), logits(seed), tokens_N) for seed in (1, 2))
    assert float((one - other).abs().max()) > 1e-3


@every_objective
def test_it_depends_on_the_sampled_token_exactly_when_its_contract_says_so(objective: Any) -> None:
    one, other = (gradients(objective, logits(0), logits(1), torch.full((4,), token)) for token in (0, 3))
    assert torch.equal(one, other) != objective.contract.depends_on_action


@every_objective
def test_the_expected_gradient_of_an_action_dependent_loss_is_that_of_its_contract(objective: Any) -> None:
    if not objective.contract.depends_on_action:
        return
    student_1V, teacher_1V = logits(0, 1), logits(1, 1)
    every_token = torch.arange(VOCAB)
    grads_VV = gradients(objective, student_1V.expand(VOCAB, -1), teacher_1V.expand(VOCAB, -1), every_token)
    expected_V = (student_1V.softmax(-1)[0][:, None] * grads_VV).sum(0)
    leaf_1V = student_1V.clone().requires_grad_()
    (exact_1V,) = torch.autograd.grad(kl(leaf_1V.log_softmax(-1), teacher_1V.log_softmax(-1)).sum(), leaf_1V)
    assert objective.contract.optimises.startswith("KL(p || q)")
    torch.testing.assert_close(expected_V, exact_1V[0])


@every_objective
def test_it_keeps_the_dtype_of_the_students_logits(objective: Any) -> None:

    student_NV, teacher_NV = logits(0).float(), logits(1).float()
    loss_N, metrics = objective(rows_for(objective, student_NV, teacher_NV, torch.arange(4)))
    assert loss_N.dtype == torch.float32
    assert all(values.dtype == torch.float32 for values in metrics.values())
