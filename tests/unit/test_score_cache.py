"""What a score cache answers: exactly the rows of these tokens under this key, or nothing, whatever its room."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.teacher_manager.score_cache import BOOKKEEPING_BYTES, ScoreCache, ScoreKey, joined, split
from distill.teacher_manager.score_pieces import Rows
from distill.types import ScoreRequest, Signal, SignalSpec, Support, TeacherScores

V, D, K, BLOCK = 3, 2, 2, 4
SPECS = (
    SignalSpec(Signal.SAMPLED),
    SignalSpec(Signal.TOPK, K),
    SignalSpec(Signal.TOPK, K, Support.STUDENT),
    SignalSpec(Signal.TOPK, K, Support.UNION),
    SignalSpec(Signal.FULL),
    SignalSpec(Signal.HIDDEN),
)
KEY = ScoreKey("weights", "tokenizer", SPECS[0], V)


def keyed(spec: SignalSpec = SPECS[0], **changes: Any) -> ScoreKey:
    return dataclasses.replace(KEY, spec=spec, **changes)


def asked(ids: Sequence[int], response: int, own: int | None = None, name: str = "a") -> ScoreRequest:
    """`own`: seed of the student's ids."""
    rows = None if own is None else np.random.default_rng(own).integers(0, V, (response, K), np.int32)
    return ScoreRequest(name, np.array(ids, np.int32), response, rows, teacher="t")


def truth(key: ScoreKey, request: ScoreRequest) -> TeacherScores:
    """What a teacher would say: numbers that follow from the key, a token, all before it and the ids of its row."""
    start = len(request.input_ids) - request.response_len
    rows = []
    for row in range(request.response_len):
        own = request.student_ids[row].tobytes() if request.student_ids is not None and key.spec.student_k else b""
        question = repr(key).encode() + request.input_ids[: start + row + 1].tobytes() + own
        rows.append(np.random.default_rng(xxhash.xxh3_64_intdigest(question)))
    made: dict[str, Any] = {"logprobs": np.array([-rng.random(dtype=np.float32) for rng in rows])}
    if key.spec.signal is Signal.TOPK:
        made["topk_ids"] = np.stack([rng.integers(0, V, key.spec.columns, np.int32) for rng in rows])
        made["topk_logprobs"] = np.stack([-rng.random(key.spec.columns, np.float32) for rng in rows])
        made["log_tail"] = np.array([-rng.random(dtype=np.float32) for rng in rows])
    elif key.spec.signal is Signal.FULL:
        made["full_logprobs"] = np.stack([-rng.random(V, np.float32) for rng in rows])
    elif key.spec.signal is Signal.HIDDEN:
        made["hidden"] = np.stack([rng.integers(-9, 9, D).astype(np.int16) for rng in rows])
    return TeacherScores("t", **made)


