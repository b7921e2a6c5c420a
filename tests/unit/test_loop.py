"""The loop over parts that live in this process: order, staleness, errors, stops. Real processes: tests/integration."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from distill.checkpoint import Checkpoints
from distill.errors import RunStopped, ServerError, TeacherError
from distill.types import sample_id
from tests.builders_loop import House, go_on


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_every_sample_is_trained_once_in_order_and_within_its_staleness(tmp_path: Path, staleness: int) -> None:
    house = House(tmp_path, staleness=staleness)
    result = await house.run()
    assert [ordinal for batch in house.student.trained for ordinal in batch] == list(range(24))
    assert max(house.student.lags) == result["max_staleness_seen"] <= staleness
    assert min(house.student.lags) >= 0
    assert (result["samples"], result["weight_updates"]) == (24, 6)


async def test_base_student_and_teachers_are_evaluated_beside_training(tmp_path: Path) -> None:
    house = House(tmp_path, kl=True)
    result = await house.run()
    assert result["domains"]["math"] == {"base": 1.0, "teacher": 1.0, "student": 1.0}
    assert result["kl"]["math"]["first"] == 1.0
    assert result["kl"]["math"]["last"] == pytest.approx(1 / 7)
    asked = {name.rsplit("-", 1)[0] for name in house.rollout.answered}
    assert asked == {"eval-base-0-math", "eval-student-2-math", "eval-student-4-math", "eval-student-6-math"}
    assert len(house.teachers.wrote) == 2, "once for its accuracy, once for the answers of the KL"


async def test_held_out_results_come_in_the_order_of_the_data(tmp_path: Path) -> None:
    domains = ["sums", "letters", "code", "words", "algebra", "logic"]
    await House(tmp_path, held_out=domains, kl=True).run(evaluate_every=None)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = [key.removeprefix("eval/accuracy/") for line in lines for key in line if key.startswith("eval/accuracy/")]
    assert names == 2 * domains  # the base and the student


async def test_a_run_without_held_out_prompts_spends_no_time_on_evaluation(tmp_path: Path) -> None:
    result = await House(tmp_path, held_out=[]).run()
    assert "eval" not in result["busy_s"] and result["busy_s"]["train"] > 0


async def test_a_server_that_is_given_up_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.rollout.broken_at = 9
    with pytest.raises(ServerError, match="rollout-0: gone"):
        await house.run()


async def test_a_teacher_that_cannot_be_trusted_ends_the_run(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.teachers.broken = True
    with pytest.raises(TeacherError, match="canary moved"):
        await house.run()
    assert house.student.trained == []
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["swaps"], result["teacher_swaps"]) == (0, {"t": 1}, 1), "it was loaded all the same"


async def test_samples_of_a_dropped_teacher_are_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.teachers.dropped = {sample_id(ordinal) for ordinal in (1, 2, 9)}
    result = await house.run()
    trained = [ordinal for batch in house.student.trained for ordinal in batch]
    assert trained == [ordinal for ordinal in range(24) if ordinal not in (1, 2, 9)]
    assert (result["samples"], result["quarantined"]["samples"]) == (21, 0)
    assert house.teachers.versions == list(range(7)), "it is told how far the student is"
    assert result["slots"]["stall_share"] == 0.25


async def test_a_batch_that_never_comes_is_named_after_its_deadline(tmp_path: Path) -> None:
    house = House(tmp_path, patience_s=0.3)
    house.rollout.silent_at = 5
    with pytest.raises(ServerError, match=r"step 1 waited 0 s for \d of 4 samples, the first is sample-00000005"):
        await house.run()


async def test_a_stop_saves_finished_samples_and_a_resume_trains_the_rest_once(tmp_path: Path) -> None:
    first = House(tmp_path)
    running = asyncio.create_task(first.run())
    while len(first.student.trained) < 2:
        await asyncio.sleep(0.001)
    first.stop.set()
    with pytest.raises(RunStopped, match=r"stopped at step \d of 6, and saved"):
        await running
    saved = Checkpoints(tmp_path / "checkpoints", keep=2).latest()
    assert saved is not None and saved.step == len(first.student.trained)

    second = go_on(tmp_path)
    held = second.store.ordinals
    result = await second.run()
    trained = [ordinal for batch in first.student.trained + second.student.trained for ordinal in batch]
    assert trained == list(range(24))
    assert not held & {int(name.split("-")[1]) for name in second.teachers.announced}, (
        "held samples are not written again"
    )
    assert result["samples"] == 24
    assert max(second.student.lags) <= 1
