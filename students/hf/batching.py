"""From a batch of scored samples to the tensors of its micro-batches.

Legend: S samples of a batch, B samples of a micro-batch, T tokens of a row of ids, N trained tokens of a micro-batch,
n those that one teacher scored, C rows of a chunk, V common vocabulary, R response tokens of one sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.modeling.packed_attention import Layout
from distill.objectives.head_loss import TeacherPart
from distill.objectives.rows import Place, TokenRows
from distill.types import Sample, ScoredSample, Signal, SignalSpec, TeacherScores
from students.hf.teacher_heads import HiddenRows, TeacherHeads, rows_of


@dataclass(frozen=True)
class Lesson:
    """A scored sample with what its whole batch says of it, so that it can be learnt in any micro-batch."""

    item: ScoredSample
    weight: float
    """Factor of each of its trained tokens in the loss."""
    outcome: NDArray[np.float64] | None = None
    """Advantage of its outcome at each trained token, where rewards are mixed in."""

    @property
    def length(self) -> int:
        return len(self.item.sample.prompt_ids) + len(self.item.sample.response_ids)

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """Which response tokens carry a loss."""
        mask = self.item.sample.loss_mask
        return np.arange(len(self.item.sample.response_ids)) if mask is None else np.flatnonzero(mask)


def split(lessons: Sequence[Lesson], max_tokens: int, *, packed: bool) -> Iterator[tuple[Lesson, ...]]:
    """Micro-batches of at most `max_tokens` tokens, but never less than one sample. Padding counts, where there is any.

    Longest first, so that the largest micro-batch, and an out-of-memory error, comes first.
    """
    ordered = sorted(lessons, key=lambda lesson: lesson.length, reverse=True)
    start = 0
    while start < len(ordered):
        if packed:
            ends = accumulate(lesson.length for lesson in ordered[start:])
            count = sum(1 for _ in _while_at_most(ends, max_tokens))
        else:
            count = max_tokens // ordered[start].length
        yield tuple(ordered[start : start + max(1, count)])
        start += max(1, count)


def _while_at_most(rising: Iterator[int], most: int) -> Iterator[int]:
    for value in rising:
        if value > most:
            return
        yield value


@dataclass(frozen=True)
class MicroBatch:
    """Samples laid end to end in one row (packed), or side by side and padded on the right.

    With causal attention no real token sees padding on its right, so there is no mask. No token id means padding: an
    end token that a tokenizer also pads with is learnt like any other.
    """

    lessons: tuple[Lesson, ...]
    input_ids_BT: Tensor
    layout: Layout | None
    rows_N: Tensor
    """Positions in the flattened (B*T) whose logits predict the trained tokens, sample after sample."""
    tokens_N: Tensor
    device: torch.device

    @classmethod
    def collate(cls, lessons: tuple[Lesson, ...], device: torch.device, *, packed: bool) -> MicroBatch:
        lengths = [lesson.length for lesson in lessons]
        width = sum(lengths) if packed else max(lengths)
        starts = (
            list(accumulate(lengths[:-1], initial=0)) if packed else [index * width for index in range(len(lengths))]
        )
        ids = np.zeros(width if packed else len(lessons) * width, np.int64)
        rows: list[NDArray[np.int64]] = []
        for lesson, start in zip(lessons, starts, strict=True):
            sample = lesson.item.sample
            ids[start : start + lesson.length] = np.concatenate([sample.prompt_ids, sample.response_ids])
            # the position before a token predicts it
            rows.append(start + len(sample.prompt_ids) - 1 + lesson.trained)
        return cls(
            lessons=lessons,
            input_ids_BT=torch.from_numpy(ids.reshape(-1, width)).to(device),
            layout=Layout(lengths, device) if packed else None,
            rows_N=joined(rows, np.int64, device),
            tokens_N=joined([each.item.sample.response_ids[each.trained] for each in lessons], np.int64, device),
            device=device,
        )

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Keywords of the model's forward pass."""
        more = {} if self.layout is None else self.layout.model_inputs
        return {"input_ids": self.input_ids_BT, "use_cache": False, **more}

    def teacher_parts(
        self, spec: SignalSpec, *, dtype: torch.dtype, heads: TeacherHeads | None = None
    ) -> list[TeacherPart]:
        """The rows of each teacher that scored here, with their weights. Teachers of weight 0 are not read.

        `dtype`: of the logits that the head will make for these rows. `heads`: of teachers that gave hidden states.
        """
        ends = accumulate(len(lesson.trained) for lesson in self.lessons)
        shares: dict[str, list[_Share]] = {}
        for number, (lesson, end) in enumerate(zip(self.lessons, ends, strict=True)):
            sample = lesson.item.sample
            for scores, weight in zip(lesson.item.scores, sample.teachers.values(), strict=True):
                if weight != 0:
                    span = range(end - len(lesson.trained), end)
                    shares.setdefault(scores.teacher, []).append(_Share(lesson, scores, weight, span, number))
        return [self._part(teacher, its_shares, spec, dtype, heads) for teacher, its_shares in shares.items()]

    def _part(
        self, teacher: str, shares: list[_Share], spec: SignalSpec, dtype: torch.dtype, heads: TeacherHeads | None
    ) -> TeacherPart:
        counts = [len(share.span) for share in shares]
        index_n = torch.from_numpy(np.concatenate([np.asarray(share.span, np.int64) for share in shares]))
        signal: dict[str, Tensor] = {}
        if spec.signal is Signal.TOPK:
            signal["topk_ids_NK"] = self._scores(shares, "topk_ids", np.int64)
            signal["topk_logp_NK"] = self._scores(shares, "topk_logprobs", np.float32)
            signal["log_tail_N"] = self._scores(shares, "log_tail", np.float32)
        if any(share.scores.spans is not None for share in shares):
            signal["span_N"] = self._scores(shares, "spans", np.int64)
        outcomes = [share.lesson.outcome for share in shares if share.lesson.outcome is not None]
        if outcomes:
            signal["outcome_N"] = joined(outcomes, np.float32, self.device)
        rows = TokenRows(
            student_logits_NV=torch.empty((sum(counts), 0), dtype=dtype, device=self.device),
            tokens_N=self.tokens_N[index_n.to(self.device)],
            behaviour_logp_N=joined([each.of_sample("logprobs") for each in shares], np.float32, self.device),
            teacher_logp_N=self._scores(shares, "logprobs", np.float32),
            sample_N=self._repeated(np.asarray([share.number for share in shares], np.int64), counts),
            describe=partial(_describe, shares, list(accumulate(counts))),
            **signal,
        )
        factors = np.asarray([share.weight * share.lesson.weight for share in shares])
        # what gives full rows a chunk at a time need not be a tensor
        full: Any = None
        if spec.signal is Signal.FULL and shares[0].scores.hidden is not None:
            assert heads is not None, f"{teacher} gave hidden states, and nobody has its head"
            full = HiddenRows([each.of_scores("hidden") for each in shares], heads.of(teacher), rows)
        elif spec.signal is Signal.FULL:
            full = HostRows([each.of_scores("full_logprobs") for each in shares])
        return TeacherPart(
            teacher=teacher,
            rows=rows,
            index_n=index_n,
            weights_n=self._repeated(factors, counts),
            full=full,
        )

    def _scores(self, shares: Sequence[_Share], name: str, dtype: Any) -> Tensor:
        return joined([share.of_scores(name) for share in shares], dtype, self.device)

    def _repeated(self, values: NDArray[Any], counts: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.repeat(values, counts)).to(self.device)


