"""The runner of the golden data must fail when the product, the data or the runner itself is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.objectives.__main__ import main


def write(folder: Path, cases: list[dict[str, Any]] | None, *, name: str = "s1_divergence", **changes: Any) -> Path:
    counted = {"n_cases": len(cases or []), "cases": cases}
    manifest = {"format": 1, "set": name, "arrays": f"{name}.npz", **counted, **changes}
    (folder / f"{name}.json").write_text(json.dumps(manifest))
    if manifest["arrays"] == f"{name}.npz":
        np.savez(folder / f"{name}.npz", logits=np.log([[[0.6, 0.4]]]))
    return folder


def case(**changes: Any) -> dict[str, Any]:
    """A student that is its own teacher: forward KL is 0."""
    same = {"student_logits": "@logits", "teacher_logits": "@logits"}
    good = {
        "id": "one",
        "kind": "fkl",
        "status": "ok",
        "params": {"V": 2, "temperature": 1.0},
        "inputs": same,
        "expect": {"value": 0.0, "grad_student_logits": [0.0, 0.0]},
        "tol": {"f64": [1e-9, 1e-11], "f32": [1e-4, 1e-5]},
    }
    return good | changes


def test_a_folder_whose_cases_pass_ends_with_0_and_one_line_a_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(tmp_path, [case()]))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].split()[:5] == ["s1_divergence", "1", "cases", "1", "passed"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expect": {"value": 1e-3}}, "times the tolerance"),
        ({"expect": {"value": "nan"}}, "times the tolerance"),
        ({"expect": {"value": [0.0, 0.0]}}, "inf times the tolerance"),
        ({"expect": {"value": 0.0, "novelty": 1.0}}, "novelty was not evaluated"),
        ({"kind": "hellinger"}, "unknown kind 'hellinger'"),
        ({"status": "error", "expect": {}}, "not refused"),
        ({"status": "skip"}, "unknown status"),
        ({"params": {"V": 2, "temperature": 0.0}}, "refused:"),
        ({"inputs": {"student_logits": "@logits"}}, "KeyError"),
    ],
)
def test_a_case_that_does_not_pass_ends_with_1_and_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    assert main([str(write(tmp_path, [case(), case(id="two", **changes)]))]) == 1
    out = capsys.readouterr().out
    assert "2 cases      1 passed" in out
    assert said in out


def test_a_set_without_a_module_is_a_failure(tmp_path: Path) -> None:
    assert main([str(write(tmp_path, [case()], name="s99_future"))]) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "format 1 is expected"),
        ({"arrays": "missing.npz"}, "missing.npz"),
        ({"cases": []}, "0 cases"),
        ({"cases": [case(), case()]}, "2 cases with 1 ids"),
        ({"n_cases": 5}, "n_cases is 5"),
        ({"cases": [case(inputs={"student_logits": "@nowhere"})]}, "nowhere"),
        ({"cases": None}, "TypeError"),
    ],
)
def test_a_folder_that_is_not_of_the_format_ends_with_2_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    assert main([str(write(tmp_path, **({"cases": [case()]} | changes)))]) == 2
    assert said in capsys.readouterr().err


def test_no_folder_no_manifest_and_no_json_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(tmp_path)]) == 2
    (tmp_path / "s1_divergence.json").write_text("{")
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("not golden data") == 3
