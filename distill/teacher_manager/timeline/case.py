"""What a trace says: devices, links, teachers and jobs, and how long each thing takes.

Time is a whole number of nanoseconds (`_ns`); bytes, tokens, parameters, FLOP/s and bytes/s are whole numbers. Products
are exact and divided once, rounded up, so that two implementations agree to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated

import msgspec

NS = 10**9
"""Nanoseconds in a second."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(gt=0)]


class Kind(StrEnum):
    DENSE = "dense"
    MOE = "moe"
    LORA = "lora"
    """An adapter: usable while its base is resident too."""
    BASE = "base"
    """The shared weights of adapters; it has no jobs."""


class Device(msgspec.Struct, frozen=True):
    """A GPU, or a tensor-parallel slot of several: budget, speed and link rate are then their sums."""

    id: Count
    budget_bytes: Count
    """For weights and stream buffers; activations and KV are outside the model."""
    flops_per_s: Positive
    """Peak times MFU."""
    link: Count
    tp: Positive = 1
    holds_one: bool = False
    """Its program serves one model at a time: one object is ever resident, nothing is copied beside a visit, nothing is
    streamed and no adapter stands on a base."""
    call_ns: Count = 0
    """What every visit takes beside its work."""


class Link(msgspec.Struct, frozen=True):
    id: Count
    bytes_per_s: Positive


class HostTier(msgspec.Struct, frozen=True):
    """Pinned host memory in front of one disk."""

    budget_bytes: Count
    disk_bytes_per_s: Positive
    initial: tuple[Count, ...] = ()
    """Teachers in host memory at time 0."""


class Teacher(msgspec.Struct, frozen=True):
    """One weight object. For `lora`, `bytes` are the adapter's own and `base` is the id of what it stands on."""

    id: Count
    kind: Kind
    bytes: Positive
    total_params: Positive
    active_params: Positive
    layers: Positive
    base: Count | None = None
    stream_bytes: Positive | None = None
    """Room that a stream takes; None: two layer buffers."""
    can_stream: bool = True
    """Of dense and moe teachers; others never can."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A rollout to score. It is announced when the rollout starts and arrives when it ends; ids follow the arrivals."""

    id: Count
    teacher: Count
    step: Count
    announced_ns: Count
    arrival_ns: Count
    expected_tokens: Count
    """What is known from the announcement on."""
    tokens: Positive
    deadline_ns: int


@dataclass(frozen=True)
class StreamTimes:
    """A visit that streams, from its start."""

    length_ns: int
    link_ns: int
    """How long the link, and the disk where it is read, are held: the last layer's compute needs neither."""


@dataclass(frozen=True)
class System:
    """The machines and the teachers: all that a scheduler knows before the first event. `host` None: all weights are in
    host memory."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    host: HostTier | None
    teachers: tuple[Teacher, ...]

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """By teacher: the objects that a resident visit needs, in the order in which they are copied."""
        return tuple((each.id,) if each.base is None else (each.base, each.id) for each in self.teachers)

    def share_a_pass(self, one: int, other: int) -> bool:
        """Whether one forward pass can serve both where they are resident: adapters of one base, and the base."""
        return self.needs[one][0] == self.needs[other][0]

    def service_ns(self, tokens: int, teacher: int, device: int) -> int:
        """Compute time of one job: 2 FLOPs a token and active parameter."""
        flops = 2 * tokens * self.teachers[teacher].active_params
        return ceil_div(flops * NS, self.devices[device].flops_per_s)

    def copy_ns(self, item: int, link: int, *, from_disk: bool) -> int:
        rate = self.links[link].bytes_per_s
        if from_disk:
            assert self.host is not None
            rate = min(rate, self.host.disk_bytes_per_s)
        return ceil_div(self.teachers[item].bytes * NS, rate)

    def stream_times(self, teacher: int, device: int, work_ns: int, *, from_disk: bool) -> StreamTimes:
        layers = self.teachers[teacher].layers
        copy_ns = self.copy_ns(teacher, self.devices[device].link, from_disk=from_disk)
        length_ns = stream_ns(copy_ns, work_ns, layers)
        return StreamTimes(length_ns, length_ns - ceil_div(work_ns, layers))

    def stream_bytes(self, teacher: int) -> int:
        """Room on the device for a stream: what the teacher says, else its two layer buffers."""
        each = self.teachers[teacher]
        return stream_bytes(each.bytes, each.layers) if each.stream_bytes is None else each.stream_bytes

    def streams(self, teacher: int, device: int) -> bool:
        """Whether the empty device could stream it."""
        each, where = self.teachers[teacher], self.devices[device]
        able = each.can_stream and each.kind in (Kind.DENSE, Kind.MOE) and not where.holds_one
        return able and self.stream_bytes(teacher) <= where.budget_bytes

    def fits(self, teacher: int, device: int) -> bool:
        """Whether all that a resident visit needs can be on the device together."""
        needs, where = self.needs[teacher], self.devices[device]
        fits = sum(self.teachers[item].bytes for item in needs) <= where.budget_bytes
        return fits and not (where.holds_one and len(needs) > 1)

    def homeless(self) -> tuple[int, ...]:
        """Teachers that no device can hold or stream: their jobs would wait for ever."""
        return tuple(
            each.id
            for each in self.teachers
            if each.kind is not Kind.BASE
            and not any(self.fits(each.id, device.id) or self.streams(each.id, device.id) for device in self.devices)
        )

    def has_shape_of(self, other: System) -> bool:
        """Whether it differs from `other` in speeds alone."""
        return _shape(self) == _shape(other)


@dataclass(frozen=True)
class Case:
    """One trace: `jobs[k]` has id k."""

    name: str
    system: System
    jobs: tuple[Job, ...]


def _shape(system: System) -> tuple[object, ...]:
    devices = [msgspec.structs.replace(each, flops_per_s=1, call_ns=0) for each in system.devices]
    host = None if system.host is None else msgspec.structs.replace(system.host, disk_bytes_per_s=1)
    return devices, len(system.links), host, system.teachers


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def stream_ns(copy_ns: int, work_ns: int, layers: int) -> int:
    """Copy and compute overlap, layer by layer, except for one layer of the shorter of the two."""
    return max(copy_ns, work_ns) + ceil_div(min(copy_ns, work_ns), layers)


def stream_bytes(size: int, layers: int) -> int:
    """Two layer buffers; never more than the weights."""
    return min(size, 2 * ceil_div(size, layers))