@dataclass(frozen=True)
class _Share:
    """One sample's rows of one teacher; `span` are its rows in the micro-batch, `number` its place there."""

    lesson: Lesson
    scores: TeacherScores
    weight: float
    span: range
    number: int

    @property
    def sample(self) -> Sample:
        return self.lesson.item.sample

    def of_scores(self, name: str) -> NDArray[Any]:
        """The trained rows of the teacher's array `name`."""
        return self._kept(getattr(self.scores, name))

    def of_sample(self, name: str) -> NDArray[Any]:
        return self._kept(getattr(self.sample, name))

    def _kept(self, array: NDArray[Any]) -> NDArray[Any]:
        # a plain view where every token is trained: full rows are large
        return array if len(array) == len(self.lesson.trained) else array[self.lesson.trained]


class HostRows:
    """Full rows of a teacher as they came, sample by sample, on the host. Only a chunk of them is ever copied."""

    def __init__(self, arrays: Sequence[NDArray[np.float32]]) -> None:
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])

    def logp(self, keep: slice | Tensor, like_CV: Tensor) -> Tensor:
        """log q (C, V) of the rows `keep`, which rise, with the dtype and on the device of `like_CV`."""
        return torch.from_numpy(rows_of(self._arrays, self._ends, keep)).to(like_CV)


def _describe(shares: Sequence[_Share], ends: Sequence[int], row: int) -> Place:
    index = bisect_right(ends, row)
    share = shares[index]
    token = int(share.lesson.trained[row - (ends[index] - len(share.span))])
    text = f"sample {share.sample.id}, teacher {share.scores.teacher}, response token {token}"
    return Place(text, share.sample.id, share.scores.teacher)


def joined(arrays: Sequence[NDArray[Any]], dtype: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False)).to(device)
