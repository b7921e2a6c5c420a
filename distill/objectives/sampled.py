"""What the objectives on sampled tokens share: log p of the token, and the checks of what is put beside it.

Legend: N response tokens, V common vocabulary. p student, q teacher, mu the distribution that sampled the token y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.errors import ConfigError, StudentError, TeacherError
from distill.objectives.fused import compute_dtype, logp_at
from distill.objectives.rows import LOGP_SLACK, TokenRows, broken_logits, first


def token_logp(rows: TokenRows) -> Tensor:
    """log p(y) (N,), differentiable in the logits; no other tensor of size (N, V) than the gradient. What the rows
    have already is not computed again."""
    if rows.student_logp_N is not None:
        return rows.student_logp_N
    return logp_at(rows.student_logits_NV, rows.tokens_N[:, None])[:, 0]


def k1(log_a_N: Tensor, log_b_N: Tensor) -> Tensor:
    """log a - log b: unbiased for KL(a || b) over samples of a."""
    return log_a_N - log_b_N


def k2(log_a_N: Tensor, log_b_N: Tensor) -> Tensor:
    """(log a - log b)^2 / 2: biased, never negative."""
    return (log_a_N - log_b_N).square() / 2.0


def k3(log_a_N: Tensor, log_b_N: Tensor) -> Tensor:
    """b/a - 1 - log(b/a): unbiased for KL(a || b) over samples of a, never negative. Not clamped: infinity where it
    overflows."""
    gap_N = log_b_N - log_a_N
    return gap_N.expm1() - gap_N


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
"""Of KL(a || b) from one sample of a. Source: Schulman, Approximating KL Divergence (2020)."""


def sampler_logp(rows: TokenRows) -> Tensor:
    """log mu(y) (N,) in the dtype of the losses. Raises StudentError where it is no log-probability."""
    behaviour_N = rows.behaviour_logp_N.to(compute_dtype(rows.student_logits_NV))
    good_N = behaviour_N.isfinite() & (behaviour_N <= LOGP_SLACK)
    if not bool(good_N.all()):
        row = first(~good_N)
        place = rows.describe(row)
        raise StudentError(
            f"{place}: the log-probability of the sampled token is {float(behaviour_N[row])}",
            why="the importance weight p/mu needs the probability with which the token was sampled",
            **place.blame,
        )
    return behaviour_N


LEAST, MOST = 1e-6, 1e6
"""Of numbers that an advantage is clipped to or multiplied by: float32 holds seven digits."""


def check_clip(advantage_clip: float | None) -> None:
    """Raises ConfigError for a clip that leaves no advantage, or clips none."""
    if advantage_clip is not None and not LEAST <= advantage_clip <= MOST:
        raise ConfigError(
            f"objective.advantage_clip: must be between {LEAST:g} and {MOST:g}, got {advantage_clip}",
            why="float32 knows log p to about 1e-6, and an advantage clipped to less optimises nothing; beside one of "
            "more than 1e6 the other tokens of a step are lost",
            fix="objective.advantage_clip=null turns clipping off",
        )


def require_advantage(advantage_N: Tensor, rows: TokenRows, current_N: Tensor, log_q_N: Tensor) -> None:
    """Every advantage is a finite number, or an error that names the row: infinity times a weight of 0 is no number.

    `current_N` and `log_q_N` are the log p and log q that it came from.
    """
    good_N = advantage_N.isfinite()
    if bool(good_N.all()):
        return
    row = first(~good_N)
    where = rows.describe(row)
    if not bool(current_N[row].isfinite()):
        raise broken_logits(where, f", and log p of the token is {float(current_N[row])}")
    if float(log_q_N[row]) == -torch.inf:
        raise TeacherError(
            f"{where}: the teacher gives probability 0 to the sampled token",
            why="its advantage is minus infinity, and is not clamped unless asked for",
            fix="use policy_gradient with objective.advantage_clip (5.0 is its default), or jsd, which is finite there",
            **where.blame,
        )
    raise TeacherError(
        f"{where}: the advantage of the sampled token overflows to {float(advantage_N[row])}",
        why=f"log p is {float(current_N[row]):g} and log q {float(log_q_N[row]):g}, too far apart for the estimator",
        fix="use policy_gradient with objective.advantage_clip and objective.estimator=k1",
        **where.blame,
    )


WEIGHT_METRICS = ("importance_weight", "gated_low", "gated_high")
"""What `weight_metrics` tells."""


def weight_metrics(weight_N: Tensor, log_ratio_N: Tensor) -> dict[str, Tensor]:
    """`importance_weight` of each token, and 1 for each token that it leaves out: apart for those that the student now
    gives less (`gated_low`) and more (`gated_high`) probability than the sampler did."""
    out_N = weight_N == 0
    return {
        "importance_weight": weight_N,
        "gated_low": (out_N & (log_ratio_N < 0)).to(weight_N.dtype),
        "gated_high": (out_N & (log_ratio_N >= 0)).to(weight_N.dtype),
    }
