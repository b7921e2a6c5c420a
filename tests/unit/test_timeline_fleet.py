"""The rules of devices, links and host memory: what breaks one raises and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distill.teacher_manager.timeline.case import HostTier, Kind
from distill.teacher_manager.timeline.fleet import Fleet, IllegalDecision
from tests.builders_timeline import S, job, system, teacher

LORA = (teacher(0, 4, Kind.BASE), teacher(1, 1, Kind.LORA, 0), teacher(2, 1, Kind.LORA, 0))


def fleet(**options: object) -> Fleet:
    """Jobs 0 and 1 of teacher 0 and job 2 of teacher 1 have arrived."""
    made = Fleet(system(**options))  # pyright: ignore[reportArgumentType]
    for each in (job(0, 0), job(1, 0), job(2, 1)):
        made.arrive(each)
    return made


def load(made: Fleet, item: int, device: int = 0, now_ns: int = 0) -> None:
    copy = made.start_copy(device, item, now_ns)
    made.end_copy(copy, copy.end_ns)


def loaded() -> Fleet:
    made = fleet()
    load(made, 0)
    return made


def visiting() -> Fleet:
    made = loaded()
    made.start_visit(0, 0, (0,), 2 * S)
    return made


def copying() -> Fleet:
    made = fleet(device_links=(0, 0))
    made.start_copy(0, 0, 0)
    return made


def streaming(device_links: tuple[int, ...] = (0, 0), host: HostTier | None = None) -> Fleet:
    made = fleet(device_links=device_links, budget=5, host=host)
    made.start_stream(0, 0, (0,), 0)
    return made


def reading() -> Fleet:
    made = fleet(device_links=(0, 1), host=HostTier(8, 1))
    made.start_copy(0, 0, 0)
    return made


@pytest.mark.parametrize(
    ("made", "decide", "said"),
    [
        (copying, lambda it: it.start_copy(1, 1, 0), "link 0 is busy"),
        (streaming, lambda it: it.start_copy(1, 1, 0), "link 0 is busy"),
        (streaming, lambda it: it.start_copy(0, 1, 0), "it has 4 bytes, 3 are free"),
        (reading, lambda it: it.start_copy(1, 1, 0), "the disk is busy"),
        (reading, lambda it: it.start_stream(1, 1, (2,), 0), "the disk is busy"),
        (
            lambda: streaming((0, 1), HostTier(8, 1, (0, 1))),
            lambda it: it.start_copy(1, 1, 0),
            "copies start before streams",
        ),
        (loaded, lambda it: it.start_copy(0, 0, 2 * S), "it is there, or coming"),
        (copying, lambda it: it.start_copy(0, 0, 0), "it is there, or coming"),
        (lambda: fleet(budget=3), lambda it: it.start_copy(0, 0, 0), "it has 4 bytes, 3 are free"),
        (fleet, lambda it: it.start_copy(0, 2, 0), "no such object"),
        (fleet, lambda it: it.start_copy(1, 0, 0), "there is no device 1"),
        (visiting, lambda it: it.evict(0, 0, 2 * S), "a visit uses it"),
        (copying, lambda it: it.evict(0, 0, 0), "it is still coming"),
        (fleet, lambda it: it.evict(0, 0, 0), "it is not there"),
        (visiting, lambda it: it.start_visit(0, 0, (1,), 2 * S), "it is on a visit to teacher 0"),
        (visiting, lambda it: it.start_stream(0, 1, (2,), 2 * S), "it is on a visit to teacher 0"),
        (loaded, lambda it: it.start_visit(0, 1, (2,), 2 * S), "objects [1] are not resident"),
        (copying, lambda it: it.start_visit(0, 0, (0,), S), "objects [0] are not resident"),
        (loaded, lambda it: it.start_visit(0, 0, (3,), 2 * S), "job 3 has not arrived"),
        (loaded, lambda it: it.start_visit(0, 0, (0, 0), 2 * S), "job 0 has not arrived, or was given out"),
        (loaded, lambda it: it.start_visit(0, 0, (0, 2), 2 * S), "job 2 is for teacher 1"),
        (loaded, lambda it: it.start_visit(0, 0, (), 2 * S), "it has no jobs"),
        (lambda: fleet(budget=1), lambda it: it.start_stream(0, 0, (0,), 0), "its buffers take 2 bytes, 1 are free"),
        (lambda: fleet(teachers=LORA), lambda it: it.start_stream(0, 1, (2,), 0), "only dense and moe"),
    ],
)
def test_a_decision_that_breaks_a_rule_raises_and_changes_nothing(
    made: Callable[[], Fleet], decide: Callable[[Fleet], object], said: str
) -> None:
    one, other = made(), made()
    with pytest.raises(IllegalDecision) as raised:
        decide(one)
    assert said in str(raised.value)
    assert [one.devices, one.transfers, one.holders, one.waiting] == [
        other.devices,
        other.transfers,
        other.holders,
        other.waiting,
    ]


def test_a_job_is_given_out_once() -> None:
    made = visiting()
    made.end_visit(0, 3 * S)
    with pytest.raises(IllegalDecision, match="job 0 has not arrived, or was given out"):
        made.start_visit(0, 0, (0,), 3 * S)


def test_an_adapter_is_usable_only_while_its_base_is_there() -> None:
    made = fleet(teachers=LORA)
    load(made, 0)
    load(made, 1, now_ns=2 * S)
    made.evict(0, 0, 3 * S)
    with pytest.raises(IllegalDecision, match=r"objects \[0\] are not resident"):
        made.start_visit(0, 1, (2,), 3 * S)
    load(made, 0, now_ns=3 * S)
    assert made.start_visit(0, 1, (2,), 5 * S).end_ns == 6 * S
    with pytest.raises(IllegalDecision, match="a visit uses it"):
        made.evict(0, 0, 5 * S)


def test_a_stream_gives_the_link_back_before_its_last_layer_is_computed() -> None:
    made = Fleet(system([teacher(0, 4)]))
    made.arrive(job(0, 0, tokens=6))
    visit = made.start_stream(0, 0, (0,), 0)
    transfer = made.transfers[0]
    assert transfer is not None
    assert (visit.end_ns, transfer.end_ns, made.devices[0].free_bytes) == (6.5 * S, 5 * S, 6)
    made.end_transfer(0, 5 * S)
    made.end_visit(0, visit.end_ns)
    assert made.transfers[0] is None and made.devices[0].free_bytes == 8 and not made.devices[0].resident


def test_what_is_read_from_disk_stays_in_host_memory_in_place_of_the_oldest() -> None:
    made = fleet(teachers=[teacher(0), teacher(1), teacher(2)], budget=12, host=HostTier(8, 1, initial=(0, 1)))
    assert [made.reads_disk(item) for item in range(3)] == [False, False, True]
    load(made, 0)
    copy = made.start_copy(0, 2, 2 * S)
    assert (copy.from_disk, copy.end_ns) == (1, 6 * S)
    assert [made.reads_disk(item) for item in range(3)] == [False, True, True]  # 1 went; 2 is there when it is read
    made.end_copy(copy, copy.end_ns)
    assert [made.reads_disk(item) for item in range(3)] == [False, True, False]


def test_what_is_being_copied_from_host_memory_is_not_dropped_and_then_nothing_is_kept() -> None:
    made = fleet(device_links=(0, 1), host=HostTier(4, 1, initial=(0,)))
    made.start_copy(0, 0, 0)
    copy = made.start_copy(1, 1, 0)
    made.end_copy(copy, copy.end_ns)
    assert not made.reads_disk(0) and made.reads_disk(1)


def test_an_object_larger_than_host_memory_drops_nothing() -> None:
    made = fleet(teachers=[teacher(0, 2), teacher(1, 6)], host=HostTier(4, 1, initial=(0,)))
    load(made, 1)
    assert not made.reads_disk(0) and made.reads_disk(1)
