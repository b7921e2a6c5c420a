"""Outcome rewards mixed with distillation. Legend: B x T the data's tokens, N those that the mask keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.config.models import OutcomeConfig
from distill.objectives.advantages import discounted_future
from distill.objectives.corrections import IcePop, NoCorrection
from distill.objectives.outcome import group_advantage, skip_observation_gae
from distill.objectives.outcome_mix import AdvantageMix, LossMix, require_outcome, with_outcome
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.reductions import row_weights
from distill.objectives.rows import TokenRows
from distill.objectives.sampled import token_logp
from distill.objectives.sampled_kl import SampledKL
from tests.builders_sampled import sampled_rows
from tests.golden.objectives.data import Case
from tests.golden.objectives.masked import Masked
from tests.golden.objectives.runner import Evaluate


def batch_of(case: Case, precision: str) -> tuple[Masked, Tensor, TokenRows]:
    """The mask, the leaf (B, T), and the rows of its trained tokens."""
    masked, leaf_BT = Masked(case.inputs["loss_mask"]), case.tensor("student_logp", precision).requires_grad_()
    rows = sampled_rows(
        masked.rows(leaf_BT),
        behaviour_logp_N=masked.rows(case.tensor("behaviour_logp", precision)),
        teacher_logp_N=masked.rows(case.tensor("teacher_logp", precision)),
        outcome_N=case.tensor("outcome_advantage", precision)[masked.sample_N],
        sample_N=masked.sample_N,
    )
    return masked, leaf_BT, rows


def weights(case: Case, masked: Masked) -> Tensor:
    """(N,) of the case's reduction."""
    count = len(masked.counts)
    weights_S = row_weights(
        case.params.get("reduction", "token_mean"),
        loss_tokens=masked.counts,
        domains=[""] * count,
        trajectories=[""] * count,
    )
    return torch.from_numpy(weights_S)[masked.sample_N]


def mixed_objective(case: Case) -> AdvantageMix:
    params = case.params
    importance = IcePop(low=params["lo"], high=params["hi"]) if "lo" in params else NoCorrection()
    plain = PolicyGradient(importance=importance, advantage_clip=params["clip"])
    if params["a"] == 0:
        # a configuration does not ask for an outcome that does not count
        return AdvantageMix(objective=plain, weight=0.0, teacher_weight=params["c"])
    mixed = with_outcome(plain, OutcomeConfig(weight=params["a"], teacher_weight=params["c"]))
    assert isinstance(mixed, AdvantageMix)
    return mixed


def mixed_advantage(case: Case, precision: str) -> dict[str, Tensor]:
    masked, leaf_BT, rows = batch_of(case, precision)
    objective = mixed_objective(case)
    loss_N, metrics = objective(rows)
    loss = (weights(case, masked).to(loss_N) * loss_N).sum()
    (gradient_BT,) = torch.autograd.grad(loss, leaf_BT)
    return {
        "loss": loss.detach(),
        "grad_student_logp": gradient_BT,
        "advantage": masked.spread(objective.advantage(rows, token_logp(rows).detach())),
        "weight": masked.spread(metrics["importance_weight"]),
    }


def loss_mix(case: Case, precision: str) -> dict[str, Tensor]:
    masked, leaf_BT, rows = batch_of(case, precision)
    teachers = SampledKL(estimator=case.params["kd"], importance=NoCorrection())
    outcome = OutcomeConfig(mix="loss", teacher_share=case.params["lambda"], importance="none")
    objective = with_outcome(teachers, outcome)
    assert isinstance(objective, LossMix)
    loss_N, _ = objective(rows)
    weights_N = weights(case, masked).to(loss_N)
    loss = (weights_N * loss_N).sum()
    (gradient_BT,) = torch.autograd.grad(loss, leaf_BT, retain_graph=True)
    rl_N, _ = objective.policy.loss(rows, token_logp(rows), require_outcome(rows))
    kd_N, _ = objective.objective(rows)
    return {
        "loss": loss.detach(),
        "grad_student_logp": gradient_BT,
        "loss_rl": (weights_N * rl_N).sum(),
        "loss_kd": (weights_N * kd_N).sum(),
    }


def grouped(case: Case, precision: str) -> dict[str, Any]:
    params = case.params
    rewards, groups = np.asarray(case.inputs["rewards"]), np.asarray(case.inputs["groups"]).tolist()
    advantage = group_advantage(rewards, groups, ddof=params["ddof"], eps=params["eps"], use_std=params["use_std"])
    return {"advantage": advantage}


def discounted(case: Case, precision: str) -> dict[str, Any]:
    values = np.asarray(case.inputs["x"])
    return {"sum": discounted_future(values, case.params["gamma"], np.zeros(len(values), np.int64))}


def gae(case: Case, precision: str) -> dict[str, Any]:
    params = case.params
    advantage, returns = skip_observation_gae(
        np.asarray(case.inputs["rewards"]),
        np.asarray(case.inputs["values"]),
        np.asarray(case.inputs["loss_mask"]),
        discount=params["gamma"],
        trace=params["lambda"],
        bootstrap=params["bootstrap"],
    )
    return {"advantage": advantage, "returns": returns}


KINDS: dict[str, Evaluate] = {
    "group_advantage": grouped,
    "mixed_advantage": mixed_advantage,
    "loss_mix": loss_mix,
    "discounted_future": discounted,
    "skip_observation_gae": gae,
}
