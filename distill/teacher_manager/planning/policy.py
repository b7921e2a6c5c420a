"""The scheduler: events and a clock in, decisions out. It knows the system, what was announced and what arrived.

In each instant, in this order: idle devices serve, idle links copy, devices that have nothing to serve stream. What
each step chooses is said in `serving`, `loading` and `urgency`, who is asked when in `roster`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from distill.teacher_manager.planning.loading import Later, Load, choose_load, displaced_next, held_until_ns, outstayed
from distill.teacher_manager.planning.outlook import Outlook
from distill.teacher_manager.planning.roster import Roster
from distill.teacher_manager.planning.serving import (
    choose_job,
    choose_stream,
    companions,
    jobs_within,
    stream_jobs,
    stream_pays,
    visit_jobs,
)
from distill.teacher_manager.planning.settings import Settings
from distill.teacher_manager.planning.urgency import critical_teacher
from distill.teacher_manager.timeline.case import Job, System
from distill.teacher_manager.timeline.decisions import Copy, Decision, Event, Evict, Stream, Visit, Wake
from distill.teacher_manager.timeline.fleet import Fleet


class IndexPolicy:
    """A `decisions.Policy`. It looks only at the devices and links that an event concerns, so that a decision costs the
    same in a fleet of any size, up to the number of teachers that wait for a device."""

    def __init__(self, system: System, settings: Settings | None = None) -> None:
        self._outlook = Outlook(system, settings or Settings())
        self._roster = Roster(self._outlook)
        self._most = self._outlook.settings.most_candidates

    def retime(self, system: System) -> None:
        """Other speeds from the next decision on. Raises ValueError where more differs."""
        self._outlook.retime(system)
        self._roster.retime()

    def decide(self, now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterator[Decision]:
        outlook, roster = self._outlook, self._roster
        outlook.now_ns, outlook.fleet = now_ns, fleet
        devices = roster.enter(events)
        critical = critical_teacher(outlook, roster.absent, 0) if roster.absent else None
        streaming: int | None = None  # where there is a disk, copies start before streams
        leaving: dict[int, int] = {}
        for device in devices:
            if device in roster.idle:
                if streaming is None and self._streams_now(device, critical):
                    streaming = device
                else:
                    outstays = set(outstayed(outlook, device, roster.wanted(device, critical), critical))
                    if outstays:
                        leaving[device] = outlook.system.devices[device].link
                    yield from self._serve(device, critical, outstays)
        links = roster.next_links(leaving.values())
        for link in links:
            if link in roster.open and (streaming is None or link != fleet.devices[streaming].link):
                yield from self._load(link, critical)
        if streaming is not None and critical is not None:
            if self._streams_now(streaming, critical):
                yield from self._stream(streaming, critical)
            else:  # a copy took the disk
                yield from self._serve(streaming, critical)
        for link in links:
            yield from self._stream_idle(link)
        for device in leaving:  # nothing came after all
            if device in roster.idle:
                yield from self._serve(device, critical)
        wake_ns = roster.wake_ns()
        if wake_ns is not None:
            yield Wake(wake_ns)

    def _streams_now(self, device: int, critical: int | None) -> bool:
        outlook = self._outlook
        return critical is not None and outlook.may_stream(device, critical) and stream_pays(outlook, device, critical)

    def _serve(self, device: int, critical: int | None, without: Collection[int] = ()) -> Iterator[Decision]:
        outlook, roster = self._outlook, self._roster
        displaced = set(displaced_next(outlook, device, roster.wanted(device, critical), critical))
        job = choose_job(outlook, device, displaced, stressed=critical is not None, without=without)
        if job is not None:
            jobs = self._batch(device, job, without) if outlook.settings.visit_tokens else [job]
            roster.starts(device, jobs)
            yield Visit(device, job.teacher, tuple(each.id for each in jobs))

    def _batch(self, device: int, first: Job, without: Collection[int]) -> list[Job]:
        """A visit: the jobs of its teacher, and in the room that is left those of others in the same forward pass."""
        outlook, roster = self._outlook, self._roster
        jobs = visit_jobs(outlook, first, sum(1 for _ in roster.idle_holders(first.teacher)))
        for teacher in companions(outlook, device, first.teacher, without):
            left = outlook.settings.visit_tokens - sum(job.tokens for job in jobs)
            idle = sum(1 for _ in roster.idle_holders(teacher))
            jobs += jobs_within(outlook, outlook.demand.queues[teacher].first_due(), left, idle)
        return jobs

    def _load(self, link: int, critical: int | None) -> Iterator[Decision]:
        """The device that runs dry first goes first."""
        outlook, roster = self._outlook, self._roster
        best, fits = None, False
        for device in roster.devices_of[link]:
            wanted = roster.wanted(device, critical)
            fits = fits or any(each in roster.absent for each in wanted)
            load = choose_load(outlook, device, wanted, critical)
            if isinstance(load, Later):
                roster.look_again(link, load.at_ns)
            elif load is not None and (best is None or load.ready_s < best.ready_s):
                best = load
        if best is not None:
            yield from self._bring(best)
            return
        self._hold(roster.devices_of[link][0])
        if roster.absent and not fits:
            roster.pass_over(link)

    def _bring(self, load: Load) -> Iterator[Decision]:
        outlook, device = self._outlook, load.device
        for item in load.victims:
            yield from self._evict(device, item)
        item = outlook.fleet.missing(device, load.teacher)[0]
        outlook.copy_starts(device, item)
        self._roster.review(outlook.members[item])
        del self._roster.open[outlook.fleet.devices[device].link]
        yield Copy(device, item)

    def _evict(self, device: int, item: int) -> Iterator[Decision]:
        """On real servers adapters go before their base does, of which they are a part there."""
        resident = self._outlook.fleet.devices[device].resident
        if item not in resident:  # it went with its base
            return
        if self._outlook.settings.recurring:
            for adapter in self._outlook.members[item]:
                if adapter != item and adapter in resident:
                    yield from self._evict(device, adapter)
        self._outlook.evicts(device, item)
        yield Evict(device, item)
        self._roster.review(self._outlook.members[item])

    def _hold(self, device: int) -> None:
        """Remembers when those that are left waiting on purpose are to be looked at again."""
        outlook, roster = self._outlook, self._roster
        for teacher in islice(roster.absent, self._most):
            until_ns = held_until_ns(outlook, device, teacher, outlook.copy_s(device, teacher))
            if until_ns > outlook.now_ns:
                roster.held[teacher] = until_ns

    def _stream_idle(self, link: int) -> Iterator[Decision]:
        """Devices that have nothing to serve."""
        for device in self._roster.devices_of[link]:
            if link in self._roster.open and device in self._roster.idle:
                teacher = choose_stream(self._outlook, device, self._roster.streamable(device))
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
        jobs = stream_jobs(outlook, device, teacher, len(self._roster.idle))
        self._roster.starts(device, jobs)
        del self._roster.open[fleet.devices[device].link]
        yield Stream(device, teacher, tuple(job.id for job in jobs))


def policy_for_runs(system: System, *, visit_tokens: int) -> IndexPolicy:
    """What a run is scheduled with. `visit_tokens`: of a visit's batch; 0: one job a visit."""
    return IndexPolicy(system, Settings.for_runs(visit_tokens))
