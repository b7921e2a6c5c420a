"""A manager with a score cache: what was scored is not asked for again, and every answer is the teacher's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.teacher_manager import Catalogue, Teacher
from distill.teacher_manager.reuse import Reuse
from distill.teacher_manager.score_cache import ScoreCache, ScoreKey
from distill.types import Floats, Sample, ScoreRequest, TeacherScores
from tests.builders import sample
from tests.builders_teachers import SAMPLED, VOCAB, FakeServer, Rig, of_prefix, open_teachers, true_scores

BLOCK = 4
PLENTY = 10**8


def made(number: int, prompt: Sequence[int], response: Sequence[int], *teachers: str) -> Sample:
    blank = sample(number, length=len(response), teachers=teachers)
    return replace(blank, prompt_ids=np.array(prompt, np.int32), response_ids=np.array(response, np.int32))


def truth(folder: Path, item: Sample) -> Floats:
    """What a server says that `reads_prefix`."""
    ids = np.concatenate([item.prompt_ids, item.response_ids])
    return true_scores(folder, item.response_ids) + of_prefix(ids, len(item.response_ids))


async def score(rig: Rig, items: Sequence[Sample]) -> None:
    """All at once; each score is checked."""
    for item, found in zip(items, await asyncio.gather(*map(rig.manager.score, items)), strict=True):
        assert [scores.teacher for scores in found.scores] == list(item.teachers)
        for scores in found.scores:
            assert scores.logprobs.tolist() == truth(rig.teachers[scores.teacher].folder, item).tolist()


def rig_with_cache(root: Path, names: str, *, memory: int = PLENTY, barrier: bool = False) -> Rig:
    server = FakeServer(holds_one=False)
    server.reads_prefix = True
    cache = ScoreCache(memory, block_tokens=BLOCK)
    return Rig(root, open_teachers(root, *names), [server], cache=cache, barrier=barrier)


def known_rows(item: Sample, before: set[bytes]) -> int:
    """How many rows of the response are known, from the first on."""
    ids = np.concatenate([item.prompt_ids, item.response_ids]).astype(np.int32)
    rows = [ids[: len(item.prompt_ids) + row + 1].tobytes() in before for row in range(len(item.response_ids))]
    return rows.index(False) if False in rows else len(rows)


def all_rows(item: Sample) -> set[bytes]:
    ids = np.concatenate([item.prompt_ids, item.response_ids]).astype(np.int32)
    return {ids[: len(item.prompt_ids) + row + 1].tobytes() for row in range(len(item.response_ids))}


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
ASKED = st.tuples(TOKENS, TOKENS, st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a")]))
ROUNDS = st.lists(st.lists(ASKED, min_size=1, max_size=4), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(rounds=ROUNDS, barrier=st.booleans(), announced=st.integers(0, 15))
def test_any_samples_get_true_scores_and_only_new_tokens_are_asked_for(
    rounds: list[list[tuple[list[int], list[int], tuple[str, ...]]]], barrier: bool, announced: int
) -> None:
    """Two symbols make repeated, continued and diverging samples likely. `announced`: bits, by place in the round."""

    async def play(root: Path) -> None:
        async with rig_with_cache(root, "ab", barrier=barrier) as rig:
            known: dict[str, set[bytes]] = {"a": set(), "b": set()}
            number, expected = 0, Counter[str]()
            for each in rounds:
                items = [made(number + place, *asked[:2], *asked[2]) for place, asked in enumerate(each)]
                number += len(items)
                for place, item in enumerate(items):
                    if announced >> place & 1:
                        rig.manager.announce(item.id, list(item.teachers), 5)
                for item in items:
                    for name in item.teachers:
                        expected[name] += len(item.response_ids) - known_rows(item, known[name])
                async with asyncio.timeout(20):
                    await score(rig, items)
                for item in items:
                    for name in item.teachers:
                        known[name] |= all_rows(item)
                assert rig.servers[0].rows == +expected
            figures, asked = rig.manager.figures(), [item for each in rounds for item in each]
            assert figures.cache_requests == sum(len(teachers) for _, _, teachers in asked)
            assert figures.cache_tokens == sum(len(response) * len(teachers) for _, response, teachers in asked)
            assert figures.cache_tokens - figures.cache_tokens_found == expected.total()

    with TemporaryDirectory() as root:
        asyncio.run(play(Path(root)))


async def test_a_cache_with_hardly_any_room_changes_no_score(tmp_path: Path) -> None:
    async with rig_with_cache(tmp_path, "a", memory=1500) as rig:
        random = np.random.default_rng(0)
        for number in range(60):
            await score(rig, [made(number, [1, 2], random.integers(0, 2, 1 + number % 9).tolist(), "a")])
        assert 0 < rig.manager.figures().cache_hit_share < 1


async def test_what_was_found_is_withdrawn_and_opens_the_barrier_for_the_others(tmp_path: Path) -> None:
    async with rig_with_cache(tmp_path, "a", barrier=True) as rig:
        await score(rig, [made(0, [1, 2], [3, 4, 5], "a")])
        again, longer, other = (
            made(1, [1, 2], [3, 4, 5], "a"),
            made(2, [1, 2], [3, 4, 5, 6], "a"),
            made(3, [1, 2], [9], "a"),
        )
        for item in (again, longer, other):
            rig.manager.announce(item.id, ["a"], 3)
        waiting = asyncio.create_task(score(rig, [longer]))
        another = asyncio.create_task(score(rig, [other]))
        await asyncio.sleep(0.02)
        assert not waiting.done() and not another.done(), "one that was announced is not there"
        async with asyncio.timeout(20):
            await score(rig, [again])
            await asyncio.gather(waiting, another)
        assert rig.servers[0].rows == {"a": 3 + 1 + 1}
        assert rig.servers[0].score_calls[1:] == [[longer.id, other.id]], "both in one request"


async def test_the_next_process_finds_the_scores_on_disk_and_loads_no_teacher(tmp_path: Path) -> None:
    items = [made(number, [1, 2], [number, 4, 5], "a", "b") for number in range(5)]
    for turn in range(2):
        server = FakeServer(holds_one=False)
        server.reads_prefix = True
        cache = ScoreCache(PLENTY, tmp_path / "scores", PLENTY)
        async with Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [server], cache=cache) as rig:
            await score(rig, items)
            assert rig.manager.figures().cache_hit_share == turn
            assert (server.loads == []) == (turn == 1)


async def test_other_weights_under_the_same_name_find_nothing(tmp_path: Path) -> None:
    for turn in range(2):
        cache = ScoreCache(PLENTY, tmp_path / "scores", PLENTY)
        (teacher,) = open_teachers(tmp_path / str(turn), "a")
        if turn:
            (_, other) = open_teachers(tmp_path / "other", "x", "y")
            teacher = Teacher.open("a", other.folder)
        server = FakeServer()
        server.reads_prefix = True
        async with Rig(tmp_path / str(turn), [teacher], [server], cache=cache) as rig:
            await score(rig, [made(0, [1, 2], [3, 4, 5], "a")])
            assert rig.manager.figures().cache_hit_share == 0 and server.rows["a"] == 3


async def test_scores_of_two_temperatures_are_never_mixed(tmp_path: Path) -> None:
    (teacher,) = open_teachers(tmp_path, "a")
    warm = Teacher.open("warm", teacher.folder, temperature=2.0)
    reuse = Reuse(Catalogue([teacher, warm]), ScoreCache(PLENTY), spec=SAMPLED, vocab_size=VOCAB)
    request = ScoreRequest("r", np.array([1, 2, 3], np.int32), 2, teacher="a")
    await reuse.keep(await reuse.find("a", request), TeacherScores("a", np.zeros(2, np.float32)))
    assert (await reuse.find("a", request)).left is None
    assert (await reuse.find("warm", replace(request, temperature=2.0))).found is None


async def test_a_sample_that_would_push_out_all_others_is_not_kept(tmp_path: Path) -> None:
    catalogue, cache = Catalogue(open_teachers(tmp_path, "a")), ScoreCache(PLENTY)
    reuse = Reuse(catalogue, cache, spec=SAMPLED, vocab_size=VOCAB, largest_bytes=40)
    for length, kept in ((11, False), (10, True)):
        request = ScoreRequest("r", np.arange(12, dtype=np.int32), length, teacher="a")
        await reuse.keep(await reuse.find("a", request), TeacherScores("a", np.zeros(length, np.float32)))
        assert (cache.stats().memory_bytes > 0) is kept


async def test_a_teacher_elsewhere_is_neither_looked_up_nor_kept(tmp_path: Path) -> None:
    cache = ScoreCache(PLENTY)
    reuse = Reuse(Catalogue(open_teachers(tmp_path, "a")), cache, spec=SAMPLED, vocab_size=VOCAB)
    request = ScoreRequest("r", np.array([1, 2, 3], np.int32), 2)
    recall = await reuse.find("far", request)
    assert recall.left is request
    fresh = TeacherScores("far", np.zeros(2, np.float32))
    assert await reuse.keep(recall, fresh) is fresh
    assert cache.stats().memory_bytes == 0 and reuse.hits.requests == 0


async def test_a_cache_that_keeps_samples_waiting_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(ScoreCache):
        async def put(self, key: ScoreKey, request: ScoreRequest, scores: TeacherScores) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("distill.teacher_manager.reuse._LONGEST_S", 0.01)
    server = FakeServer()
    server.reads_prefix = True
    async with Rig(tmp_path, open_teachers(tmp_path, "a"), [server], cache=Hangs(PLENTY)) as rig:
        for number in range(2):
            await score(rig, [made(number, [1], [2, 3], "a")])
        warnings = [text for level, text in rig.events if level == "warning"]
        assert len(warnings) == 1 and "not used any more" in warnings[0]
        assert server.rows["a"] == 4


async def test_a_sample_given_up_while_it_is_looked_for_leaves_nothing_announced(tmp_path: Path) -> None:
    class Hangs(ScoreCache):
        async def find(self, key: ScoreKey, request: ScoreRequest) -> tuple[int, TeacherScores | None]:
            if request.id == gone.id:
                await asyncio.Event().wait()
            return await super().find(key, request)

    server = FakeServer()
    server.reads_prefix = True
    gone, kept = made(0, [1], [2], "a"), made(1, [1], [3], "a")
    async with Rig(tmp_path, open_teachers(tmp_path, "a"), [server], cache=Hangs(PLENTY), barrier=True) as rig:
        await score(rig, [made(2, [1], [4], "a")])  # from now on there is something to look for
        for item in (gone, kept):
            rig.manager.announce(item.id, ["a"], 3)
        waiting = asyncio.create_task(score(rig, [kept]))
        looking = asyncio.create_task(rig.manager.score(gone))
        await asyncio.sleep(0.01)
        assert not waiting.done() and not looking.done()
        looking.cancel()
        async with asyncio.timeout(20):
            await waiting
        assert server.rows["a"] == 2
