"""Several teachers on one slot: residents side by side, copies beside scores, streams, shared and stacked objects."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from distill.errors import TeacherError
from distill.protocols import WeightCosts
from distill.teacher_manager import CPU, Catalogue, Teacher
from distill.teacher_manager.timeline.case import Kind
from distill.types import GenerateRequest
from tests.builders import sample
from tests.builders_teachers import FakeServer, Rig, open_teachers, true_scores


async def score_all(rig: Rig, names: str, count: int, first: int = 0) -> None:
    items = [sample(first + index, teachers=(names[index % len(names)],)) for index in range(count)]
    for item, found in zip(items, await asyncio.gather(*(rig.manager.score(each) for each in items)), strict=True):
        assert np.array_equal(found.scores[0].logprobs, rig.expected(item)[0])


async def test_teachers_that_fit_side_by_side_are_loaded_once(tmp_path: Path) -> None:
    teachers = open_teachers(tmp_path, "a", "b", "c")
    server = FakeServer(holds_one=False, budget_bytes=3 * teachers[0].bytes)
    async with Rig(tmp_path, teachers, [server]) as rig:
        for first in (0, 12, 24):
            await score_all(rig, "abc", 12, first)
        assert sorted(server.loads) == ["a", "b", "c"] and server.streamed == []


async def test_with_less_room_than_teachers_nothing_is_ever_over_the_budget(tmp_path: Path) -> None:
    teachers = open_teachers(tmp_path, *"abcdef")
    server = FakeServer(holds_one=False, budget_bytes=2 * teachers[0].bytes + 1)  # a load past it raises
    server.load_s = 0.005
    async with Rig(tmp_path, teachers, [server], call_tokens=20) as rig:
        for first in (0, 30, 60):
            await score_all(rig, "abcdef", 30, first)
        assert len(server.loads) >= 6
        assert not any("does not fit" in message for _, message in rig.events)
        figures = rig.manager.figures()
        assert figures.loads == len(server.loads)
        assert figures.load_bytes == figures.loads * teachers[0].bytes
        assert figures.busy_s > 0 and 0 <= figures.stall_share <= 1


async def test_the_next_teacher_is_copied_while_the_present_one_scores(tmp_path: Path) -> None:
    teachers = open_teachers(tmp_path, "a", "b")
    server = FakeServer(holds_one=False, budget_bytes=2 * teachers[0].bytes)
    async with Rig(tmp_path, teachers, [server]) as rig:
        await score_all(rig, "a", 1)
        server.gate = asyncio.Event()
        first = asyncio.create_task(rig.manager.score(sample(1, teachers=("a",))))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(rig.manager.score(sample(2, teachers=("b",))))
        while "b" not in server.tensors:
            await asyncio.sleep(0.005)
        assert not first.done() and not second.done()
        server.gate.set()
        await asyncio.gather(first, second)


async def test_two_names_for_one_folder_share_an_object_and_each_gets_scores_of_its_own_name(tmp_path: Path) -> None:
    (first,) = open_teachers(tmp_path, "a")
    second = Teacher.open("alias", first.folder)
    server = FakeServer()
    async with Rig(tmp_path, [first, second], [server]) as rig:
        found = await rig.manager.score(sample(0, teachers=("alias", "a")))
        assert [scores.teacher for scores in found.scores] == ["alias", "a"]
        for scores in found.scores:
            assert np.array_equal(scores.logprobs, true_scores(first.folder, found.sample.response_ids))
        assert server.loads == ["a"]
        assert server.score_calls == [["sample-00000000 (alias)", "sample-00000000 (a)"]], "one call, two names"
        tokens = rig.manager.token_counts()
        assert tokens["a"] == tokens["alias"] > 0


async def test_a_refused_sample_is_named_by_its_own_id_and_teacher_where_two_share_an_object(tmp_path: Path) -> None:
    (first,) = open_teachers(tmp_path, "a")
    server = FakeServer()
    async with Rig(tmp_path, [first, Teacher.open("alias", first.folder)], [server]) as rig:
        server.nonsense = {"sample-00000000 (alias)": 99}
        with pytest.raises(TeacherError) as caught:
            await rig.manager.score(sample(0, teachers=("a", "alias")))
        assert (caught.value.sample_id, caught.value.teacher) == ("sample-00000000", "alias")


def test_an_adapter_stands_on_its_base_and_a_base_that_is_a_teacher_is_one_object(tmp_path: Path) -> None:
    base, own, other = open_teachers(tmp_path, "base", "own", "other")
    catalogue = Catalogue([base, own, other], {"own": Teacher.open("base of own", base.folder)})
    assert [item.files.folder for item in catalogue.items] == [base.folder, own.folder, other.folder]
    assert [item.base for item in catalogue.items] == [None, 0, None]
    assert catalogue.items[0].teachers == ("base",)
    assert [source.base for source in catalogue.sources] == [None, catalogue.items[0].files.name, None]
    costs = [WeightCosts(100, 2, 50, 50, 60), WeightCosts(10, 2, 5, 5, None), WeightCosts(80, 2, 40, 20, 50)]
    system = catalogue.system(costs, [200, 300], holds_one=False, rates=CPU)
    assert [teacher.kind for teacher in system.teachers] == [Kind.DENSE, Kind.LORA, Kind.MOE]
    assert system.needs == ((0,), (0, 1), (2,))
    assert [device.budget_bytes for device in system.devices] == [200, 300] and system.host is None
    assert [teacher.can_stream for teacher in system.teachers] == [True, False, True]


def test_teachers_share_calls_where_they_are_one_object_or_of_one_base(tmp_path: Path) -> None:
    base, first, second, alone, plain, other = open_teachers(
        tmp_path, "base", "first", "second", "alone", "plain", "other"
    )
    twin = Teacher.open("twin", plain.folder)
    lonely = Teacher.open("lonely", alone.folder)
    catalogue = Catalogue([first, second, lonely, plain, twin], {"first": base, "second": base, "lonely": other})
    shares = {name: catalogue.shares_calls(item) for name, item in catalogue.item_of.items()}
    assert shares == {"first": True, "second": True, "lonely": False, "plain": True, "twin": True}


def test_a_budget_counts_the_base_of_an_adapter_too_and_what_streams_needs_less(tmp_path: Path) -> None:
    base, own = open_teachers(tmp_path, "base", "own")
    catalogue = Catalogue([own], {"own": base})
    assert [item.teachers for item in catalogue.items] == [(), ("own",)]
    costs = [WeightCosts(100, 2, 50, 50, 60), WeightCosts(10, 2, 5, 5, None)]
    catalogue.check_budget(costs, "slot-0", 110)
    with pytest.raises(TeacherError, match=r"teacher own has .* \(110 bytes\); slot-0 holds .* \(109 bytes\)"):
        catalogue.check_budget(costs, "slot-0", 109)
    system = catalogue.system(costs, [110], holds_one=False, rates=CPU)
    assert system.teachers[1].active_params == 55, "its tokens pass through the base too"
    alone = Catalogue([own])
    alone.check_budget(costs[:1], "slot-0", 60)
    with pytest.raises(TeacherError, match="and 60 bytes while it is streamed layer by layer"):
        alone.check_budget(costs[:1], "slot-0", 59)


async def test_a_teacher_that_no_slot_has_room_for_scores_streamed_and_is_not_waited_for_to_write(
    tmp_path: Path,
) -> None:
    teachers = open_teachers(tmp_path, "a")
    server = FakeServer(holds_one=False, budget_bytes=teachers[0].bytes - 1)
    async with Rig(tmp_path, teachers, [server]) as rig:
        with pytest.raises(TeacherError, match=rf"a cannot write: it has {teachers[0].bytes} bytes .*, and slots hold"):
            await rig.manager.generate("a", [GenerateRequest("g", np.array([1, 2], np.int32), 2)])
        await score_all(rig, "a", 3)
        assert server.loads == [] and server.streamed


def test_equal_files_in_two_folders_are_two_objects(tmp_path: Path) -> None:
    (first,) = open_teachers(tmp_path, "a")
    shutil.copytree(first.folder, tmp_path / "copy")
    assert len(Catalogue([first, Teacher.open("copy", tmp_path / "copy")]).items) == 2