def assert_same(found: TeacherScores, expected: TeacherScores) -> None:
    for member in dataclasses.fields(TeacherScores):
        ours, theirs = getattr(found, member.name), getattr(expected, member.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, member.name
            assert ours.tolist() == theirs.tolist(), member.name
        else:
            assert ours == theirs, member.name


def leading(scores: TeacherScores, rows: int) -> TeacherScores:
    arrays = {
        member.name: value[:rows]
        for member in dataclasses.fields(TeacherScores)
        if isinstance(value := getattr(scores, member.name), np.ndarray)
    }
    return TeacherScores(scores.teacher, **arrays)


async def answered(cache: ScoreCache, key: ScoreKey, request: ScoreRequest) -> int:
    """One turn as a manager takes it. Returns how many rows had not to be asked for."""
    rows, found = await cache.find(key, request)
    expected = truth(key, request)
    assert (found is None) == (rows == 0)
    if found is not None:
        assert_same(found, leading(expected, rows))
    left = split(request, rows)
    scores = joined(found, None if left is None else truth(key, left))
    assert_same(scores, expected)
    await cache.put(key, request, scores)
    return rows


IDS = st.lists(st.integers(0, 1), min_size=2, max_size=14)
TURNS = st.lists(
    st.tuples(st.sampled_from(SPECS), IDS, st.integers(1, 13), st.integers(0, 2), st.sampled_from(["w1", "w2"])),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=120)
@given(turns=TURNS, memory=st.integers(0, 6000), disk=st.integers(0, 4000), reopen=st.integers(0, 12))
def test_any_turns_under_any_budget_are_answered_with_exactly_the_right_rows(
    turns: list[tuple[SignalSpec, list[int], int, int, str]], memory: int, disk: int, reopen: int
) -> None:
    async def all_turns(folder: Path) -> None:
        cache = ScoreCache(memory, folder, disk, block_tokens=BLOCK)
        for number, (spec, ids, response, own, weights) in enumerate(turns):
            if number == reopen:
                await cache.close()
                cache = ScoreCache(memory, folder, disk, block_tokens=BLOCK)
            request = asked(ids, min(response, len(ids) - 1), own if spec.student_k else None)
            await answered(cache, keyed(spec, weights=weights), request)
            stats = cache.stats()
            assert stats.memory_bytes <= memory and stats.disk_bytes <= disk
            assert stats.disk_bytes == sum(file.stat().st_size for file in folder.iterdir())
            assert stats.corrupt == stats.late == 0

    with TemporaryDirectory() as folder:
        asyncio.run(all_turns(Path(folder)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.signal.value}-{spec.support.value}")
async def test_a_replayed_sample_is_answered_whole(spec: SignalSpec) -> None:
    cache, request = ScoreCache(10**6, block_tokens=BLOCK), asked(range(11), 6, own=1 if spec.student_k else None)
    assert await answered(cache, keyed(spec), request) == 0
    assert await answered(cache, keyed(spec), request) == 6
    stats = cache.stats()
    assert (stats.requests, stats.whole, stats.tokens, stats.tokens_found) == (2, 1, 12, 6)


@pytest.mark.parametrize("length", range(6, 20))
async def test_a_continued_sample_asks_for_its_new_rows_only(length: int) -> None:
    cache = ScoreCache(10**6, block_tokens=BLOCK)
    await answered(cache, KEY, asked(range(6), 3))
    assert await answered(cache, KEY, asked(range(length), length - 3)) == 3
    assert await answered(cache, KEY, asked(range(length), length - 3)) == length - 3
    assert await answered(cache, KEY, asked(range(length), length - 5)) == length - 5, "a response that begins later"


async def test_two_samples_share_rows_up_to_the_token_at_which_they_part() -> None:
    cache = ScoreCache(10**6, block_tokens=BLOCK)
    ids = list(range(14))
    await answered(cache, KEY, asked(ids, 11))
    for parting in range(3, 14):
        other = [*ids[:parting], 99, *ids[parting + 1 :]]
        assert await answered(cache, KEY, asked(other, 11)) == parting - 3
    other = [99, *ids[1:]]
    assert await answered(cache, KEY, asked(other, 11)) == 0, "another prompt"


async def test_rows_about_other_ids_of_the_students_are_others() -> None:
    cache, spec = ScoreCache(10**6, block_tokens=BLOCK), SPECS[2]
    first = asked(range(12), 9, own=1)
    assert first.student_ids is not None
    await answered(cache, keyed(spec), first)
    changed = first.student_ids.copy()
    changed[5, 1] = (changed[5, 1] + 1) % V
    assert await answered(cache, keyed(spec), dataclasses.replace(first, student_ids=changed)) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "x"},
        {"adapter": "x"},
        {"tokenizer": "x"},
        {"temperature": 0.5},
        {"vocab_size": V + 1},
        {"numerics": "bfloat16"},
        {"spec": SPECS[4]},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_scores_under_another_key_are_not_found(changes: dict[str, Any]) -> None:
    cache = ScoreCache(10**6, block_tokens=BLOCK)
    await answered(cache, KEY, asked(range(9), 6))
    assert await answered(cache, dataclasses.replace(KEY, **changes), asked(range(9), 6)) == 0
    assert await answered(cache, KEY, asked(range(9), 6)) == 6


async def test_what_was_not_used_for_the_longest_time_goes_first_and_the_tail_before_the_beginning() -> None:
    cache = ScoreCache(4 * await bytes_of(BLOCK), block_tokens=BLOCK)
    first, second, third = (asked([n, *range(3 * BLOCK - 1)], 2 * BLOCK) for n in range(3))  # two pieces each
    await cache.put(KEY, first, truth(KEY, first))
    await cache.put(KEY, second, truth(KEY, second))
    await cache.find(KEY, first)
    await cache.put(KEY, third, truth(KEY, third))
    assert (await cache.find(KEY, second))[0] == 0
    assert cache.stats().dropped == 2
    assert (await cache.find(KEY, first))[0] == (await cache.find(KEY, third))[0] == 2 * BLOCK
    fourth = asked([3, *range(2 * BLOCK - 1)], BLOCK)
    await cache.put(KEY, fourth, truth(KEY, fourth))
    assert (await cache.find(KEY, first))[0] == BLOCK
    assert (await cache.find(KEY, third))[0] == 2 * BLOCK


async def bytes_of(rows: int) -> int:
    """What one whole piece is counted with."""
    cache = ScoreCache(10**6, block_tokens=BLOCK)
    request = asked([0] * (BLOCK + rows), rows)
    await cache.put(KEY, request, truth(KEY, request))
    return cache.stats().memory_bytes


async def test_a_growing_tail_replaces_itself() -> None:
    cache = ScoreCache(10**6, block_tokens=64)
    for length in range(4, 40):
        await cache.put(KEY, asked(range(length), length - 3), truth(KEY, asked(range(length), length - 3)))
    grown = cache.stats().memory_bytes
    fresh = ScoreCache(10**6, block_tokens=64)
    await fresh.put(KEY, asked(range(39), 36), truth(KEY, asked(range(39), 36)))
    assert grown == fresh.stats().memory_bytes


async def test_a_spilled_sample_is_found_on_disk_and_by_the_next_process(tmp_path: Path) -> None:
    request, other = asked(range(23), 20), asked(range(1, 24), 20)
    cache = ScoreCache(4000, tmp_path, 10**6, block_tokens=BLOCK)
    await answered(cache, KEY, request)
    await answered(cache, KEY, other)
    assert cache.stats().spilled > 0 and cache.stats().dropped == 0
    assert await answered(cache, KEY, request) == 20
    await cache.close()
    again = ScoreCache(4000, tmp_path, 10**6, block_tokens=BLOCK)
    assert again.stats().memory_bytes == 0
    assert await answered(again, KEY, request) == 20 and await answered(again, KEY, other) == 20


@pytest.mark.parametrize("spoil", ["cut", "changed", "empty", "gone"])
async def test_a_spilled_file_that_is_not_whole_is_dropped_and_counted(tmp_path: Path, spoil: str) -> None:
    request = asked(range(11), 8)
    first = ScoreCache(10**6, tmp_path, 10**6, block_tokens=BLOCK)
    await answered(first, KEY, request)
    await first.close()
    cache = ScoreCache(10**6, tmp_path, 10**6, block_tokens=BLOCK)
    assert (await cache.find(KEY, request))[0] == 8
    files = sorted(tmp_path.iterdir())
    for file in files:
        content = file.read_bytes()
        if spoil == "gone":
            file.unlink()
        else:
            middle = bytes([content[60] ^ 1])
            file.write_bytes(
                {"cut": content[:-1], "empty": b"", "changed": content[:60] + middle + content[61:]}[spoil]
            )
    assert (await cache.find(KEY, request)) == (0, None)
    assert cache.stats().corrupt == 1, "what comes after a row that is missing is not looked at"
    assert len(list(tmp_path.iterdir())) == (0 if spoil == "gone" else len(files) - 1)
    assert await answered(cache, KEY, request) == 0
    assert await answered(cache, KEY, request) == 8


async def test_files_that_were_never_finished_and_files_of_others_are_no_scores(tmp_path: Path) -> None:
    (tmp_path / "ab-cd.tmp").write_bytes(b"half")
    (tmp_path / "README").write_bytes(b"mine")
    for name in ("zz-zz", "zz-0-zz-zz"):
        (tmp_path / f"{name}.scores").write_bytes(b"")
    cache = ScoreCache(10**6, tmp_path, 10**6)
    assert cache.stats().disk_bytes == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README", "zz-0-zz-zz.scores", "zz-zz.scores"]


async def test_thousands_of_short_samples_in_one_block_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are in the first block, under one chain digest: only those that begin as the request does are opened,
    to find it and to keep it."""
    cache, opened = ScoreCache(10**7), 0
    unpack = Rows.unpack

    def counted(buffer: bytes) -> Rows:
        nonlocal opened
        opened += 1
        return unpack(buffer)

    requests = [asked([1 + index // 40, index % 40, 3, 5, 7], 3) for index in range(1600)]
    for request in requests:
        await answered(cache, KEY, request)
    monkeypatch.setattr(Rows, "unpack", counted)
    for request in requests[::100]:
        assert await answered(cache, KEY, request) == 3
    assert opened <= 2 * len(requests[::100])


async def test_a_disk_that_is_too_slow_is_a_miss(tmp_path: Path) -> None:
    request = asked(range(11), 8)
    first = ScoreCache(10**6, tmp_path, 10**6)
    await answered(first, KEY, request)
    await first.close()
    cache = ScoreCache(10**6, tmp_path, 10**6, deadline_s=0.0)
    assert await answered(cache, KEY, request) == 0
    assert cache.stats().late == 1 and cache.stats().corrupt == 0


async def test_a_folder_that_cannot_be_written_costs_the_pieces_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    cache = ScoreCache(BOOKKEEPING_BYTES + 400, folder, 10**6, block_tokens=BLOCK)
    folder.rmdir()
    for n in range(4):
        await answered(cache, KEY, asked([n, *range(3)], 3))
    assert cache.stats().late == 3 and cache.stats().disk_bytes == 0


async def test_tasks_that_share_a_cache_do_not_break_its_books(tmp_path: Path) -> None:
    cache = ScoreCache(3000, tmp_path, 3000, block_tokens=BLOCK)

    async def turns(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            length = int(rng.integers(4, 20))
            await answered(cache, KEY, asked(rng.integers(0, 2, length).tolist(), length - 2))

    await asyncio.gather(*(turns(seed) for seed in range(5)))
    stats = cache.stats()
    assert stats.requests == 75 and stats.corrupt == stats.late == 0
    assert stats.memory_bytes <= 3000
    assert stats.disk_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3000


def test_nothing_is_left_to_ask_when_all_rows_were_found() -> None:
    request = asked(range(9), 6, own=0)
    assert split(request, 6) is None
    left = split(request, 4)
    assert left is not None and left.response_len == 2 and left.student_ids is not None
    assert request.student_ids is not None and left.student_ids.tolist() == request.student_ids[4:].tolist()
    assert left.input_ids.tolist() == request.input_ids.tolist()
