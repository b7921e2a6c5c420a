"""Traces of cluster size, drawn from a few numbers: groups of rollouts with heavy-tailed lengths for popular teachers.

The order of the draws and every rounding are part of the format: the same numbers give the same trace everywhere.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from distill.teacher_manager.timeline.case import Count, Job, Kind, Positive, Teacher

MS = 10**6
"""Nanoseconds in a millisecond."""
MIN_RESPONSE = 64
FIRST_TOKEN_MS = 1000
"""From the start of a rollout to its first token."""
SLOWEST_TOKENS_PER_S, SPEEDS = 340, 121

Table = Annotated[tuple[Count, ...], msgspec.Meta(min_length=2)]


class Model(msgspec.Struct, frozen=True):
    total_params: Positive
    active_params: Positive
    layers: Positive
    bytes: Positive


class Generator(msgspec.Struct, frozen=True):
    seed: Count
    n_teachers: Positive
    models: Annotated[tuple[Model, ...], msgspec.Meta(min_length=1)]
    popularity_weights: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    response_quantiles: Table
    group_scale_permille_quantiles: Table
    steps: Positive
    groups_per_step: Positive
    group_size: Positive
    period_ms: Count
    spread_ms: Count
    prompt_min: Count
    prompt_max: Count
    response_cap: Positive
    window_ms: Count
    """No rollout takes longer."""
    deadline_ms: Count
    """From the arrival."""


class _Row(NamedTuple):
    """A job before it has an id; rows sort as jobs are numbered."""

    arrival_ms: int
    start_ms: int
    teacher: int
    tokens: int
    drawn: int
    """Index of the draw."""
    step: int
    expected: int


def draw(generator: Generator) -> tuple[tuple[Teacher, ...], tuple[Job, ...]]:
    groups = generator.steps * generator.groups_per_step
    draws = generator.n_teachers + groups * (5 + 2 * generator.group_size)
    uniform: Iterator[float] = iter(np.random.Generator(np.random.PCG64(generator.seed)).random(draws).tolist())
    teachers = tuple(
        _teacher(id, generator.models[int(next(uniform) * len(generator.models))]) for id in range(generator.n_teachers)
    )
    rows: list[_Row] = []
    cumulative = list(accumulate(generator.popularity_weights))
    for index in range(groups):
        rows += _group(generator, index // generator.groups_per_step, len(rows), cumulative, uniform)
    rows.sort()
    jobs = tuple(
        Job(
            id=id,
            teacher=row.teacher,
            step=row.step,
            announced_ns=row.start_ms * MS,
            arrival_ns=row.arrival_ms * MS,
            expected_tokens=row.expected,
            tokens=row.tokens,
            deadline_ns=(row.arrival_ms + generator.deadline_ms) * MS,
        )
        for id, row in enumerate(rows)
    )
    return teachers, jobs


def _teacher(id: int, model: Model) -> Teacher:
    kind = Kind.MOE if model.active_params < model.total_params else Kind.DENSE
    return Teacher(id, kind, model.bytes, model.total_params, model.active_params, model.layers)


def _group(
    generator: Generator, step: int, first: int, cumulative: Sequence[int], uniform: Iterator[float]
) -> list[_Row]:
    """The rollouts of one prompt. They share teacher, start, prompt and expectation."""
    u1, u2, u3, u4, u5 = (next(uniform) for _ in range(5))
    teacher = bisect_right(cumulative, int(u1 * cumulative[-1]))
    start_ms = step * generator.period_ms + int(u2 * generator.spread_ms)
    prompt = generator.prompt_min + int(u3 * (generator.prompt_max - generator.prompt_min))
    scale = _quantile(generator.group_scale_permille_quantiles, u4)
    factor = 700 + int(u5 * 600)
    responses: list[int] = []
    arrivals: list[int] = []
    for _ in range(generator.group_size):
        ua, ub = next(uniform), next(uniform)
        length = _quantile(generator.response_quantiles, ua) * scale // 1000
        response = min(generator.response_cap, max(MIN_RESPONSE, length))
        speed = SLOWEST_TOKENS_PER_S + int(ub * SPEEDS)
        responses.append(response)
        arrivals.append(start_ms + min(generator.window_ms, FIRST_TOKEN_MS + response * 1000 // speed))
    expected = prompt + sum(responses) // generator.group_size * factor // 1000
    return [
        _Row(arrival, start_ms, teacher, prompt + response, first + index, step, expected)
        for index, (arrival, response) in enumerate(zip(arrivals, responses, strict=True))
    ]


def _quantile(table: Sequence[int], u: float) -> int:
    """Linear between the entries of the table, in steps of 1/1024 of their distance."""
    x = u * (len(table) - 1)
    k = int(x)
    fraction = int((x - k) * 1024)
    return table[k] + (table[k + 1] - table[k]) * fraction // 1024


def digest(jobs: Sequence[Job]) -> str:
    """sha256 of the rows in milliseconds, to compare one generator with another."""
    hashed = hashlib.sha256()
    for job in jobs:
        times = (job.announced_ns // MS, job.arrival_ns // MS, job.expected_tokens, job.tokens, job.deadline_ns // MS)
        hashed.update((",".join(map(str, (job.id, job.teacher, job.step, *times))) + "\n").encode())
    return hashed.hexdigest()
