"""Whole runs with real processes in which samples, a teacher or all of the steps are of no use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from distill.teacher_manager.gate import canary_ids
from tests.builders_run import DEADLINE_S, Run, write_run
from tests.builders_student import VOCAB

pytestmark = pytest.mark.timeout(280)
LETTER = "u"
TOKEN = VOCAB - 1
"""The letter's id; the tiny tokenizer has one id a letter, in their order."""


def spoil(model: Path, tensor: str, rows: slice) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[tensor][rows] = np.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_samples_that_a_teacher_cannot_score_are_set_aside_and_the_rest_is_learnt_with_rewards(tmp_path: Path) -> None:
    assert TOKEN not in canary_ids(VOCAB)
    path = write_run(
        tmp_path,
        objective={"name": "policy_gradient", "outcome": {"baseline": "batch"}},
        trainer={"steps": 3, "batch_size": 16, "max_quarantined": 40},
        evaluation={"teachers": False},
    )
    rows = [{"prompt": text, "answer": "a"} for text in ("ab", LETTER, "bca", f"a{LETTER}", "cc")]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spoil(tmp_path / "math", "model.embed_tokens.weight", slice(TOKEN, TOKEN + 1))
    run = Run(tmp_path / "out", str(path))
    assert run.wait(DEADLINE_S) == 0, run.output()[-3000:]

    lines = [json.loads(line) for line in (run.folder / "quarantine.jsonl").read_text().splitlines()]
    assert lines and all(line["teacher"] == "math" and "response token" in line["rule"] for line in lines)
    assert all(TOKEN in line["prompt_ids"] + line["response_ids"][:-1] for line in lines), "only those with that token"
    result = run.result()
    assert result["quarantined"] == {"samples": len(lines), "teachers": {"math": len(lines)}}
    assert result["samples"] == 48 - len(lines)
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "train/loss" in row]
    assert sum(row["quarantine/samples"] for row in steps) == len(lines)
    assert all(np.isfinite(row["train/loss"]) and 0 <= row["reward/code"] <= 1 for row in steps)
    assert f"{len(lines)} samples could not be used and were set aside" in run.output()


def test_a_teacher_that_knows_no_number_at_all_ends_the_run_with_one_message(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    spoil(tmp_path / "code", "lm_head.weight", slice(None))
    run = Run(tmp_path / "out", str(path))
    assert run.wait(DEADLINE_S) == 4, run.output()[-3000:]
    assert "Traceback" not in run.output()
    message = run.output().rpartition("error: ")[2]
    first = message.partition("\n")[0].removeprefix("evaluation, domain math: ")  # where it is asked first, by chance
    assert first.startswith("teacher code: request canary-code: ") and "is not a number" in first
    assert "why: " in message and "fix: " in message and run.output().count("error: ") == 1
    assert run.result()["status"] == "failed" and run.result()["quarantined"]["samples"] == 0


def test_a_run_whose_correction_leaves_out_every_token_fails_and_says_so(tmp_path: Path) -> None:
    path = write_run(
        tmp_path,
        objective={"name": "policy_gradient"},
        rollout={"temperature": 1e-4},  # a student of random weights is far from certain of what it writes then
        trainer={"steps": 2},
        evaluation={"teachers": False},
    )
    run = Run(tmp_path / "out", str(path))
    assert run.wait(DEADLINE_S) == 4, run.output()[-3000:]
    assert "Traceback" not in run.output()
    message = run.output().rpartition("error: ")[2]
    assert message.startswith(
        "no step of the run taught anything (2 in all): objective policy_gradient with importance=icepop"
    )
    assert "100 % of its" in message and "fix: bring rollout.temperature" in message
    warned = [line for line in (run.folder / "events.log").read_text().splitlines() if "taught nothing" in line]
    assert [f"({count} of {count} so far)" in line for count, line in enumerate(warned, 1)] == [True, True]
    result = run.result()
    assert (result["status"], result["steps"], result["export_dir"]) == ("failed", 2, None)
