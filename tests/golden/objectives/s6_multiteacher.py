"""Several teachers on one sample: weighted divergences and mixtures."""

from __future__ import annotations

import torch
from torch import Tensor

from distill.objectives.mixture import log_mixture, mix_rows
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import TokenRows
from tests.golden.objectives.data import PRECISIONS, Case
from tests.golden.objectives.models import full_rows, logits, loss_and_gradient
from tests.golden.objectives.runner import Evaluate
from tests.golden.objectives.s1_divergence import objective_of


def weights(case: Case, precision: str) -> Tensor:
    """(M,) as written, or (M, N)."""
    if "weights" in case.inputs:
        return case.tensor("weights", precision).flatten(1)
    return torch.tensor(case.params["weights"], dtype=PRECISIONS[precision])


def parts(case: Case, precision: str, student_NV: Tensor) -> list[TokenRows]:
    names = [name for name in case.inputs if name.startswith("teacher_logits_")]
    tokens_N = case.ints("tokens").flatten() if "tokens" in case.inputs else None
    return [full_rows(student_NV, logits(case, name, precision), tokens_N) for name in names]


def student(case: Case, precision: str) -> Tensor:
    """The student's logits; a case about teachers alone has none, and any will do."""
    name = "student_logits" if "student_logits" in case.inputs else "teacher_logits_0"
    return logits(case, name, precision)


def weighted_divergence(case: Case, precision: str) -> dict[str, Tensor]:
    """As a step adds them up: rows of weight 0 have no part, the others their loss times their weight."""
    objective = objective_of(case.params["divergence"], {"beta": 0.5})

    def loss_of(student_NV: Tensor) -> Tensor:
        total_N = student_NV.new_zeros(len(student_NV))
        weights_MN = weights(case, precision).reshape(case.params["n_teachers"], -1).expand(-1, len(student_NV))
        for rows, weight_N in zip(parts(case, precision, student_NV), weights_MN, strict=True):
            live = weight_N.nonzero()[:, 0]
            if len(live):
                loss_n, _ = objective(rows.cut(live, student_NV[live]))
                total_N = total_N.index_add(0, live, loss_n * weight_N[live])
        return total_N

    return loss_and_gradient(case, precision, loss_of)


def mixed(case: Case, precision: str, student_NV: Tensor) -> TokenRows:
    return mix_rows(case.params["mixture"], parts(case, precision, student_NV), weights(case, precision))


def mixture(case: Case, precision: str) -> dict[str, Tensor | None]:
    rows = mixed(case, precision, student(case, precision))
    teachers = [part.full_logp_NV for part in parts(case, precision, rows.student_logits_NV)]
    log_z_N = log_mixture(case.params["mixture"], teachers, weights(case, precision))[1]  # pyright: ignore[reportArgumentType]
    return {"log_probs": rows.full_logp_NV, "log_normaliser": log_z_N}


def mixture_divergence(case: Case, precision: str) -> dict[str, Tensor]:
    objective = objective_of(case.params["divergence"], {"beta": 0.5})
    return loss_and_gradient(case, precision, lambda student_NV: objective(mixed(case, precision, student_NV))[0])


def mixture_advantage(case: Case, precision: str) -> dict[str, Tensor]:
    return {"advantage": advantage(mixed(case, precision, student(case, precision)))}


def sum_advantage(case: Case, precision: str) -> dict[str, Tensor]:
    rows = parts(case, precision, student(case, precision))
    weighted = [
        advantage(part) * weight
        for part, weight in zip(rows, weights(case, precision), strict=True)
        if bool((weight != 0).all())
    ]
    return {"advantage": torch.stack(weighted).sum(0)}


def advantage(rows: TokenRows) -> Tensor:
    """log q(y) - log p(y): what the policy gradient reports, with its sign turned, as `kl`."""
    return -PolicyGradient()(rows)[1]["kl"]


KINDS: dict[str, Evaluate] = {
    "weighted_divergence": weighted_divergence,
    "mixture": mixture,
    "mixture_divergence": mixture_divergence,
    "mixture_advantage": mixture_advantage,
    "sum_advantage": sum_advantage,
}
