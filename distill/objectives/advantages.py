"""Sums along a sample: returns of token advantages, and weights by position.

The arithmetic is numpy's, in float64; `along_samples` is the way in for tensors. Legend: N tokens of whole samples, one
after the other; `sample_N` says which sample a token belongs to, rising.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def sample_numbers(sample_N: Tensor | None, count: int) -> Ints:
    """Which sample each token belongs to, as numbers on the host; without any, each token is one of its own."""
    return np.arange(count) if sample_N is None else sample_N.cpu().numpy()


def along_samples(values_N: Tensor, function: Callable[[Floats, Ints], Floats], sample_N: Ints) -> Tensor:
    """`function` of values and sample numbers in float64 on the host, with dtype and device of the values."""
    result_N = function(values_N.detach().double().cpu().numpy(), sample_N)
    return torch.from_numpy(result_N).to(values_N)


def spans_of(sample_N: Ints) -> tuple[Ints, Ints]:
    """(first token of each sample, its number of tokens)."""
    starts = np.flatnonzero(np.diff(sample_N, prepend=sample_N[:1] - 1))
    return starts, np.diff(starts, append=len(sample_N))


def discounted_future(values_N: Floats, discount: float, sample_N: Ints) -> Floats:
    """sum over j >= t of discount^(j-t) * value_j, inside each sample."""
    starts, counts = spans_of(sample_N)
    result_N = np.array(values_N, np.float64)
    # from the last token backwards, all samples at once: `back` tokens before each sample's end
    for back in range(1, int(counts.max(initial=0))):
        at = (starts + counts - 1 - back)[counts > back]
        result_N[at] += discount * result_N[at + 1]
    return result_N


def tokens_left(sample_N: Ints) -> Floats:
    """How many tokens of its sample stand from each token on, itself among them."""
    starts, counts = spans_of(sample_N)
    ends_N = np.repeat(starts + counts, counts)
    return (ends_N - np.arange(len(sample_N))).astype(np.float64)


def mean_of_sample(values_N: Floats, sample_N: Ints) -> Floats:
    """The mean over its sample, at each of its tokens."""
    starts, counts = spans_of(sample_N)
    if not len(starts):
        return values_N
    return np.repeat(np.add.reduceat(values_N, starts) / counts, counts)


def front_loading(values_N: Floats, gain: float, sample_N: Ints) -> Floats:
    """1 + gain * (1 - sum over j < t of |value_j| / sum over all j of |value_j|): IW-OPD's weight of a token.

    From 1 + gain at the first token of a sample down to 1. Where all values of a sample are 0 there is nothing to
    weigh, and the weight is 1 + gain.
    """
    starts, counts = spans_of(sample_N)
    if not len(starts):
        return values_N
    size_N = np.abs(values_N)
    running_N = np.concatenate([[0.0], np.cumsum(size_N)])
    before_N = running_N[:-1] - np.repeat(running_N[starts], counts)
    total_N = np.repeat(np.add.reduceat(size_N, starts), counts)
    spent_N = np.divide(before_N, total_N, out=np.zeros_like(before_N), where=total_N > 0)
    return 1.0 + gain * (1.0 - spent_N)
