"""All topology pastes of the acceptance data, on the product's readers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.golden.mesh.topology import check

DATA = Path(__file__).parent / "data" / "mesh"
RESULTS = check(DATA)


def test_no_case_is_left_out() -> None:
    assert [result.case.split("/")[0] for result in RESULTS] == ["topo"] * 24 + ["nictools"] * 4


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.case)
def test_a_paste_gives_the_answer(result) -> None:
    assert result.ok, result.detail


def test_a_wrong_answer_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "topo").mkdir()
    for name in ("15_single_gpu_vm_one_nic.txt", "15_single_gpu_vm_one_nic.expected.json"):
        shutil.copy(DATA / "topo" / name, tmp_path / "topo" / name)
    answer = tmp_path / "topo" / "15_single_gpu_vm_one_nic.expected.json"
    answer.write_text(json.dumps(json.loads(answer.read_text()) | {"links": {"GPU0-mlx5_0": "PIX"}}))
    [result] = check(tmp_path)
    assert not result.ok and "links is {'GPU0-mlx5_0': 'PHB'}" in result.detail


def test_a_broken_paste_that_is_read_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "topo").mkdir()
    shutil.copy(DATA / "topo" / "15_single_gpu_vm_one_nic.txt", tmp_path / "topo" / "01.txt")
    broken = {"error": "not_square", "message_must_contain": ["GPU1"]}
    (tmp_path / "topo" / "01.expected.json").write_text(json.dumps(broken))
    [result] = check(tmp_path)
    assert not result.ok and "must be refused" in result.detail
