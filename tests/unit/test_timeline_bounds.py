"""Bounds by hand, and the residency bound against all choices."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.teacher_manager.timeline.bounds import bounds
from distill.teacher_manager.timeline.break_even import Placement
from distill.teacher_manager.timeline.case import HostTier
from distill.teacher_manager.timeline.residency_bound import least_bytes
from tests.builders_timeline import S, case, job, system, teacher


def test_the_bounds_of_a_small_trace_by_hand() -> None:
    found = bounds(case([job(0, 0, 0, 3), job(1, 1, 1, 1), job(2, 0, 2, 2)]))
    assert found.makespan_lb_compute_ns == 6 * S  # 3 + 1 + 2 seconds of work from time 0
    assert found.makespan_lb_job_ns == 4 * S
    assert found.makespan_lb_copy_ns == 4 * S  # 8 bytes at 2 a second
    assert found.makespan_lb_ns == 6 * S and found.busy_fraction_ub == 1.0
    assert found.latency_mean_lb_ns == 3 * S  # job 1 goes first at its arrival: 1, 4 and 4 seconds
    assert found.max_lateness_lb_ns == -6 * S
    assert (found.bytes_lb_each_once, found.windows_disjoint) == (8, 2)
    assert found.missed_deadlines_lb == 0


def test_a_late_job_and_a_slow_disk_count() -> None:
    found = bounds(case([job(0, 0, 0, 11)], system(host=HostTier(8, 1))))
    assert found.makespan_lb_disk_ns == 4 * S
    assert found.missed_deadlines_lb == 1
    assert found.max_lateness_lb_ns == S and not found.all_deadlines_feasible_for_compute_alone


def test_an_object_returns_where_it_cannot_stay() -> None:
    jobs = [job(0, 0, 0), job(1, 1, 11), job(2, 0, 22), job(3, 1, 33)]
    assert bounds(case(jobs, system(budget=8))).bytes_lb_all_deadlines_met == 8
    assert bounds(case(jobs, system(budget=7))).bytes_lb_all_deadlines_met == 12


Gaps = list[tuple[int, int, int]]


@given(
    gaps=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(1, 5)), max_size=7),
    room=st.integers(0, 12),
)
def test_what_stays_whole_is_the_best_of_all_choices_and_parts_are_no_worse(gaps: Gaps, room: int) -> None:
    """Each gap is an object of its own: (start, length, bytes)."""
    teachers = [teacher(id, size) for id, (_, _, size) in enumerate(gaps)] or [teacher(0)]
    trace = case([job(0, 0)], system(teachers, budget=room))
    windows = {id: [(0, start), (start + length, 99)] for id, (start, length, _) in enumerate(gaps)}
    total = 2 * sum(size for _, _, size in gaps)
    best = 0
    for stays in product([False, True], repeat=len(gaps)):
        chosen = [gap for gap, stay in zip(gaps, stays, strict=True) if stay]
        if all(sum(size for start, length, size in chosen if start <= t < start + length) <= room for t in range(24)):
            best = max(best, sum(size for _, _, size in chosen))
    whole, divided = least_bytes(trace, windows), least_bytes(trace, windows, max_states=0)
    assert whole.is_optimal and whole.total == total - best
    assert divided.total <= whole.total


def test_too_many_choices_end_in_the_weaker_bound_and_say_so() -> None:
    trace = case([job(0, 0)], system([teacher(0, 4), teacher(1, 4)], budget=6))
    windows = {0: [(0, 1), (5, 6)], 1: [(0, 2), (4, 6)]}
    assert least_bytes(trace, windows).total == 12
    weaker = least_bytes(trace, windows, max_states=1)
    assert (weaker.total, weaker.is_optimal) == (10, False)


def test_break_even_is_where_compute_lasts_as_long_as_the_copy() -> None:
    dense = Placement(
        total_params=8_000_000,
        active_params=8_000_000,
        layers=4,
        bytes=16_000_000,
        flops_per_s=16_000_000_000,
        bytes_per_s=16_000_000,
    )
    assert dense.break_even_tokens == 1000.0
    assert dense.copy_ns == dense.compute_ns(1000) == S
    assert dense.stream_ns(1000) == 1.25 * S and dense.exposed_ns(500) == S // 2
    assert dense.visits_until_resident_wins(1000) == 4  # loading once costs 1 s, streaming 0.25 s each time
    assert dense.tokens_for_overhead(0.1) == pytest.approx(9000)
    assert dense.stream_bytes == 8_000_000
