"""Traces from JSON (`tm-sched/1`): `timed` and `timed_exact` list their jobs, `generated` says how to draw them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from distill.errors import ConfigError
from distill.teacher_manager.timeline.case import (
    Case,
    Count,
    Device,
    HostTier,
    Job,
    Kind,
    Link,
    Positive,
    System,
    Teacher,
)
from distill.teacher_manager.timeline.generated import Generator, draw

FORMAT = "tm-sched/1"
COLUMNS = ("id", "teacher", "step", "announced_ns", "arrival_ns", "expected_tokens", "tokens", "deadline_ns")


class _System(msgspec.Struct):
    devices: Annotated[tuple[Device, ...], msgspec.Meta(min_length=1)]
    links: Annotated[tuple[Link, ...], msgspec.Meta(min_length=1)]
    host: HostTier | None = None


class _Timed(msgspec.Struct):
    name: str
    system: _System
    teachers: Annotated[tuple[Teacher, ...], msgspec.Meta(min_length=1)]
    jobs_columns: tuple[str, ...]
    jobs: Annotated[tuple[Job, ...], msgspec.Meta(min_length=1)]


class _CompactDevice(msgspec.Struct):
    count: Positive
    budget_bytes: Count
    flops_per_s: Positive
    tp: Positive = 1


class _CompactSystem(msgspec.Struct):
    device: _CompactDevice
    devices_per_link: Positive
    link_bytes_per_s: Positive
    host: HostTier | None = None


class _Generated(msgspec.Struct):
    name: str
    system_compact: _CompactSystem
    generator: Generator


class _Head(msgspec.Struct):
    format: Literal["tm-sched/1"]
    kind: Literal["timed", "timed_exact", "generated"]


def read_case(path: Path) -> Case:
    """Raises ConfigError, with the place in the file, for anything that is not a trace that can be simulated."""
    try:
        return parse_case(path.read_bytes())
    except (OSError, msgspec.DecodeError, _NoTrace) as error:
        raise ConfigError(
            f"{path}: {error}",
            why=f"a trace of format {FORMAT} is expected",
            fix="give system, teachers, jobs_columns and jobs, or system_compact and generator",
        ) from error


def parse_case(text: bytes) -> Case:
    if msgspec.json.decode(text, type=_Head).kind == "generated":
        generated = msgspec.json.decode(text, type=_Generated)
        teachers, jobs = draw(generated.generator)
        case = Case(generated.name, _expand(generated.system_compact, teachers), jobs)
    else:
        timed = msgspec.json.decode(text, type=_Timed)
        if timed.jobs_columns != COLUMNS:
            raise _NoTrace(f"jobs_columns are {', '.join(timed.jobs_columns)}; expected {', '.join(COLUMNS)}")
        system = System(timed.system.devices, timed.system.links, timed.system.host, timed.teachers)
        case = Case(timed.name, system, timed.jobs)
    _check_system(case.system)
    _check_jobs(case)
    return case


class _NoTrace(Exception):
    """Well-formed JSON that does not hold together. The message names the entry."""


def _expand(compact: _CompactSystem, teachers: tuple[Teacher, ...]) -> System:
    """Device d stands on link d // devices_per_link; all devices and all links are equal."""
    each = compact.device
    devices = tuple(
        Device(id, each.budget_bytes, each.flops_per_s, id // compact.devices_per_link, each.tp)
        for id in range(each.count)
    )
    links = tuple(Link(id, compact.link_bytes_per_s) for id in range(devices[-1].link + 1))
    return System(devices, links, compact.host, teachers)


def _check_system(system: System) -> None:
    for name, things in (("devices", system.devices), ("links", system.links), ("teachers", system.teachers)):
        _check_ids(name, [thing.id for thing in things])
    for device in system.devices:
        if device.link >= len(system.links):
            raise _NoTrace(f"devices[{device.id}].link is {device.link}; there are {len(system.links)} links")
    for teacher in system.teachers:
        _check_base(teacher, system.teachers)
    for item in system.host.initial if system.host else ():
        if item >= len(system.teachers):
            raise _NoTrace(f"host.initial names teacher {item}; there are {len(system.teachers)}")


def _check_base(teacher: Teacher, teachers: Sequence[Teacher]) -> None:
    where = f"teachers[{teacher.id}].base"
    if (teacher.base is not None) != (teacher.kind is Kind.LORA):
        raise _NoTrace(f"{where} is {teacher.base}, kind is {teacher.kind}: a lora has a base, nothing else has one")
    if teacher.base is not None and (teacher.base >= len(teachers) or teachers[teacher.base].kind is not Kind.BASE):
        raise _NoTrace(f"{where} is {teacher.base}, which is no teacher of kind base")


def _check_jobs(case: Case) -> None:
    _check_ids("jobs", [job.id for job in case.jobs])
    previous = 0
    for job in case.jobs:
        if job.teacher >= len(case.system.teachers) or case.system.teachers[job.teacher].kind is Kind.BASE:
            raise _NoTrace(f"jobs[{job.id}].teacher is {job.teacher}, which is no teacher that has jobs")
        if job.arrival_ns < previous:
            raise _NoTrace(f"jobs[{job.id}] arrives at {job.arrival_ns} ns, before the job of the id below")
        if job.announced_ns > job.arrival_ns:
            raise _NoTrace(f"jobs[{job.id}] arrives at {job.arrival_ns} ns, before it is announced")
        previous = job.arrival_ns


def _check_ids(name: str, ids: Sequence[int]) -> None:
    for index, id in enumerate(ids):
        if id != index:
            raise _NoTrace(f"{name}[{index}].id is {id}; ids count from 0")
