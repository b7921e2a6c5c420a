"""A whole run in which the student's own weights teach it, once with privileged context and once without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders_run import finished

pytestmark = pytest.mark.timeout(280)


def test_a_teacher_of_the_students_own_weights_teaches_what_its_context_tells_it(tmp_path: Path) -> None:
    """At the first step all three are one model: what a teacher can tell then comes from its context alone."""
    run = finished(
        tmp_path,
        teachers={"math": {"model": "base", "context": {"template": "{prompt}d{answer}"}}, "code": {"model": "base"}},
        data=[{"path": "math.jsonl", "domain": "x", "teachers": ["math", "code"]}],
        evaluation={"data": [{"path": "code.jsonl", "domain": "x"}], "kl": True},
    )
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3
    assert abs(steps[0]["teacher/kl/code"]) < 1e-5
    assert steps[0]["teacher/kl/math"] > 0.01
    assert steps[-1]["teacher/kl/code"] > 1e-4, "the student has moved away from itself"
    assert run.result()["status"] == "done"
