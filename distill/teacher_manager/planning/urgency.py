"""Which teacher deadlines call for: the one rule that goes before all others."""

from __future__ import annotations

from collections.abc import Iterable

from distill.teacher_manager.planning.outlook import Outlook
from distill.teacher_manager.timeline.case import NS


def critical_teacher(outlook: Outlook, absent: Iterable[int], device: int) -> int | None:
    """The teacher, of those that no device holds, that must come now.

    In the order of their latest starts each is copied and served before the next. If one of them would begin later than
    its latest start (less a margin), the first must come at once. Earliest deadline first is optimal where switching is
    free; here a whole queue is one job, and its copy is part of it.
    """
    rate = outlook.rate
    now_ns, queues, teachers = outlook.now_ns, outlook.demand.queues, outlook.system.teachers
    starts: list[tuple[float, int, float]] = []
    for teacher in absent:
        queue = queues[teacher]
        latest_ns = queue.latest_start_ns(now_ns, 2 * teachers[teacher].active_params * NS / rate)
        slack_s = (latest_ns - now_ns) / NS - outlook.copy_s(device, teacher)
        starts.append((slack_s, teacher, queue.work / rate))
    starts.sort()
    before_s = 0.0
    for slack_s, _, work_s in starts:
        if slack_s - before_s < outlook.settings.deadline_margin_s:
            return starts[0][1]
        before_s += work_s
    return None
