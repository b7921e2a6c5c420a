"""Rows of sampled tokens with given probabilities, for the objectives that see nothing else. Legend: N tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.objectives.rows import TokenRows


def two_column_logits(logp_N: Tensor) -> Tensor:
    """(N, 2): a vocabulary of the sampled token and all the rest. Their log-softmax is log p and log(1 - p), and the
    gradient of log p with respect to `logp_N` is 1."""
    return torch.stack([logp_N, (-torch.expm1(logp_N)).log()], -1)


def sampled_rows(logp_N: Tensor, **members: Any) -> TokenRows:
    """Tokens of these log-probabilities, sampled on-policy, of a teacher like the student unless given."""
    defaults: dict[str, Any] = {"behaviour_logp_N": logp_N.detach(), "teacher_logp_N": logp_N.detach()}
    tokens_N = torch.zeros(len(logp_N), dtype=torch.int64)
    return TokenRows(student_logits_NV=two_column_logits(logp_N), tokens_N=tokens_N, **(defaults | members))


def one_row(*, log_p: float, log_mu: float, log_q: float, **members: Any) -> TokenRows:
    """A row whose sampled token has probability p under the student, mu when it was sampled, q under the teacher."""
    single = {"behaviour_logp_N": log_mu, "teacher_logp_N": log_q}
    values = {name: torch.tensor([value], dtype=torch.float64) for name, value in single.items()}
    return sampled_rows(torch.tensor([log_p], dtype=torch.float64), **values, **members)


def random_logp(seed: int, count: int) -> Tensor:
    """Between about e^-4 and nearly 1, float64."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(np.log(random.uniform(0.02, 0.98, count)))


def random_rows(seed: int, counts: list[int]) -> tuple[Tensor, TokenRows]:
    """A leaf of log-probabilities, and the rows of samples with these many tokens: off-policy, of another teacher."""
    total = sum(counts)
    leaf_N = random_logp(seed, total).requires_grad_()
    random = np.random.default_rng(seed + 1)
    rows = sampled_rows(
        leaf_N,
        behaviour_logp_N=(leaf_N.detach() + torch.from_numpy(random.normal(0, 0.3, total))).clamp(max=-1e-3),
        teacher_logp_N=random_logp(seed + 2, total),
        sample_N=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
    )
    return leaf_N, rows


def of_samples(rows: TokenRows, wanted: list[int]) -> tuple[Tensor, TokenRows]:
    """(row numbers, rows) of some of the samples."""
    assert rows.sample_N is not None
    keep = torch.isin(rows.sample_N, torch.tensor(wanted)).nonzero()[:, 0]
    return keep, rows.cut(keep, rows.student_logits_NV[keep])


def conditioned(objective: Any, rows: TokenRows, logp_N: Tensor) -> TokenRows:
    """The rows after the first pass, where the objective wants one."""
    return objective.condition(rows, logp_N.detach()) if objective.contract.couples_tokens else rows


def loss_of(objective: Any, rows: TokenRows, logp_N: Tensor) -> Tensor:
    """The loss of every row (N,), of whole samples."""
    return objective(conditioned(objective, rows, logp_N))[0]
