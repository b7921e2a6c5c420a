"""What must be true of a batch before any work is done on it.

Legend: R response tokens of one sample, K columns of a top-k row, V common vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.errors import ConfigError, StudentError, TeacherError
from distill.protocols import Objective
from distill.types import Batch, Sample, Signal, SignalSpec, Support, TeacherScores


def require_sound(
    batch: Batch, objective: Objective, vocab_size: int, hidden_sizes: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Check that every sample is whole and has the scores that the objective needs, one row a response token.

    Raises TeacherError or StudentError naming the sample (and the teacher), ConfigError for scores on byte spans that
    the objective would take for scores of tokens. What teachers say is checked by the objective. `hidden_sizes`: D of
    the teachers whose heads are here, and who may give hidden states for full rows.
    """
    for item in batch.samples:
        sample = item.sample
        _require_whole(sample, vocab_size)
        named = [scores.teacher for scores in item.scores]
        if named != list(sample.teachers):
            raise TeacherError(
                f"sample {sample.id}: scored by {named}, but its teachers are {list(sample.teachers)}",
                sample_id=sample.id,
            )
        for scores, weight in zip(item.scores, sample.teachers.values(), strict=True):
            if not 0 <= weight < np.inf:
                raise StudentError(
                    f"sample {sample.id}: its teacher {scores.teacher} has the weight {weight}",
                    why="a weight is a number of at least 0",
                    sample_id=sample.id,
                )
            if scores.spans is not None and not objective.contract.reads_spans:
                raise ConfigError(
                    f"sample {sample.id}: its teacher {scores.teacher} has another tokenizer, which the objective "
                    f"{type(objective).__name__} cannot use",
                    why="the scores are of byte spans, and it would take them for scores of single tokens",
                    fix="use span_kl, or a teacher of the student's tokenizer",
                )
            if weight != 0:
                _require_shapes(sample, scores, objective.spec, vocab_size, hidden_sizes.get(scores.teacher))
    if not any(item.sample.loss_tokens for item in batch.samples):
        raise StudentError(
            f"the batch for weight version {batch.version} has no token to learn from",
            why="it is empty, or the loss masks of all its samples are 0",
        )


def _require_whole(sample: Sample, vocab_size: int) -> None:
    rows = len(sample.response_ids)
    if rows == 0 or len(sample.prompt_ids) == 0 or sample.logprobs.shape != (rows,):
        raise StudentError(
            f"sample {sample.id}: {len(sample.prompt_ids)} prompt tokens, {rows} response tokens and "
            f"log-probabilities of shape {sample.logprobs.shape}",
            why="a response token needs a token before it, and the probability with which it was sampled",
            sample_id=sample.id,
        )
    for what, ids in (("prompt", sample.prompt_ids), ("response", sample.response_ids)):
        if ids.dtype.kind not in "iu" or int(ids.max()) >= vocab_size or int(ids.min()) < 0:
            raise StudentError(
                f"sample {sample.id}: a {what} token lies outside of the common vocabulary of {vocab_size}",
                why="the tokenizer cannot decode it, and the teachers cannot score it",
                sample_id=sample.id,
            )
    mask = sample.loss_mask
    if mask is not None and (mask.shape != (rows,) or not np.isin(mask, (0, 1)).all()):
        raise StudentError(
            f"sample {sample.id}: its loss mask has shape {mask.shape}, and must hold {rows} zeros or ones",
            sample_id=sample.id,
        )
    trained = sample.logprobs if mask is None else sample.logprobs[mask == 1]
    if sample.logprobs.dtype.kind != "f" or not np.isfinite(trained).all():
        raise StudentError(
            f"sample {sample.id}: the log-probabilities of its tokens hold NaN or infinity, or are no numbers",
            why="the importance weight p/mu needs the probability with which each token was sampled",
            sample_id=sample.id,
        )


def _require_shapes(
    sample: Sample, scores: TeacherScores, spec: SignalSpec, vocab_size: int, hidden_size: int | None
) -> None:
    rows = len(sample.response_ids)
    expected: dict[str, tuple[int, ...]] = {"logprobs": (rows,)}
    if spec.signal is Signal.TOPK:
        # a vocabulary of fewer than k tokens gives shorter rows, but a union keeps its slots
        columns = spec.columns if spec.support is Support.UNION else min(spec.columns, vocab_size)
        expected |= {"topk_ids": (rows, columns), "topk_logprobs": (rows, columns), "log_tail": (rows,)}
    elif spec.signal is Signal.FULL and hidden_size is not None:
        expected["hidden"] = (rows, hidden_size)
    elif spec.signal is Signal.FULL:
        expected["full_logprobs"] = (rows, vocab_size)
    if scores.spans is not None:
        expected["spans"] = (rows,)
    for name, shape in expected.items():
        array: NDArray[Any] | None = getattr(scores, name)
        if array is None or array.shape != shape:
            got = "nothing" if array is None else f"shape {array.shape}"
            raise TeacherError(
                f"sample {sample.id}, teacher {scores.teacher}: {name} must have shape {shape}, got {got}",
                why="row t of the scores is about response token t, so each token has exactly one row",
                fix="check that the teacher scored the same token ids, over the common vocabulary",
                sample_id=sample.id,
                teacher=scores.teacher,
            )
        kind = "iu" if name in ("topk_ids", "spans") else "fi" if name == "hidden" else "f"
        if array.dtype.kind not in kind:
            raise TeacherError(
                f"sample {sample.id}, teacher {scores.teacher}: {name} holds {array.dtype}",
                why="ids and spans are whole numbers, log-probabilities floating ones",
                sample_id=sample.id,
                teacher=scores.teacher,
            )
