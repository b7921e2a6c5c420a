"""What every objective must be, run over all that the registry names, and that each does what its contract says.

Legend: N rows, V common vocabulary, C outcomes compared, K ids.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distill import registry
from distill.config.models import ObjectiveConfig
from distill.objectives import build_objective
from distill.objectives.rows import TokenRows
from distill.protocols import Objective, SequenceObjective
from distill.types import Signal
from tests.builders_objectives import random_logits, rows_for, support_ids

VOCAB = 7
EXACT: dict[str, Any] = {"importance": "none"}
"""What biases nothing: with mu = p the weight is 1 anyway."""
KL_OPTIONS: list[dict[str, Any]] = [
    {},
    *(
        {"support": support, "k": 3, "form": form}
        for support in ("teacher_topk", "student_topk", "union")
        for form in ("tail", "renormalised", "truncated", "corrected")
    ),
]
BOUNDED_OPTIONS: list[dict[str, Any]] = [
    {},
    {"support": "teacher_topk", "k": 3},
    {"support": "student_topk", "k": 1},
    {"support": "union", "k": 2, "form": "renormalised"},
]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "reverse_kl": [*KL_OPTIONS, {"teacher_smoothing": 0.2}],
    "forward_kl": KL_OPTIONS,
    "jsd": [
        *BOUNDED_OPTIONS,
        *({"beta": beta} for beta in (0.0, 0.1, 0.9, 1.0)),
        *({"beta": beta, "scaled": True} for beta in (0.1, 0.9)),
        {"beta": 0.3, "teacher_smoothing": 0.1},
    ],
    "skew_kl": [*BOUNDED_OPTIONS, {"direction": "reverse", "alpha": 0.3}, {"alpha": 0.0}],
    "total_variation": BOUNDED_OPTIONS,
    "policy_gradient": [
        {**EXACT, "advantage_clip": None},
        {**EXACT, "advantage_clip": None, "estimator": "k2"},
        {**EXACT, "advantage_clip": None, "estimator": "k3"},
        {},
    ],
    "sampled_kl": [{**EXACT, "estimator": name} for name in ("k2", "k3", "k3_value_k2_gradient")],
    "span_kl": [EXACT, {**EXACT, "form": "advantage"}],
}


def build(name: str, options: dict[str, Any]) -> Any:
    return build_objective(ObjectiveConfig.model_validate({"name": name, **options}))


def cases(wanted: Callable[[Any], bool] = lambda _: True) -> Any:
    built = [
        (f"{name}-{'-'.join(str(value) for value in options.values())}", build(name, options))
        for name in registry.names("objective")
        for options in SETTINGS[name]
    ]
    return pytest.mark.parametrize("objective", [pytest.param(o, id=label) for label, o in built if wanted(o)])


every_objective = cases()


def ready(objective: Objective, student_NV: Tensor, teacher_NV: Tensor, tokens_N: Tensor) -> TokenRows:
    """Rows, each a sample of its own, after the first pass where the objective has one."""
    rows = rows_for(objective, student_NV, teacher_NV, tokens_N)
    if objective.contract.couples_tokens:
        assert isinstance(objective, SequenceObjective)
        return objective.condition(rows, rows.behaviour_logp_N)
    return rows


def gradients(objective: Objective, student_NV: Tensor, teacher_NV: Tensor, tokens_N: Tensor) -> Tensor:
    student_NV = student_NV.clone().requires_grad_()
    loss_N, _ = objective(ready(objective, student_NV, teacher_NV, tokens_N))
    return torch.autograd.grad(loss_N.sum(), student_NV)[0]


def two_models(count: int = 4) -> tuple[Tensor, Tensor]:
    return random_logits(0, (count, VOCAB), scale=1.0), random_logits(1, (count, VOCAB), scale=1.0)


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


@cases(lambda objective: objective.contract.reads_sampled_only)
def test_one_that_says_that_log_p_of_the_sampled_tokens_is_enough_needs_no_logits(objective: Any) -> None:
    student_NV, teacher_NV = two_models()
    rows = ready(objective, student_NV, teacher_NV, torch.arange(4))
    logp_N = student_NV.log_softmax(-1).gather(-1, torch.arange(4)[:, None])[:, 0]
    without = replace(rows, student_logits_NV=student_NV[:, :0], student_logp_N=logp_N)
    torch.testing.assert_close(objective(without), objective(rows))


def test_exactly_those_on_sampled_tokens_say_so() -> None:
    said = {name for name in SETTINGS for options in SETTINGS[name] if build(name, options).contract.reads_sampled_only}
    assert said == {"policy_gradient", "sampled_kl", "span_kl"}


@every_objective
def test_it_returns_one_differentiable_loss_a_row_and_metrics_that_are_not(objective: Any) -> None:
    student_NV, teacher_NV = two_models()
    loss_N, metrics = objective(ready(objective, student_NV.requires_grad_(), teacher_NV, torch.arange(4)))
    assert loss_N.shape == (4,)
    assert loss_N.requires_grad
    assert "kl" in metrics
    for values_N in metrics.values():
        assert values_N.shape == (4,)
        assert not values_N.requires_grad


@every_objective
def test_a_row_alone_is_worth_what_it_is_among_others(objective: Any) -> None:
    student_NV, teacher_NV = two_models()
    rows = ready(objective, student_NV, teacher_NV, torch.arange(4))
    together_N, _ = objective(rows)
    alone_N = [objective(rows.cut(slice(n, n + 1), student_NV[n : n + 1]))[0] for n in range(4)]
    torch.testing.assert_close(torch.cat(alone_N), together_N)


@every_objective
def test_its_gradient_depends_on_the_teacher(objective: Any) -> None:
    student_NV, _ = two_models()
    # one is surer of the student's favourite than the student is, the other likes it least
    one, other = (gradients(objective, student_NV, q, torch.arange(4)) for q in (3.0 * student_NV, -student_NV))
    assert float((one - other).abs().max()) > 1e-3


@every_objective
def test_it_depends_on_the_sampled_token_exactly_when_its_contract_says_so(objective: Any) -> None:
    one, other = (gradients(objective, *two_models(), torch.full((4,), token)) for token in (0, 3))
    assert torch.equal(one, other) != objective.contract.depends_on_action


@every_objective
def test_it_keeps_the_dtype_of_the_students_logits(objective: Any) -> None:
    student_NV, teacher_NV = (logits_NV.float() for logits_NV in two_models())
    loss_N, metrics = objective(ready(objective, student_NV, teacher_NV, torch.arange(4)))
    assert loss_N.dtype == torch.float32
    assert all(values.dtype == torch.float32 for values in metrics.values())


# What follows takes a contract by its word: the text of `optimises` is the formula that is computed.


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a / b).log()).sum(-1)


def formula_of(text: str) -> Callable[[Tensor, Tensor], Tensor]:
    """D(p, q) for the beginning of a contract, from probabilities, by automatic differentiation alone."""
    if text.startswith("KL(p || q)"):
        return kl
    if text.startswith("KL(q || p)"):
        return lambda p, q: kl(q, p)
    if text.startswith("TV(p, q)"):
        return lambda p, q: (p - q).abs().sum(-1) / 2
    if found := re.match(r"JSD_([\d.]+)\(p, q\)( / \(beta \(1 - beta\)\))?", text):
        beta = float(found[1])
        scale = beta * (1 - beta) if found[2] else 1.0
        return lambda p, q: mixed_kls(p, q, beta) / scale
    if found := re.match(r"KL\(q \|\| ([\d.]+) q \+ \(1 - \1\) p\)", text):
        alpha = float(found[1])
        return lambda p, q: kl(q, alpha * q + (1 - alpha) * p)
    if found := re.match(r"KL\(p \|\| \(1 - ([\d.]+)\) q \+ \1 p\)", text):
        alpha = float(found[1])
        return lambda p, q: kl(p, (1 - alpha) * q + alpha * p)
    raise AssertionError(f"no formula for {text!r}")


def mixed_kls(p: Tensor, q: Tensor, beta: float) -> Tensor:
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def outcomes(text: str, p_NV: Tensor, q_NV: Tensor, ids_NK: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Row by row, the probabilities (C,) that the contract's text says are compared."""
    if found := re.search(r"q smoothed by ([\d.]+)", text):
        q_NV = (1 - float(found[1])) * q_NV + float(found[1]) / VOCAB
    rows: list[tuple[Tensor, Tensor]] = []
    for n in range(len(p_NV)):
        pair = (p_NV[n], q_NV[n])
        if ids_NK is not None:
            ids = ids_NK[n][ids_NK[n] >= 0]
            inside = tuple(x[ids] for x in pair)
            if "one outcome for all the others" in text:
                pair = tuple(torch.cat([x, 1 - x.sum(-1, keepdim=True)]) for x in inside)
            elif "renormalised" in text:
                pair = tuple(x / x.sum() for x in inside)
            else:
                pair = inside
        rows.append((pair[0], pair[1]))
    return rows


