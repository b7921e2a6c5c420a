"""The checker finds every kind of fault that is planted in a schedule, and none in a right one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from distill.errors import ConfigError
from distill.teacher_manager.timeline.case import Case, HostTier, Job, Kind, Teacher
from distill.teacher_manager.timeline.checker import Rule, check
from distill.teacher_manager.timeline.schedule import (
    CopyRow,
    EvictionRow,
    Mode,
    Schedule,
    VisitRow,
    read_schedule,
    write_schedule,
)
from tests.builders_timeline import S, case, job, system, teacher

JOBS = (job(0, 0, 0, 3), job(1, 1, 1, 1))
DENSE = (teacher(0), teacher(1))
LORA = (teacher(0, 2, Kind.BASE), teacher(1, 2, Kind.LORA, 0))
LORAS = (*LORA, teacher(2, 2, Kind.LORA, 0))


def copy(item: int, start_s: float, end_s: float, *, device: int = 0, link: int = 0, from_disk: int = 0) -> CopyRow:
    return CopyRow(link, device, item, int(start_s * S), int(end_s * S), from_disk)


def visit(
    teacher: int, jobs: Sequence[int], start_s: float, end_s: float, *, device: int = 0, mode: Mode = Mode.RESIDENT
) -> VisitRow:
    return VisitRow(device, teacher, mode, int(start_s * S), int(end_s * S), tuple(jobs))


def stream(teacher: int, jobs: Sequence[int], start_s: float, end_s: float, *, device: int = 0) -> VisitRow:
    return visit(teacher, jobs, start_s, end_s, device=device, mode=Mode.STREAM)


def evict(item: int, at_s: float) -> EvictionRow:
    return EvictionRow(0, item, int(at_s * S))


COPY_0, COPY_1 = copy(0, 0, 2), copy(1, 2, 4)
COPIED = [copy(0, 0, 1), copy(1, 1, 2), copy(2, 2, 3)]
"""The objects of LORAS."""
VISIT_0, VISIT_1 = visit(0, [0], 2, 5), visit(1, [1], 5, 6)


def small(
    jobs: Sequence[Job] = JOBS,
    teachers: Sequence[Teacher] = DENSE,
    *,
    budget: int = 8,
    device_links: Sequence[int] = (0,),
    host: HostTier | None = None,
) -> Case:
    return case(jobs, system(teachers, budget=budget, device_links=device_links, host=host))


def rows(
    copies: Sequence[CopyRow] = (COPY_0, COPY_1),
    visits: Sequence[VisitRow] = (VISIT_0, VISIT_1),
    evictions: Sequence[EvictionRow] = (),
) -> Schedule:
    return Schedule(list(copies), list(evictions), list(visits))


RIGHT = {
    "both fit": (small(), rows()),
    "one at a time": (
        small(budget=4),
        rows([COPY_0, copy(1, 5, 7)], [VISIT_0, visit(1, [1], 7, 8)], [evict(0, 5)]),
    ),
    "streams": (small(budget=2), rows([], [stream(0, [0], 0, 3.5), stream(1, [1], 3.5, 5.75)])),
    "a stream beside a copy that follows it": (
        small(),
        rows([copy(1, 2.75, 4.75)], [stream(0, [0], 0, 3.5), visit(1, [1], 4.75, 5.75)]),
    ),
    "an adapter": (
        small([job(0, 1)], LORA),
        rows([copy(0, 0, 1), copy(1, 1, 2)], [visit(1, [0], 2, 3)]),
    ),
    "two adapters in one visit": (
        small([job(0, 1), job(1, 2)], LORAS),
        rows(COPIED, [visit(1, [0, 1], 3, 5)], [evict(2, 5)]),
    ),
    "a disk": (
        small(host=HostTier(4, 1, initial=(0,))),
        rows([COPY_0, copy(1, 2, 6, from_disk=1)], [VISIT_0, visit(1, [1], 6, 7)]),
    ),
    "a stream from a disk": (
        small(host=HostTier(4, 1, initial=(0,))),
        rows([COPY_0], [VISIT_0, stream(1, [1], 5, 9.25)]),
    ),
}
DISK = HostTier(0, 2)
WRONG = [
    (Rule.NAME, small(), rows([copy(2, 0, 2)])),
    (Rule.NAME, small(), rows([copy(0, 0, 2, link=1)])),
    (Rule.NAME, small(), rows(visits=[visit(0, [2], 2, 5)])),
    (Rule.NAME, small(), rows(visits=[visit(0, [0], 2, 5, device=1)])),
    (Rule.NAME, small(), rows(evictions=[evict(-1, 6)])),
    (Rule.ONCE, small(), rows(visits=[VISIT_0])),
    (Rule.ONCE, small(), rows(visits=[VISIT_0, VISIT_1, visit(0, [0], 6, 9)])),
    (Rule.ARRIVAL, small([job(0, 0, 0, 3), job(1, 1, 6, 1)]), rows()),
    (Rule.ARRIVAL, small(), rows(visits=[VISIT_0, VISIT_1, visit(1, [], 6, 6)])),
    (Rule.TEACHER, small(), rows(visits=[VISIT_0, visit(0, [1], 5, 6)])),
    (Rule.TEACHER, small([job(0, 1)], LORA), rows([], [stream(1, [0], 0, 1.25)])),
    (Rule.TEACHER, small([job(0, 0), job(1, 1)]), rows(visits=[visit(0, [0, 1], 4, 6)])),
    (Rule.LENGTH, small(), rows(visits=[VISIT_0, visit(1, [1], 5, 7)])),
    (Rule.LENGTH, small(), rows([COPY_0, copy(1, 2, 3.5)])),
    (Rule.LENGTH, small(budget=2), rows([], [stream(0, [0], 0, 3.5), stream(1, [1], 3.5, 5.5)])),
    (Rule.DEVICE, small(), rows(visits=[VISIT_0, visit(1, [1], 4, 5)])),
    (Rule.LINK, small(), rows([COPY_0, copy(1, 1, 3)])),
    (Rule.LINK, small(), rows([copy(1, 2, 4)], [stream(0, [0], 0, 3.5), visit(1, [1], 4, 5)])),
    (Rule.LINK, small(device_links=(0, 1)), rows([copy(0, 0, 2, link=1), COPY_1])),
    (
        Rule.DISK,
        small(device_links=(0, 1), host=DISK),
        rows(
            [copy(0, 0, 2, from_disk=1), copy(1, 1, 3, device=1, link=1, from_disk=1)],
            [VISIT_0, visit(1, [1], 3, 4, device=1)],
        ),
    ),
    (Rule.HOST, small(), rows([COPY_0, copy(1, 2, 4, from_disk=1)])),
    (Rule.HOST, small(host=HostTier(8, 2, initial=(0, 1))), rows([COPY_0, copy(1, 2, 4, from_disk=1)])),
    (Rule.HOST, small(host=HostTier(8, 2, initial=(0,))), rows()),
    (Rule.COPY, small(), rows([COPY_0, COPY_1, copy(0, 4, 6)])),
    (Rule.EVICTION, small(), rows(evictions=[evict(0, 3)])),
    (Rule.EVICTION, small(), rows(evictions=[evict(0, 5), evict(0, 6)])),
    (Rule.RESIDENT, small(), rows([COPY_0])),
    (Rule.RESIDENT, small(), rows(visits=[VISIT_0, visit(1, [1], 5, 6)], copies=[COPY_0, copy(1, 4, 6)])),
    (Rule.RESIDENT, small([job(0, 1)], LORA), rows([copy(1, 0, 1)], [visit(1, [0], 1, 2)])),
    (Rule.RESIDENT, small([job(0, 1), job(1, 2)], LORAS), rows(COPIED[:2], [visit(1, [0, 1], 3, 5)])),
    (Rule.EVICTION, small([job(0, 1), job(1, 2)], LORAS), rows(COPIED, [visit(1, [0, 1], 3, 5)], [evict(2, 4)])),
    (Rule.BUDGET, small(budget=7), rows()),
    (Rule.BUDGET, small(budget=5), rows([COPY_0], [VISIT_0, stream(1, [1], 5, 7.25)])),
]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_schedule_has_no_fault(name: str) -> None:
    trace, schedule = RIGHT[name]
    assert check(trace, schedule) == []


@pytest.mark.parametrize(("rule", "trace", "schedule"), WRONG)
def test_a_planted_fault_is_found_and_is_the_only_one(rule: Rule, trace: Case, schedule: Schedule) -> None:
    assert {fault.rule for fault in check(trace, schedule)} == {rule}


def test_each_rule_has_a_planted_fault() -> None:
    assert {rule for rule, _, _ in WRONG} == set(Rule)


def test_a_schedule_survives_its_file_as_rows(tmp_path: Path) -> None:
    written = rows(evictions=[evict(0, 5)])
    write_schedule(written, tmp_path / "logs" / "one.json")
    assert read_schedule(tmp_path / "logs" / "one.json") == written
    assert (tmp_path / "logs" / "one.json").read_text().startswith('{"copies":[[0,0,0,0,2000000000,0],')


@pytest.mark.parametrize("text", ["", "{}[]", '{"copies":[[0]]}', '{"visits":[[0,0,2,0,1,[0]]]}'])
def test_a_file_that_is_no_schedule_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(ConfigError, match=r"one\.json"):
        read_schedule(tmp_path / "one.json")
