"""From a batch of scored samples to the tensors of its micro-batches.

Legend: B samples of a micro-batch, T its padded length, N its response tokens, V common vocabulary, R response tokens
of one sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.errors import StudentError, TeacherError
from distill.objectives.rows import TokenRows
from distill.types import Batch, Sample, ScoredSample, Signal, SignalSpec, TeacherScores


def length(item: ScoredSample) -> int:
    return len(item.sample.prompt_ids) + len(item.sample.response_ids)


def require_sound(batch: Batch, spec: SignalSpec, vocab_size: int) -> None:
    """Check, before any work, that every sample has the scores that the objective needs, one row a response token.

    Raises TeacherError or StudentError naming the sample (and the teacher). Values are checked by the objective.
    """
    for item in batch.samples:
        sample = item.sample
        rows = len(sample.response_ids)
        if rows == 0 or len(sample.prompt_ids) == 0 or sample.logprobs.shape != (rows,):
            raise StudentError(
                f"sample {sample.id}: {len(sample.prompt_ids)} prompt tokens, {rows} response tokens and "
                f"log-probabilities of shape {sample.logprobs.shape}",
                why="a response token needs a token before it, and the probability with which it was sampled",
            )
        if int(sample.response_ids.max()) >= vocab_size or int(sample.response_ids.min()) < 0:
            raise StudentError(
                f"sample {sample.id}: a response token lies outside of the common vocabulary of {vocab_size}",
                why="the tokenizer cannot decode it, and the teachers cannot score it",
            )
        named = [scores.teacher for scores in item.scores]
        if named != list(sample.teachers):
            raise TeacherError(f"sample {sample.id}: scored by {named}, but its teachers are {list(sample.teachers)}")
        for scores, weight in zip(item.scores, sample.teachers.values(), strict=True):
            if weight != 0:
                _require_shapes(sample, scores, spec, vocab_size)


def _require_shapes(sample: Sample, scores: TeacherScores, spec: SignalSpec, vocab_size: int) -> None:
    rows = len(sample.response_ids)
    expected: dict[str, tuple[int, ...]] = {"logprobs": (rows,)}
    if spec.signal is Signal.TOPK:
        columns = min(spec.k, vocab_size)
        expected |= {"topk_ids": (rows, columns), "topk_logprobs": (rows, columns), "log_tail": (rows,)}
    elif spec.signal is Signal.FULL:
        expected["full_logprobs"] = (rows, vocab_size)
    for name, shape in expected.items():
        array = getattr(scores, name)
        if array is None or array.shape != shape:
            got = "nothing" if array is None else f"shape {array.shape}"
            raise TeacherError(
                f"sample {sample.id}, teacher {scores.teacher}: {name} must have shape {shape}, got {got}",
                why="row t of the scores is about response token t, so each token has exactly one row",
                fix="check that the teacher scored the same token ids, over the common vocabulary",
            )


def split(samples: Sequence[ScoredSample], max_tokens: int) -> Iterator[tuple[ScoredSample, ...]]:
    """Samples of similar length together, at most `max_tokens` each, padding included; never less than one sample.

    Longest first, so that the largest micro-batch, and an out-of-memory error, comes first.
    """
    ordered = sorted(samples, key=length, reverse=True)
    start = 0
    while start < len(ordered):
        stop = start + max(1, max_tokens // length(ordered[start]))
        yield tuple(ordered[start:stop])
        start = stop


@dataclass(frozen=True)
class MicroBatch:
    """Samples padded on the right. With causal attention no real token sees the padding, so there is no mask."""

    samples: tuple[ScoredSample, ...]
    input_ids_BT: Tensor
    rows_N: Tensor
    """Positions in the flattened (B*T) whose logits predict the response tokens, sample after sample."""
    tokens_N: Tensor
    behaviour_logp_N: Tensor
    device: torch.device

    @classmethod
    def collate(cls, samples: tuple[ScoredSample, ...], device: torch.device) -> MicroBatch:
        width = max(length(item) for item in samples)
        ids = np.zeros((len(samples), width), np.int64)
        rows: list[NDArray[np.int64]] = []
        for index, item in enumerate(samples):
            prompt, response = item.sample.prompt_ids, item.sample.response_ids
            ids[index, : length(item)] = np.concatenate([prompt, response])
            # the position before a token predicts it
            first = index * width + len(prompt) - 1
            rows.append(np.arange(first, first + len(response), dtype=np.int64))
        return cls(
            samples=samples,
            input_ids_BT=torch.from_numpy(ids).to(device),
            rows_N=_joined(rows, np.int64, device),
            tokens_N=_joined([item.sample.response_ids for item in samples], np.int64, device),
            behaviour_logp_N=_joined([item.sample.logprobs for item in samples], np.float32, device),
            device=device,
        )

    def by_teacher(self, logits_NV: Tensor, spec: SignalSpec) -> Iterator[TeacherRows]:
        """The rows of each teacher that scored here, with the weight of each row. Teachers of weight 0 are not read."""
        ends = list(accumulate(len(item.sample.response_ids) for item in self.samples))
        parts: dict[str, list[_Part]] = {}
        for item, end in zip(self.samples, ends, strict=True):
            for scores, weight in zip(item.scores, item.sample.teachers.values(), strict=True):
                if weight != 0:
                    span = range(end - len(item.sample.response_ids), end)
                    parts.setdefault(scores.teacher, []).append(_Part(item.sample, scores, weight, span))
        for teacher, its_parts in parts.items():
            yield self._rows(teacher, its_parts, logits_NV, spec)

    def _rows(self, teacher: str, parts: list[_Part], logits_NV: Tensor, spec: SignalSpec) -> TeacherRows:
        counts = [len(part.span) for part in parts]
        tokens_N, behaviour_logp_N = self.tokens_N, self.behaviour_logp_N
        if sum(counts) != len(tokens_N):
            mine = _joined([np.asarray(part.span) for part in parts], np.int64, self.device)
            logits_NV, tokens_N, behaviour_logp_N = logits_NV[mine], tokens_N[mine], behaviour_logp_N[mine]
        scores = [part.scores for part in parts]
        signal: dict[str, Tensor] = {}
        if spec.signal is Signal.TOPK:
            signal["topk_ids_NK"] = self._scores(scores, "topk_ids", np.int64)
            signal["topk_logp_NK"] = self._scores(scores, "topk_logprobs", np.float32)
            signal["log_tail_N"] = self._scores(scores, "log_tail", np.float32)
        elif spec.signal is Signal.FULL:
            signal["full_logp_NV"] = self._scores(scores, "full_logprobs", np.float32)
        rows = TokenRows(
            student_logits_NV=logits_NV,
            tokens_N=tokens_N,
            behaviour_logp_N=behaviour_logp_N,
            teacher_logp_N=self._scores(scores, "logprobs", np.float32),
            describe=partial(_describe, parts, list(accumulate(counts))),
            **signal,
        )
        weights = np.repeat(np.asarray([part.weight for part in parts], np.float32), counts)
        return TeacherRows(teacher, rows, torch.from_numpy(weights).to(self.device))

    def _scores(self, scores: Sequence[TeacherScores], name: str, dtype: Any) -> Tensor:
        return _joined([getattr(part, name) for part in scores], dtype, self.device)


@dataclass(frozen=True)
class TeacherRows:
    """One teacher's rows of a micro-batch."""

    teacher: str
    rows: TokenRows
    weights_N: Tensor


@dataclass(frozen=True)
class _Part:
    """One sample's rows of one teacher; `span` are its rows in the micro-batch."""

    sample: Sample
    scores: TeacherScores
    weight: float
    span: range


def _describe(parts: Sequence[_Part], ends: Sequence[int], row: int) -> str:
    index = bisect_right(ends, row)
    part = parts[index]
    token = row - (ends[index] - len(part.span))
    return f"sample {part.sample.id}, teacher {part.scores.teacher}, response token {token}"


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False)).to(device)
