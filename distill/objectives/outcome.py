"""From the rewards of a batch to the advantages of its tokens. Without torch. Legend: S samples, T tokens of one
trajectory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from distill.config.models import OutcomeConfig
from distill.errors import StudentError
from distill.types import Sample

Floats = NDArray[np.float64]


def outcome_advantages(samples: Sequence[Sample], outcome: OutcomeConfig) -> list[Floats]:
    """For each sample of a whole batch what `TokenRows.outcome_N` holds for its trained tokens.

    A group is the samples of one prompt, or with baseline=batch all of them. Samples with the same trajectory name are
    segments of one answer to the prompt of the earliest: they count once in their group, and all get its advantage,
    with gae_lambda < 1 less of it the further a token stands from the trajectory's end.
    It is divided by the sum of the sample's teacher weights, by which the losses of its teachers, added up or mixed,
    are multiplied: the outcome counts once, however many teachers score the sample.

    Raises StudentError for a sample without a reward, or with one that is no finite number, and where segments of a
    trajectory have different rewards.
    """
    rewards_S = np.asarray([_reward(sample) for sample in samples], np.float64)
    heads = _heads(samples, rewards_S)
    advantages_S = _advantages(samples, rewards_S, heads, outcome)
    return [
        # a sample that no teacher weighs has no rows
        traced / (sum(sample.teachers.values()) or 1.0)
        for sample, traced in zip(samples, _traced(samples, advantages_S, heads, outcome.gae_lambda), strict=True)
    ]


def _traced(samples: Sequence[Sample], advantages_S: Floats, heads: Sequence[int], trace: float) -> list[Floats]:
    """The advantage of each sample at each of its trained tokens."""
    if trace == 1.0:
        return [np.full(sample.loss_tokens, value) for sample, value in zip(samples, advantages_S, strict=True)]
    traced = [np.empty(0)] * len(samples)
    for head in set(heads):
        segments = sorted((s for s, its in enumerate(heads) if its == head), key=lambda s: samples[s].ordinal)
        masks = [_trained(samples[s]) for s in segments]
        mask_T = np.concatenate(masks)
        # the baseline is taken off the reward already; as the value of every token it would cancel between two of them
        rewards_T = np.zeros(len(mask_T))
        rewards_T[np.flatnonzero(mask_T)[-1:]] = advantages_S[head]
        of_token_T, _ = skip_observation_gae(
            rewards_T, np.zeros_like(rewards_T), mask_T, discount=1.0, trace=trace, bootstrap=0.0
        )
        ends = np.cumsum([len(mask) for mask in masks])[:-1]
        for s, values, mask in zip(segments, np.split(of_token_T, ends), masks, strict=True):
            traced[s] = values[mask == 1]
    return traced


def _advantages(samples: Sequence[Sample], rewards_S: Floats, heads: Sequence[int], outcome: OutcomeConfig) -> Floats:
    """(S,) one for each sample."""
    if outcome.baseline == "none":
        return rewards_S
    answers = sorted(set(heads))
    groups = ["" if outcome.baseline == "batch" else _prompt(samples[s]) for s in answers]
    relative = group_advantage(rewards_S[answers], groups, ddof=outcome.ddof, eps=outcome.eps, use_std=outcome.use_std)
    of_answer = dict(zip(answers, relative, strict=True))
    return np.asarray([of_answer[head] for head in heads], np.float64)


def _trained(sample: Sample) -> NDArray[np.int8]:
    """1 for each response token that the student wrote."""
    return np.ones(len(sample.response_ids), np.int8) if sample.loss_mask is None else sample.loss_mask


def _prompt(sample: Sample) -> Hashable:
    return sample.domain, sample.prompt_ids.tobytes()


def _heads(samples: Sequence[Sample], rewards_S: Floats) -> list[int]:
    """For each sample, which one stands for its answer: the earliest of its trajectory."""
    earliest: dict[str, int] = {}
    for s in sorted(range(len(samples)), key=lambda s: samples[s].ordinal):
        head = earliest.setdefault(samples[s].trajectory, s) if samples[s].trajectory else s
        if rewards_S[s] != rewards_S[head]:
            raise StudentError(
                f"samples {samples[head].id} and {samples[s].id} of trajectory {samples[s].trajectory} have the "
                f"rewards {rewards_S[head]:g} and {rewards_S[s]:g}",
                why="the outcome is that of the whole trajectory",
            )
    return [earliest.get(sample.trajectory, s) if sample.trajectory else s for s, sample in enumerate(samples)]


def _reward(sample: Sample) -> float:
    if sample.reward is None or not np.isfinite(sample.reward):
        raise StudentError(
            f"sample {sample.id}: its reward is {sample.reward}",
            why="objective.outcome mixes rewards in, so every sample needs one that is a finite number",
            fix="check the grader objective.outcome.grader, and that the prompt has an answer",
            sample_id=sample.id,
        )
    return float(sample.reward)


def group_advantage(
    rewards_S: Floats, groups: Sequence[Hashable], *, ddof: int = 1, eps: float = 1e-6, use_std: bool = True
) -> Floats:
    """(R - mean of its group) / (std of its group + eps), or without the division. A group of one gives 0.

    `ddof` 1 is the sample's standard deviation, 0 the population's. Source: GRPO, arXiv 2402.03300; without the
    division: Dr. GRPO, arXiv 2503.20783.
    """
    members: dict[Hashable, list[int]] = {}
    for s, group in enumerate(groups):
        members.setdefault(group, []).append(s)
    advantages_S = np.zeros(len(rewards_S))
    for indices in members.values():
        group_rewards = rewards_S[indices]
        # the mean of equal numbers may differ from them in the last bit, and eps is small
        if len(indices) == 1 or bool((group_rewards == group_rewards[0]).all()):
            continue
        centred = group_rewards - group_rewards.mean()
        advantages_S[indices] = centred / (group_rewards.std(ddof=ddof) + eps) if use_std else centred
    return advantages_S


def skip_observation_gae(
    rewards_T: Floats,
    values_T: Floats,
    loss_mask_T: NDArray[np.int8],
    *,
    discount: float,
    trace: float,
    bootstrap: float,
) -> tuple[Floats, Floats]:
    """Generalised advantages and returns over a trajectory whose observations (mask 0) are stepped over.

    delta_t = r_t + discount * V(next action token) - V_t and A_t = delta_t + discount * trace * A(next action token),
    where the token after the last action is worth `bootstrap`. Returns are A + V; both are 0 at observations, whose
    values and rewards are never read. Source: SAO, arXiv 2607.07508; GAE, arXiv 1506.02438.
    """
    advantage_T, return_T = np.zeros(len(values_T)), np.zeros(len(values_T))
    next_value, next_advantage = bootstrap, 0.0
    for t in np.flatnonzero(loss_mask_T)[::-1]:
        delta = rewards_T[t] + discount * next_value - values_T[t]
        next_advantage = delta + discount * trace * next_advantage
        next_value = values_T[t]
        advantage_T[t], return_T[t] = next_advantage, next_advantage + values_T[t]
    return advantage_T, return_T
