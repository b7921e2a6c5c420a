"""Which job an idle device serves next, which go with it, and which jobs it streams. Where a visit costs nothing beyond
its jobs, each visit is one job and the choice is made anew after it; else it is a batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distill.teacher_manager.planning.outlook import Outlook
from distill.teacher_manager.timeline.case import NS, Job, ceil_div


def choose_job(
    outlook: Outlook, device: int, displaced: Collection[int], *, stressed: bool, without: Collection[int] = ()
) -> Job | None:
    """By deadline if one is in danger, or all are (`stressed`); else the teacher whose jobs have waited longest on
    average, among those that the next copy displaces if there are any, and its shortest job. No teacher that needs an
    object in `without`."""
    ready = list(outlook.ready(device))
    if without:
        needs = outlook.system.needs
        ready = [teacher for teacher in ready if not any(item in without for item in needs[teacher])]
    if not ready:
        return None
    job = _endangered(outlook, device, ready, stressed)
    if job is not None:
        return job
    going = [teacher for teacher in ready if any(item in displaced for item in outlook.system.needs[teacher])]
    queues = outlook.demand.queues

    def wait_s(teacher: int) -> float:
        return queues[teacher].waited_s(outlook.now_ns) / len(queues[teacher].jobs)

    return queues[max(going or ready, key=wait_s)].shortest()


def _endangered(outlook: Outlook, device: int, ready: Sequence[int], stressed: bool) -> Job | None:
    """The earliest deadline that can still be met, if serving all by deadline would meet one with little to spare."""
    queues, now_ns = outlook.demand.queues, outlook.now_ns
    margin_s = 2 * outlook.settings.deadline_margin_s
    share_s = sum(outlook.work_s(queues[teacher].work, device) / outlook.usable[teacher] for teacher in ready)
    first_s = (min(queues[teacher].first_deadline_ns() for teacher in ready) - now_ns) / NS
    if not stressed and first_s >= share_s + margin_s:
        return None
    jobs = [job for teacher in ready for job in queues[teacher].jobs.values()]
    earliest, before_s = None, 0.0
    for job in sorted(jobs, key=lambda job: (job.deadline_ns, job.id)):
        work_s = outlook.work_s(outlook.demand.work(job), device)
        left_s = (job.deadline_ns - now_ns) / NS
        if left_s <= work_s:
            continue
        earliest = earliest or job
        before_s += work_s / outlook.usable[job.teacher]
        if stressed or left_s - before_s < margin_s:
            return earliest
    return None


def visit_jobs(outlook: Outlook, first: Job, idle: int) -> list[Job]:
    """`first`, and further jobs of its teacher up to `Settings.visit_tokens`, but of a queue that other idle devices
    could serve too no more than this one's share. `idle`: how many could, with this one.

    The group of `first` goes first, then the others by their earliest deadlines; inside a group they go by id. What is
    too long for the room that is left is left out, not what comes behind it.
    """
    return jobs_within(outlook, first, outlook.settings.visit_tokens, idle) or [first]


def companions(outlook: Outlook, device: int, teacher: int, without: Collection[int]) -> list[int]:
    """Other teachers with jobs that the same forward pass can serve there, those that are due first before the others:
    adapters of one base, and the base. None that needs an object in `without`."""
    system, queues = outlook.system, outlook.demand.queues
    found = [
        each
        for each in outlook.ready(device)
        if each != teacher and system.share_a_pass(each, teacher) and not set(system.needs[each]) & set(without)
    ]
    return sorted(found, key=lambda each: (queues[each].first_deadline_ns(), each))


def jobs_within(outlook: Outlook, first: Job, limit: int, idle: int) -> list[Job]:
    """As `visit_jobs`, in `limit` tokens; none where `first` takes more."""
    if limit < first.tokens:
        return []
    queue, demand = outlook.demand.queues[first.teacher], outlook.demand
    tokens = queue.work * first.tokens // demand.work(first)
    limit = max(first.tokens, min(limit, ceil_div(tokens, idle)))
    groups: dict[int, list[Job]] = {}
    for job in queue.jobs.values():
        groups.setdefault(demand.groups.get(job.id, ~job.id), []).append(job)  # one without a group is its own
    begins_with = groups.pop(demand.groups.get(first.id, ~first.id))
    others = sorted(groups.values(), key=lambda group: min((job.deadline_ns, job.id) for job in group))
    chosen, left = [], limit - first.tokens
    for group in [begins_with, *others]:
        for job in sorted(group, key=lambda job: job.id):
            if job is first:
                chosen.append(job)
            elif job.tokens <= left:
                chosen.append(job)
                left -= job.tokens
        if left <= 0 and first in chosen:
            break
    return chosen


def stream_pays(outlook: Outlook, device: int, teacher: int) -> bool:
    """The compute hides the reading, so that nothing is exposed and nothing need go."""
    work_s = outlook.work_s(outlook.demand.queues[teacher].work, device)
    return work_s >= outlook.settings.stream_copies * outlook.copy_s(device, teacher)


def stream_is_best(outlook: Outlook, device: int, teacher: int) -> bool:
    """Of a teacher that will be needed again: it can never be resident there, or has no room now and enough work to
    hide the reading."""
    if not outlook.fits(device, teacher):
        return True
    return not outlook.has_room(device, teacher) and stream_pays(outlook, device, teacher)


def stream_jobs(outlook: Outlook, device: int, teacher: int, idle: int) -> list[Job]:
    """By deadline: as many as fill the time of the reading, and more while all still end by the first deadline; where
    other devices hold the teacher, or are idle too, no more than this one's share. `idle`: how many are, with it."""
    queue = outlook.demand.queues[teacher]
    copy_s = outlook.copy_s(device, teacher)
    share_s = outlook.work_s(queue.work, device) / max(outlook.holders(teacher) + 1, idle)
    chosen: list[Job] = []
    work_s, first_s = 0.0, float("inf")
    for job in sorted(queue.jobs.values(), key=lambda job: (job.deadline_ns, job.id)):
        more_s = outlook.work_s(outlook.demand.work(job), device)
        left_s = (job.deadline_ns - outlook.now_ns) / NS
        if chosen and work_s > copy_s and (work_s + more_s > first_s or work_s + more_s > share_s):
            break
        chosen.append(job)
        work_s += more_s
        if left_s >= copy_s:
            first_s = min(first_s, left_s)
    return chosen


def choose_stream(outlook: Outlook, device: int, absent: Collection[int]) -> int | None:
    """For a device that has nothing to serve: the teacher with the best work / (work + copy)."""

    def index(teacher: int) -> float:
        work_s = outlook.work_s(outlook.demand.queues[teacher].work, device)
        return work_s / (work_s + outlook.copy_s(device, teacher))

    possible = [teacher for teacher in absent if outlook.may_stream(device, teacher)]
    if outlook.settings.recurring:
        possible = [teacher for teacher in possible if stream_is_best(outlook, device, teacher)]
    return max(possible, key=lambda teacher: (index(teacher), -teacher), default=None)
