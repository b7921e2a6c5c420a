"""Speeds from samples: what was really taken comes out, and single oddities change nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.teacher_manager.calibration import LEAST, MOVED, Calibration
from distill.teacher_manager.timeline.case import HostTier, System
from tests.builders_timeline import system

GB = 10**9


def started(device_links: tuple[int, ...] = (0, 1)) -> tuple[Calibration, System]:
    of = system(device_links=device_links, host=HostTier(8, 1))
    return Calibration(of), of


def test_without_samples_and_with_too_few_the_start_values_stay() -> None:
    made, of = started()
    for _ in range(LEAST - 1):
        made.copied(0, GB, 1.0, from_disk=False)
        made.copied(0, GB, 1.0, from_disk=True)
        made.visited(0, 0, 100, 1.0)
    assert made.system() == of


def test_a_copy_from_host_memory_says_how_fast_its_link_is_and_one_from_disk_how_fast_the_disk_is() -> None:
    made, of = started()
    for _ in range(LEAST):
        made.copied(1, 10 * GB, 2.0, from_disk=False)
        made.copied(1, 10 * GB, 10.0, from_disk=True)
    got = made.system()
    assert [link.bytes_per_s for link in got.links] == [of.links[0].bytes_per_s, 5 * GB]
    assert got.host is not None and got.host.disk_bytes_per_s == GB
    assert got.devices == of.devices and got.has_shape_of(of)


def test_small_copies_that_are_mostly_delay_do_not_make_the_link_slow() -> None:
    made, _ = started()
    for _ in range(10):
        made.copied(0, 10_000, 0.1, from_disk=False)
    for _ in range(3):
        made.copied(0, 10 * GB, 1.0, from_disk=False)
    assert made.system().links[0].bytes_per_s == 10 * GB


@given(
    speed=st.floats(1e6, 1e15), call_s=st.floats(0.0, 0.5), seed=st.integers(0, 2**16), odd=st.integers(0, 3)
)  # fmt: skip
def test_speed_and_constant_of_a_device_come_out_of_visits_of_many_lengths(
    speed: float, call_s: float, seed: int, odd: int
) -> None:
    """Up to three of 32 took fifty times as long as they should."""
    made, _ = started()
    dice = random.Random(seed)
    longest_s = 0.0
    for index in range(32):
        tokens = int(dice.uniform(0.1, 2.0) * speed / 2) + 1
        seconds = call_s + 2 * tokens / speed
        longest_s = max(longest_s, seconds)
        made.visited(1, 0, tokens, seconds * (50 if index < odd else 1))
    device = made.system().devices[1]
    assert device.flops_per_s == pytest.approx(speed, rel=2 * MOVED)
    assert abs(device.call_ns / 1e9 - call_s) <= 2 * MOVED * longest_s


def test_visits_of_one_length_tell_the_speed_and_leave_the_constant() -> None:
    made, of = started()
    for _ in range(8):
        made.visited(0, 0, 500, 2.0)
    assert (made.system().devices[0].flops_per_s, made.system().devices[0].call_ns) == (500, of.devices[0].call_ns)


def test_longer_visits_that_took_less_time_still_give_a_speed() -> None:
    made, _ = started()
    for tokens, seconds in ((100, 3.0), (200, 2.0), (300, 1.0)):
        made.visited(0, 0, tokens, seconds)
    assert made.system().devices[0].flops_per_s == 200


def test_old_samples_make_room_for_new_ones() -> None:
    made = Calibration(system(), window=4)
    for seconds in (1.0,) * 4 + (4.0,) * 4:
        made.copied(0, 8 * GB, seconds, from_disk=False)
    assert made.system().links[0].bytes_per_s == 2 * GB


def test_a_small_change_is_none() -> None:
    made, _ = started()
    for _ in range(LEAST):
        made.copied(0, 100 * GB, 10.0, from_disk=False)
    before = made.system()
    for _ in range(32):
        made.copied(0, 100 * GB, 10.0 * (1 + MOVED / 2), from_disk=False)
    assert made.system() == before


def test_nothing_and_no_time_are_no_samples() -> None:
    made, of = started()
    for _ in range(LEAST):
        made.copied(0, 0, 1.0, from_disk=False)
        made.copied(0, GB, 0.0, from_disk=False)
        made.visited(0, 0, 0, 1.0)
        made.visited(0, 0, 9, 0.0)
    assert made.system() == of


def test_copies_from_disk_of_a_fleet_that_knows_no_disk_are_left_out() -> None:
    of = system()
    made = Calibration(of)
    for _ in range(LEAST):
        made.copied(0, GB, 1.0, from_disk=True)
    assert made.system() == of
