"""Steps that taught nothing: told at once, and the end of the run when there are too many of them.

A correction may leave out every token of a batch, and weights of 0 may spare every sample of it. Nothing moves then but
the optimiser's memory of earlier steps; a run made of such steps would end as if all were well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distill.errors import StudentError
from distill.types import StepResult

IN_A_ROW = 16
"""So many idle steps one after another end the run. Stale samples alone make few: while nothing is learnt the student
stands still, and what it writes catches up with it."""
LEFT_OUT = ("gated_low", "gated_high")
"""Metrics of the objectives: tokens without weight, to which the student now gives less or more probability than the
sampler did."""
_ROUNDING = 1e-9
"""Of the two shares, each a mean of zeros and ones."""


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
        fix = "give the teachers and the domains of the data weights above 0"
        if result.token_share:
            fix = (
                "bring rollout.temperature, top_p and top_k nearer to 1, 1 and -1; lower student.lr or "
                "trainer.max_staleness; or use a correction that caps instead: objective.importance=tis"
            )
        return StudentError(
            f"{what}: objective {self._objective}",
            why=f"step {result.version}: {_reason(result)}",
            fix=fix,
        )


def is_idle(result: StepResult) -> bool:
    """No token moved a weight: no teacher's scores count, or the correction leaves out all of them.

    A gradient of zero alone is no sign of it: a student that has arrived has one too.
    """
    if result.grad_norm != 0:
        return False
    return all(sum(_shares(result, teacher)) >= 1 - _ROUNDING for teacher in result.token_share)


def _shares(result: StepResult, teacher: str) -> tuple[float, float]:
    """Of the teacher's tokens: left out as now too improbable, and as too probable."""
    low, high = (result.objective.get(name, {}).get(teacher, 0.0) for name in LEFT_OUT)
    return low, high


def _reason(result: StepResult) -> str:
    if not result.token_share:
        return "its samples, or their teachers, all have the weight 0"
    low, high = zip(*(_shares(result, teacher) for teacher in result.token_share), strict=True)
    # a teacher with more tokens counts for more
    weights = list(result.token_share.values())
    means = [sum(w * x for w, x in zip(weights, each, strict=True)) / sum(weights) for each in (low, high)]
    return (
        f"100 % of its {result.tokens} tokens are left out by the correction: {100 * means[0]:.0f} % are less probable "
        f"to the student at temperature 1 than they were to the sampler, {100 * means[1]:.0f} % more"
    )
