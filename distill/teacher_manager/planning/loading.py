"""What comes next over an idle link, to which device, and what goes for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from distill.teacher_manager.planning.outlook import Outlook
from distill.teacher_manager.planning.serving import stream_is_best
from distill.teacher_manager.timeline.case import NS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A teacher that a device might be given. Times in seconds, work is this device's share of the queue."""

    score: float
    teacher: int
    announced_s: float
    copy_s: float
    urgent: bool
    queued: bool


@dataclass(frozen=True, slots=True)
class Load:
    device: int
    teacher: int
    victims: list[int]
    ready_s: float
    """Work that the device has without it."""


@dataclass(frozen=True, slots=True)
class Later:
    """A copy that is to start only when the device's present work is about to end."""

    at_ns: int


def candidates(outlook: Outlook, device: int, wanted: Iterable[int], critical: int | None) -> list[Candidate]:
    """The teachers that are worth a copy to this device, best first: what has jobs by the index work / (work + copy),
    raised by how long they wait (Duenyas and Van Oyen's rule for a server with switching times), then what is only
    announced."""
    if outlook.fleet.devices[device].coming is not None:
        return []
    found = (_candidate(outlook, device, teacher, teacher == critical) for teacher in wanted)
    return sorted((each for each in found if each is not None), key=lambda each: (-each.score, each.teacher))


def _candidate(outlook: Outlook, device: int, teacher: int, urgent: bool) -> Candidate | None:
    missing = outlook.fleet.missing(device, teacher)
    if not missing or not outlook.fits(device, teacher) or not outlook.fleet.can_transfer(device, missing[0]):
        return None
    settings, queue, holders = outlook.settings, outlook.demand.queues[teacher], outlook.holders(teacher)
    copy_s = outlook.copy_s(device, teacher)
    announced_s = outlook.work_s(queue.announced_work, device) / (holders + 1)
    coming_s = settings.announced_share * announced_s
    if not queue.jobs:
        if holders:
            return None
        return Candidate(coming_s / (coming_s + copy_s) - 1, teacher, announced_s, copy_s, False, False)
    work_s = outlook.work_s(queue.work, device) / (holders + 1)
    if holders and work_s < settings.replicate_copies * copy_s:
        return None
    if not holders and not urgent and held_until_ns(outlook, device, teacher, copy_s) > outlook.now_ns:
        return None
    mean_wait_s = queue.waited_s(outlook.now_ns) / len(queue.jobs)
    age = settings.age_weight * mean_wait_s / (4 * holders if holders else 1)
    gain_s = work_s + coming_s
    # An urgent one goes before all others, a replica waits behind the same age of a teacher that nobody serves.
    score = gain_s / (gain_s + copy_s) * (1 + age) + (1e6 if urgent else 0)
    return Candidate(score, teacher, announced_s, copy_s, urgent, True)


def held_until_ns(outlook: Outlook, device: int, teacher: int, copy_s: float) -> int:
    """Wait and see: a small queue that rollouts under way will lengthen is left to grow until its jobs have waited long
    enough to pay for the copy, or until its deadlines come near. Now, or earlier, if it is worth the copy."""
    settings, queue = outlook.settings, outlook.demand.queues[teacher]
    if settings.recurring and outlook.has_room(device, teacher):
        return outlook.now_ns
    if not queue.announced or outlook.work_s(queue.work, device) >= settings.worth_copies * copy_s:
        return outlook.now_ns
    patience_s = settings.patience_copies * copy_s - queue.waited_s(outlook.now_ns)
    slack_s = (queue.first_deadline_ns() - outlook.now_ns) / NS
    slack_s -= copy_s + outlook.work_s(queue.work, device) + settings.deadline_margin_s
    return outlook.now_ns + int(min(patience_s / len(queue.jobs), slack_s) * NS)


def choose_load(outlook: Outlook, device: int, wanted: Iterable[int], critical: int | None) -> Load | Later | None:
    """The best candidate that can come now, if now is the time. The best one with jobs is waited for: another in its
    place would only put it off."""
    ready_s = outlook.ready_s(device)
    roomy = outlook.is_roomy(device)
    for candidate in candidates(outlook, device, wanted, critical):
        if candidate.queued and ready_s == 0.0 and _streams_better(outlook, device, candidate.teacher):
            return None
        if not candidate.queued and not _runs_dry(outlook, candidate, ready_s) and not roomy:
            continue
        victims = outlook.victims(device, candidate.teacher)
        if victims is None:
            continue
        if _is_time(outlook, device, candidate, victims, ready_s):
            return Load(device, candidate.teacher, victims, ready_s)
        if candidate.queued:
            wait_s = ready_s - candidate.copy_s - outlook.settings.jitter_s
            return Later(outlook.now_ns + math.ceil(wait_s * NS)) if wait_s > 0 else None
    return None


def _streams_better(outlook: Outlook, device: int, teacher: int) -> bool:
    """For a device with nothing to serve and a teacher that nobody holds: a stream computes under its reading, and a
    copy pays only where more jobs follow."""
    if outlook.settings.recurring:
        return (
            not outlook.holders(teacher)
            and outlook.may_stream(device, teacher)
            and stream_is_best(outlook, device, teacher)
        )
    announced = outlook.demand.queues[teacher].announced
    return not announced and not outlook.holders(teacher) and outlook.may_stream(device, teacher)


def _runs_dry(outlook: Outlook, candidate: Candidate, ready_s: float) -> bool:
    return ready_s <= candidate.copy_s + outlook.settings.jitter_s


def _is_time(outlook: Outlook, device: int, candidate: Candidate, victims: list[int], ready_s: float) -> bool:
    """At once if nothing of use goes for it. Else as late as the copy still ends with the present work: until then more
    jobs come for what is there. Jobs that could be served now are displaced by an earlier deadline alone."""
    settings = outlook.settings
    runs_dry = _runs_dry(outlook, candidate, ready_s)
    if not candidate.queued:
        displaced = outlook.work_s(sum(outlook.worth(item) for item in victims), device)
        gain_s = settings.announced_share * candidate.announced_s
        return not victims or (runs_dry and gain_s > settings.prefetch_gain * displaced)
    if not any(any(outlook.claim(item)) for item in victims):
        return True
    deadline_ns = outlook.demand.queues[candidate.teacher].first_deadline_ns()
    if candidate.urgent and deadline_ns < outlook.first_deadline_ns(victims):
        return True
    if outlook.is_turn_over(device, candidate.teacher, victims):
        return True
    return runs_dry and outlook.ready_s(device, victims) == ready_s


def displaced_next(outlook: Outlook, device: int, wanted: Iterable[int], critical: int | None) -> Iterator[int]:
    """Objects that the next copy displaces, if what else the device holds does not hide it for long: serving them first
    keeps work for the time of the copy."""
    for candidate in candidates(outlook, device, wanted, critical)[:1]:
        victims = outlook.victims(device, candidate.teacher)
        if victims:
            hidden_s = outlook.ready_s(device, victims)
            if hidden_s <= outlook.settings.drain_ahead_copies * candidate.copy_s:
                yield from victims


def outstayed(outlook: Outlook, device: int, wanted: Iterable[int], critical: int | None) -> Iterator[int]:
    """Objects that had their turn and would go for the best candidate: they are not served any more, so that they can.
    Without anything of the kind where turns do not count."""
    if not outlook.settings.turn_copies:
        return
    for candidate in candidates(outlook, device, wanted, critical)[:1]:
        victims = outlook.victims(device, candidate.teacher)
        if victims and outlook.is_turn_over(device, candidate.teacher, victims):
            yield from victims
