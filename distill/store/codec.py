"""Scored samples <-> one packed buffer: ids and counts in the header, arrays raw behind it.

What a sample does not have is left out, so a buffer from before a member existed reads as one without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.packing import PackingError, pack, unpack
from distill.types import Sample, ScoredSample, TeacherScores

_SAMPLE_ARRAYS = ("prompt_ids", "response_ids", "logprobs", "versions")
_OPTIONAL_SAMPLE_ARRAYS = ("topk_ids", "loss_mask")
_SCORE_ARRAYS = ("logprobs", "topk_ids", "topk_logprobs", "log_tail", "full_logprobs", "hidden", "spans")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a store holds."""

    first_ordinal: int
    """Everything before it was trained or set aside."""
    items: Sequence[ScoredSample]
    skipped: Collection[int]
    """Ordinals from `first_ordinal` on whose samples were set aside."""


def encode(snapshot: Snapshot) -> bytes:
    arrays: dict[str, NDArray[Any]] = {}
    rows: list[dict[str, Any]] = []
    for index, item in enumerate(snapshot.items):
        sample = item.sample
        for name in (*_SAMPLE_ARRAYS, *_OPTIONAL_SAMPLE_ARRAYS):
            array = getattr(sample, name)
            if array is not None:
                arrays[f"{index}.{name}"] = array
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
                "reward": sample.reward,
                "trajectory": sample.trajectory,
                "scored_by": [scores.teacher for scores in item.scores],
            }
        )
    meta = {"first_ordinal": snapshot.first_ordinal, "samples": rows, "skipped": sorted(snapshot.skipped)}
    return pack(meta, arrays)


def decode(data: bytes) -> Snapshot:
    """Raises PackingError for anything that `encode` did not write."""
    meta, arrays = unpack(data)
    try:
        items = [_sample(index, row, arrays) for index, row in enumerate(meta["samples"])]
        return Snapshot(meta["first_ordinal"], items, meta.get("skipped", ()))
    except (KeyError, TypeError, AttributeError) as error:
        raise PackingError(f"samples are incomplete: {error}") from error


def _sample(index: int, row: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> ScoredSample:
    def own(key: str) -> Any:
        # A copy: a view would keep the whole snapshot alive for one sample.
        return np.array(arrays[key]) if key in arrays else None

    sample = Sample(
        id=row["id"],
        ordinal=row["ordinal"],
        domain=row["domain"],
        teachers=row["teachers"],
        finish_reason=row["finish_reason"],
        reward=row.get("reward"),
        trajectory=row.get("trajectory", ""),
        **{name: np.array(arrays[f"{index}.{name}"]) for name in _SAMPLE_ARRAYS},
        **{name: own(f"{index}.{name}") for name in _OPTIONAL_SAMPLE_ARRAYS},
    )
    scores = tuple(
        TeacherScores(teacher=teacher, **{name: own(f"{index}.{place}.{name}") for name in _SCORE_ARRAYS})
        for place, teacher in enumerate(row["scored_by"])
    )
    return ScoredSample(sample, scores)
