"""The columns of the output: one row for each answer and each teacher that scored it, in the order of the input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distill.score_files.job import ScoreJob
from distill.score_files.parts import nested
from distill.score_files.rows import Answer, Overview, as_kind
from distill.types import ScoredSample, Signal, SignalSpec, TeacherScores

_ALWAYS = ("id", "line", "teacher", "prompt_ids", "response_ids", "logprobs", "mean_logprob", "tokens")
_SPANS = "spans"
_BY_SIGNAL = {
    Signal.TOPK: ("topk_ids", "topk_logprobs", "log_tail"),
    Signal.FULL: ("full_logprobs",),
    Signal.HIDDEN: ("hidden",),
}
RESERVED = frozenset((*_ALWAYS, _SPANS, *(name for names in _BY_SIGNAL.values() for name in names)))

Scored = tuple[Answer, ScoredSample]


class Columns:
    """Arrow tables of scored answers, all of one schema."""

    def __init__(self, job: ScoreJob, overview: Overview, spec: SignalSpec, *, spans: bool) -> None:
        """`spec` is what teachers were asked for; with `spans` some of them have another tokenizer."""
        import pyarrow as pa

        self._kinds = {} if job.source.suffix == ".parquet" else overview.kinds
        self._kept = _kept_types(job, overview)
        self._names = (*_BY_SIGNAL.get(spec.signal, ()), *((_SPANS,) if spans else ()))
        fields = [
            *(pa.field("id", pa.string()), pa.field("line", pa.int64()), pa.field("teacher", pa.string())),
            *(pa.field(name, pa.list_(pa.int32())) for name in ("prompt_ids", "response_ids")),
            pa.field("logprobs", pa.list_(pa.float32())),
            *(pa.field("mean_logprob", pa.float64()), pa.field("tokens", pa.int32())),
            *(pa.field(name, _type_of(name)) for name in self._names),
            *(pa.field(name, kind) for name, kind in self._kept.items()),
        ]
        about = {"signal": str(spec.signal), "k": spec.k, "source": str(job.source)}
        self.schema: Any = pa.schema(fields, metadata={"distill": json.dumps(about)})

    def table(self, scored: Sequence[Scored]) -> Any:
        import pyarrow as pa

        rows = [(answer, scores) for answer, sample in scored for scores in sample.scores]
        means, counts = zip(*(_mean(scores) for _, scores in rows), strict=True) if rows else ((), ())
        arrays = [
            pa.array([answer.id for answer, _ in rows], pa.string()),
            pa.array([answer.row.line for answer, _ in rows], pa.int64()),
            pa.array([scores.teacher for _, scores in rows], pa.string()),
            nested([answer.sample.prompt_ids for answer, _ in rows], pa.int32()),
            nested([answer.sample.response_ids for answer, _ in rows], pa.int32()),
            nested([scores.logprobs for _, scores in rows], pa.float32()),
            pa.array(means, pa.float64()),
            pa.array(counts, pa.int32()),
            *(self._scores(name, [scores for _, scores in rows]) for name in self._names),
            *(self._keep(name, [answer for answer, _ in rows]) for name in self._kept),
        ]
        return pa.Table.from_arrays(
            [array.cast(field.type) for array, field in zip(arrays, self.schema, strict=True)], schema=self.schema
        )

    def _scores(self, name: str, scores: Sequence[TeacherScores]) -> Any:
        import pyarrow as pa

        if name == _SPANS:
            return pa.array([None if each.spans is None else each.spans for each in scores], _type_of(name))
        arrays = [getattr(each, name) for each in scores]
        if not arrays:
            return pa.array([], _type_of(name))
        return nested([_floats(each) if name == "hidden" else each for each in arrays], _innermost(_type_of(name)))

    def _keep(self, name: str, answers: Sequence[Answer]) -> Any:
        import pyarrow as pa

        values = [answer.row.columns.get(name) for answer in answers]
        kind = self._kinds.get(name)
        return pa.array([as_kind(each, kind) for each in values] if kind else values, self._kept[name])


def _type_of(name: str) -> Any:
    import pyarrow as pa

    flat = pa.int32() if name in ("topk_ids", _SPANS) else pa.float32()
    return pa.list_(flat) if name in ("log_tail", _SPANS) else pa.list_(pa.list_(flat))


def _innermost(kind: Any) -> Any:
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return kind


def _kept_types(job: ScoreJob, overview: Overview) -> Mapping[str, Any]:
    """Of Parquet as they are there; of JSON as the values of all rows allow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if job.source.suffix == ".parquet":
        there = pq.read_schema(job.source)
        return {name: there.field(name).type for name in job.keep}
    types = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
    return {name: types.get(kind, pa.string()) for name, kind in overview.kinds.items()}


def _mean(scores: TeacherScores) -> tuple[float, int]:
    """Of the tokens that the teacher speaks about, in double precision, and how many those are. Where it has another
    tokenizer its log-probability of the text is over the student's tokens of it."""
    tokens = len(scores.logprobs) if scores.spans is None else int((scores.spans >= 0).sum())
    return (float(scores.logprobs.sum(dtype=np.float64)) / tokens if tokens else float("nan")), tokens


def _floats(hidden: Any) -> Any:
    """float32, exactly; int16 holds the upper half of a float32, which is what bfloat16 is."""
    if hidden.dtype != np.int16:
        return hidden.astype(np.float32)
    return (hidden.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
