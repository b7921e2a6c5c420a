"""The scheduler: events and a clock in, decisions out. It knows the system, what was announced and what arrived.

In each instant, in this order: idle devices serve, idle links copy, devices that have nothing to serve stream. What
each step chooses is said in `serving`, `loading` and `urgency`; here is only who is asked when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from distill.teacher_manager.planning.loading import Load, choose_load, displaced_next, held_until_ns
from distill.teacher_manager.planning.outlook import Outlook
from distill.teacher_manager.planning.serving import choose_job, choose_stream, stream_jobs, stream_pays
from distill.teacher_manager.planning.settings import Settings
from distill.teacher_manager.planning.urgency import critical_teacher
from distill.teacher_manager.timeline.case import System
from distill.teacher_manager.timeline.decisions import (
    Announced,
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
    Wake,
)
from distill.teacher_manager.timeline.fleet import Fleet


class IndexPolicy:
    """A `decisions.Policy`. It looks only at the devices and links that an event concerns, so that a decision costs the
    same in a fleet of any size, up to the number of teachers that wait for a device."""

    def __init__(self, system: System, settings: Settings | None = None) -> None:
        self._outlook = Outlook(system, settings or Settings())
        self._devices_of: list[list[int]] = [[] for _ in system.links]
        for device in system.devices:
            self._devices_of[device.link].append(device.id)
        self._most = self._outlook.settings.most_candidates
        fastest = max(link.bytes_per_s for link in system.links)
        self._shortest_copy_s = [teacher.bytes / fastest for teacher in system.teachers]
        self._idle: dict[int, None] = {device.id: None for device in system.devices}
        """Devices on no visit, the longest idle first."""
        self._open: dict[int, None] = {link.id: None for link in system.links}
        """Idle links, the longest idle first."""
        self._look: dict[int, None] = {}
        """Links to look at."""
        self._absent: dict[int, None] = {}
        """Teachers with jobs that no device holds or is about to, the longest absent first."""
        self._expected: dict[int, None] = {}
        """The same for teachers with rollouts only."""
        self._crowded: dict[int, None] = {}
        """Teachers whose queue may be worth one more device."""
        self._held: dict[int, int] = {}
        """Absent teachers that are left waiting on purpose -> when to look again (ns)."""

    def decide(self, now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        outlook = self._outlook
        outlook.now_ns, outlook.fleet = now_ns, fleet
        devices = self._enter(events)
        critical = critical_teacher(outlook, self._absent, 0) if self._absent else None
        streaming: int | None = None  # where there is a disk, copies start before streams
        for device in devices:
            if device in self._idle:
                if streaming is None and self._streams_now(device, critical):
                    streaming = device
                else:
                    yield from self._serve(device, critical)
        links = self._next_links()
        for link in links:
            if link in self._open and (streaming is None or link != fleet.devices[streaming].link):
                yield from self._load(link, critical)
        if streaming is not None and critical is not None:
            if self._streams_now(streaming, critical):
                yield from self._stream(streaming, critical)
            else:  # a copy took the disk
                yield from self._serve(streaming, critical)
        for link in links:
            yield from self._stream_idle(link)
        yield from self._wake()

    def _next_links(self) -> list[int]:
        links: list[int] = []
        left = self._outlook.settings.looks_at_once
        while self._look and left > 0:
            link = next(iter(self._look))
            del self._look[link]
            links.append(link)
            left -= len(self._devices_of[link])
        return links

    def _wake(self) -> Iterator[Decision]:
        times = list(self._held.values())
        if self._look:
            times.append(self._outlook.now_ns + 1)
        if times:
            yield Wake(min(times))

    def _enter(self, events: Sequence[Event]) -> list[int]:
        """The devices to look at; the links go to `_look`."""
        outlook, fleet = self._outlook, self._outlook.fleet
        devices: dict[int, None] = {}
        news: set[int] = set()
        for event in events:
            match event:
                case Announced(teacher=teacher):
                    outlook.demand.announce(event)
                    news.add(teacher)
                case Arrived(job=job):
                    outlook.demand.arrive(event)
                    news.add(job.teacher)
                case CopyEnded(link=link, device=device, item=item):
                    outlook.copy_ended(device, item)
                    self._review(outlook.members[item])
                    devices[device] = None
                    self._release(link)
                case LinkReleased(link=link):
                    self._release(link)
                case VisitEnded(device=device):
                    self._idle[device] = devices[device] = None
                    self._look[fleet.devices[device].link] = None
        self._review(news)
        for teacher in news:
            devices.update(dict.fromkeys(self._idle_holders(teacher)))
        due = [teacher for teacher, at_ns in self._held.items() if at_ns <= outlook.now_ns]
        for teacher in due:
            del self._held[teacher]
        if due or any(each in self._absent or each in self._expected or each in self._crowded for each in news):
            self._look.update(dict.fromkeys(islice(self._open, outlook.settings.look_at_links)))
        return list(devices)

    def _release(self, link: int) -> None:
        self._open[link] = self._look[link] = None
        if self._outlook.system.host is not None:  # others may have waited for the disk
            self._look.update(self._open)

    def _idle_holders(self, teacher: int) -> Iterator[int]:
        """Idle devices on which it is usable, as many as it has jobs."""
        outlook = self._outlook
        jobs = len(outlook.demand.queues[teacher].jobs)
        if not jobs:
            return iter(())
        holders = sorted(outlook.fleet.holders[outlook.system.needs[teacher][-1]])
        usable = (each for each in holders if each in self._idle and not outlook.fleet.missing(each, teacher))
        return islice(usable, jobs)

    def _review(self, teachers: Iterable[int]) -> None:
        """Their queues or holders changed: who waits for a device?"""
        outlook = self._outlook
        for teacher in teachers:
            queue, holders = outlook.demand.queues[teacher], outlook.holders(teacher)
            share_s = outlook.work_s(queue.work, 0) / (holders + 1)
            crowded = share_s >= outlook.settings.replicate_copies * self._shortest_copy_s[teacher]
            _keep(self._absent, teacher, not holders and bool(queue.jobs))
            _keep(self._expected, teacher, not holders and not queue.jobs and queue.announced > 0)
            _keep(self._crowded, teacher, holders > 0 and crowded)
            if teacher not in self._absent:
                self._held.pop(teacher, None)

    def _wanted(self, critical: int | None) -> list[int]:
        first = [] if critical is None else [critical]
        others = chain(self._absent, self._crowded, self._expected)
        return list(islice(chain(first, (each for each in others if each != critical)), self._most))

    def _streams_now(self, device: int, critical: int | None) -> bool:
        outlook = self._outlook
        return critical is not None and outlook.may_stream(device, critical) and stream_pays(outlook, device, critical)

    def _serve(self, device: int, critical: int | None) -> Iterator[Decision]:
        outlook = self._outlook
        displaced = set(displaced_next(outlook, device, self._wanted(critical), critical))
        job = choose_job(outlook, device, displaced, stressed=critical is not None)
        if job is not None:
            outlook.demand.take([job])
            self._review([job.teacher])
            del self._idle[device]
            yield Visit(device, job.teacher, (job.id,))

    def _load(self, link: int, critical: int | None) -> Iterator[Decision]:
        """The device that runs dry first goes first."""
        outlook, best = self._outlook, None
        wanted = self._wanted(critical)
        for device in self._devices_of[link]:
            load = choose_load(outlook, device, wanted, critical)
            if load is not None and (best is None or load.ready_s < best.ready_s):
                best = load
        if best is not None:
            yield from self._bring(best)
        else:
            self._hold(self._devices_of[link][0])

    def _bring(self, load: Load) -> Iterator[Decision]:
        outlook, device = self._outlook, load.device
        for item in load.victims:
            yield from self._evict(device, item)
        item = outlook.fleet.missing(device, load.teacher)[0]
        outlook.copy_starts(device, item)
        self._review(outlook.members[item])
        del self._open[outlook.fleet.devices[device].link]
        yield Copy(device, item)

    def _evict(self, device: int, item: int) -> Iterator[Decision]:
        self._outlook.evicts(device, item)
        yield Evict(device, item)
        self._review(self._outlook.members[item])

    def _hold(self, device: int) -> None:
        """Remembers when those that are left waiting on purpose are to be looked at again."""
        outlook = self._outlook
        for teacher in islice(self._absent, self._most):
            until_ns = held_until_ns(outlook, device, teacher, outlook.copy_s(device, teacher))
            if until_ns > outlook.now_ns:
                self._held[teacher] = until_ns

    def _stream_idle(self, link: int) -> Iterator[Decision]:
        """Devices that have nothing to serve."""
        for device in self._devices_of[link]:
            if link in self._open and device in self._idle:
                teacher = choose_stream(self._outlook, device, list(islice(self._absent, self._most)))
                if teacher is not None:
                    yield from self._stream(device, teacher)

    def _stream(self, device: int, teacher: int) -> Iterator[Decision]:
        outlook, fleet = self._outlook, self._outlook.fleet
        victims = outlook.least_worth(
            device, outlook.system.stream_bytes(teacher), list(fleet.devices[device].resident)
        )
        if victims is None:
            return
        for item in victims:
            yield from self._evict(device, item)
        jobs = stream_jobs(outlook, device, teacher, len(self._idle))
        outlook.demand.take(jobs)
        self._review([teacher])
        del self._idle[device], self._open[fleet.devices[device].link]
        yield Stream(device, teacher, tuple(job.id for job in jobs))


def _keep(members: dict[int, None], teacher: int, belongs: bool) -> None:
    if belongs:
        members[teacher] = None
    else:
        members.pop(teacher, None)
