"""Busy and overlap seconds, against a count of single seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.observe.timeline import OVERLAPPING, Timeline, seconds_together, union

Spans = list[tuple[str, int, int]]

spans = st.lists(
    st.tuples(st.sampled_from([*OVERLAPPING, "publish"]), st.integers(0, 60), st.integers(0, 12)).map(
        lambda drawn: (drawn[0], drawn[1], drawn[1] + drawn[2])
    ),
    max_size=40,
)


def busy_seconds(found: Spans, kind: str) -> set[int]:
    return {second for name, start, end in found if name == kind for second in range(start, end)}


def counted_overlap(found: Spans) -> int:
    sets = [busy_seconds(found, kind) for kind in OVERLAPPING]
    return sum(sum(second in busy for busy in sets) >= 2 for second in range(100))


@given(spans)
def test_busy_and_overlap_seconds_are_those_that_one_counts(found: Spans) -> None:
    timeline = Timeline()
    for span in found:
        timeline.add(*span)
    assert timeline.overlap() == counted_overlap(found)
    for kind, seconds in timeline.seconds().items():
        assert seconds == len(busy_seconds(found, kind))


@given(spans)
def test_folding_the_past_keeps_the_seconds_of_spans_that_come_in_order(found: Spans) -> None:
    # One span at a time: nothing that comes later can begin before what is folded.
    ordered = [(kind, 100 * index + start, 100 * index + end) for index, (kind, start, end) in enumerate(found)]
    pairs = [span for kind, start, end in ordered for span in ((kind, start, end), ("train", start, end))]
    small, large = Timeline(limit=3), Timeline()
    for span in pairs:
        small.add(*span)
        large.add(*span)
    assert small.overlap() == pytest.approx(large.overlap())
    assert small.seconds() == pytest.approx(large.seconds())


def test_a_folded_timeline_stays_small() -> None:
    timeline = Timeline(limit=100)
    for second in range(0, 10_000, 2):
        timeline.add("rollout", second, second + 1)
        timeline.add("train", second + 0.5, second + 1.5)
    assert len(timeline.intervals("rollout", 0, 1e9)) <= 100
    assert timeline.seconds() == {"rollout": 5000.0, "train": 5000.0}
    assert timeline.overlap() == 2500.0


def test_a_span_that_begins_before_the_fold_counts_from_the_fold_on() -> None:
    timeline = Timeline(limit=2)
    for second in (0, 10, 20):
        timeline.add("score", second, second + 1)
    timeline.add("train", 0, 12)
    assert timeline.seconds()["train"] == 2.0


def test_a_restored_timeline_goes_on_counting() -> None:
    before = Timeline()
    before.add("rollout", 0, 6)
    before.add("train", 4, 8)
    after = Timeline()
    after.restore(before.state(), horizon=8.0)
    after.add("rollout", 9, 12)
    after.add("score", 10, 11)
    assert after.seconds() == {"rollout": 9.0, "train": 4.0, "score": 1.0}
    assert after.overlap() == 3.0


def test_intervals_are_cut_to_the_window() -> None:
    busy = union([(0, 2), (1, 3), (5, 6), (9, 9)])
    assert busy.seconds == 4
    assert busy.within(2.5, 5.5) == [(2.5, 3), (5, 5.5)]
    assert busy.within(3, 5) == []


def test_touching_intervals_of_different_sets_are_not_together() -> None:
    assert seconds_together([[(0, 2)], [(2, 4)]], at_least=2) == 0.0
    assert seconds_together([[(0, 2)], [(1, 4)], [(1, 3)]], at_least=3) == 1.0