def claimed_value(text: str, p_NV: Tensor, q_NV: Tensor, ids_NK: Tensor | None) -> Tensor:
    formula, values = formula_of(text), list[Tensor]()
    for p_C, q_C in outcomes(text, p_NV, q_NV, ids_NK):
        value = formula(p_C, q_C)
        if "corrected" in text:
            excess = (p_C - q_C).sum()
            value = value + (excess if text.startswith("KL(q") else -excess)
        values.append(value)
    return torch.stack(values)


@cases(lambda objective: not objective.contract.depends_on_action)
def test_an_action_independent_loss_has_the_value_and_the_gradient_of_its_contract(objective: Any) -> None:
    student_NV, teacher_NV = two_models()
    tokens_N = torch.arange(4)
    spec, leaf_NV = objective.spec, student_NV.clone().requires_grad_()
    ids_NK = support_ids(student_NV, teacher_NV, spec) if spec.signal is Signal.TOPK else None
    value_N = claimed_value(objective.contract.optimises, leaf_NV.softmax(-1), teacher_NV.softmax(-1), ids_NK)
    torch.testing.assert_close(objective(ready(objective, student_NV, teacher_NV, tokens_N))[0], value_N.detach())
    (claimed_NV,) = torch.autograd.grad(value_N.sum(), leaf_NV)
    torch.testing.assert_close(gradients(objective, student_NV, teacher_NV, tokens_N), claimed_NV)


