"""A whole run in which one of two teachers in the same slot has another tokenizer and another vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.builders_run import Run
from tests.builders_tokenizers import BYTE_LEVEL, FALLBACK, byte_level, fallback, write_speaker

pytestmark = pytest.mark.timeout(280)


def write_foreign_run(folder: Path) -> Path:
    """`same` has the student's tokenizer, `other` has not; both score every sample, in one slot."""
    write_speaker(folder / "base", byte_level(), head_rows=len(BYTE_LEVEL) + 1, seed=0)
    write_speaker(folder / "same", byte_level(), head_rows=len(BYTE_LEVEL) + 1, seed=1)
    write_speaker(folder / "other", fallback(), head_rows=len(FALLBACK) + 6, seed=2)
    rows = [{"prompt": text, "answer": "a"} for text in ("abcd a", "cd", "b a", "eab", "é a")]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "run": {"name": "foreign", "dir": str(folder / "out")},
        "student": {"model": "base", "lr": 1e-2, "warmup_steps": 0},
        "teachers": {"same": {"model": "same"}, "other": {"model": "other", "alignment": "bytes"}},
        "data": [{"path": "data.jsonl", "domain": "text", "teachers": ["other", "same"]}],
        "objective": {"name": "span_kl"},
        "rollout": {"max_new_tokens": 8},
        "teacher_manager": {"slots": 1},
        "trainer": {"steps": 3, "batch_size": 8},
        "evaluation": {"data": [{"path": "data.jsonl", "domain": "text"}], "teachers": True, "kl": True},
    }
    path = folder / "teachers.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def test_a_student_learns_from_a_teacher_with_another_tokenizer(tmp_path: Path) -> None:
    run = Run(tmp_path / "out", str(write_foreign_run(tmp_path)))
    assert run.wait(150) == 0, run.output()[-3000:]
    result = run.result()
    assert (result["status"], result["steps"]) == ("done", 3)
    assert result["teacher_swaps"] >= 3, "the slot goes from one vocabulary to the other and back"
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3
    for row in steps:
        assert row["objective/aligned/same"] == 1.0
        assert 0.2 < row["objective/aligned/other"] < 1.0, "some random answers have no text after a broken character"
    assert len(json.loads((run.folder / "canaries.json").read_text())) == 2
    assert "refused" not in (run.folder / "events.log").read_text()
