"""What a run does when a teacher or a slot cannot be served: stop, go on without the teacher, or wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from distill.errors import TeacherDropped, TeacherError
from distill.teacher_manager import failures
from distill.types import GenerateRequest
from tests.builders import sample
from tests.builders_teachers import FakeServer, Rig, open_teachers, true_scores


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_FIRST_WAIT_S", 0.05)


async def test_samples_go_on_without_a_dropped_teacher_and_are_counted(tmp_path: Path) -> None:
    server = FakeServer()
    async with Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [server], on_teacher_failure="drop_teacher") as rig:
        server.corrupt_loads = 2
        await asyncio.gather(rig.manager.score(sample(0, teachers=("a",))), return_exceptions=True)
        both = await rig.manager.score(sample(1, teachers=("a", "b")))
        assert list(both.sample.teachers) == ["b"] and [each.teacher for each in both.scores] == ["b"]
        assert np.array_equal(both.scores[0].logprobs, true_scores(tmp_path / "b", both.sample.response_ids))
        only = sample(2, teachers=("a",))
        with pytest.raises(TeacherDropped, match=r"none of its teachers could be served") as caught:
            await rig.manager.score(only)
        assert caught.value.sample_id == only.id and "with other bytes" in caught.value.why
        with pytest.raises(TeacherDropped):
            await rig.manager.generate("a", [GenerateRequest("g", np.array([1, 2], np.int32), 2)])
        assert rig.manager.figures().dropped == {"a": 4}
        assert sum("samples go on without teacher a" in message for _, message in rig.events) == 1
        assert rig.manager.queue_ages() == {"a": 0.0, "b": 0.0}


async def test_a_weight_of_a_dropped_teacher_leaves_those_of_the_others_as_they_are(tmp_path: Path) -> None:
    server = FakeServer()
    async with Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [server], on_teacher_failure="drop_teacher") as rig:
        server.corrupt_loads = 2
        await asyncio.gather(rig.manager.score(sample(0, teachers=("a",))), return_exceptions=True)
        item = sample(1, teachers=("b", "a"))
        found = await rig.manager.score(item)
        assert dict(found.sample.teachers) == {"b": item.teachers["b"]}


async def test_a_run_that_waits_scores_everything_when_the_files_are_right_again(
    tmp_path: Path, short_waits: None
) -> None:
    server = FakeServer()
    async with Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [server], on_teacher_failure="wait") as rig:
        server.corrupt_loads = 5  # refused twice, tried again twice
        items = [sample(index, teachers=("ab"[index % 2],)) for index in range(6)]
        for item, found in zip(items, await asyncio.gather(*(rig.manager.score(item) for item in items)), strict=True):
            assert np.array_equal(found.scores[0].logprobs, rig.expected(item)[0])
        waits = [message for _, message in rig.events if "tried again in" in message]
        assert len(waits) == 2 and all("on_teacher_failure=wait" in message for message in waits)
        assert rig.manager.figures().dropped == {}


async def test_a_caller_that_goes_away_while_its_teacher_is_waited_for_leaves_nothing(
    tmp_path: Path, short_waits: None
) -> None:
    server = FakeServer()
    async with Rig(tmp_path, open_teachers(tmp_path, "a"), [server], on_teacher_failure="wait") as rig:
        server.corrupt_loads = 2
        leaving = asyncio.create_task(rig.manager.score(sample(0, teachers=("a",))))
        while not any("tried again" in message for _, message in rig.events):
            await asyncio.sleep(0.005)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert server.score_calls == [] and rig.manager.queue_ages() == {"a": 0.0}
        await rig.manager.score(sample(1, teachers=("a",)))


@pytest.mark.parametrize("rule", ["stop", "drop_teacher"])
async def test_when_no_slot_comes_back_whoever_waits_is_told_why(tmp_path: Path, rule: str) -> None:
    server = FakeServer()
    async with Rig(
        tmp_path, open_teachers(tmp_path, "a"), [server], on_teacher_failure=rule, max_tries=2, timeout_s=2
    ) as rig:
        server.unreachable = True
        with pytest.raises(
            TeacherError, match=r"none of its teachers|no slot can be reached: server slot-0 ended"
        ) as caught:
            await rig.manager.score(sample(0, teachers=("a",)))
        assert isinstance(caught.value, TeacherDropped) == (rule == "drop_teacher")


async def test_while_one_slot_is_gone_the_other_serves_and_the_first_is_taken_back(tmp_path: Path) -> None:
    gone, left = FakeServer("slot-0"), FakeServer("slot-1")
    async with Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [gone, left], call_tokens=8, max_tries=3) as rig:
        gone.die_at_call, gone.unreachable = 0, False
        items = [sample(index, teachers=("ab"[index % 2],)) for index in range(12)]
        for item, found in zip(items, await asyncio.gather(*(rig.manager.score(item) for item in items)), strict=True):
            assert np.array_equal(found.scores[0].logprobs, rig.expected(item)[0])
        assert gone.incarnation <= 1 and len(left.score_calls) > 0


async def test_a_quarantined_teacher_is_not_loaded_for_what_was_announced(tmp_path: Path) -> None:
    server = FakeServer(holds_one=False)
    async with Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [server]) as rig:
        for index in range(4):
            rig.manager.announce(sample(index).id, ["a"], 50)
        server.corrupt_loads = 2
        with pytest.raises(TeacherError, match="with other bytes"):
            await rig.manager.score(sample(0, teachers=("a",)))
        rig.manager.announce(sample(9).id, ["a"], 50)
        await rig.manager.score(sample(5, teachers=("b",)))
        await asyncio.sleep(0.05)
        assert server.loads.count("a") == 2
