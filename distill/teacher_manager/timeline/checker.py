"""Judges a schedule against its trace. It trusts nobody: it shares no rule and no arithmetic with the simulator.

Everything follows from the rows. At one instant the order is: ends, evictions, starts of copies, starts of visits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from distill.teacher_manager.timeline.case import Case, Kind
from distill.teacher_manager.timeline.schedule import CopyRow, EvictionRow, Mode, Schedule, VisitRow

_Row = TypeVar("_Row", CopyRow, EvictionRow, VisitRow)


class Rule(StrEnum):
    """What a schedule may break."""

    NAME = "a row names a device, link, object, teacher or job that does not exist"
    ONCE = "each job is served exactly once"
    ARRIVAL = "a visit starts after its jobs arrived, and has jobs"
    TEACHER = "a job is served by its own teacher; adapters and bases are not streamed"
    LENGTH = "a visit or a copy lasts as long as its work or its bytes take"
    DEVICE = "a device is on one visit at a time"
    LINK = "a link carries one transfer at a time, to its own devices"
    DISK = "the disk is read by one transfer at a time"
    HOST = "an object is read from disk when, and only when, it is not in host memory"
    COPY = "an object that is there or coming is not copied again"
    EVICTION = "only what is there and unused is evicted"
    RESIDENT = "a resident visit has all its objects from start to end"
    BUDGET = "weights and stream buffers fit into the device at every instant"


@dataclass(frozen=True)
class Fault:
    rule: Rule
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}"


@dataclass
class _Transfer:
    """The bytes of a copy, or of a stream until its last layer is read."""

    name: str
    link: int
    item: int
    start_ns: int
    end_ns: int
    copy: CopyRow | None
    from_disk: bool = False
    """As the replay of host memory finds it."""


def check(case: Case, schedule: Schedule) -> list[Fault]:
    """All faults; none means that the schedule is one of the model and that `metrics.measure` may be believed."""
    faults = list(_unknown_names(case, schedule))
    if faults:
        return faults
    faults += _job_faults(case, schedule.visits)
    transfers = _transfers(case, schedule)
    faults += _HostReplay(case, transfers).faults
    faults += _length_faults(case, schedule, transfers)
    faults += _overlap_faults(case, schedule, transfers)
    copies, evictions = _by_device(schedule.copies), _by_device(schedule.evictions)
    visits = _by_device(schedule.visits)
    for device in range(len(case.system.devices)):
        faults += _DeviceReplay(case, copies[device], evictions[device], visits[device]).faults
    return faults


def _by_device(rows: Iterable[_Row]) -> dict[int, list[_Row]]:
    grouped: dict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        grouped[row.device].append(row)
    return grouped


def _unknown_names(case: Case, schedule: Schedule) -> Iterator[Fault]:
    devices, links = range(len(case.system.devices)), range(len(case.system.links))
    teachers, jobs = range(len(case.system.teachers)), range(len(case.jobs))
    for index, copy in enumerate(schedule.copies):
        if copy.device not in devices or copy.link not in links or copy.item not in teachers:
            yield Fault(Rule.NAME, f"copies[{index}]")
    for index, eviction in enumerate(schedule.evictions):
        if eviction.device not in devices or eviction.item not in teachers:
            yield Fault(Rule.NAME, f"evictions[{index}]")
    for index, visit in enumerate(schedule.visits):
        if visit.device not in devices or visit.teacher not in teachers or any(id not in jobs for id in visit.jobs):
            yield Fault(Rule.NAME, f"visits[{index}]")


def _job_faults(case: Case, visits: Sequence[VisitRow]) -> Iterator[Fault]:
    served = Counter(id for visit in visits for id in visit.jobs)
    for job in case.jobs:
        if served[job.id] != 1:
            yield Fault(Rule.ONCE, f"job {job.id} is served {served[job.id]} times")
    for index, visit in enumerate(visits):
        kind = case.system.teachers[visit.teacher].kind
        if visit.mode is Mode.STREAM and kind in (Kind.LORA, Kind.BASE):
            yield Fault(Rule.TEACHER, f"visits[{index}] streams {kind} {visit.teacher}")
        if not visit.jobs:
            yield Fault(Rule.ARRIVAL, f"visits[{index}] has no jobs")
        for job in (case.jobs[id] for id in visit.jobs):
            if job.teacher != visit.teacher and (
                visit.mode is Mode.STREAM or not _one_base(case, job.teacher, visit.teacher)
            ):
                yield Fault(Rule.TEACHER, f"visits[{index}], job {job.id} of teacher {job.teacher}")
            if job.arrival_ns > visit.start_ns:
                yield Fault(Rule.ARRIVAL, f"visits[{index}], job {job.id} arrives at {job.arrival_ns} ns")


def _up(numerator: int, denominator: int) -> int:
    return (numerator + denominator - 1) // denominator


def _work_ns(case: Case, visit: VisitRow) -> int:
    """Each job is rounded up by itself."""
    teachers, speed = case.system.teachers, case.system.devices[visit.device].flops_per_s
    jobs = [case.jobs[id] for id in visit.jobs]
    return sum(_up(2 * job.tokens * teachers[job.teacher].active_params * 1_000_000_000, speed) for job in jobs)


def _one_base(case: Case, one: int, other: int) -> bool:
    """Adapters of one base, and that base, are served by one forward pass."""
    bases = [each.id if each.base is None else each.base for each in (case.system.teachers[t] for t in (one, other))]
    return bases[0] == bases[1]


def _bytes_ns(case: Case, transfer: _Transfer) -> int:
    speeds = [case.system.links[transfer.link].bytes_per_s]
    if transfer.from_disk and case.system.host:
        speeds.append(case.system.host.disk_bytes_per_s)
    return _up(case.system.teachers[transfer.item].bytes * 1_000_000_000, min(speeds))


def _transfers(case: Case, schedule: Schedule) -> list[_Transfer]:
    """Of the copies and then of the streams, each in the order of the rows."""
    found = [
        _Transfer(f"copies[{index}]", copy.link, copy.item, copy.start_ns, copy.end_ns, copy)
        for index, copy in enumerate(schedule.copies)
    ]
    for index, visit in enumerate(schedule.visits):
        if visit.mode is Mode.STREAM:
            last_layer_ns = _up(_work_ns(case, visit), case.system.teachers[visit.teacher].layers)
            link = case.system.devices[visit.device].link
            end_ns = visit.end_ns - last_layer_ns
            found.append(_Transfer(f"visits[{index}]", link, visit.teacher, visit.start_ns, end_ns, None))
    return found


def _length_faults(case: Case, schedule: Schedule, transfers: Sequence[_Transfer]) -> Iterator[Fault]:
    streamed = {transfer.name: transfer for transfer in transfers if transfer.copy is None}
    for transfer in transfers:
        if transfer.copy is not None and transfer.end_ns - transfer.start_ns != _bytes_ns(case, transfer):
            yield Fault(Rule.LENGTH, transfer.name)
    for index, visit in enumerate(schedule.visits):
        expected_ns = _work_ns(case, visit)
        if visit.mode is Mode.STREAM:
            copy_ns = _bytes_ns(case, streamed[f"visits[{index}]"])
            shorter, longer = sorted((copy_ns, expected_ns))
            expected_ns = longer + _up(shorter, case.system.teachers[visit.teacher].layers)
        if visit.end_ns - visit.start_ns != expected_ns:
            yield Fault(Rule.LENGTH, f"visits[{index}]")


def _overlap_faults(case: Case, schedule: Schedule, transfers: Sequence[_Transfer]) -> Iterator[Fault]:
    for index, copy in enumerate(schedule.copies):
        if case.system.devices[copy.device].link != copy.link:
            yield Fault(Rule.LINK, f"copies[{index}] to device {copy.device} over link {copy.link}")
    spans: dict[tuple[Rule, str], list[tuple[int, int]]] = defaultdict(list)
    for visit in schedule.visits:
        spans[Rule.DEVICE, f"device {visit.device}"].append((visit.start_ns, visit.end_ns))
    for transfer in transfers:
        spans[Rule.LINK, f"link {transfer.link}"].append((transfer.start_ns, transfer.end_ns))
        if transfer.from_disk:
            spans[Rule.DISK, "the disk"].append((transfer.start_ns, transfer.end_ns))
    for (rule, name), busy in spans.items():
        yield from _overlaps(rule, name, busy)


def _overlaps(rule: Rule, name: str, spans: Iterable[tuple[int, int]]) -> Iterator[Fault]:
    busy_until = -1
    for start_ns, end_ns in sorted(spans):
        if start_ns < max(busy_until, 0):
            yield Fault(rule, f"{name} at {start_ns} ns")
        busy_until = max(busy_until, end_ns)


class _HostReplay:
    """Follows host memory through all transfers, and finds which of them read the disk."""

    def __init__(self, case: Case, transfers: Sequence[_Transfer]) -> None:
        self.faults: list[Fault] = []
        self._bytes = [teacher.bytes for teacher in case.system.teachers]
        if case.system.host is None:
            wrong = [each for each in transfers if each.copy is not None and each.copy.from_disk]
            self.faults += [Fault(Rule.HOST, f"{each.name} reads a disk that is not there") for each in wrong]
            return
        self._budget = case.system.host.budget_bytes
        self._memory = dict.fromkeys(case.system.host.initial, -1)
        """Object -> stamp."""
        self._reserved = 0
        self._read_by: list[int] = []
        """Objects that transfers under way read from host memory; one can be there twice."""
        self._kept: set[str] = set()
        """Transfers whose object has a place reserved."""
        order = [(each.end_ns, 0, index) for index, each in enumerate(transfers)]
        order += [(each.start_ns, 1, index) for index, each in enumerate(transfers)]
        for t_ns, is_start, index in sorted(order):
            if is_start:
                self._start(transfers[index], t_ns)
            elif t_ns > transfers[index].start_ns:
                self._end(transfers[index], t_ns)

    def _start(self, transfer: _Transfer, t_ns: int) -> None:
        item = transfer.item
        transfer.from_disk = item not in self._memory
        if transfer.copy is not None and bool(transfer.copy.from_disk) != transfer.from_disk:
            self.faults.append(Fault(Rule.HOST, f"{transfer.name} at {t_ns} ns"))
        if not transfer.from_disk:
            self._memory[item] = t_ns
            self._read_by.append(item)
        elif self._bytes[item] <= self._budget:
            self._drop_for(item)
            if self._bytes[item] <= self._room():
                self._reserved += self._bytes[item]
                self._kept.add(transfer.name)

    def _end(self, transfer: _Transfer, t_ns: int) -> None:
        if not transfer.from_disk:
            self._read_by.remove(transfer.item)
        elif transfer.name in self._kept:
            self._reserved -= self._bytes[transfer.item]
            self._memory[transfer.item] = t_ns

    def _drop_for(self, item: int) -> None:
        oldest_first = sorted((stamp, other) for other, stamp in self._memory.items() if other not in self._read_by)
        while oldest_first and self._bytes[item] > self._room():
            del self._memory[oldest_first.pop(0)[1]]

    def _room(self) -> int:
        return self._budget - self._reserved - sum(self._bytes[item] for item in self._memory)


class _DeviceReplay:
    """Follows one device's memory through its copies, evictions and visits."""

    def __init__(
        self,
        case: Case,
        copies: Sequence[CopyRow],
        evictions: Sequence[EvictionRow],
        visits: Sequence[VisitRow],
    ) -> None:
        self.faults: list[Fault] = []
        self._teachers = case.system.teachers
        self._devices = case.system.devices
        self._jobs = case.jobs
        self._held: dict[int, bool] = {}
        """Object -> it is usable, not still coming."""
        self._visits: list[VisitRow] = []
        """Those under way: at most one, where the schedule is right."""
        rows: list[tuple[int, int, CopyRow | EvictionRow | VisitRow]] = []
        rows += [(copy.end_ns, 0, copy) for copy in copies] + [(copy.start_ns, 2, copy) for copy in copies]
        rows += [(visit.end_ns, 0, visit) for visit in visits] + [(visit.start_ns, 3, visit) for visit in visits]
        rows += [(eviction.t_ns, 1, eviction) for eviction in evictions]
        rows.sort(key=lambda each: each[:2])
        for _, place, row in rows:
            self._follow(row, starts=place > 0)

    def _follow(self, row: CopyRow | EvictionRow | VisitRow, *, starts: bool) -> None:
        match row:
            case EvictionRow():
                self._evict(row)
            case CopyRow() if starts:
                if row.item in self._held:
                    self._fault(Rule.COPY, f"object {row.item}", row.device, row.start_ns)
                self._held.setdefault(row.item, False)
                self._weigh(row.device, row.start_ns)
            case CopyRow():
                if row.item in self._held:
                    self._held[row.item] = True
            case VisitRow() if starts:
                self._visits.append(row)
                if row.mode is Mode.RESIDENT and not all(self._held.get(item) for item in self._needed(row)):
                    self._fault(Rule.RESIDENT, f"teacher {row.teacher}", row.device, row.start_ns)
                self._weigh(row.device, row.start_ns)
            case VisitRow():
                self._visits = [visit for visit in self._visits if visit is not row]

    def _evict(self, row: EvictionRow) -> None:
        used = {item for visit in self._visits if visit.mode is Mode.RESIDENT for item in self._needed(visit)}
        if not self._held.get(row.item) or row.item in used:
            self._fault(Rule.EVICTION, f"object {row.item}", row.device, row.t_ns)
        self._held.pop(row.item, None)

    def _needed(self, visit: VisitRow) -> set[int]:
        teachers = {visit.teacher, *(self._jobs[id].teacher for id in visit.jobs)}
        bases = {self._teachers[teacher].base for teacher in teachers}
        return teachers | {base for base in bases if base is not None}

    def _weigh(self, device: int, t_ns: int) -> None:
        total = sum(self._teachers[item].bytes for item in self._held)
        for teacher in (self._teachers[visit.teacher] for visit in self._visits if visit.mode is Mode.STREAM):
            total += min(teacher.bytes, 2 * _up(teacher.bytes, teacher.layers))
        if total > self._devices[device].budget_bytes:
            self._fault(Rule.BUDGET, f"{total} bytes", device, t_ns)

    def _fault(self, rule: Rule, what: str, device: int, t_ns: int) -> None:
        self.faults.append(Fault(rule, f"{what} on device {device} at {t_ns} ns"))
