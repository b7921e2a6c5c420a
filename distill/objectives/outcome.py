"""From the rewards of a batch to one advantage a sample. Without torch. Legend: S samples."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from distill.config.models import OutcomeConfig
from distill.errors import StudentError
from distill.types import Sample

Floats = NDArray[np.float64]


def outcome_advantages(samples: Sequence[Sample], outcome: OutcomeConfig) -> Floats:
    """(S,) what `TokenRows.outcome_N` holds for the samples of a whole batch.

    A group is the samples of one prompt, or with baseline=batch all of them. Samples with the same trajectory name are
    segments of one answer to the prompt of the earliest: they count once in their group, and all get its advantage.
    It is divided by the sum of the sample's teacher weights, by which the losses of its teachers, added up or mixed,
    are multiplied: the outcome counts once, however many teachers score the sample.

    Raises StudentError for a sample without a reward, or with one that is no finite number, and where segments of a
    trajectory have different rewards.
    """
    rewards_S = np.asarray([_reward(sample) for sample in samples], np.float64)
    advantages_S = _advantages(samples, rewards_S, outcome)
    weights_S = np.asarray([sum(sample.teachers.values()) for sample in samples], np.float64)
    # a sample that no teacher weighs has no rows
    return np.divide(advantages_S, weights_S, out=np.zeros_like(advantages_S), where=weights_S > 0)


def _advantages(samples: Sequence[Sample], rewards_S: Floats, outcome: OutcomeConfig) -> Floats:
    heads = _heads(samples, rewards_S)
    if outcome.baseline == "none":
        return rewards_S
    answers = sorted(set(heads))
    groups = ["" if outcome.baseline == "batch" else _prompt(samples[s]) for s in answers]
    relative = group_advantage(rewards_S[answers], groups, ddof=outcome.ddof, eps=outcome.eps, use_std=outcome.use_std)
    of_answer = dict(zip(answers, relative, strict=True))
    return np.asarray([of_answer[head] for head in heads], np.float64)


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
