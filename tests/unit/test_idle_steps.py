"""A step that taught nothing is told at once; too many of them, or nothing else in a run, end it with the reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from distill.build import objective_label
from distill.checkpoint import Checkpoints
from distill.config.models import ObjectiveConfig
from distill.errors import StudentError
from distill.idle_steps import IN_A_ROW, IdleSteps, is_idle
from distill.objectives import build_objective
from distill.types import StepResult
from tests.builders_loop import House, go_on

LEARNT = StepResult(1, 0.1, 0.5, 1e-3, 8, 0.1, token_share={"t": 1.0})
GATED = dataclasses.replace(
    LEARNT,
    grad_norm=0.0,
    objective={"gated_low": {"t": 0.75}, "gated_high": {"t": 0.25}, "importance_weight": {"t": 0.0}},
)
ARRIVED = dataclasses.replace(LEARNT, grad_norm=0.0, kl={"t": 0.0})
UNKNOWN = "no other reason shows in its metrics"


def changed(result: StepResult, **changes: Any) -> StepResult:
    return dataclasses.replace(result, **changes)


def counting(total: int = 1000) -> tuple[IdleSteps, list[str]]:
    told: list[str] = []
    return IdleSteps("toy with importance=icepop", total_steps=total, on_event=lambda _, text: told.append(text)), told


@pytest.mark.parametrize(
    ("result", "idle"),
    [
        (LEARNT, False),
        (GATED, True),
        (changed(GATED, grad_norm=1e-9), False),  # outcomes, or a term beside the gate, taught something
        (changed(LEARNT, grad_norm=0.0, tokens=0, token_share={}), True),
        (changed(GATED, objective={}), True),
        (ARRIVED, False),
        (changed(ARRIVED, kl={"t": 1e-6}), False),  # 0 within rounding
        (changed(ARRIVED, kl={"t": 1e-4}), True),
        (changed(ARRIVED, kl={}), True),  # an objective that does not measure it
        (changed(ARRIVED, token_share={"t": 0.5, "u": 0.5}), True),
        (changed(ARRIVED, objective={"aligned": {"t": 0.5}}), False),
        (changed(ARRIVED, objective={"aligned": {"t": 0.0}}), True),
        (changed(ARRIVED, objective={"outcome_advantage": {"t": 0.0}}), True),
        (changed(GATED, kl={"t": 0.0}), True),
    ],
)
def test_a_step_is_idle_where_its_gradient_is_0_unless_the_student_has_arrived(result: StepResult, idle: bool) -> None:
    assert is_idle(result) == idle


def test_an_idle_step_is_told_with_its_count_and_its_shares() -> None:
    steps, told = counting()
    steps.take(LEARNT)
    assert told == []
    steps.take(changed(GATED, version=2))
    assert told == [
        "step 2 taught nothing (1 of 2 so far): 100 % of its 8 tokens are left out by the correction: 75 % are less "
        "probable to the student at temperature 1 than they were to the sampler, 25 % more"
    ]


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, [UNKNOWN]),
        ({"token_share": {}}, ["the teachers of its samples all have the weight 0"]),
        ({"token_share": {}, "tokens": 0}, ["its samples all have the weight 0, or no token that is trained"]),
        ({"objective": {"aligned": {"t": 0.0}}}, ["100 % of its 8 tokens are aligned with nothing"]),
        ({"objective": {"outcome_advantage": {"t": 0.0}}}, ["the advantage of every outcome is 0"]),
        ({"objective": {"outcome_advantage": {"t": 0.5}}}, [UNKNOWN]),
        (
            {"objective": {"outcome_advantage": {"t": 0.0}}, "kl": {"t": 0.0}},
            ["the advantage of every outcome is 0", "the KL to the teacher is 0: t"],
        ),
        (
            {"objective": {"gated_low": {"t": 0.5}, "aligned": {"t": 0.5}}, "kl": {"t": 0.2}},
            ["50 % of its 8 tokens are left out by the correction", "50 % of its 8 tokens are aligned with nothing"],
        ),
        ({"objective": {"gated_low": {"t": 0.5}}}, ["50 % of its 8 tokens are left out by the correction", UNKNOWN]),
        (
            {"objective": {"gated_high": {"t": 1.0}}, "token_share": {"t": 0.25, "u": 0.75}, "kl": {"u": 0.0}},
            ["25 % of its 8 tokens are left out by the correction", "the KL to the teacher is 0: u"],
        ),
    ],
)
def test_the_reasons_are_those_that_the_metrics_show(changes: dict[str, Any], reasons: list[str]) -> None:
    steps, told = counting(total=1)
    with pytest.raises(StudentError, match="no step of the run taught anything") as caught:
        steps.take(changed(LEARNT, grad_norm=0.0, **changes))
    found = told[0].removeprefix("step 1 taught nothing (1 of 1 so far): ").split("; ")
    assert len(found) == len(reasons)
    assert all(text.startswith(reason) for text, reason in zip(found, reasons, strict=True)), found
    assert caught.value.fix


def test_a_run_of_a_student_that_has_arrived_ends_well() -> None:
    steps, told = counting(total=IN_A_ROW + 1)
    for version in range(1, IN_A_ROW + 2):
        steps.take(changed(ARRIVED, version=version))
    assert told == [] and steps.state() == [IN_A_ROW + 1, 0, 0]


def test_so_many_idle_steps_in_a_row_end_the_run_and_one_that_teaches_begins_the_count_anew() -> None:
    steps, told = counting()
    for _ in range(2):
        for _ in range(IN_A_ROW - 1):
            steps.take(GATED)
        steps.take(LEARNT)
    saved = steps.state()
    for _ in range(IN_A_ROW - 1):
        steps.take(GATED)
    with pytest.raises(StudentError) as caught:
        steps.take(changed(GATED, version=48))
    error = caught.value
    assert error.exit_code == 4 and error.sample_id == ""
    assert error.what == "16 steps one after another taught nothing: objective toy with importance=icepop"
    assert error.why.startswith("step 48: 100 % of its 8 tokens") and "objective.importance=tis" in error.fix
    assert len(told) == 3 * IN_A_ROW - 2

    resumed, _ = counting()
    resumed.restore(saved)
    for _ in range(IN_A_ROW - 1):
        resumed.take(GATED)
    with pytest.raises(StudentError, match="16 steps one after another"):
        resumed.take(GATED)


def test_samples_without_weight_are_another_reason_with_another_remedy() -> None:
    steps, _ = counting(total=1)
    with pytest.raises(StudentError, match="no step of the run taught anything") as caught:
        steps.take(changed(LEARNT, grad_norm=0.0, tokens=0, token_share={}))
    assert "weight 0" in caught.value.why and "weights above 0" in caught.value.fix


async def test_a_run_that_never_learns_fails_and_one_that_learns_once_does_not(tmp_path: Path) -> None:
    never = House(tmp_path / "never", steps=3)
    never.student.gated = {1, 2, 3}
    with pytest.raises(StudentError, match=r"no step of the run taught anything \(3 in all\)"):
        await never.run()
    assert len([line for line in events(tmp_path / "never") if "taught nothing" in line]) == 3

    once = House(tmp_path / "once", steps=3)
    once.student.gated = {1, 3}
    assert (await once.run())["steps"] == 3
    assert len([line for line in events(tmp_path / "once") if "taught nothing" in line]) == 2


async def test_the_count_goes_on_after_a_resume(tmp_path: Path) -> None:
    first = House(tmp_path, steps=4)
    first.student.gated = {2}
    await first.run(steps=2, checkpoint_every=1)
    saved = Checkpoints(tmp_path / "checkpoints", keep=2).latest()
    assert saved is not None and saved.state["idle_steps"] == [2, 1, 1]
    second = go_on(tmp_path, steps=4)
    second.student.gated = {3, 4}
    await second.run()
    assert second.idle_steps.state() == [4, 3, 3], "the first step taught something, so the run did"


def events(folder: Path) -> list[str]:
    return (folder / "events.log").read_text().splitlines()


@pytest.mark.parametrize(
    ("section", "label"),
    [
        ({"name": "jsd"}, "jsd"),
        ({"name": "policy_gradient"}, "policy_gradient with importance=icepop"),
        ({"name": "sampled_kl", "importance": "tis"}, "sampled_kl with importance=tis"),
        ({"name": "policy_gradient", "outcome": {"baseline": "batch"}}, "policy_gradient with importance=icepop"),
        ({"name": "jsd", "outcome": {"mix": "loss", "baseline": "batch"}}, "jsd"),
    ],
)
def test_the_objective_is_named_with_its_correction(section: dict[str, Any], label: str) -> None:
    config = ObjectiveConfig.model_validate(section)
    assert objective_label(config.name, build_objective(config)) == label
