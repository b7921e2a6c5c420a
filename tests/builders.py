"""Small real values for tests."""

from __future__ import annotations

import numpy as np

from distill.types import Sample, ScoredSample, TeacherScores, sample_id


def sample(
    ordinal: int, *, length: int = 3, version: int = 0, domain: str = "math", teachers: tuple[str, ...] = ("t",)
) -> Sample:
    random = np.random.default_rng(ordinal)
    return Sample(
        id=sample_id(ordinal),
        ordinal=ordinal,
        domain=domain,
        teachers=dict.fromkeys(teachers, 1.0),
        prompt_ids=random.integers(0, 50, 4).astype(np.int32),
        response_ids=random.integers(0, 50, length).astype(np.int32),
        logprobs=-random.random(length).astype(np.float32),
        versions=np.full(length, version, np.int32),
        finish_reason="stop",
    )


def scored(ordinal: int, *, k: int = 0, vocab: int = 0, **kwargs: object) -> ScoredSample:
    item = sample(ordinal, **kwargs)  # pyright: ignore[reportArgumentType]
    rows = len(item.response_ids)
    random = np.random.default_rng(ordinal + 1000)
    scores = tuple(
        TeacherScores(
            teacher=name,
            logprobs=-random.random(rows).astype(np.float32),
            topk_ids=random.integers(0, 50, (rows, k)).astype(np.int32) if k else None,
            topk_logprobs=-random.random((rows, k)).astype(np.float32) if k else None,
            log_tail=-random.random(rows).astype(np.float32) if k else None,
            full_logprobs=-random.random((rows, vocab)).astype(np.float32) if vocab else None,
        )
        for name in item.teachers
    )
    return ScoredSample(item, scores)
