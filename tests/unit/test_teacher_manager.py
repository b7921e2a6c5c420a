"""The manager over fake servers: every sample is scored once by each of its teachers, or fails with a reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from distill.errors import ServerError, TeacherError
from distill.types import GenerateRequest, Sample
from tests.builders import sample
from tests.builders_teachers import FakeServer, Rig, open_teachers


async def check(rig: Rig, samples: list[Sample]) -> None:
    scored = await asyncio.gather(*(rig.manager.score(item) for item in samples))
    for item, result in zip(samples, scored, strict=True):
        assert result.sample is item
        assert [scores.teacher for scores in result.scores] == list(item.teachers)
        for scores, expected in zip(result.scores, rig.expected(item), strict=True):
            assert np.array_equal(scores.logprobs, expected)


def mixed(count: int, *teachers: str) -> list[Sample]:
    """Samples of one teacher each in turn, every fourth of all of them in reverse order."""
    return [
        sample(index, teachers=teachers[::-1] if index % 4 == 3 else (teachers[index % len(teachers)],))
        for index in range(count)
    ]


@pytest.mark.parametrize("slots", [1, 2])
async def test_every_sample_gets_the_scores_of_its_own_teachers_in_their_order(tmp_path: Path, slots: int) -> None:
    servers = [FakeServer(f"slot-{index}") for index in range(slots)]
    rig = Rig(tmp_path, open_teachers(tmp_path, "a", "b", "c"), servers)
    await rig.manager.start()
    await check(rig, mixed(24, "a", "b", "c"))
    assert sum(rig.manager.swap_counts().values()) == sum(len(server.loads) for server in servers) >= 3
    assert set(rig.manager.queue_ages().values()) == {0.0}
    await rig.manager.close()


async def test_steps_that_need_all_teachers_load_one_less_than_there_are(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a", "b", "c"), [server := FakeServer()], barrier=True)
    await rig.manager.start()
    for step in range(3):
        samples = [sample(9 * step + index, teachers=("abc"[index % 3],)) for index in range(9)]
        for item in samples:
            rig.manager.announce(item.id, list(item.teachers), 3)
        await check(rig, samples)
    assert len(server.loads) == 3 + 2 + 2, "each step begins with the teacher that the last one ended with"
    await rig.manager.close()


async def test_behind_a_barrier_the_requests_are_the_same_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    seen: list[list[list[str]]] = []
    for seed in range(3):
        teachers = open_teachers(tmp_path, "a", "b")
        rig = Rig(tmp_path, teachers, [server := FakeServer()], barrier=True, call_tokens=20)
        await rig.manager.start()
        samples = [sample(index, teachers=("ab"[index % 2],)) for index in range(12)]
        for item in samples:
            rig.manager.announce(item.id, list(item.teachers), 3)
        tasks: list[asyncio.Task[object]] = []
        for index in np.random.default_rng(seed).permutation(12):
            tasks.append(asyncio.create_task(rig.manager.score(samples[index])))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        seen.append(sorted(server.score_calls))
        await rig.manager.close()
    assert seen[0] == seen[1] == seen[2]
    assert all(len(call) == 2 for call in seen[0]), "20 tokens hold two samples of 7"


async def test_a_sample_is_scored_while_others_of_its_batch_are_still_being_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [FakeServer()])
    await rig.manager.start()
    first, second = sample(0, teachers=("a",)), sample(1, teachers=("a",))
    for item in (first, second):
        rig.manager.announce(item.id, ["a"], 3)
    await check(rig, [first])
    rig.manager.cancel(second.id)
    await rig.manager.close()


async def test_a_cancelled_rollout_opens_the_barrier_for_the_others(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [FakeServer()], barrier=True)
    await rig.manager.start()
    kept, failed = sample(0, teachers=("a",)), sample(1, teachers=("a",))
    for item in (kept, failed):
        rig.manager.announce(item.id, ["a"], 3)
    scoring = asyncio.create_task(rig.manager.score(kept))
    await asyncio.sleep(0.02)
    assert not scoring.done() and rig.manager.queue_ages()["a"] > 0
    rig.manager.cancel(failed.id)
    assert (await scoring).sample is kept
    await rig.manager.close()


async def test_a_server_that_dies_in_the_middle_of_a_visit_loses_no_sample(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a", "b", "c"), [server := FakeServer()], call_tokens=10)
    await rig.manager.start()
    server.die_at_call = 5
    await check(rig, mixed(24, "a", "b", "c"))
    assert server.incarnation == 1
    assert any("gave no answer" in message for _, message in rig.events)
    await rig.manager.close()


async def test_the_other_slot_takes_over_what_a_dead_server_left(tmp_path: Path) -> None:
    servers = [FakeServer("slot-0"), FakeServer("slot-1")]
    rig = Rig(tmp_path, open_teachers(tmp_path, "a", "b", "c"), servers, call_tokens=10)
    await rig.manager.start()
    servers[0].die_at_call = 0
    await check(rig, mixed(24, "a", "b", "c"))
    assert sum(len(calls) for server in servers for calls in server.score_calls) == 36 + 1, "one was asked twice"
    await rig.manager.close()


async def test_a_failing_load_is_tried_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server := FakeServer()], max_tries=3)
    await rig.manager.start()
    server.fail_loads = 2
    await check(rig, mixed(4, "a"))
    await rig.manager.close()


async def test_a_sample_that_no_try_can_score_fails_and_is_named_with_its_teacher(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server := FakeServer()], max_tries=2, call_tokens=7)
    await rig.manager.start()
    good, bad = sample(0, teachers=("a",)), sample(1, teachers=("a",))
    server.refuse = {bad.id}
    scoring = asyncio.create_task(rig.manager.score(good))
    with pytest.raises(TeacherError, match=f"teacher a: {bad.id} failed 2 times, last: slot-0 cannot score"):
        await rig.manager.score(bad)
    assert (await scoring).sample is good
    await rig.manager.close()


async def test_a_sample_whose_scores_are_refused_twice_fails_by_itself_and_takes_nobody_along(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server := FakeServer()], max_tries=2)
    await rig.manager.start()
    samples = [sample(index, teachers=("a",)) for index in range(6)]
    bad = {samples[2].id, samples[4].id, samples[5].id}
    server.nonsense = dict.fromkeys(bad, 99)
    outcomes = await asyncio.gather(*(rig.manager.score(item) for item in samples), return_exceptions=True)
    for item, outcome in zip(samples, outcomes, strict=True):
        if item.id in bad:
            assert isinstance(outcome, TeacherError) and (outcome.sample_id, outcome.teacher) == (item.id, "a")
            assert outcome.what == f"teacher a: {item.id}: no number"
            assert server.score_calls.count([item.id]) >= 1, "the last time it was asked for by itself"
        else:
            assert not isinstance(outcome, BaseException)
            assert np.array_equal(outcome.scores[0].logprobs, rig.expected(item)[0])
    asked = [sum(item.id in call for call in server.score_calls) for item in samples]
    assert asked == [2, 2, 2, 2, 3, 3], "in the first call only one of those at fault could be named"
    assert len(server.loads) == 3, "the weights are verified anew before any is given up, and not for each"
    server.nonsense = {}
    await check(rig, mixed(4, "a"))
    await rig.manager.close()


async def test_a_sample_without_a_token_fails_by_itself_and_opens_the_barrier_for_the_others(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [FakeServer()], barrier=True)
    await rig.manager.start()
    empty, good = sample(0, teachers=("a",), length=0), sample(1, teachers=("a",))
    for item in (empty, good):
        rig.manager.announce(item.id, ["a"], 3)
    scoring = asyncio.create_task(check(rig, [good]))
    with pytest.raises(ServerError, match=f"{empty.id}: its rollout server wrote no token") as caught:
        await rig.manager.score(empty)
    assert caught.value.sample_id == empty.id
    await scoring
    await rig.manager.close()


async def test_scores_that_were_wrong_once_are_asked_for_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server := FakeServer()], max_tries=1)
    await rig.manager.start()
    items = mixed(5, "a")
    server.nonsense = {items[1].id: 1}
    await check(rig, items)
    assert len(server.loads) == 2
    await rig.manager.close()


async def test_a_teacher_whose_weights_do_not_check_out_is_quarantined_and_the_others_go_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [server := FakeServer()])
    await rig.manager.start()
    server.corrupt_loads = 2
    waiting = [asyncio.create_task(rig.manager.score(sample(index, teachers=("a",)))) for index in range(3)]
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, TeacherError) and "with other bytes" in error.what for error in failures)
    with pytest.raises(TeacherError, match="with other bytes"):
        await rig.manager.score(sample(7, teachers=("a",)))
    assert server.loads == ["a", "a"], "it is not loaded a third time"
    await check(rig, mixed(4, "b"))
    await rig.manager.close()


async def test_a_teacher_writes_when_it_has_its_turn(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [server := FakeServer()], call_tokens=8)
    server.load_s = 0.02
    await rig.manager.start()
    requests = [GenerateRequest(f"g{index}", np.array([1, 2], np.int32), 3) for index in range(5)]
    scoring = asyncio.create_task(check(rig, mixed(6, "a", "b")))
    written = await rig.manager.generate("b", requests)
    await scoring
    assert [item.id for item in written] == [request.id for request in requests]
    assert {version for item in written for version in item.versions} == {rig.teachers["b"].version}
    assert server.loads in (["a", "b"], ["b", "a"])
    assert await rig.manager.generate("a", []) == []
    await rig.manager.close()


async def test_what_it_reports_adds_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [FakeServer()])
    await rig.manager.start()
    samples = mixed(8, "a", "b")
    await check(rig, samples)
    tokens = {name: sum(7 for item in samples if name in item.teachers) for name in "ab"}
    assert rig.manager.token_counts() == tokens
    assert rig.manager.swap_counts() == {"a": 1, "b": 1}
    for name in "ab":
        assert sum(span[4] for span in rig.spans if span[0] == "score" and span[3] == name) == tokens[name]
        assert [span[4] for span in rig.spans if span[0] == "swap" and span[3] == name] == [rig.teachers[name].bytes]
    assert all(start <= end for _, start, end, _, _ in rig.spans)
    await rig.manager.close()


async def test_a_caller_that_goes_away_leaves_nothing_behind(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server := FakeServer()])
    await rig.manager.start()
    server.gate = asyncio.Event()
    leaving = asyncio.create_task(rig.manager.score(sample(0, teachers=("a",))))
    await asyncio.sleep(0.05)
    queued = asyncio.create_task(rig.manager.score(sample(1, teachers=("a",))))
    await asyncio.sleep(0)
    for task in (leaving, queued):
        task.cancel()
    await asyncio.gather(leaving, queued, return_exceptions=True)
    assert rig.manager.queue_ages() == {"a": 0.0}
    server.gate.set()
    await check(rig, [sample(2, teachers=("a",))])
    assert server.score_calls == [["sample-00000000"], ["sample-00000002"]]
    await rig.manager.close()


async def test_closing_ends_whoever_still_waits(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server := FakeServer()])
    await rig.manager.start()
    server.gate = asyncio.Event()
    waiting = asyncio.create_task(rig.manager.score(sample(0, teachers=("a",))))
    await asyncio.sleep(0.05)
    await rig.manager.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_teacher_that_fits_no_slot_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server := FakeServer(budget_bytes=10)])
    with pytest.raises(TeacherError, match=r"teacher a has .* bytes\); slot-0 holds .* \(10 bytes\)"):
        await rig.manager.start()
    assert server.loads == []
    await rig.manager.close()


async def test_a_fault_of_ours_reaches_those_who_wait(tmp_path: Path) -> None:
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server := FakeServer()])
    await rig.manager.start()

    async def bring(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    rig.manager._slots[0].bring = bring  # pyright: ignore
    for ordinal in range(2):
        with pytest.raises(ZeroDivisionError):
            await rig.manager.score(sample(ordinal, teachers=("a",)))
    assert server.loads == []
    await rig.manager.close()
