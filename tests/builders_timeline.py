"""Traces small enough to follow by hand: one token takes one second, one byte half a second."""

from __future__ import annotations

from collections.abc import Sequence

from distill.teacher_manager.timeline.case import Case, Device, HostTier, Job, Kind, Link, System, Teacher

S = 10**9
"""A second in ns."""


def teacher(id: int, size: int = 4, kind: Kind = Kind.DENSE, base: int | None = None) -> Teacher:
    return Teacher(id, kind, size, total_params=1, active_params=1, layers=4, base=base)


def job(id: int, teacher: int, arrival_s: int = 0, tokens: int = 1, *, step: int = 0, announced_s: int = 0) -> Job:
    """Its deadline is ten seconds after it arrives; its length was expected to be one more."""
    arrival_ns = arrival_s * S
    return Job(id, teacher, step, announced_s * S, arrival_ns, tokens + 1, tokens, arrival_ns + 10 * S)


def system(
    teachers: Sequence[Teacher] = (teacher(0), teacher(1)),
    *,
    budget: int = 8,
    device_links: Sequence[int] = (0,),
    host: HostTier | None = None,
) -> System:
    devices = tuple(Device(id, budget, 2, link) for id, link in enumerate(device_links))
    links = tuple(Link(id, 2) for id in range(max(device_links) + 1))
    return System(devices, links, host, tuple(teachers))


def case(jobs: Sequence[Job], of: System | None = None) -> Case:
    return Case("small", of or system(), tuple(jobs))
