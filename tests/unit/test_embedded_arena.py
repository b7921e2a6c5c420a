"""The memory of a slot: counted exactly, never passed, and really given back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import EnvironmentFault
from distill.serving.embedded.arena import Arena

PAGE = 4096
CPU = torch.device("cpu")
MIB = 1 << 20


def rss() -> int:
    """Anonymous memory of this process in bytes, counted page by page: the plain counter of Linux is approximate."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_a_buffer_has_its_size_and_counts_exactly() -> None:
    arena = Arena(1000, CPU)
    buffer = arena.take("a", 600)
    assert (buffer.dtype, tuple(buffer.shape)) == (torch.uint8, (600,))
    arena.take("a", 1)
    assert (arena.used_bytes, arena.peak_bytes, arena.owners) == (601, 601, {"a": 601})
    assert arena.give_back("a") == 601
    assert (arena.used_bytes, arena.peak_bytes, arena.owners) == (0, 601, {})
    assert arena.give_back("a") == 0


def test_past_the_budget_nothing_changes_and_the_numbers_are_named() -> None:
    arena = Arena(1000, CPU)
    arena.take("a", 600)
    with pytest.raises(EnvironmentFault, match=r"b needs 401 bytes .* 400 of 1000 are free") as caught:
        arena.take_all("b", [400, 1])
    assert "a 600" in caught.value.why
    assert (arena.used_bytes, arena.owners) == (600, {"a": 600})
    arena.take("b", 400)


def test_an_empty_buffer_is_a_buffer() -> None:
    assert Arena(0, CPU).take("a", 0).numel() == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 500)), max_size=30))
def test_what_is_used_is_what_owners_hold(steps: list[tuple[str, int]]) -> None:
    """A size of 0 stands for giving back."""
    arena = Arena(1000, CPU)
    held: dict[str, int] = {}
    for owner, size in steps:
        if not size:
            assert arena.give_back(owner) == held.pop(owner, 0)
        elif sum(held.values()) + size > 1000:
            with pytest.raises(EnvironmentFault):
                arena.take(owner, size)
        else:
            arena.take(owner, size)
            held[owner] = held.get(owner, 0) + size
        assert arena.owners == held and arena.used_bytes == sum(held.values()) <= arena.peak_bytes <= 1000


def _filled(arena: Arena, owner: str, sizes: list[int]) -> Iterator[torch.Tensor]:
    for buffer in arena.take_all(owner, sizes):
        yield buffer.fill_(1)


def test_the_ledger_is_what_the_process_holds_and_views_do_not_keep_memory() -> None:
    arena = Arena(1 << 40, CPU)
    sizes = [3 * MIB + 5, 7 * MIB, 40 * MIB + 4097]
    list(_filled(arena, "warm up", sizes))
    arena.give_back("warm up")
    gc.collect()
    before = rss()
    views = [buffer[:100] for buffer in _filled(arena, "a", sizes)]
    assert abs(rss() - before - arena.used_bytes) <= PAGE * (len(sizes) + 2)
    arena.give_back("a")
    assert abs(rss() - before) <= PAGE * (len(sizes) + 2)
    assert [view.sum().item() for view in views] == [0, 0, 0]


def test_memory_does_not_grow_over_many_swaps() -> None:
    arena = Arena(64 * MIB, CPU)
    sizes = [5 * MIB + 1] * 6
    levels: list[int] = []
    for cycle in range(50):
        list(_filled(arena, f"teacher {cycle}", sizes))
        arena.give_back(f"teacher {cycle}")
        levels.append(rss())
    assert max(levels[5:]) - levels[5] <= 32 * PAGE
    assert arena.peak_bytes == sum(sizes)


def test_threads_never_pass_the_budget_together() -> None:
    arena = Arena(1000, CPU)
    refused: list[int] = []

    def work(index: int) -> None:
        for _ in range(100):
            try:
                arena.take(f"t{index}", 300)
            except EnvironmentFault:
                refused.append(index)
            arena.give_back(f"t{index}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.used_bytes == 0 and arena.peak_bytes <= 900
