"""Graders: (written text, expected answer, finished by itself) -> a mark, such as 1.0 for right and 0.0 for wrong.

A grader may be slow, or run programs: it works in a thread of its own, and has `DEADLINE_S` for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any

from distill.errors import GraderError
from distill.types import Ids, Sample

Grader = Callable[[str, str, bool], float]

DEADLINE_S = 60.0
"""Longest time for one answer. A thread cannot be stopped: it is left alone, and ends with the run at the latest."""
AT_ONCE = 8
"""Answers that are graded at the same time."""


def exact_match(text: str, answer: str, finished: bool) -> float:
    """The whole text is the answer, and the model ended it itself."""
    return float(finished and text.strip() == answer.strip())


class Marker:
    """A grader that is waited for without holding up anybody else."""

    def __init__(self, name: str, grade: Grader, *, deadline_s: float = DEADLINE_S) -> None:
        self._name = name
        self._grade = grade
        self._deadline_s = deadline_s
        self._room = asyncio.Semaphore(AT_ONCE)

    async def mark(self, text: str, answer: str, finished: bool, of: str) -> float:
        """The mark of what `of` wrote. Raises GraderError when the grader fails, is late, or gives no finite number."""
        async with self._room:
            try:
                async with asyncio.timeout(self._deadline_s):
                    value = await _in_thread(lambda: self._grade(text, answer, finished))
            except TimeoutError as error:
                raise self._error(of, f"took longer than {self._deadline_s:g} s") from error
            except Exception as error:  # somebody else's code: whatever it raises is about this answer
                raise self._error(of, f"failed: {type(error).__name__}: {error}") from error
        try:
            mark = float(value)
        except (TypeError, ValueError):
            mark = math.nan
        if not math.isfinite(mark):
            raise self._error(of, f"gave {value!r}, which is no finite number")
        return mark

    def _error(self, of: str, what: str) -> GraderError:
        return GraderError(
            f"{of}: the grader {self._name} {what}",
            why="a grader is called with (text, answer, finished) and returns a number",
            fix="mend the grader, or the answers in the data",
            sample_id=of,
        )


class OutcomeGrader:
    """The reward of a finished sample: the mark of its text, against the answer of its prompt."""

    def __init__(self, marker: Marker, *, answer: Callable[[int], str | None], decode: Callable[[Ids], str]) -> None:
        """`answer`: of the prompt that a sample's ordinal answers."""
        self._marker = marker
        self._answer = answer
        self._decode = decode

    async def __call__(self, sample: Sample) -> float:
        """Raises GraderError with the sample's id."""
        answer = self._answer(sample.ordinal)
        if answer is None:
            raise GraderError(
                f"{sample.id}: its prompt has no answer to grade with",
                why="objective.outcome needs the answer of every prompt",
                fix="fill the answers in the data",
                sample_id=sample.id,
            )
        text = self._decode(sample.response_ids)
        return await self._marker.mark(text, answer, sample.finish_reason == "stop", sample.id)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises. Its thread is a daemon: one that hangs does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(settle_with: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            settle_with(value)

    def work() -> None:
        try:
            outcome = future.set_result, call()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the run has ended meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="grader", daemon=True).start()
    return await future
