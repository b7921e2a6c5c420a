"""How the losses of single tokens become one number: the factor of every token of a sample, over the whole batch.

A reduction is linear in the token losses l: loss = sum over samples s of w_s * (sum over its trained tokens of l). The
factors come from counts of the whole batch, so micro-batches and ranks add up to the same loss however it is split.
Without torch. Legend: S samples of a batch, n_s trained tokens of sample s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from distill.errors import ConfigError
from distill.registry import did_you_mean

Factors = NDArray[np.float64]


def row_weights(
    reduction: str,
    *,
    loss_tokens: Sequence[int],
    domains: Sequence[str],
    trajectories: Sequence[str],
    domain_weights: Mapping[str, float] | None = None,
) -> Factors:
    """w (S,), the factor of each trained token of each sample.

    token_mean: 1 / (all trained tokens). seq_mean: every sample with tokens has the same mass, shared by its tokens.
    domain_balanced: a token mean inside each domain; `domain_weights` between the domains that have tokens, divided by
    their sum; equal ones without. segment_mean: samples with the same trajectory are its segments; every trajectory has
    the same mass, shared by its segments, and each segment's by its tokens. segment_token: a token mean in which a
    token weighs 1 / (segments of its trajectory), so that a trajectory cut in many pieces counts no more than a whole
    one. An empty trajectory name makes the sample a trajectory of its own.

    Samples without trained tokens have weight 0 and count in no mean. So has every sample where all domains that are
    there weigh 0. Raises ConfigError for an unknown reduction and for weights that are negative, not finite, or missing
    for a domain.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(
            f"objective.reduction: there is no {reduction!r}", fix=did_you_mean(reduction, list(REDUCTIONS))
        )
    if domain_weights is not None and reduction != "domain_balanced":
        raise ConfigError(
            f"objective.domain_weights: has no effect with reduction={reduction}",
            why="a setting that is ignored is a mistake",
            fix="set objective.reduction=domain_balanced, or remove objective.domain_weights",
        )
    if not len(loss_tokens) == len(domains) == len(trajectories):
        raise ValueError("one count, one domain and one trajectory a sample")
    tokens_S = np.asarray(loss_tokens, np.float64)
    live = [s for s, tokens in enumerate(loss_tokens) if tokens > 0]
    weights_S = np.zeros(len(tokens_S))
    if live:
        own = [trajectories[s] or f"\0{s}" for s in live]
        weights_S[live] = REDUCTIONS[reduction](tokens_S[live], [domains[s] for s in live], own, domain_weights)
    return weights_S


def _token_mean(tokens_S: Factors, *_: object) -> Factors:
    return np.full(len(tokens_S), 1.0 / tokens_S.sum())


def _seq_mean(tokens_S: Factors, *_: object) -> Factors:
    return 1.0 / (tokens_S * len(tokens_S))


def _domain_balanced(
    tokens_S: Factors, domains: Sequence[str], _: Sequence[str], domain_weights: Mapping[str, float] | None
) -> Factors:
    present = list(dict.fromkeys(domains))
    shares = _shares(present, domain_weights)
    totals = {domain: sum(n for n, d in zip(tokens_S, domains, strict=True) if d == domain) for domain in present}
    return np.asarray([shares[domain] / totals[domain] for domain in domains])


def _shares(present: Sequence[str], domain_weights: Mapping[str, float] | None) -> dict[str, float]:
    if domain_weights is None:
        return dict.fromkeys(present, 1.0 / len(present))
    missing = [domain for domain in present if domain not in domain_weights]
    if missing:
        raise ConfigError(
            f"objective.domain_weights: there is none for the domain {missing[0]!r}",
            fix=f"give it one, 0 to leave its samples out; there are some for {', '.join(sorted(domain_weights))}",
        )
    wrong = [domain for domain, weight in domain_weights.items() if not 0 <= weight < np.inf]
    if wrong:
        raise ConfigError(
            f"objective.domain_weights.{wrong[0]}: must be a number of at least 0, got {domain_weights[wrong[0]]}"
        )
    total = sum(domain_weights[domain] for domain in present)
    if not total:  # a batch that teaches nothing is no fault: the next may hold the other domains
        return dict.fromkeys(present, 0.0)
    return {domain: domain_weights[domain] / total for domain in present}


def _segment_mean(tokens_S: Factors, _: Sequence[str], trajectories: Sequence[str], __: object) -> Factors:
    segments = Counter(trajectories)
    return np.asarray(
        [1.0 / (len(segments) * segments[name] * n) for name, n in zip(trajectories, tokens_S, strict=True)]
    )


def _segment_token(tokens_S: Factors, _: Sequence[str], trajectories: Sequence[str], __: object) -> Factors:
    segments = Counter(trajectories)
    weights_S = np.asarray([1.0 / segments[name] for name in trajectories])
    return weights_S / (weights_S * tokens_S).sum()


REDUCTIONS: Mapping[str, Callable[[Factors, Sequence[str], Sequence[str], Mapping[str, float] | None], Factors]] = {
    "token_mean": _token_mean,
    "seq_mean": _seq_mean,
    "domain_balanced": _domain_balanced,
    "segment_mean": _segment_mean,
    "segment_token": _segment_token,
}
