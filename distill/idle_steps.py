"""Steps that taught nothing: told at once, and the end of the run when there are too many of them.

A step whose gradient is exactly 0 moves no weight. A run made of such steps would end as if all were well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distill.errors import StudentError
from distill.types import StepResult

IN_A_ROW = 16
"""So many idle steps one after another end the run. Stale samples alone make few: while nothing is learnt the student
stands still, and what it writes catches up with it."""
LEFT_OUT = ("gated_low", "gated_high")
"""Metrics of the objectives: tokens without weight, to which the student now gives less or more probability than the
sampler did."""
ALIGNED = "aligned"
"""Metric of objectives that compare spans: tokens inside of one."""
OUTCOME = "outcome_advantage"
"""Metric of objectives with rewards mixed in: the size of the outcome's advantage."""
_ROUNDING = 1e-9
"""Of a share, which is a mean of zeros and ones."""
_SAME_NATS = 1e-5
"""A KL that is 0 within rounding: it adds up differences of logarithms of a size of 10 to 100, in float32."""


class IdleSteps:
    """Counts them over all resumes. `objective` is what to call it in a message, its correction included."""

    def __init__(self, objective: str, *, total_steps: int, on_event: Callable[[str, str], None]) -> None:
        self._objective = objective
        self._total_steps = total_steps
        self._event = on_event
        self._steps = 0
        self._idle = 0
        self._in_a_row = 0

    def take(self, result: StepResult) -> None:
        """Count the step. Raises StudentError after too many idle ones in a row, and at the end of a run that had no
        others."""
        self._steps += 1
        if not is_idle(result):
            self._in_a_row = 0
            return
        self._idle += 1
        self._in_a_row += 1
        self._event(
            "warning",
            f"step {result.version} taught nothing ({self._idle} of {self._steps} so far): {_reason(result)}",
        )
        if self._in_a_row >= IN_A_ROW:
            raise self._error(f"{self._in_a_row} steps one after another taught nothing", result)
        if result.version == self._total_steps and self._idle == self._steps:
            raise self._error(f"no step of the run taught anything ({self._steps} in all)", result)

    def state(self) -> list[int]:
        """For a checkpoint: plain JSON."""
        return [self._steps, self._idle, self._in_a_row]

    def restore(self, state: Sequence[int]) -> None:
        """Go on from `state()`."""
        self._steps, self._idle, self._in_a_row = state

    def _error(self, what: str, result: StepResult) -> StudentError:
        return StudentError(
            f"{what}: objective {self._objective}",
            why=f"step {result.version}: {_reason(result)}",
            fix="; ".join(cause.fix for cause in _causes(result) if cause.fix),
        )


def is_idle(result: StepResult) -> bool:
    """The gradient was exactly 0, and not because the student has arrived: nothing but its teachers counts, and it
    equals them."""
    if result.grad_norm != 0:
        return False
    arrived = [_arrived_at(result, teacher) for teacher in result.token_share]
    return OUTCOME in result.objective or not arrived or not all(arrived)


@dataclass(frozen=True)
class _Cause:
    what: str
    fix: str


def _reason(result: StepResult) -> str:
    return "; ".join(cause.what for cause in _causes(result))


def _causes(result: StepResult) -> list[_Cause]:
    """What explains a gradient of 0, as far as the metrics tell."""
    if not result.token_share:
        return [_nothing_weighed(result)]
    causes = [_gated(result), _unaligned(result), _no_advantage(result), _arrived(result)]
    found = [cause for cause in causes if cause is not None]
    return found if _no_outcome(result) or _explained(result) else [*found, _UNKNOWN]


def _explained(result: StepResult) -> bool:
    """Each teacher is out of reach, or, where nothing else counts, equalled."""
    alone = OUTCOME not in result.objective
    return all(
        _reached(result, teacher) <= _ROUNDING or (alone and _arrived_at(result, teacher))
        for teacher in result.token_share
    )


def _nothing_weighed(result: StepResult) -> _Cause:
    if result.tokens:
        return _Cause("the teachers of its samples all have the weight 0", "give the teachers weights above 0")
    return _Cause(
        "its samples all have the weight 0, or no token that is trained",
        "give the domains of the data weights above 0 (objective.domain_weights), or take those of weight 0 out of it; "
        "check the loss masks, where samples have one",
    )


def _gated(result: StepResult) -> _Cause | None:
    low, high = (_mean(result, name) for name in LEFT_OUT)
    if not low + high:
        return None
    return _Cause(
        f"{_percent(low + high)} of its {result.tokens} tokens are left out by the correction: {_percent(low)} are "
        f"less probable to the student at temperature 1 than they were to the sampler, {_percent(high)} more",
        "bring rollout.temperature, top_p and top_k nearer to 1, 1 and -1; lower student.lr or trainer.max_staleness; "
        "or use a correction that caps instead: objective.importance=tis",
    )


def _unaligned(result: StepResult) -> _Cause | None:
    if ALIGNED not in result.objective:
        return None
    outside = 1 - _mean(result, ALIGNED)
    if outside < _ROUNDING:
        return None
    return _Cause(
        f"{_percent(outside)} of its {result.tokens} tokens are aligned with nothing that a teacher scored",
        "have teachers and student given the same text: compare their tokenizers and chat templates",
    )


def _no_advantage(result: StepResult) -> _Cause | None:
    if not _no_outcome(result):
        return None
    return _Cause(
        "the advantage of every outcome is 0: rewards that are compared with one another do not differ",
        "check the answers of the data and objective.outcome.grader; take more samples per prompt, or prompts that are "
        "neither always nor never answered right; or let the teachers count (objective.outcome.teacher_weight)",
    )


def _arrived(result: StepResult) -> _Cause | None:
    teachers = [teacher for teacher in result.token_share if _arrived_at(result, teacher)]
    return _Cause(f"the KL to the teacher is 0: {', '.join(teachers)}", "") if teachers else None


_UNKNOWN = _Cause(
    "no other reason shows in its metrics",
    "tiny weights of teachers or of the objective vanish in float32: bring them nearer to 1; a student that is certain "
    "of every token has no gradient either: start from an earlier checkpoint, with a lower student.lr",
)


def _arrived_at(result: StepResult, teacher: str) -> bool:
    """The student equals the teacher, where tokens of the teacher can teach."""
    return _reached(result, teacher) > _ROUNDING and abs(result.kl.get(teacher, float("inf"))) <= _SAME_NATS


def _reached(result: StepResult, teacher: str) -> float:
    """Of the teacher's tokens: the least share that the correction lets through and that are in a span. One token may
    be left out for both reasons, so it can be below 0."""
    gated = sum(result.objective.get(name, {}).get(teacher, 0.0) for name in LEFT_OUT)
    return result.objective.get(ALIGNED, {}).get(teacher, 1.0) - gated


def _no_outcome(result: StepResult) -> bool:
    return OUTCOME in result.objective and not any(result.objective[OUTCOME].values())


def _mean(result: StepResult, metric: str) -> float:
    """Token mean over all teachers; one with more tokens counts for more. 0 where no teacher has it."""
    values = result.objective.get(metric)
    if not values:
        return 0.0
    total = sum(result.token_share.values())
    return sum(share * values.get(teacher, 0.0) for teacher, share in result.token_share.items()) / total


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
