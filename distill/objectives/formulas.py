"""Divergences between two discrete distributions and their derivatives, as closed formulas. In nats.

Each formula takes a `Pair` and returns the divergence D of every row (N,) and u = p dD/dp (N, C). From u follows the
gradient with respect to logits, u - p sum(u), or to log-probabilities, u itself; adding a constant times p to u changes
neither where the columns hold all of the distribution, and the formulas leave such terms out. Two of them say that they
do not (`truncated_*`).

Legend: N rows, C columns (a vocabulary, or the outcomes of a top-k row). p student, q teacher.
0 log 0 = 0 log(0/0) = 0. A divergence that is infinite comes out as infinity or NaN, never clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

OVERFLOW_GUARD = 60.0
"""log(q/p) up to which exp is taken: e^60 fits float32, and 1 is far below its rounding error."""
ROUNDING_UNITS = 64.0
"""Units of rounding, each of size 1 + |log q|, up to which two computed log-probabilities may mean the same number.
Twice the largest error that was seen: in float32, 33 for the log-softmax of 256 000 logits around 20."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The two distributions of every row; exponentials are taken once."""

    log_p: Tensor
    log_q: Tensor
    p: Tensor
    q: Tensor

    @classmethod
    def of(cls, log_p: Tensor, log_q: Tensor) -> Pair:
        return cls(log_p, log_q, log_p.exp(), log_q.exp())


Formula = Callable[[Pair], tuple[Tensor, Tensor]]


