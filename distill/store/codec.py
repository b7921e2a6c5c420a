"""Scored samples <-> one packed buffer: ids and counts in the header, arrays raw behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.packing import PackingError, pack, unpack
from distill.types import Sample, ScoredSample, TeacherScores

_SAMPLE_ARRAYS = ("prompt_ids", "response_ids", "logprobs", "versions")
_SCORE_ARRAYS = ("logprobs", "topk_ids", "topk_logprobs", "log_tail", "full_logprobs")


def encode(first_ordinal: int, items: Sequence[ScoredSample]) -> bytes:
    arrays: dict[str, NDArray[Any]] = {}
    rows: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        sample = item.sample
        for name in _SAMPLE_ARRAYS:
            arrays[f"{index}.{name}"] = getattr(sample, name)
        for place, scores in enumerate(item.scores):
            for name in _SCORE_ARRAYS:
                array = getattr(scores, name)
                if array is not None:
                    arrays[f"{index}.{place}.{name}"] = array
        rows.append(
            {
                "id": sample.id,
                "ordinal": sample.ordinal,
                "domain": sample.domain,
                "teachers": dict(sample.teachers),
                "finish_reason": sample.finish_reason,
                "scored_by": [scores.teacher for scores in item.scores],
            }
        )
    return pack({"first_ordinal": first_ordinal, "samples": rows}, arrays)


def decode(data: bytes) -> tuple[int, list[ScoredSample]]:
    """(first ordinal, samples). Raises PackingError for anything that `encode` did not write."""
    meta, arrays = unpack(data)
    try:
        return meta["first_ordinal"], [_sample(index, row, arrays) for index, row in enumerate(meta["samples"])]
    except (KeyError, TypeError) as error:
        raise PackingError(f"samples are incomplete: {error}") from error


def _sample(index: int, row: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> ScoredSample:
    def own(key: str) -> NDArray[Any] | None:
        # A copy: a view would keep the whole snapshot alive for one sample.
        return np.array(arrays[key]) if key in arrays else None

    sample = Sample(
        id=row["id"],
        ordinal=row["ordinal"],
        domain=row["domain"],
        teachers=row["teachers"],
        finish_reason=row["finish_reason"],
        **{name: np.array(arrays[f"{index}.{name}"]) for name in _SAMPLE_ARRAYS},
    )
    scores = tuple(
        TeacherScores(teacher=teacher, **{name: own(f"{index}.{place}.{name}") for name in _SCORE_ARRAYS})  # pyright: ignore[reportArgumentType]
        for place, teacher in enumerate(row["scored_by"])
    )
    return ScoredSample(sample, scores)
