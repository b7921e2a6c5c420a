"""Whole runs in which teachers are asked for every kind of signal, over two servers and two slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders_run import finished

pytestmark = pytest.mark.timeout(280)


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param({"name": "policy_gradient"}, marks=pytest.mark.slow),  # other runs have sampled tokens
        {"name": "reverse_kl", "support": "teacher_topk", "k": 4},
        {"name": "forward_kl", "support": "full"},
        pytest.param({"name": "reverse_kl", "support": "student_topk", "k": 4}, marks=pytest.mark.slow),  # as in union
        {"name": "reverse_kl", "support": "union", "k": 3},
    ],
    ids=lambda value: "-".join(str(value.get(key, "")) for key in ("name", "support")),
)
def test_every_kind_of_signal_trains_over_two_servers_and_two_slots(tmp_path: Path, objective: dict[str, Any]) -> None:
    data = [
        {"path": "math.jsonl", "domain": "math", "teachers": {"math": 0.7, "code": 0.3}},
        {"path": "code.jsonl", "domain": "code"},
    ]
    run = finished(
        tmp_path,
        objective=objective,
        data=data,
        rollout={"servers": 2, "samples_per_prompt": 2},
        teacher_manager={"slots": 2},
        evaluation={"kl": True},
        trainer={"steps": 2},
    )
    result = run.result()
    assert result["samples"] == 16
    assert all(np.isfinite(value) for domain in result["kl"].values() for value in domain.values())
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("publish/receivers") == 2 for row in rows)


@pytest.mark.slow
def test_a_run_learns_from_hidden_states_what_it_learns_from_rows(tmp_path: Path) -> None:
    """Synchronous, so that both runs ask for the same samples; one teacher at another temperature."""
    losses: list[list[float]] = []
    for kind in ("rows", "hidden"):
        run = finished(
            tmp_path / kind,
            objective={"name": "jsd"},
            teachers={"math": {"model": "math"}, "code": {"model": "code", "temperature": 0.7}},
            teacher_manager={"slots": 1, "full_rows": kind},
            trainer={"steps": 2, "max_staleness": 0},
        )
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
        sent = "hidden states are sent" if kind == "hidden" else "full rows are sent"
        assert any(sent in path.read_text() for path in run.folder.rglob("*.jsonl")) or sent in run.output()
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
