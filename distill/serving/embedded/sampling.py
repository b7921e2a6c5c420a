"""Drawing tokens so that a seeded request gets the same ones alone, in any batch, and after a pause.

The uniform number of a draw is a hash of (seed, position in the sequence), and the draw inverts the cumulative
distribution in float64, so nothing depends on which other rows share the step. N rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds_N: NDArray[np.uint64], positions_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) a row, from its seed and the position of the token to draw."""
    state = _mix(seeds_N + _GOLDEN) + (positions_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Rules:
    """Sampling parameters of N rows, on the host."""

    temperature_N: NDArray[np.float32]
    """0 is greedy."""
    top_p_N: NDArray[np.float64]
    top_k_N: NDArray[np.int64]
    """0 is no limit."""


@dataclass(frozen=True, slots=True)
class Draw:
    tokens_N: Tensor
    logprobs_N: Tensor
    logp_NV: Tensor
    """float32, of the temperature-scaled distribution before top-k and top-p; greedy rows have T = 1."""


def draw(logits_NV: Tensor, rules: Rules, uniform_N: NDArray[np.float64]) -> Draw:
    """Choose one token a row. As SGLang does, top-k and top-p limit the choice but not the reported numbers."""
    device = logits_NV.device
    greedy_N = rules.temperature_N == 0
    if (rules.temperature_N != 1).any() and not greedy_N.all():
        scale_N = np.where(greedy_N, np.float32(1), rules.temperature_N)
        logits_NV = logits_NV / torch.from_numpy(scale_N).to(device)[:, None]
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    if greedy_N.all():
        tokens_N = logp_NV.argmax(-1)
    else:
        limited_N = ((rules.top_p_N < 1) | (rules.top_k_N > 0)) & ~greedy_N
        tokens_N = _invert(logp_NV.double().exp_(), torch.from_numpy(uniform_N).to(device))
        if limited_N.any():
            rows = torch.from_numpy(np.flatnonzero(limited_N)).to(device)
            tokens_N[rows] = _draw_limited(logp_NV[rows], rules, uniform_N, limited_N)
        if greedy_N.any():
            tokens_N = torch.where(torch.from_numpy(greedy_N).to(device), logp_NV.argmax(-1), tokens_N)
    return Draw(tokens_N, logp_NV.gather(1, tokens_N[:, None])[:, 0], logp_NV)


def _draw_limited(
    logp_MV: Tensor, rules: Rules, uniform_N: NDArray[np.float64], limited_N: NDArray[np.bool_]
) -> Tensor:
    device = logp_MV.device
    sorted_MV, order_MV = logp_MV.sort(dim=-1, descending=True, stable=True)
    p_MV = sorted_MV.double().exp_()
    vocab = logp_MV.shape[1]
    top_k_M = rules.top_k_N[limited_N]
    limit_M = torch.from_numpy(np.where(top_k_M > 0, top_k_M, vocab)).to(device)
    top_p_M = torch.from_numpy(rules.top_p_N[limited_N]).to(device)
    ranks_V = torch.arange(vocab, device=device)
    before_MV = p_MV.cumsum(-1) - p_MV
    outside_MV = (ranks_V >= limit_M[:, None]) | (before_MV > top_p_M[:, None])
    p_MV = p_MV.masked_fill_(outside_MV, 0.0)
    picked_M = _invert(p_MV, torch.from_numpy(uniform_N[limited_N]).to(device))
    return order_MV.gather(1, picked_M[:, None])[:, 0]


def _invert(mass_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds uniform * total. An index with no mass is never chosen."""
    total_NV = mass_NV.cumsum_(-1)
    whole_N1 = total_NV[:, -1:].contiguous()
    index_N1 = torch.searchsorted(total_NV, uniform_N[:, None] * whole_N1, right=True)
    last_N1 = torch.searchsorted(total_NV, whole_N1)
    # A row of NaN has no order: any index in range will do, its NaN log-probability is what fails the request.
    return torch.minimum(index_N1, last_N1)[:, 0].clamp_(max=mass_NV.shape[1] - 1)
