"""One slot: nothing is scored unless the gate has let the teacher through, and late replies are dropped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from distill.errors import ServerError, TeacherError
from distill.teacher_manager.gate import CANARY_RESPONSE, CanaryStore, Gate, canary_ids
from distill.teacher_manager.slot import Slot, State
from distill.types import GenerateRequest, ScoreRequest, Signal, SignalSpec
from tests.builders_teachers import VOCAB, FakeServer, open_teachers, true_scores, write_tensors

SAMPLED = SignalSpec(Signal.SAMPLED)
REQUEST = ScoreRequest("sample-1", np.array([1, 2, 3, 4], np.int32), 2)


def gate(tmp_path: Path, atol: float = 1e-4) -> Gate:
    return Gate(CanaryStore(tmp_path / "canaries.json"), vocab_size=VOCAB, atol=atol)


async def score(slot: Slot) -> np.ndarray:
    (reply,) = await slot.score(slot.epoch, [REQUEST], SAMPLED, 5)
    return reply.logprobs


async def test_a_cold_slot_scores_nothing_and_an_activated_one_scores_with_its_teacher(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    slot = FakeServer().slot()
    with pytest.raises(ServerError, match="is cold"):
        await score(slot)
    await slot.activate(teacher, gate(tmp_path), 5)
    assert slot.state is State.READY and slot.resident == "math"
    assert np.array_equal(await score(slot), true_scores(teacher.folder, [3, 4]))


async def test_a_teacher_larger_than_the_budget_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    with pytest.raises(TeacherError, match=rf"\({teacher.bytes} bytes\), slot-0 holds .* \(100 bytes\)"):
        await server.slot(budget_bytes=100).activate(teacher, gate(tmp_path), 5)
    assert server.loads == []


async def test_a_load_that_went_wrong_once_is_done_again(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    server.corrupt_loads = 1
    slot = server.slot()
    await slot.activate(teacher, gate(tmp_path), 5)
    assert server.loads == ["math", "math"]
    assert np.array_equal(await score(slot), true_scores(teacher.folder, [3, 4]))


async def test_weights_that_differ_twice_from_the_file_are_refused_and_leave_the_slot_cold(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    server.corrupt_loads = 2
    slot = server.slot()
    with pytest.raises(TeacherError, match=r"holds 1 of 2 tensors with other bytes .* the first is table"):
        await slot.activate(teacher, gate(tmp_path), 5)
    assert slot.state is State.COLD and slot.resident is None


async def test_a_file_rewritten_during_the_run_is_refused_although_the_server_loads_it_well(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    slot, checks = FakeServer().slot(), gate(tmp_path)
    await slot.activate(math, checks, 5)
    await slot.activate(code, checks, 5)
    write_tensors(math.folder, seed=99)
    with pytest.raises(TeacherError, match="with other bytes"):
        await slot.activate(math, checks, 5)


async def test_a_canary_that_moved_is_refused_although_the_weights_agree(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    server = FakeServer()
    slot, checks = server.slot(), gate(tmp_path)
    await slot.activate(math, checks, 5)
    await slot.activate(code, checks, 5)
    server.stale_buffer = 5e-5
    await slot.activate(math, checks, 5)
    server.stale_buffer = 2e-4
    with pytest.raises(TeacherError, match=r"its canary on slot-0 moved by 0\.0002 nat, more than 0\.0001"):
        await slot.activate(code, checks, 5)
    server.stale_buffer = float("nan")
    with pytest.raises(TeacherError, match="moved by nan"):
        await slot.activate(code, checks, 5)


async def test_a_resumed_run_checks_the_canary_of_the_run_before(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    await server.slot().activate(teacher, gate(tmp_path), 5)
    server.stale_buffer = 0.5
    with pytest.raises(TeacherError, match="canary"):
        await server.slot().activate(teacher, gate(tmp_path), 5)


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


async def test_the_next_teacher_is_loaded_only_after_the_last_reply(tmp_path: Path) -> None:
    math, code = open_teachers(tmp_path, "math", "code")
    server = FakeServer()
    slot, checks = server.slot(), gate(tmp_path)
    await slot.activate(math, checks, 5)
    server.gate = asyncio.Event()
    asked = asyncio.create_task(score(slot))
    await asyncio.sleep(0.01)
    swapping = asyncio.create_task(slot.activate(code, checks, 5))
    await asyncio.sleep(0.01)
    assert slot.state is State.DRAINING and server.loads == ["math"]
    with pytest.raises(ServerError, match="is draining"):
        await score(slot)
    server.gate.set()
    await swapping
    assert np.array_equal(await asked, true_scores(math.folder, [3, 4]))
    assert np.array_equal(await score(slot), true_scores(code.folder, [3, 4]))


async def test_a_reply_that_comes_after_its_epoch_is_dropped(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    slot = server.slot()
    await slot.activate(teacher, gate(tmp_path), 5)
    server.gate = asyncio.Event()
    asked = asyncio.create_task(score(slot))
    await asyncio.sleep(0.01)
    slot.fail()
    server.gate.set()
    with pytest.raises(ServerError, match="was dropped"):
        await asked


async def test_a_server_that_was_started_again_holds_nobody(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    slot = server.slot()
    await slot.activate(teacher, gate(tmp_path), 5)
    assert await slot.holds("math", 5)
    assert not await slot.holds("code", 5)
    server.restart()
    assert not await slot.holds("math", 5)
    assert slot.state is State.COLD
    await slot.activate(teacher, gate(tmp_path), 5)
    assert np.array_equal(await score(slot), true_scores(teacher.folder, [3, 4]))


async def test_a_server_that_answers_with_other_weights_gives_no_score_and_no_text(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    slot = server.slot()
    await slot.activate(teacher, gate(tmp_path), 5)
    server.version = "code@12345678"
    with pytest.raises(TeacherError, match="comes from weights code@12345678"):
        await score(slot)
    with pytest.raises(ServerError, match=r"should be written by math@.*code@12345678"):
        await slot.generate(slot.epoch, [GenerateRequest("g", REQUEST.input_ids, 2)], 5)


async def test_a_reply_that_does_not_come_is_an_error_that_says_how_long_was_waited(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "math")
    server = FakeServer()
    slot = server.slot()
    await slot.activate(teacher, gate(tmp_path), 5)
    server.gate = asyncio.Event()
    with pytest.raises(ServerError, match=r"slot-0: waited 0\.1 s for a reply"):
        await slot.score(slot.epoch, [REQUEST], SAMPLED, 0.1)
