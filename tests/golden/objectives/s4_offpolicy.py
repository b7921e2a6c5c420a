"""Off-policy corrections of given advantages. Legend: B x T the data's tokens, N those that the mask keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distill.objectives import corrections
from distill.objectives.correction import Correction, Sampled
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.reductions import row_weights
from tests.builders_sampled import conditioned, sampled_rows
from tests.golden.objectives.data import Case
from tests.golden.objectives.masked import Masked
from tests.golden.objectives.runner import Evaluate, Mismatch

Build = Callable[[Mapping[str, Any]], Correction]
BUILD: dict[str, Build] = {
    "none": lambda _: corrections.NoCorrection(),
    "is": lambda _: corrections.ImportanceSampling(),
    "tis": lambda p: corrections.TruncatedImportanceSampling(cap=p["cap"]),
    "clamp": lambda p: corrections.Clamp(low=p["lo"], high=p["hi"]),
    "sao_detached": lambda p: corrections.SAO(eps_low=p["eps_l"], eps_high=p["eps_h"]),
    "sao_through": lambda p: corrections.SAO(eps_low=p["eps_l"], eps_high=p["eps_h"], variant="through"),
    "sao_surrogate": lambda p: corrections.SAO(eps_low=p["eps_l"], eps_high=p["eps_h"], variant="surrogate"),
    "icepop": lambda p: corrections.IcePop(low=p["lo"], high=p["hi"]),
    "icepop_ppo": lambda p: corrections.IcePopPPO(low=p["lo"], high=p["hi"], eps=p["eps"]),
    "seq_geo_mask": lambda p: corrections.SequenceGeometricMask(low=p["lo"], high=p["hi"]),
    "seq_geo_mask_tis": lambda p: corrections.SequenceGeometricMaskTIS(low=p["lo"], high=p["hi"], cap=p["cap"]),
    "seq_geo_trunc": lambda p: corrections.SequenceGeometricTruncation(cap=p["cap"]),
    "prob_diff_rl": lambda p: corrections.ProbabilityDifference(low=p["low"], high=p["high"], kl_tau=p["kl_tau"]),
    "prob_diff_refkl": lambda p: corrections.ProbabilityDifferenceOneSided(low=p["low"], kl_tau=p["kl_tau"]),
    "decoupled_ppo": lambda p: corrections.DecoupledPPO(eps=p["eps"], cap=p.get("cap"), alpha=p.get("alpha")),
}


def offpolicy(case: Case, precision: str) -> dict[str, Any]:
    masked, leaf_BT = Masked(case.inputs["loss_mask"]), case.tensor("student_logp", precision).requires_grad_()
    logp_N = masked.rows(leaf_BT)
    objective = PolicyGradient(importance=importance_of(case), advantage_clip=None)
    members: dict[str, Tensor] = {
        name: masked.rows(case.tensor(key, precision)) for name, key in MEMBERS.items() if key in case.inputs
    }
    if not objective.importance.reads_sampler:
        # what a correction says that it does not read, it must not read
        members["behaviour_logp_N"] = torch.full_like(logp_N.detach(), torch.nan)
    rows = sampled_rows(logp_N, sample_N=masked.sample_N, **members)
    loss_N, metrics = objective(conditioned(objective, rows, logp_N))
    weights_S = row_weights("token_mean", loss_tokens=masked.counts, domains=[""] * 4, trajectories=[""] * 4)
    loss = (torch.from_numpy(weights_S).to(loss_N)[masked.sample_N] * loss_N).sum()
    (gradient_BT,) = torch.autograd.grad(loss, leaf_BT)
    claim_denominator(case, masked)
    keep_N = 1 - metrics["gated_low"] - metrics["gated_high"]
    return {
        "loss": loss.detach(),
        "per_token_loss": masked.spread(loss_N),
        "grad_student_logp": gradient_BT,
        "weight": masked.spread(metrics["importance_weight"]),
        "keep": masked.spread(keep_N),
        "kept_fraction": keep_N.mean(),
        "gated_low": metrics["gated_low"].sum(),
        "gated_high": metrics["gated_high"].sum(),
        "prox_logp": masked.spread(prox_logp(objective.importance, logp_N, rows.behaviour_logp_N)),
    }


MEMBERS = {
    "behaviour_logp_N": "behaviour_logp",
    "prox_logp_N": "prox_logp",
    "teacher_logp_N": "teacher_logp",
    "advantage_N": "advantages",
}


def importance_of(case: Case) -> Any:
    return BUILD[case.kind.removeprefix("offpolicy:")](case.params)


def prox_logp(importance: Any, logp_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """The proximal policy that `decoupled_ppo` makes where the data give none."""
    if not isinstance(importance, corrections.DecoupledPPO):
        return torch.zeros_like(logp_N)
    sampled = Sampled(log_p_N=logp_N, advantage_N=torch.zeros_like(logp_N), behaviour_logp_N=behaviour_N)
    return importance.prox_logp(sampled)


def claim_denominator(case: Case, masked: Masked) -> None:
    if sum(masked.counts) != case.params["denominator"]:
        raise Mismatch(f"{sum(masked.counts)} trained tokens, the case counts {case.params['denominator']}")


KINDS: dict[str, Evaluate] = {f"offpolicy:{name}": offpolicy for name in BUILD}
