"""All golden sets on the product's code, through the runner that `python -m tests.golden.objectives` is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.objectives.data import load
from tests.golden.objectives.runner import run_set

DATA = Path(__file__).parent / "data" / "objectives"
CASES = {
    "s1_divergence": 73,
    "s2_topk": 354,
    "s3_estimators": 53,
    "s4_offpolicy": 29,
    "s5_reductions": 46,
    "s6_multiteacher": 71,
    "s7_rl_mix": 32,
    "s8_crosstok": 31,
    "s9_nasty": 109,
    "t1_planted_table": 10,
    "t2_sglang_replies": 56,
}
"""As FORMAT.md counts them: a set that shrinks, or is not there, must not pass."""


@pytest.mark.parametrize("name", CASES)
def test_every_case_of_a_set_has_the_reference_result_or_the_refusal(name: str) -> None:
    report = run_set(name, load(DATA, name))
    assert not report.failures
    assert report.passed == report.cases == CASES[name]


def test_no_set_is_left_out() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == set(CASES)
