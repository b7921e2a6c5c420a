"""Samples that cannot be used are set aside, counted and not waited for; too many of them end the run."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import GraderError, RunStopped, ServerError, ServiceError, StudentError, TeacherError
from distill.quarantine import IN_A_ROW, QUARANTINE_FILE, Quarantine, default_limit
from distill.types import Sample, sample_id
from tests.builders import sample
from tests.builders_loop import House, go_on

STEPS, BATCH = 4, 3


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / QUARANTINE_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def broken_by(house: House, fates: dict[int, str]) -> House:
    house.teachers.refuse = {sample_id(ordinal) for ordinal, fate in fates.items() if fate == "teacher"}
    house.student.refuse = {ordinal for ordinal, fate in fates.items() if fate == "student"}
    return house


async def stopped_after(house: House, steps: int) -> None:
    running = asyncio.create_task(house.run())
    while len(house.student.trained) < steps and not running.done():
        await asyncio.sleep(0.001)
    house.stop.set()
    try:
        await running
    except RunStopped:
        pass


@st.composite
def some_of_each_batch(draw: st.DrawFn) -> dict[int, str]:
    """What befalls which ordinals; one sample of each batch, at least, is sound."""
    fates: dict[int, str] = {}
    for step in range(STEPS):
        sound = draw(st.integers(0, BATCH - 1))
        for index in range(BATCH):
            fate = draw(st.sampled_from(("", "", "teacher", "student")))
            if index != sound and fate:
                fates[step * BATCH + index] = fate
    return fates


@settings(max_examples=25, deadline=None)
@given(fates=some_of_each_batch(), staleness=st.integers(0, 2), stop_after=st.integers(0, STEPS))
def test_every_sample_is_trained_or_set_aside_exactly_once_also_over_a_stop(
    fates: dict[int, str], staleness: int, stop_after: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    options: dict[str, Any] = {"steps": STEPS, "batch": BATCH, "staleness": staleness, "limit": STEPS * BATCH}

    async def both() -> tuple[list[list[int]], dict[str, Any], int]:
        first = broken_by(House(folder, **options), fates)
        await stopped_after(first, stop_after)
        if len(first.student.trained) == STEPS:
            return first.student.trained, first.observer.finish("done"), max(first.student.lags)
        second = broken_by(go_on(folder, **options), fates)
        result = await second.run()
        lags = first.student.lags + second.student.lags
        return first.student.trained + second.student.trained, result, max(lags)

    trained, result, lag = asyncio.run(both())
    assert trained == [
        [ordinal for ordinal in range(step * BATCH, (step + 1) * BATCH) if ordinal not in fates]
        for step in range(STEPS)
    ]
    assert lag <= staleness
    assert sorted(line["ordinal"] for line in lines(folder)) == sorted(fates)
    by_teacher = sum(fate == "teacher" for fate in fates.values())
    assert result["quarantined"] == {"samples": len(fates), "teachers": {"t": by_teacher} if by_teacher else {}}
    assert result["samples"] == STEPS * BATCH - len(fates)
    assert [row["quarantine/samples"] for row in metrics(folder)] == [BATCH - len(batch) for batch in trained]
    assert sum(row.get("teacher/quarantined/t", 0) for row in metrics(folder)) == by_teacher


async def test_a_line_says_whose_fault_it_was_and_holds_what_is_needed_to_look_at_it(tmp_path: Path) -> None:
    house = broken_by(House(tmp_path), {2: "teacher", 9: "student"})
    await house.run()
    teacher, student = sorted(lines(tmp_path), key=lambda line: line["ordinal"])
    assert (teacher["id"], teacher["domain"], teacher["teacher"]) == ("sample-00000002", "math", "t")
    assert teacher["rule"] == "teacher t: sample-00000002: not a number"
    assert teacher["prompt_ids"] == sample(2).prompt_ids.tolist()
    assert teacher["response_ids"] == sample(2).response_ids.tolist()
    assert (student["id"], student["teacher"], student["error"]) == ("sample-00000009", None, "StudentError")
    assert "sample-00000002 is set aside (1 of at most 5)" in (tmp_path / "events.log").read_text()


async def test_too_many_end_the_run_and_the_error_says_which_whose_why_and_how_many(tmp_path: Path) -> None:
    house = broken_by(House(tmp_path, limit=2, staleness=0), {0: "teacher", 5: "student", 9: "teacher"})
    with pytest.raises(TeacherError) as caught:
        await house.run()
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert caught.value.what == "teacher t: sample-00000009: not a number"
    assert "3 samples had to be set aside (no teacher: 1, t: 2), and trainer.max_quarantined is 2" in message
    assert str(tmp_path / QUARANTINE_FILE) in message
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["quarantined"] == {"samples": 3, "teachers": {"t": 2}}
    assert house.student.version == 2


async def test_a_limit_of_none_at_all_ends_the_run_at_the_first(tmp_path: Path) -> None:
    with pytest.raises(StudentError, match=r"sample-00000005: its loss is infinite[\s\S]*max_quarantined is 0"):
        await broken_by(House(tmp_path, limit=0), {5: "student"}).run()


@pytest.mark.parametrize("whose", ["teacher", "student"])
async def test_a_batch_of_which_nothing_is_left_ends_the_run(tmp_path: Path, whose: str) -> None:
    house = broken_by(House(tmp_path, limit=99), dict.fromkeys(range(4, 8), whose))
    with pytest.raises(ServiceError, match="nothing is left to learn from in step 2") as caught:
        await house.run()
    assert type(caught.value) is (TeacherError if whose == "teacher" else StudentError)
    assert house.student.trained == [[0, 1, 2, 3]]


async def test_a_fault_of_nobody_or_of_another_sample_is_no_reason_to_go_on(tmp_path: Path) -> None:
    for index, of in enumerate(("", sample_id(3))):
        house = House(tmp_path / str(index))

        async def step(batch: Any, of: str = of) -> Any:
            raise StudentError("the gradient's norm is nan", sample_id=of and "sample-99999999")

        house.student.step = step  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(StudentError, match="the gradient's norm is nan"):
            await house.run()
        assert lines(tmp_path / str(index)) == []


def quarantine(folder: Path, limit: int) -> Quarantine:
    return Quarantine(folder, limit=limit, on_event=lambda *_: None, on_count=lambda _: None)


def test_a_teacher_that_fails_on_one_sample_after_another_is_broken_itself(tmp_path: Path) -> None:
    room = quarantine(tmp_path, 10_000)
    for ordinal in range(IN_A_ROW - 1):
        room.add(sample(ordinal), TeacherError("nan", sample_id=sample_id(ordinal), teacher="t"))
    room.passed(sample(100))
    room.passed(sample(101, teachers=("other",)))
    for ordinal in range(200, 200 + IN_A_ROW - 1):
        room.add(sample(ordinal), TeacherError("nan", sample_id=sample_id(ordinal), teacher="t"))
    room.add(sample(300), StudentError("inf", sample_id=sample_id(300)))
    with pytest.raises(TeacherError, match=f"teacher t failed on {IN_A_ROW} samples one after another"):
        room.add(sample(301), TeacherError("nan", sample_id=sample_id(301), teacher="t"))


def test_what_is_done_again_after_a_resume_is_struck_off(tmp_path: Path) -> None:
    room = quarantine(tmp_path, 99)
    for ordinal in (3, 9, 12):
        room.add(sample(ordinal), TeacherError("nan", sample_id=sample_id(ordinal), teacher="t"))
    saved = json.loads(json.dumps(room.state()))
    room.add(sample(20), TeacherError("nan", sample_id=sample_id(20), teacher="t"))
    with (tmp_path / QUARANTINE_FILE).open("a") as file:
        file.write('{"ordinal": 2')
    again = quarantine(tmp_path, 99)
    again.restore(saved, first_ordinal=8, held={12, 13})
    assert [line["ordinal"] for line in lines(tmp_path)] == [3, 12]
    assert again.counts == {"t": 2}
    assert again.within(range(8, 16)) == {"t": 1}


def test_a_sample_without_a_token_can_be_written_down_too(tmp_path: Path) -> None:
    quarantine(tmp_path, 1).add(sample(3, length=0), ServerError("no token", sample_id=sample_id(3)))
    (line,) = lines(tmp_path)
    assert (line["response_ids"], line["version"], line["teacher"]) == ([], None, None)


def test_a_run_without_such_samples_writes_no_file(tmp_path: Path) -> None:
    room = quarantine(tmp_path, 1)
    room.restore((), first_ordinal=0, held=())
    assert not (tmp_path / QUARANTINE_FILE).exists()


def test_unless_said_otherwise_one_percent_and_at_least_eight_may_be_missing() -> None:
    assert [default_limit(samples) for samples in (1, 800, 900, 64_000)] == [8, 8, 9, 640]


@pytest.mark.parametrize("kind", [TeacherError, StudentError, ServerError, GraderError])
def test_an_error_names_its_sample_and_teacher_also_on_the_other_side_of_a_process(kind: type[ServiceError]) -> None:
    error = kind("what", why="why", fix="fix", sample_id="sample-00000001", teacher="t")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind and str(back) == str(error)
    assert (back.sample_id, back.teacher, back.args) == ("sample-00000001", "t", ("what",))


async def test_rewards_come_with_the_samples_and_a_grader_that_fails_on_one_sets_that_aside(tmp_path: Path) -> None:
    async def grade(item: Sample) -> float:
        await asyncio.sleep(0)
        if item.ordinal == 6:
            raise GraderError("no mark", sample_id=item.id)
        return float(item.ordinal % 2)

    house = House(tmp_path, staleness=0, grade=grade)
    seen: dict[int, float | None] = {}
    step = house.student.step

    async def watched(batch: Any) -> Any:
        seen.update({item.sample.ordinal: item.sample.reward for item in batch.samples})
        return await step(batch)

    house.student.step = watched  # pyright: ignore[reportAttributeAccessIssue]
    result = await house.run()
    assert seen == {ordinal: float(ordinal % 2) for ordinal in range(24) if ordinal != 6}
    assert result["quarantined"] == {"samples": 1, "teachers": {}}
    rewards = [row["reward/math"] for row in metrics(tmp_path)]
    assert rewards == pytest.approx([0.5, 2 / 3, 0.5, 0.5, 0.5, 0.5])


async def test_a_held_out_answer_that_cannot_be_scored_is_left_out_of_the_kl_and_told(tmp_path: Path) -> None:
    house = House(tmp_path, kl=True)
    house.teachers.refuse = {"eval-kl-t-math-1"}
    result = await house.run()
    assert result["kl"]["math"]["first"] == 1.0
    assert (
        "a held-out answer is left out of the KL: teacher t: eval-kl-t-math-1" in (tmp_path / "events.log").read_text()
    )
    assert result["quarantined"]["samples"] == 0
    none_left = House(tmp_path / "none", kl=True)
    none_left.teachers.refuse = {f"eval-kl-t-math-{index}" for index in range(3)}
    with pytest.raises(TeacherError, match="eval-kl-t-math-0"):
        await none_left.run()
