"""What travels between the HTTP side and the engine thread: jobs in, results out. Loads no torch.

Shape legend: P prompt tokens, R scored rows, K top-k entries, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Hidden = NDArray[Any]
"""float32, float16, or int16 with the bits of bfloat16."""


class Refusal(Exception):
    """An answer other than 200: `status` and a message for the caller. It never leaves the server as an exception."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to write. `temperature` 0 is greedy; `top_k` 0 or less means no limit. `seed` fixes every draw."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which log-probabilities to report."""

    start: int = -1
    """Prompt rows are reported for the tokens after this position; -1 asks for none."""
    output: bool = False
    """Report the log-probability of every written token."""
    top_k: int = 0
    token_ids: Ids | None = None
    """Further ids to report at every position."""
    row_ids: Ids | None = None
    """(R, J) further ids to report at each scored position, of its own (packed replies only)."""
    full: bool = False
    """Report whole rows of the prompt's distribution (packed replies only)."""
    hidden: bool = False
    """Report the final hidden states of the prompt's rows (packed replies only)."""
    half: bool = False
    """Log-probabilities of top-k rows are sent as float16 (packed replies only)."""
    temperature: float = 1.0
    """What logits are divided by before the prompt's rows are normalised (packed replies only)."""


@dataclass(frozen=True, slots=True)
class InputScores:
    """Rows of the prompt: row t predicts token `start + 1 + t`; there are P - 1 - start of them."""

    token_ids: Ids
    logprobs: Floats
    top_ids: Ids | None
    """(R, K) by falling log-probability."""
    top_logprobs: Floats | None
    log_tail: Floats | None
    """(R,) log of the mass beside the top-k and the row's own ids; None where there are neither."""
    picked: Floats | None
    """(R, len(Wanted.token_ids))"""
    row_logprobs: Floats | None
    """(R, J) at `Wanted.row_ids`."""
    full: Floats | None
    """(R, V)"""
    hidden: Hidden | None = None
    """(R, D) in the model's dtype; bfloat16 as its bits in int16."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a job ended: "stop" (with the id that matched), "length" or "abort" (with a message)."""

    kind: str
    matched: int = -1
    message: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What a job has produced so far; `finish` is None in the middle of a stream."""

    rid: str
    prompt_tokens: int
    output_ids: Ids
    output_logprobs: Floats
    output_tops: list[tuple[Ids, Floats]]
    output_picked: list[Floats]
    spans: list[tuple[str, int, int]]
    """(weight version, first token, one past its last token) over the output."""
    weight_version: str
    """The version that the server holds at the time of this result."""
    retractions: int
    scores: InputScores | None
    finish: Finish | None


def _no_ids() -> Ids:
    return np.empty(0, np.int32)


def _no_floats() -> Floats:
    return np.empty(0, np.float32)


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to score, to continue, or both. The engine thread alone touches it after `Engine.submit`."""

    rid: str
    prompt: Ids
    sampling: Sampling
    wanted: Wanted
    call: int = 0
    """Number of the HTTP request that brought it."""
    batch_rid: str = ""
    """The one name that was given to a whole batch."""
    teacher: str = ""
    """The weight object that it names, where a server holds several."""
    adapter: Any = None
    """A LoRA adapter (`distill.modeling.adapters`) to compute it with, over the engine's model."""
    label: str = ""
    """Version of the adapter: what replies name instead of the engine's version."""
    on_progress: Callable[[Result], None] | None = None
    """Called on the engine thread after every token of a streamed job."""
    done: Future[Result] = field(default_factory=Future[Result])
    output_ids: Ids = field(default_factory=_no_ids)
    output_logprobs: Floats = field(default_factory=_no_floats)
    output_tops: list[tuple[Ids, Floats]] = field(default_factory=list[tuple[Ids, Floats]])
    output_picked: list[Floats] = field(default_factory=list[Floats])
    marks: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(weight version, index of the first output token that it wrote)."""
    scores: InputScores | None = None
    retractions: int = 0

    @property
    def wants_scores(self) -> bool:
        return self.wanted.start >= 0 and self.scores is None

    @property
    def context(self) -> Ids:
        """Everything that the model has to have read before the next token."""
        return np.concatenate([self.prompt, self.output_ids]) if len(self.output_ids) else self.prompt

    def mark(self, version: str, at: int) -> None:
        """From output token `at` on, `version` writes."""
        version = self.label or version
        if self.marks and self.marks[-1][1] == at:
            self.marks.pop()
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, at))

    def result(self, version: str, finish: Finish | None) -> Result:
        """A snapshot of the job."""
        count = len(self.output_ids)
        ends = [start for _, start in self.marks[1:]] + [count]
        spans = [
            (name, start, end) for (name, start), end in zip(self.marks, ends, strict=bool(self.marks)) if end > start
        ]
        return Result(
            rid=self.rid,
            prompt_tokens=len(self.prompt),
            output_ids=self.output_ids,
            output_logprobs=self.output_logprobs,
            output_tops=list(self.output_tops),
            output_picked=list(self.output_picked),
            spans=spans,
            weight_version=self.label or version,
            retractions=self.retractions,
            scores=self.scores,
            finish=finish,
        )

    def finish(self, version: str, finish: Finish) -> None:
        """Hand the result to whoever waits, unless they have gone."""
        if not self.done.done():
            self.done.set_result(self.result(version, finish))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
