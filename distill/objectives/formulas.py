"""Divergences between two discrete distributions, given as log-probabilities over the last axis. In nats.

p is the student, q the teacher; the axis may be a vocabulary or the buckets of a top-k row. Results keep the dtype and
lose the last axis. 0 log 0 = 0 log(0/0) = 0; a divergence that is infinite is returned as infinity, never clamped.
Gradients are finite wherever the value is, -inf entries included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) = sum_v a log(a/b)."""
    dead = log_a == -torch.inf
    # entries with a = 0 contribute nothing; filling both sides keeps inf - inf out of the backward pass
    gap = log_a.masked_fill(dead, 0.0) - log_b.masked_fill(dead, 0.0)
    return (log_a.exp() * gap).sum(-1)


def jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """D = beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p  (GKD, arXiv 2306.13649, eq. 3).

    The formula is 0 at both ends. As in the paper's use of it, beta = 0 means KL(q || p) and beta = 1 means KL(p || q).
    """
    if beta == 0.0:
        return kl(log_q, log_p)
    if beta == 1.0:
        return kl(log_p, log_q)
    both_dead = (log_p == -torch.inf) & (log_q == -torch.inf)
    log_m = torch.logaddexp(
        log_q.masked_fill(both_dead, 0.0) + math.log(beta), log_p.masked_fill(both_dead, 0.0) + math.log1p(-beta)
    ).masked_fill(both_dead, -torch.inf)
    return beta * kl(log_q, log_m) + (1.0 - beta) * kl(log_p, log_m)


def entropy(log_a: Tensor) -> Tensor:
    """H(a) = -sum_v a log a."""
    return -(log_a.exp() * log_a.masked_fill(log_a == -torch.inf, 0.0)).sum(-1)


def smooth(log_q: Tensor, epsilon: float) -> Tensor:
    """log((1 - epsilon) q + epsilon / V)."""
    uniform = log_q.new_tensor(math.log(epsilon) - math.log(log_q.shape[-1]))
    return torch.logaddexp(log_q + math.log1p(-epsilon), uniform)


def log_outside(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log of the softmax mass outside the ids, (N,), without the cancellation of log(1 - sum). Needs K < V."""
    outside_NV = logits_NV.scatter(-1, ids_NK, -torch.inf)
    empty_N = outside_NV.detach().amax(-1) == -torch.inf
    # logsumexp of nothing but -inf has a NaN gradient
    outside_N = outside_NV.masked_fill(empty_N[:, None], 0.0).logsumexp(-1)
    return (outside_N - logits_NV.logsumexp(-1)).masked_fill(empty_N, -torch.inf)
