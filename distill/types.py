"""The only types that cross seams. Arrays are numpy, never torch.

Shape legend: R response tokens of one sample, P prompt tokens, K top-k entries, V common vocabulary.
Log-probabilities are natural logarithms; row t of a response array is about the distribution that predicts token t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Hidden = NDArray[Any]
"""float32, float16 or int16: what the teacher computes in, unrounded. numpy has no bfloat16, int16 holds its bits."""


class Signal(StrEnum):
    """What an objective needs from a teacher, from least to most."""

    SAMPLED = "sampled"
    """log q of the token that was sampled: (R,)."""
    TOPK = "topk"
    """log q at k most probable tokens of each row, and the mass beside them: (R, K). `Support` says whose."""
    FULL = "full"
    """log q of the whole vocabulary: (R, V)."""
    HIDDEN = "hidden"
    """The same as final hidden states, (R, D), for whoever has the teacher's head. No objective asks for it: it is how
    FULL travels where D is much smaller than V."""


class Support(StrEnum):
    """Whose most probable tokens a TOPK row is about."""

    TEACHER = "teacher_topk"
    STUDENT = "student_topk"
    """Those of the weights that wrote the sample, as its rollout server reported them."""
    UNION = "union"
    """The teacher's k and the student's k, each id once: k to 2k of them."""


@dataclass(frozen=True, slots=True)
class SignalSpec:
    """A signal with its size. `k` counts the most probable tokens of each model in `support`, and is 0 without TOPK."""

    signal: Signal
    k: int = 0
    support: Support = Support.TEACHER

    @property
    def columns(self) -> int:
        """K, the width of a TOPK row."""
        return 2 * self.k if self.support is Support.UNION else self.k

    @property
    def student_k(self) -> int:
        """How many of its own most probable tokens the student must report with each token it writes."""
        return 0 if self.support is Support.TEACHER else self.k


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the data set. `ordinal` never changes and is never used twice in a run; it counts over epochs."""

    ordinal: int
    domain: str
    input_ids: Ids
    teachers: Mapping[str, float]
    """Teacher name -> weight of its divergence in the loss."""
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished rollout. `id` is unique in a run and never reused."""

    id: str
    ordinal: int
    """Position in the run's stream of samples: prompt ordinal * samples per prompt + index."""
    domain: str
    teachers: Mapping[str, float]
    prompt_ids: Ids
    response_ids: Ids
    """(R,), at least one token; ends with an end token when `finish_reason` is "stop"."""
    logprobs: Floats
    """(R,) log mu of each sampled token, of the temperature-scaled distribution that sampled it."""
    versions: Ids
    """(R,) weight version that wrote each token."""
    finish_reason: str
    topk_ids: Ids | None = None
    """(R, k) the writing weights' most probable tokens, where the objective's support needs them."""
    loss_mask: NDArray[np.int8] | None = None
    """(R,) 1: trained; 0: a token that the student did not write, such as a tool's answer. None: all are trained."""
    reward: float | None = None
    """What the grader gave the answer, where the objective needs an outcome."""
    trajectory: str = ""
    """Samples with the same name are segments of one trajectory; empty: the sample is a trajectory of its own."""

    @property
    def loss_tokens(self) -> int:
        """Response tokens that are trained."""
        return len(self.response_ids) if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int:
        return int(self.versions.min())


def sample_id(ordinal: int) -> str:
    """The id of the sample with this ordinal: unique in a run, the same after a resume."""
    return f"sample-{ordinal:08d}"


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """What one teacher says of one sample's response. Exactly R rows."""

    teacher: str
    logprobs: Floats
    """(R,) log q of the sampled tokens. With `spans`: a span's log q at its first token, 0 at all other tokens."""
    topk_ids: Ids | None = None
    """(R, K) no id twice in a row; -1: a slot that is not used, which only a union has."""
    topk_logprobs: Floats | None = None
    """(R, K) log q at those ids; -inf in slots that are not used."""
    log_tail: Floats | None = None
    """(R,) log(1 - mass of q on those ids)."""
    full_logprobs: Floats | None = None
    """(R, V)"""
    hidden: Hidden | None = None
    """(R, D) instead of `full_logprobs`: what the teacher's head is applied to."""
    spans: Ids | None = None
    """(R,) which byte span a token belongs to, where the teacher has another tokenizer; -1: none, so no loss."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    sample: Sample
    scores: tuple[TeacherScores, ...]
    """One entry a teacher of `sample.teachers`, in that order."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimiser step learns from. `version` is the student's version before the step."""

    version: int
    samples: tuple[ScoredSample, ...]

    @property
    def response_tokens(self) -> int:
        return sum(len(item.sample.response_ids) for item in self.samples)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimiser step did. Token means are over all response tokens of the batch."""

    version: int
    """Weight version after the step."""
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Response tokens that carried a loss."""
    seconds: float
    kl: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per teacher: mean KL(p || q) in nats, exact for full signals, over the known support otherwise."""
    entropy_gap: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per teacher: mean H(q) - H(p) in nats; absent where the signal does not tell."""
    token_share: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per teacher: share of the batch's response tokens that it scored."""
    objective: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Whatever else the objective measures, per teacher: metric name -> teacher -> token mean."""
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue. `temperature` 0 is greedy; `seed` fixes the tokens whatever shares the batch."""

    id: str
    input_ids: Ids
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    report_k: int = 0
    """Most probable tokens to report with each written token, of the distribution before temperature and cuts."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What a server wrote for one request."""

    id: str
    output_ids: Ids
    logprobs: Floats
    versions: tuple[str, ...]
    """One weight version label a token."""
    finish_reason: str
    """stop | length | abort"""
    topk_ids: Ids | None = None
    """(R, report_k), where asked for."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A finished sequence to score: the last `response_len` of `input_ids` are the response."""

    id: str
    input_ids: Ids
    response_len: int
    student_ids: Ids | None = None
    """(R, k) tokens of the student's choice to be scored at each response token; for STUDENT and UNION supports."""
    teacher: str = ""
    """Who is asked, where a server holds more than one."""
    temperature: float = 1.0
    """Of the teacher: its logits are divided by it before they are normalised."""
