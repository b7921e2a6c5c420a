"""Who is idle, which links to look at and which teachers wait, kept up to date event by event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, islice

from distill.teacher_manager.planning.outlook import Outlook
from distill.teacher_manager.timeline.case import Job
from distill.teacher_manager.timeline.decisions import (
    Announced,
    Arrived,
    CopyEnded,
    CopyFailed,
    DeviceBack,
    DeviceLost,
    Dropped,
    Event,
    LinkReleased,
    VisitEnded,
    VisitFailed,
    Withdrawn,
)


class Roster:
    """What the policy reads to see whom an instant concerns. Lost devices are in none of the lists."""

    def __init__(self, outlook: Outlook) -> None:
        system = outlook.system
        self._outlook = outlook
        self.devices_of: list[list[int]] = [[] for _ in system.links]
        """By link, without lost devices."""
        for device in system.devices:
            self.devices_of[device.link].append(device.id)
        self.idle: dict[int, None] = {device.id: None for device in system.devices}
        """Devices on no visit, the longest idle first."""
        self.open: dict[int, None] = {link.id: None for link in system.links if self.devices_of[link.id]}
        """Idle links of at least one device, the longest idle first."""
        self.look: dict[int, None] = {}
        """Links to look at."""
        self.absent: dict[int, None] = {}
        """Teachers with jobs that no device holds or is about to, the longest absent first."""
        self.held: dict[int, int] = {}
        """Absent teachers that are left waiting on purpose -> when to look again (ns)."""
        self._later: list[tuple[int, int]] = []
        """Heap of (ns, link): when a copy is to start over it, if it is still idle then ..."""
        self._first_look: dict[int, int] = {}
        """... and by link the earliest of those."""
        self._expected: dict[int, None] = {}
        """As `absent`, with rollouts only."""
        self._crowded: dict[int, None] = {}
        """Teachers whose queue may be worth one more device."""
        self._serving: dict[int, tuple[Job, ...]] = {}
        """By device: the jobs of its visit."""
        self._left: dict[int, None] = {}
        """Links that may have been given up with a visit or a device."""
        self._searched = False
        """All idle links were looked at since the last event."""
        self.retime()

    def retime(self) -> None:
        """Speeds changed."""
        system = self._outlook.system
        fastest = max(link.bytes_per_s for link in system.links)
        self._shortest_copy_s = [teacher.bytes / fastest for teacher in system.teachers]
        self.review(range(len(system.teachers)))

    # What the policy decides.

    def starts(self, device: int, jobs: Sequence[Job]) -> None:
        """A visit."""
        self._serving[device] = tuple(jobs)
        self._outlook.demand.take(jobs)
        self.review({job.teacher for job in jobs})
        del self.idle[device]

    def next_links(self, first: Iterable[int]) -> list[int]:
        """Links to look at now: `first`, and of the others as many as an instant allows."""
        links = list(dict.fromkeys(first))
        for link in links:
            self.look.pop(link, None)
        left = self._outlook.settings.looks_at_once
        while self.look and left > 0:
            link = next(iter(self.look))
            del self.look[link]
            links.append(link)
            left -= len(self.devices_of[link])
        return links

    def look_again(self, link: int, at_ns: int) -> None:
        """Whatever happens until then."""
        if at_ns < self._first_look.get(link, at_ns + 1):
            self._first_look[link] = at_ns
            heappush(self._later, (at_ns, link))

    def pass_over(self, link: int) -> None:
        """Nobody who waits fits behind it: others are to be asked before it."""
        del self.open[link]
        self.open[link] = None

    def wake_ns(self) -> int | None:
        """When to be asked again if nothing happens."""
        if not self.look and not self.held and self.absent and self._is_quiet() and not self._searched:
            self._searched = True
            self.look.update(self.open)
        times = list(self.held.values())
        if self._later:
            times.append(self._later[0][0])
        if self.look:
            times.append(self._outlook.now_ns + 1)
        return min(times, default=None)

    def _is_quiet(self) -> bool:
        """Nothing is under way that would end and have somebody looked at."""
        return len(self.idle) == self._outlook.live and len(self.open) == sum(map(bool, self.devices_of))

    # What happens.

    def enter(self, events: Sequence[Event]) -> list[int]:
        """The devices to look at; the links go to `look`."""
        outlook = self._outlook
        devices: dict[int, None] = {}
        news: set[int] = set()
        for event in events:
            self._enter_one(event, devices, news)
        for link in self._left:
            if link not in self.open and outlook.fleet.transfers[link] is None:
                self._release(link)
        self._left.clear()
        self._searched = self._searched and not events
        self.review(news)
        for teacher in news:
            devices.update(dict.fromkeys(self.idle_holders(teacher)))
        while self._later and self._later[0][0] <= outlook.now_ns:
            at_ns, link = heappop(self._later)
            if self._first_look.get(link) == at_ns:
                del self._first_look[link]
            if link in self.open:
                self.look[link] = None
        due = [teacher for teacher, at_ns in self.held.items() if at_ns <= outlook.now_ns]
        for teacher in due:
            del self.held[teacher]
        if due or any(each in self.absent or each in self._expected or each in self._crowded for each in news):
            self.look.update(dict.fromkeys(islice(self.open, outlook.settings.look_at_links)))
        return list(devices)

    def _enter_one(self, event: Event, devices: dict[int, None], news: set[int]) -> None:
        outlook, demand = self._outlook, self._outlook.demand
        match event:
            case Announced(teacher=teacher):
                demand.announce(event)
                news.add(teacher)
            case Arrived(job=job):
                demand.arrive(event)
                news.add(job.teacher)
            case Withdrawn(rollout=rollout):
                news.update(_known(demand.withdraw(rollout)))
            case Dropped(job=job):
                news.update(_known(demand.drop(job)))
            case CopyEnded(link=link, device=device, item=item):
                outlook.copy_ended(device, item)
                self.review(outlook.members[item])
                devices[device] = None
                self._release(link)
            case CopyFailed(link=link, device=device, item=item):
                outlook.copy_failed(device, item)
                news.update(outlook.members[item])
                devices[device] = None
                self._release(link)
            case LinkReleased(link=link):
                self._release(link)
            case VisitEnded(device=device):
                self._visit_over(device, (), news)
                devices[device] = None
            case VisitFailed(device=device, jobs=jobs):
                self._visit_over(device, jobs, news)
                devices[device] = None
            case DeviceLost(device=device):
                self._lose(device, news)
            case DeviceBack(device=device):
                self._restore(device)
                devices[device] = None

    def _visit_over(self, device: int, again: Sequence[int], news: set[int]) -> None:
        self._wait_again(device, again, news)
        link = self._outlook.system.devices[device].link
        self.idle[device] = self.look[link] = self._left[link] = None

    def _wait_again(self, device: int, again: Sequence[int], news: set[int]) -> None:
        """Of the visit there; the other jobs are done."""
        demand = self._outlook.demand
        for job in self._serving.pop(device, ()):
            if job.id in again:
                demand.wait(job)
                news.add(job.teacher)
            else:
                demand.forget([job.id])

    def _lose(self, device: int, news: set[int]) -> None:
        outlook, link = self._outlook, self._outlook.system.devices[device].link
        self._wait_again(device, [job.id for job in self._serving.get(device, ())], news)
        outlook.lost(device)
        self.idle.pop(device, None)
        self.devices_of[link].remove(device)
        if not self.devices_of[link]:
            self.open.pop(link, None)
            self.look.pop(link, None)
        self._left[link] = None
        news.update(teacher for teacher, queue in enumerate(outlook.demand.queues) if queue.jobs or queue.announced)

    def _restore(self, device: int) -> None:
        outlook, link = self._outlook, self._outlook.system.devices[device].link
        outlook.back(device)
        self.idle[device] = None
        self.devices_of[link] = sorted([*self.devices_of[link], device])
        self.look[link] = self._left[link] = None
        self.review(range(len(outlook.system.teachers)))

    def _release(self, link: int) -> None:
        if self.devices_of[link]:
            self.open[link] = self.look[link] = None
        if self._outlook.system.host is not None:  # others may have waited for the disk
            self.look.update(self.open)

    def idle_holders(self, teacher: int) -> Iterator[int]:
        """Idle devices on which it is usable, as many as it has jobs."""
        outlook = self._outlook
        jobs = len(outlook.demand.queues[teacher].jobs)
        if not jobs:
            return iter(())
        holders = sorted(outlook.fleet.holders[outlook.system.needs[teacher][-1]])
        usable = (each for each in holders if each in self.idle and not outlook.fleet.missing(each, teacher))
        return islice(usable, jobs)

    def review(self, teachers: Iterable[int]) -> None:
        """Their queues or holders changed: who waits for a device?"""
        outlook = self._outlook
        for teacher in teachers:
            queue, holders = outlook.demand.queues[teacher], outlook.holders(teacher)
            share_s = outlook.work_s(queue.work, 0) / (holders + 1)
            crowded = share_s >= outlook.settings.replicate_copies * self._shortest_copy_s[teacher]
            homeless = not outlook.has_home(teacher)
            _keep(self.absent, teacher, not holders and bool(queue.jobs) and not homeless)
            _keep(self._expected, teacher, not holders and not queue.jobs and queue.announced > 0 and not homeless)
            _keep(self._crowded, teacher, holders > 0 and crowded)
            if teacher not in self.absent:
                self.held.pop(teacher, None)

    def wanted(self, device: int, critical: int | None) -> list[int]:
        """Teachers that the device might be given, as many as are compared."""
        outlook = self._outlook
        first = [] if critical is None else [critical]
        others = (each for each in chain(self.absent, self._crowded, self._expected) if each != critical)
        wanted = chain(first, others)
        if not outlook.fits_all(device):
            wanted = (each for each in wanted if outlook.fits(device, each))
        return list(islice(wanted, outlook.settings.most_candidates))

    def streamable(self, device: int) -> list[int]:
        """The same of absent teachers that it could stream."""
        outlook = self._outlook
        able = (each for each in self.absent if outlook.can_stream(device, each))
        return list(islice(able, outlook.settings.most_candidates))


def _known(teacher: int | None) -> tuple[int, ...]:
    return () if teacher is None else (teacher,)


def _keep(members: dict[int, None], teacher: int, belongs: bool) -> None:
    if belongs:
        members[teacher] = None
    else:
        members.pop(teacher, None)
