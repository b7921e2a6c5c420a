"""Simple policies that load a teacher when a device is to visit it, and not before.

They are what other systems do, written down exactly, and the yardstick of a scheduler that knows what was announced.
A `Chooser` says whom a free device serves; `OnDemand` places the visit, loads what is missing and starts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from distill.teacher_manager.timeline.case import Kind, System
from distill.teacher_manager.timeline.choosers import Chooser
from distill.teacher_manager.timeline.decisions import (
    Arrived,
    Copy,
    CopyEnded,
    Decision,
    Event,
    Evict,
    LinkReleased,
    Stream,
    Visit,
    VisitEnded,
)
from distill.teacher_manager.timeline.fleet import Fleet


@dataclass(frozen=True, slots=True)
class _Transfer:
    """In a link's list: a copy to a device that waits for it, or its whole visit as a stream."""

    device: int
    item: int
    stream: Stream | None = None


class OnDemand:
    """A device that is given a visit waits for its copies, one list a link, first in first out; then it computes.

    With `stream`, dense and moe teachers are never copied: their visits are streams. With `one_teacher`, a device gives
    up everything else before it loads; else it evicts the least recently used until the copy fits.
    """

    def __init__(self, system: System, chooser: Chooser, *, stream: bool = False, one_teacher: bool = False) -> None:
        self._system = system
        self._chooser = chooser
        self._stream = stream
        self._one_teacher = one_teacher
        self._free = set(range(len(system.devices)))
        """Devices that neither are on a visit nor wait for one."""
        self._pending: dict[int, Visit] = {}
        """By device: the visit that waits for copies."""
        self._lists = [deque[_Transfer]() for _ in system.links]
        self._look_at: set[int] = set()
        """Links with a list whose head they may be able to start."""

    def decide(self, now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        for device in sorted(self._take(events)):
            if device in self._pending and not fleet.missing(device, self._pending[device].teacher):
                yield self._pending.pop(device)
        yield from self._assign(fleet)
        heads = [(self._lists[link][0].stream is not None, link) for link in self._look_at]
        for _, link in sorted(heads):  # copies before streams
            yield from self._start_head(link, fleet)

    def _take(self, events: Sequence[Event]) -> Set[int]:
        """Enters the events; the devices to which a copy ended."""
        loaded: set[int] = set()
        for event in events:
            match event:
                case Arrived(job=job):
                    self._chooser.arrive(job)
                case VisitEnded(device=device, jobs=jobs):
                    self._free.add(device)
                    self._chooser.finish(jobs)
                case CopyEnded(link=link, device=device):
                    self._look_again(link)
                    loaded.add(device)
                case LinkReleased(link=link):
                    self._look_again(link)
                case _:
                    pass
        return loaded

    def _look_again(self, link: int) -> None:
        if self._lists[link]:
            self._look_at.add(link)

    def _assign(self, fleet: Fleet) -> Iterator[Decision]:
        while self._free:
            choice = self._chooser.next(self._free, fleet)
            if choice is None:
                return
            device, teacher = choice.device, choice.teacher
            self._free.discard(device)
            visit = Visit(device, teacher, tuple(job.id for job in choice.jobs))
            link = fleet.devices[device].link
            if self._stream and self._system.teachers[teacher].kind in (Kind.DENSE, Kind.MOE):
                self._lists[link].append(_Transfer(device, teacher, Stream(device, teacher, visit.jobs)))
            elif missing := fleet.missing(device, teacher):
                self._pending[device] = visit
                self._lists[link].extend(_Transfer(device, item) for item in missing)
            else:
                yield visit
                continue
            self._look_at.add(link)

    def _start_head(self, link: int, fleet: Fleet) -> Iterator[Decision]:
        head = self._lists[link][0]
        if fleet.transfers[link] is not None:
            self._look_at.discard(link)
        elif fleet.can_transfer(head.device, head.item):  # else the disk is busy: look again at the next instant
            self._look_at.discard(link)
            self._lists[link].popleft()
            yield from self._evict_for(head, fleet)
            yield Copy(head.device, head.item) if head.stream is None else head.stream

    def _evict_for(self, transfer: _Transfer, fleet: Fleet) -> Iterator[Evict]:
        device = fleet.devices[transfer.device]
        if transfer.stream is None:
            wanted = self._system.teachers[transfer.item].bytes
            kept = self._system.needs[self._pending[transfer.device].teacher]
        else:
            wanted, kept = self._system.stream_bytes(transfer.item), ()
        for item in sorted(device.resident, key=lambda item: (device.resident[item], item)):
            if device.free_bytes >= wanted and not self._one_teacher:
                return
            if item not in kept:
                yield Evict(device.id, item)
