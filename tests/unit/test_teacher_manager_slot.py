"""One slot: nothing is scored unless the gate has let its weights through, and late replies are dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from distill.errors import ServerError, TeacherError
from distill.protocols import Loaded, TeacherServer
from distill.teacher_manager import Catalogue, Teacher
from distill.teacher_manager.gate import CANARY_RESPONSE, CanaryStore, Gate, canary_ids
from distill.teacher_manager.slot import Slot, Stage
from distill.types import GenerateRequest, ScoreRequest, Signal, SignalSpec
from tests.builders_teachers import VOCAB, FakeServer, open_teachers, true_scores, write_tensors

SAMPLED = SignalSpec(Signal.SAMPLED)
IDS = np.array([1, 2, 3, 4], np.int32)


def gate(tmp_path: Path, atol: float = 1e-4) -> Gate:
    return Gate(CanaryStore(tmp_path / "canaries.json"), vocab_size=VOCAB, atol=atol)


async def opened(server: FakeServer, *teachers: Teacher) -> Slot:
    slot = server.slot()
    await slot.open(Catalogue(teachers).sources, 5)
    return slot


async def bring(slot: Slot, teacher: Teacher, checks: Gate) -> Loaded:
    return await slot.bring(teacher, checks, 5)


async def score(slot: Slot, *teachers: str, deadline_s: float = 5) -> list[np.ndarray]:
    requests = [ScoreRequest(f"sample-{name}", IDS, 2, teacher=name) for name in teachers]
    return [reply.logprobs for reply in await slot.score(requests, SAMPLED, deadline_s)]


async def test_a_cold_object_scores_nothing_and_several_that_were_brought_in_score_together(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    slot = await opened(FakeServer(holds_one=False), math, code)
    with pytest.raises(ServerError, match="slot-0: math is cold and cannot be asked"):
        await score(slot, "math")
    await bring(slot, math, gate(tmp_path))
    assert (slot.stage("math"), slot.stage("code")) == (Stage.READY, Stage.COLD)
    with pytest.raises(ServerError, match="code is cold"):
        await score(slot, "math", "code")
    await bring(slot, code, gate(tmp_path))
    found = await score(slot, "code", "math")
    for teacher, scores in zip((code, math), found, strict=True):
        assert np.array_equal(scores, true_scores(teacher.folder, [3, 4]))


async def test_opening_makes_the_server_give_up_what_it_holds(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    server = FakeServer(holds_one=False)
    slot = await opened(server, math, code)
    await bring(slot, math, gate(tmp_path))
    epoch = slot.epoch("math")
    await slot.open(Catalogue([math, code]).sources, 5)
    assert server.tensors == {} and slot.stage("math") is Stage.COLD and slot.epoch("math") > epoch


async def test_costs_come_back_in_the_order_of_the_sources(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    costs = await FakeServer().slot().open(Catalogue([math, code]).sources, 5)
    assert [cost.bytes for cost in costs] == [math.bytes, code.bytes]


async def test_a_load_that_went_wrong_once_is_done_again(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    server.corrupt_loads = 1
    slot = await opened(server, teacher)
    await bring(slot, teacher, gate(tmp_path))
    assert server.loads == ["math", "math"]
    assert np.array_equal((await score(slot, "math"))[0], true_scores(teacher.folder, [3, 4]))


async def test_weights_that_differ_twice_from_the_file_are_refused_and_free_their_bytes(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    server = FakeServer(holds_one=False)
    slot, checks = await opened(server, math, code), gate(tmp_path)
    await bring(slot, code, checks)
    server.corrupt_loads = 2
    with pytest.raises(TeacherError, match=r"holds 1 of 2 tensors with other bytes .* the first is table"):
        await bring(slot, math, checks)
    assert slot.stage("math") is Stage.COLD and list(server.tensors) == ["code"]
    assert np.array_equal((await score(slot, "code"))[0], true_scores(code.folder, [3, 4])), "the others go on"


async def test_a_file_rewritten_during_the_run_is_refused_although_the_server_loads_it_well(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    slot, checks = await opened(FakeServer(), math, code), gate(tmp_path)
    await bring(slot, math, checks)
    await bring(slot, code, checks)
    write_tensors(math.folder, seed=99)
    with pytest.raises(TeacherError, match="with other bytes"):
        await bring(slot, math, checks)


async def test_a_canary_that_moved_is_refused_although_the_weights_agree(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    server = FakeServer()
    slot, checks = await opened(server, math, code), gate(tmp_path)
    await bring(slot, math, checks)
    await bring(slot, code, checks)
    server.stale_buffer = 5e-5
    await bring(slot, math, checks)
    server.stale_buffer = 2e-4
    with pytest.raises(TeacherError, match=r"its canary on slot-0 moved by 0\.0002 nat, more than 0\.0001"):
        await bring(slot, code, checks)
    server.stale_buffer = float("nan")
    with pytest.raises(TeacherError, match="moved by nan"):
        await bring(slot, code, checks)


async def test_a_first_canary_that_is_no_number_is_refused(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    server.stale_buffer = float("nan")
    slot = await opened(server, teacher)
    with pytest.raises(TeacherError, match="its canary on slot-0 is no number"):
        await bring(slot, teacher, gate(tmp_path))


async def test_a_resumed_run_checks_the_canary_of_the_run_before(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    await bring(await opened(server, teacher), teacher, gate(tmp_path))
    server.stale_buffer = 0.5
    slot = await opened(server, teacher)
    with pytest.raises(TeacherError, match="canary"):
        await bring(slot, teacher, gate(tmp_path))


async def test_a_streamed_batch_counts_only_if_its_canary_agrees(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer(holds_one=False)
    slot, checks = await opened(server, teacher), gate(tmp_path)
    request = ScoreRequest("sample-1", IDS, 2, teacher="math")
    (found,) = await slot.stream(teacher, checks, [request], SAMPLED, 5)
    assert np.array_equal(found.logprobs, true_scores(teacher.folder, [3, 4]))
    assert server.tensors == {} and slot.stage("math") is Stage.COLD
    server.stale_buffer = 0.5
    with pytest.raises(TeacherError, match=r"its canary on slot-0 moved by 0\.5 nat"):
        await slot.stream(teacher, checks, [request], SAMPLED, 5)


def test_a_canary_file_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "canaries.json").write_text("{")
    with pytest.raises(TeacherError, match=r"canaries\.json: cannot be read"):
        CanaryStore(tmp_path / "canaries.json")


@pytest.mark.parametrize("vocab", [2, 26, 152_064])
def test_canary_ids_are_fixed_and_inside_the_vocabulary(vocab: int) -> None:
    ids = canary_ids(vocab)
    assert np.array_equal(ids, canary_ids(vocab))
    assert len(ids) > CANARY_RESPONSE and ids.min() >= 0 and ids.max() < vocab
    assert len(set(ids.tolist())) >= min(vocab, 8)


async def test_an_object_is_given_up_only_after_its_last_reply_and_others_are_not_waited_for(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    server = FakeServer(holds_one=False)
    slot, checks = await opened(server, math, code), gate(tmp_path)
    await bring(slot, math, checks)
    await bring(slot, code, checks)
    server.gate = asyncio.Event()
    asked = asyncio.create_task(score(slot, "math"))
    await asyncio.sleep(0.01)
    await slot.give_up("code", 5)
    leaving = asyncio.create_task(slot.give_up("math", 5))
    await asyncio.sleep(0.01)
    assert slot.stage("math") is Stage.DRAINING and list(server.tensors) == ["math"]
    with pytest.raises(ServerError, match="is draining"):
        await score(slot, "math")
    server.gate.set()
    await leaving
    assert np.array_equal((await asked)[0], true_scores(math.folder, [3, 4]))
    assert slot.stage("math") is Stage.COLD and server.tensors == {}


async def test_a_reply_that_comes_after_its_epoch_is_dropped(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    slot = await opened(server, teacher)
    await bring(slot, teacher, gate(tmp_path))
    server.gate = asyncio.Event()
    asked = asyncio.create_task(score(slot, "math"))
    await asyncio.sleep(0.01)
    slot.fail()
    server.gate.set()
    with pytest.raises(ServerError, match="was dropped"):
        await asked


async def test_a_server_that_was_started_again_holds_nobody_until_it_is_opened_anew(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    slot = await opened(server, teacher)
    await bring(slot, teacher, gate(tmp_path))
    server.restart()
    with pytest.raises(ServerError, match="gave no answer"):
        await score(slot, "math")
    await slot.open(Catalogue([teacher]).sources, 5)
    assert slot.stage("math") is Stage.COLD
    await bring(slot, teacher, gate(tmp_path))
    assert np.array_equal((await score(slot, "math"))[0], true_scores(teacher.folder, [3, 4]))


async def test_a_server_that_answers_with_other_weights_gives_no_score_and_no_text(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    slot = await opened(server, teacher)
    await bring(slot, teacher, gate(tmp_path))
    server.relabel = "code@12345678"
    with pytest.raises(TeacherError, match="comes from weights code@12345678"):
        await score(slot, "math")
    with pytest.raises(ServerError, match=r"should be written by math@.*code@12345678"):
        await slot.generate(teacher, [GenerateRequest("g", IDS, 2)], 5)


async def test_a_reply_that_does_not_come_is_an_error_that_says_how_long_was_waited(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    slot = await opened(server, teacher)
    await bring(slot, teacher, gate(tmp_path))
    server.gate = asyncio.Event()
    with pytest.raises(ServerError, match=r"slot-0: waited 0\.1 s for a reply"):
        await score(slot, "math", deadline_s=0.1)


async def test_the_label_of_weights_says_when_their_files_were_written(tmp_path: Path) -> None:
    (first,) = open_teachers(tmp_path, "math")
    again = Teacher.open("math", first.folder)
    other = Teacher.open("logic", first.folder)
    assert again.version == first.version != other.version
    write_tensors(first.folder, seed=5)
    assert Teacher.open("math", first.folder).version != first.version


async def test_a_stream_of_other_weights_than_the_files_is_refused_before_it_leaves_a_canary(tmp_path: Path) -> None:
    teacher, other = open_teachers(tmp_path, "a", "b")
    server = FakeServer(holds_one=False)
    slot, checks = await opened(server, teacher), gate(tmp_path)
    request = ScoreRequest("s", IDS, 2, teacher="a")
    server.streams_folder = other.folder
    with pytest.raises(TeacherError, match=r"teacher a: slot-0 streamed 2 of 2 tensors with other bytes"):
        await slot.stream(teacher, checks, [request], SAMPLED, 5)
    assert CanaryStore(tmp_path / "canaries.json").get(teacher.digest) is None
    server.streams_folder = None
    (found,) = await slot.stream(teacher, checks, [request], SAMPLED, 5)
    assert np.array_equal(found.logprobs, true_scores(teacher.folder, IDS[-2:]))


@pytest.mark.parametrize(("missing", "wrong"), [((), ()), (("table",), ()), (("table", "bias"), ("2 of 2",))])
async def test_one_tensor_of_a_stream_may_have_been_read_by_rows(
    tmp_path: Path, missing: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    (teacher,) = open_teachers(tmp_path, "a")

    class Listing:
        async def checksums(self, name: str) -> dict[str, str]:
            return {key: digest for key, digest in teacher.checksums.items() if key not in missing}

    checking = gate(tmp_path).check_streamed(cast(TeacherServer, Listing()), teacher, "slot-0")
    if not wrong:
        await checking
    else:
        with pytest.raises(TeacherError, match=f"slot-0 streamed {wrong[0]} tensors"):
            await checking
