"""Deadlines from the pace of the run."""

from __future__ import annotations

import pytest

from distill.teacher_manager.pace import Pace


def test_before_a_step_was_seen_every_sample_has_the_longest_time() -> None:
    pace = Pace(8, 120.0)
    assert pace.due_s(0, now=5.0) == 120.0
    pace.advance(0, now=10.0)
    assert pace.due_s(100, now=10.0) == 120.0


def test_a_sample_is_due_when_its_step_would_begin() -> None:
    pace = Pace(8, 120.0)
    pace.advance(0, now=10.0)
    pace.advance(1, now=14.0)  # 4 s a step
    assert pace.due_s(8, now=14.0) == 4.0, "the step that comes next, at the end of the present one"
    assert pace.due_s(16, now=14.0) == 8.0
    assert pace.due_s(16, now=20.0) == 2.0
    assert pace.due_s(7, now=20.0) == 0.0, "its step waits already"
    assert pace.due_s(8 * 100, now=14.0) == 120.0
    assert pace.due_s(-1, now=14.0) == 120.0


def test_the_length_of_a_step_is_a_moving_average() -> None:
    pace = Pace(1, 1000.0)
    for version, now in enumerate((0.0, 10.0, 30.0)):
        pace.advance(version, now)
    assert pace.due_s(2, now=30.0) == pytest.approx(0.7 * 10 + 0.3 * 20)
