"""What an observer remembers. Times are seconds since the run began, on the monotonic clock, over all resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("rollout", "score", "swap", "train", "publish", "checkpoint", "eval")
LEVELS = ("debug", "info", "warning", "error")


@dataclass(slots=True)
class Span:
    """One stretch of work. `amount` may be set until it ends: tokens for rollout, score and train, bytes otherwise.

    The label of score and swap spans is the teacher's name.
    """

    kind: str
    start: float
    end: float = 0.0
    label: str = ""
    amount: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Visit:
    """A teacher's stay in a slot: from the start of its loading to the end of the last scoring before the next one."""

    teacher: str
    start: float
    loaded: float
    end: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimiser step with its metrics, by names of `distill.observe.metrics.METRICS`."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluation on one domain. `who` is "base", "student" or a teacher; a share and nats, None if not measured."""

    step: int
    version: int
    who: str
    domain: str
    accuracy: float | None
    kl: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Event:
    time: float
    level: str
    message: str
