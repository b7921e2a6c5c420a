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
        {"name": "policy_gradient"},
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
