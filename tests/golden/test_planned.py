"""The planners meet their targets on the smaller cases without a clock; the runner tries all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill.teacher_manager.planning.paging import Pager, Turn
from tests.golden.scheduling.planned import Planned
from tests.golden.scheduling.tally import Tally

DATA = Path(__file__).parent / "data" / "scheduling"


def cases(*patterns: str) -> Iterator[dict[str, Any]]:
    for pattern in patterns:
        for path in sorted(DATA.glob(pattern)):
            yield json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (("A/A_uniform_*.json",), 12),
        (("A/A_weighted_small_*.json",), 10),
        (("A/A_weighted_large_01_*.json",), 1),
        (("B/B_step_sets_*.json",), 8),
        (("B/B_max_age_*.json",), 8),
    ],
)
def test_targets_are_met_and_every_plan_obeys_the_budget(patterns: tuple[str, ...], count: int) -> None:
    planned, found = Planned(), list(cases(*patterns))
    assert len(found) == count
    for case in found:
        tally = Tally(case["name"])
        planned.add(case, tally)
        assert tally.failures == []
    assert planned.missed_targets() == []


@pytest.mark.parametrize(("evicted", "said"), [((), "above the budget"), ((5,), "evicted what was not there")])
def test_a_pager_that_breaks_the_rules_is_found_out(
    evicted: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = Pager.serve

    def break_rules(pager: Pager) -> Turn:
        turn = serve(pager)
        return Turn(turn.teacher, turn.mode, evicted) if turn.evicted else turn

    monkeypatch.setattr(Pager, "serve", break_rules)
    tally = Tally("broken")
    Planned().add(next(cases("A/A_uniform_01_*.json")), tally)
    assert said in tally.failures[0]


def test_a_missed_target_is_named_with_both_numbers() -> None:
    case = next(cases("A/A_uniform_01_*.json"))
    case["expected"]["min_loads"] = 24
    planned = Planned()
    planned.add(case, Tally("halved"))
    assert planned.missed_targets()[0] == "equal size, all announced: 2 of the optimum, target 1"
