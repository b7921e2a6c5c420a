"""Graders are waited for in threads of their own; whatever they do is about one answer."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from distill.errors import GraderError
from distill.rollout.graders import AT_ONCE, Marker, OutcomeGrader, exact_match
from distill.types import Sample
from tests.builders import sample


def test_exact_match_wants_the_whole_text_and_an_end() -> None:
    assert exact_match(" 42\n", "42", True) == 1.0
    assert exact_match("42", "42", False) == exact_match("421", "42", True) == 0.0


async def test_a_grader_works_beside_the_loop_and_not_in_it() -> None:
    free = threading.Event()

    def slow(text: str, answer: str, finished: bool) -> float:
        assert free.wait(20), "the loop was held up"
        return 0.25

    marking = asyncio.create_task(Marker("slow", slow).mark("a", "b", True, "x"))
    await asyncio.sleep(0.01)
    assert not marking.done()
    free.set()
    assert await marking == 0.25


async def test_only_some_are_graded_at_once() -> None:
    lock = threading.Lock()
    running: list[int] = [0, 0]

    def count(text: str, answer: str, finished: bool) -> float:
        with lock:
            running[0] += 1
            running[1] = max(running)
        threading.Event().wait(0.01)
        with lock:
            running[0] -= 1
        return 1.0

    marker = Marker("count", count)
    assert await asyncio.gather(*(marker.mark("", "", True, str(index)) for index in range(4 * AT_ONCE))) == [1.0] * (
        4 * AT_ONCE
    )
    assert 1 <= running[1] <= AT_ONCE


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (float("nan"), "gave nan, which is no finite number"),
        (None, "gave None, which is no finite number"),
        ("good", "gave 'good', which is no finite number"),
        (ZeroDivisionError("by zero"), "failed: ZeroDivisionError: by zero"),
    ],
)
async def test_a_mark_is_a_finite_number_or_an_error_that_names_grader_and_answer(gives: Any, message: str) -> None:
    def grade(text: str, answer: str, finished: bool) -> Any:
        if isinstance(gives, Exception):
            raise gives
        return gives

    with pytest.raises(GraderError, match=f"sample-00000001: the grader mine {message}") as caught:
        await Marker("mine", grade).mark("a", "b", True, "sample-00000001")
    assert (caught.value.sample_id, caught.value.exit_code) == ("sample-00000001", 4)


async def test_a_grader_that_hangs_is_given_up_and_the_others_go_on() -> None:
    free = threading.Event()

    def hang(text: str, answer: str, finished: bool) -> float:
        return 1.0 if text == "fine" else float(free.wait(20))

    marker = Marker("hang", hang, deadline_s=0.1)
    with pytest.raises(GraderError, match=r"the grader hang took longer than 0\.1 s"):
        await asyncio.gather(*(marker.mark("hangs", "", True, "x") for _ in range(AT_ONCE)))
    assert await marker.mark("fine", "", True, "y") == 1.0
    free.set()


def finished(reason: str) -> Sample:
    return dataclasses.replace(sample(7), response_ids=np.array([4, 2], np.int32), finish_reason=reason)


async def test_an_outcome_is_the_mark_of_the_text_against_the_answer_of_its_prompt() -> None:
    seen: list[tuple[str, str, bool]] = []

    def grade(text: str, answer: str, ended: bool) -> float:
        seen.append((text, answer, ended))
        return float(ended)

    grader = OutcomeGrader(
        Marker("g", grade), answer={7: "42"}.get, decode=lambda ids: "".join(str(index) for index in ids)
    )
    assert await grader(finished("stop")) == 1.0
    assert await grader(finished("length")) == 0.0
    assert seen == [("42", "42", True), ("42", "42", False)]


async def test_a_sample_whose_prompt_has_no_answer_cannot_be_graded() -> None:
    grader = OutcomeGrader(Marker("g", exact_match), answer=lambda _: None, decode=lambda _: "")
    with pytest.raises(GraderError, match="sample-00000007: its prompt has no answer") as caught:
        await grader(sample(7))
    assert caught.value.sample_id == "sample-00000007"