@cases(lambda o: not o.contract.depends_on_action and "corner at p = q" not in o.contract.optimises)
def test_only_what_its_contract_calls_no_divergence_has_a_gradient_at_p_equal_to_q(objective: Any) -> None:
    student_NV, _ = two_models()
    largest = float(gradients(objective, student_NV, student_NV, torch.arange(4)).abs().max())
    moves_optimum = "no divergence" in objective.contract.optimises or "smoothed" in objective.contract.optimises
    assert (largest > 1e-3) == moves_optimum
    assert moves_optimum or largest < 1e-12


@cases(lambda objective: objective.contract.depends_on_action)
def test_the_expected_gradient_of_an_action_dependent_loss_is_that_of_its_contract(objective: Any) -> None:
    """Every token of the vocabulary is sampled once, and weighted with its probability."""
    student_1V, teacher_1V = two_models(1)
    grads_VV = gradients(objective, student_1V.expand(VOCAB, -1), teacher_1V.expand(VOCAB, -1), torch.arange(VOCAB))
    expected_V = (student_1V.softmax(-1)[0][:, None] * grads_VV).sum(0)
    exact: dict[str, Tensor] = {}
    for text in ("KL(p || q)", "KL(q || p)"):
        leaf_1V = student_1V.clone().requires_grad_()
        value = formula_of(text)(leaf_1V.softmax(-1), teacher_1V.softmax(-1)).sum()
        exact[text] = torch.autograd.grad(value, leaf_1V)[0][0]
    claim = objective.contract.optimises
    if claim.startswith("neither"):
        for exact_V in exact.values():
            assert float(torch.nn.functional.cosine_similarity(expected_V, exact_V, dim=0)) < 0.99
        return
    torch.testing.assert_close(expected_V, exact[claim[: len("KL(p || q)")]])
