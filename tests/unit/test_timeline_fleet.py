"""The rules of devices, links and host memory: what breaks one raises and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
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


def one_object(budget: int = 100) -> Fleet:
    """Its device holds teacher 0, and would have room for more."""
    of = system(budget=budget)
    made = Fleet(replace(of, devices=(msgspec.structs.replace(of.devices[0], holds_one=True),)))
    for each in (job(0, 0), job(1, 0), job(2, 1)):
        made.arrive(each)
    load(made, 0)
    return made


def one_object_visiting() -> Fleet:
    made = one_object()
    made.start_visit(0, 0, (0,), 2 * S)
    return made


def lost() -> Fleet:
    made = loaded()
    made.lose(0, 2 * S)
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
        (one_object, lambda it: it.start_copy(0, 1, 2 * S), "must be empty and idle; it holds [0]"),
        (one_object_visiting, lambda it: it.start_copy(0, 1, 2 * S), "must be empty and idle; it is on a visit"),
        (one_object, lambda it: it.start_stream(0, 1, (2,), 2 * S), "the device, or the teacher, cannot be streamed"),
        (
            lambda: fleet(teachers=[teacher(0), msgspec.structs.replace(teacher(1), can_stream=False)]),
            lambda it: it.start_stream(0, 1, (2,), 0),
            "the device, or the teacher, cannot be streamed",
        ),
        (
            lambda: fleet(teachers=[teacher(0), msgspec.structs.replace(teacher(1), stream_bytes=9)]),
            lambda it: it.start_stream(0, 1, (2,), 0),
            "its buffers take 9 bytes, 8 are free",
        ),
        (lost, lambda it: it.start_copy(0, 0, 2 * S), "device 0 is lost"),
        (lost, lambda it: it.start_visit(0, 0, (0,), 2 * S), "device 0 is lost"),
        (lost, lambda it: it.start_stream(0, 0, (0,), 2 * S), "device 0 is lost"),
        (lost, lambda it: it.evict(0, 0, 2 * S), "device 0 is lost"),
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


def test_adapters_of_one_base_share_a_visit_and_none_of_them_goes_meanwhile() -> None:
    made = Fleet(system(LORA))
    for each in (job(0, 1, tokens=2), job(1, 2, tokens=3)):
        made.arrive(each)
    load(made, 0)
    load(made, 1, now_ns=2 * S)
    with pytest.raises(IllegalDecision, match=r"objects \[2\] are not resident"):
        made.start_visit(0, 1, (0, 1), 3 * S)
    load(made, 2, now_ns=3 * S)
    assert made.start_visit(0, 1, (0, 1), 4 * S).end_ns == 9 * S
    for item in (0, 1, 2):
        with pytest.raises(IllegalDecision, match="a visit uses it"):
            made.evict(0, item, 5 * S)
    made.fail_visit(0, [1], 9 * S)
    assert list(made.waiting) == [1] and made.devices[0].resident == dict.fromkeys((0, 1, 2), 9 * S)
    made.evict(0, 2, 9 * S)


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


def test_a_copy_that_failed_leaves_the_room_and_the_link_as_they_were() -> None:
    made = fleet()
    made.fail_copy(made.start_copy(0, 0, 0), S)
    state = made.devices[0]
    assert (state.free_bytes, state.coming, state.resident, made.transfers, made.holders[0]) == (
        8,
        None,
        {},
        [None],
        set(),
    )
    load(made, 0, now_ns=S)
    assert made.devices[0].resident == {0: 3 * S}


def test_what_was_not_read_to_the_end_is_not_in_host_memory_and_leaves_its_room() -> None:
    made = fleet(teachers=[teacher(0), teacher(1)], host=HostTier(4, 1))
    made.fail_copy(made.start_copy(0, 0, 0), S)
    assert made.reads_disk(0) and made.can_transfer(0, 1)
    load(made, 1, now_ns=S)  # it would not fit beside room that is still reserved for 0
    assert not made.reads_disk(1)


def test_of_a_visit_that_failed_the_given_jobs_wait_again_and_the_teacher_stays() -> None:
    made = loaded()
    made.start_visit(0, 0, (0, 1), 2 * S)
    made.fail_visit(0, (1,), 3 * S)
    assert sorted(made.waiting) == [1, 2] and made.devices[0].visit is None and made.devices[0].resident == {0: 3 * S}
    assert made.start_visit(0, 0, (1,), 3 * S).jobs == (1,)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_a_stream_gives_up_room_and_link_whether_or_not_it_read_to_the_end(fails: bool, read: bool) -> None:
    made = streaming(host=HostTier(8, 1))
    if read:
        made.end_transfer(0, S)
    if fails:
        made.fail_visit(0, (0,), 2 * S)
    else:
        made.end_visit(0, 2 * S)
    assert made.transfers == [None] and made.devices[0].free_bytes == 5 and (0 in made.waiting) == fails
    assert made.reads_disk(0) == (fails and not read)
    made.start_copy(0, 1, 3 * S)


def test_the_end_of_a_visit_leaves_the_link_to_the_copy_that_followed_its_stream() -> None:
    made = Fleet(system([teacher(0), teacher(1)], budget=10))
    made.arrive(job(0, 0, tokens=6))
    made.start_stream(0, 0, (0,), 0)
    made.end_transfer(0, 2 * S)
    made.start_copy(0, 0, 2 * S)
    made.end_visit(0, 3 * S)
    transfer = made.transfers[0]
    assert transfer is not None and made.devices[0].coming == transfer.item == 0


def test_a_lost_device_is_empty_and_its_jobs_wait_again_while_another_keeps_the_link() -> None:
    made = fleet(device_links=(0, 0))
    load(made, 0)
    made.start_visit(0, 0, (1, 0), 2 * S)
    made.start_copy(1, 1, 2 * S)
    assert made.lose(0, 3 * S) == (1, 0)
    state = made.devices[0]
    assert (state.lost, state.free_bytes, state.resident, state.visit, made.holders[0]) == (True, 8, {}, None, set())
    assert sorted(made.waiting) == [0, 1, 2] and made.transfers[0] is not None
    assert made.lose(1, 3 * S) == ()
    assert made.transfers == [None] and made.devices[1].coming is None
    made.restore(0)
    load(made, 0, now_ns=4 * S)
    assert made.start_visit(0, 0, (0,), 6 * S).jobs == (0,)


def test_a_dropped_job_is_not_given_out_any_more() -> None:
    made = loaded()
    made.drop(0)
    with pytest.raises(IllegalDecision, match="job 0 has not arrived"):
        made.start_visit(0, 0, (0,), 2 * S)


def test_the_constant_of_a_device_is_part_of_each_of_its_visits() -> None:
    of = system(budget=10)
    made = Fleet(replace(of, devices=(msgspec.structs.replace(of.devices[0], call_ns=5),)))
    for id in range(2):
        made.arrive(job(id, 0))
    stream = made.start_stream(0, 0, (1,), 0)
    assert stream.end_ns == int(2.25 * S) + 5
    made.end_visit(0, stream.end_ns)
    load(made, 0, now_ns=3 * S)
    assert made.start_visit(0, 0, (0,), 5 * S).end_ns == 6 * S + 5