def _gap(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(a/b), and 0 where a is 0: such an entry contributes nothing, and inf - inf is no number."""
    gap = log_a - log_b
    # one look at the smallest is far cheaper than masking, and models seldom give exact zeros
    return gap.masked_fill_(log_a == -torch.inf, 0.0) if _has_zeros(log_a) else gap


def _has_zeros(log_a: Tensor) -> bool:
    return bool(log_a.numel()) and bool(log_a.amin() == -torch.inf)


def reverse_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p log(p/q);  u = p log(p/q)."""
    u = _gap(pair.log_p, pair.log_q).mul_(pair.p)
    return u.sum(-1), u


def forward_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q log(q/p);  u = -q."""
    return _gap(pair.log_q, pair.log_p).mul_(pair.q).sum(-1), -pair.q


def jsd(pair: Pair, *, beta: float, scaled: bool) -> tuple[Tensor, Tensor]:
    """D = b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p  (GKD, arXiv 2306.13649, eq. 3);
    u = (1 - b) p log(p/m).

    `scaled` divides by b (1 - b), which makes D continuous in b: its limits at 0 and 1 are KL(q || p) and KL(p || q).
    Both forms mean those divergences at the ends, where the plain formula is 0.
    """
    if beta in (0.0, 1.0):
        return reverse_kl(pair) if beta else forward_kl(pair)
    ratio = _log_ratio(pair)
    log_mp, log_mq = _log_mix(ratio, beta), _log_mix(-ratio, 1.0 - beta)
    u = log_mp.mul_(pair.p).mul_(beta - 1.0)
    value = torch.sum(u - log_mq.mul_(pair.q).mul_(beta), -1)
    scale = beta * (1.0 - beta) if scaled else 1.0
    return value / scale, u.div_(scale)


def skew_forward_kl(pair: Pair, *, alpha: float) -> tuple[Tensor, Tensor]:
    """KL(q || m), m = a q + (1 - a) p  (DistiLLM, arXiv 2402.03898);  u = -(1 - a) p q/m. a = 0: KL(q || p)."""
    if alpha == 0.0:
        return forward_kl(pair)
    log_mq = _log_mix(-_log_ratio(pair), 1.0 - alpha)
    return -(pair.q * log_mq).sum(-1), log_mq.neg_().exp_().mul_(pair.p).mul_(alpha - 1.0)


def skew_reverse_kl(pair: Pair, *, alpha: float) -> tuple[Tensor, Tensor]:
    """KL(p || m), m = (1 - a) q + a p  (DistiLLM, arXiv 2402.03898);  u = p (log(p/m) - a (p/m - 1)).
    a = 0: KL(p || q)."""
    if alpha == 0.0:
        return reverse_kl(pair)
    log_pm = _log_mix(_log_ratio(pair), 1.0 - alpha).neg_()
    value = (pair.p * log_pm).sum(-1)
    return value, (log_pm - log_pm.expm1().mul_(alpha)).mul_(pair.p)


def total_variation(pair: Pair, *, has_rest: bool) -> tuple[Tensor, Tensor]:
    """sum |p - q| / 2;  u = p sign(p - q) / 2, which is 0 where p = q and there is no derivative.

    p and q count as equal where they differ by no more than rounding may have made of one number: else the sign of
    that noise would pull at a student that has arrived. `has_rest`: the last column is what the others leave of 1,
    so that the errors of all of them may meet in it.
    """
    gap, noise = pair.p - pair.q, _noise(pair)
    if has_rest:
        noise[..., -1] = noise.sum(-1)
    distance = gap.abs()
    return distance.sum(-1).div_(2.0), gap.sign_().mul_(pair.p).div_(2.0).masked_fill_(distance <= noise, 0.0)


def _noise(pair: Pair) -> Tensor:
    """How far rounding may have moved q: q times ROUNDING_UNITS of log q."""
    limits = torch.finfo(pair.q.dtype)
    return (1.0 - pair.log_q.clamp(min=limits.min)).mul_(pair.q).mul_(ROUNDING_UNITS * limits.eps)


def truncated_reverse_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    """sum_S p log(p/q) over some of the outcomes; may be negative.  u = p (log(p/q) + 1), with its constant."""
    value, u = reverse_kl(pair)
    return value, u + pair.p


def truncated_forward_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    """sum_S q log(q/p) over some of the outcomes; may be negative.  u = -q, with its constant, which is 0."""
    return forward_kl(pair)


def corrected_reverse_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    """sum_S [p log(p/q) - p + q]  (MOPD, arXiv 2606.30406): no summand is negative.  u = p log(p/q)."""
    value, u = reverse_kl(pair)
    return value - (pair.p - pair.q).sum(-1), u


def corrected_forward_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    """sum_S [q log(q/p) - q + p]: no summand is negative.  u = p - q."""
    value, _ = forward_kl(pair)
    gap = pair.p - pair.q
    return value + gap.sum(-1), gap


def entropy_gap(pair: Pair) -> Tensor:
    """H(q) - H(p)."""
    return _negentropy(pair.log_p, pair.p) - _negentropy(pair.log_q, pair.q)


def _negentropy(log_a: Tensor, a: Tensor) -> Tensor:
    # where log a is -inf, any finite number will do: a is 0
    return log_a.clamp(min=torch.finfo(log_a.dtype).min).mul_(a).sum(-1)


def _log_ratio(pair: Pair) -> Tensor:
    """log(q/p) with finite stand-ins where p or q is 0; whatever they are multiplied with is 0. NaN stays NaN."""
    ratio, most = pair.log_q - pair.log_p, torch.finfo(pair.log_p.dtype).max
    if _has_zeros(pair.log_q):
        ratio.masked_fill_(pair.log_q == -torch.inf, -most)
    return ratio.clamp_(max=most)


def _log_mix(x: Tensor, weight: float) -> Tensor:
    """log((1 - weight) + weight e^x), exact near x = 0, and without overflow for large x."""
    guarded = x.clamp(max=OVERFLOW_GUARD)
    return guarded.expm1_().mul_(weight).log1p_().add_((x - OVERFLOW_GUARD).clamp_(min=0.0))


def smooth(log_q: Tensor, epsilon: float) -> Tensor:
    """log((1 - epsilon) q + epsilon / V)."""
    uniform = log_q.new_tensor(math.log(epsilon) - math.log(log_q.shape[-1]))
    return torch.logaddexp(log_q + math.log1p(-epsilon), uniform)


def logsumexp_outside(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log-sum-exp of the logits that are not at the ids, (N,); -inf where nothing is left."""
    return logits_NV.scatter(-1, ids_NK, -torch.inf).logsumexp(-1)
