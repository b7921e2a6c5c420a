"""Speeds as they are measured: links, the disk and devices, from the seconds that copies and visits took.

A planner ranks choices by how long things take. It begins with what somebody believed; here that is replaced by what
was seen. Medians over the last samples are taken, so that one stall, or one copy from a warm cache, changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

import msgspec

from distill.teacher_manager.timeline.case import NS, Device, System

LEAST = 3
"""Samples without which the start value stays."""
MOVED = 0.05
"""Relative change below which a value stays as it is: whoever takes it over has to compute much anew."""
SPREAD = 1.5
"""Longest work over shortest, above which the constant part of a visit can be told from the rest."""

_Samples = deque[tuple[float, float]]
"""(amount, seconds), the newest last."""


class Calibration:
    """Estimates for one fleet. Samples of which nothing can be learnt (no amount, no time) are ignored."""

    def __init__(self, system: System, window: int = 32) -> None:
        """`window`: samples that count, of each link, of the disk and of each device."""
        self._system = system
        self._links = [_Samples(maxlen=window) for _ in system.links]
        self._disk = _Samples(maxlen=window)
        self._devices = [_Samples(maxlen=window) for _ in system.devices]
        self._changed: set[int] = set()
        """Devices with samples that `system` has not seen."""

    def copied(self, device: int, bytes: int, seconds: float, *, from_disk: bool) -> None:
        """A copy to the device ended. One from disk says how fast the disk is, the others how fast its link."""
        if bytes > 0 and seconds > 0:
            samples = self._disk if from_disk else self._links[self._system.devices[device].link]
            samples.append((bytes, seconds))

    def visited(self, device: int, teacher: int, tokens: int, seconds: float) -> None:
        """A visit to a resident teacher ended. Streams say nothing: reading and computing cannot be told apart."""
        if tokens > 0 and seconds > 0:
            self._devices[device].append((2 * tokens * self._system.teachers[teacher].active_params, seconds))
            self._changed.add(device)

    def system(self) -> System:
        """The same machines and teachers with the speeds as far as they were measured; equal to the one before where
        nothing moved."""
        old = self._system
        links = tuple(
            msgspec.structs.replace(link, bytes_per_s=_rate(samples, link.bytes_per_s))
            for link, samples in zip(old.links, self._links, strict=True)
        )
        host = old.host
        if host is not None:
            host = msgspec.structs.replace(host, disk_bytes_per_s=_rate(self._disk, host.disk_bytes_per_s))
        devices = list(old.devices)
        for device in self._changed:
            devices[device] = _fitted(devices[device], self._devices[device])
        self._changed.clear()
        self._system = replace(old, devices=tuple(devices), links=links, host=host)
        return self._system


def _rate(samples: Sequence[tuple[float, float]], old: int) -> int:
    """Bytes/s: the median over the bytes, not the copies, as what a small copy takes is mostly not its bytes."""
    if len(samples) < LEAST:
        return old
    left = sum(size for size, _ in samples) / 2
    for size, seconds in sorted(samples, key=lambda sample: sample[0] / sample[1]):
        left -= size
        if left <= 0:
            return _settled(old, size / seconds)
    raise AssertionError("a median is among its samples")


def _fitted(device: Device, samples: Sequence[tuple[float, float]]) -> Device:
    """seconds = constant + work / speed, by the median of the slopes between all samples (Theil and Sen). Where all
    visits are about equal, the constant stays and the speed follows."""
    if len(samples) < LEAST:
        return device
    works = [work for work, _ in samples]
    slope, call_s = 0.0, device.call_ns / NS
    if max(works) >= SPREAD * min(works):
        slope = _slope(samples)
        call_s = max(0.0, median(seconds - work * slope for work, seconds in samples))
    if slope <= 0.0:
        call_s = min(device.call_ns / NS, min(seconds for _, seconds in samples) / 2)
        slope = median((seconds - call_s) / work for work, seconds in samples)
    moved = abs(call_s - device.call_ns / NS) > MOVED * median(seconds for _, seconds in samples)
    return msgspec.structs.replace(
        device,
        flops_per_s=_settled(device.flops_per_s, 1 / slope),
        call_ns=round(call_s * NS) if moved else device.call_ns,
    )


def _slope(samples: Iterable[tuple[float, float]]) -> float:
    """Seconds for each FLOP; 0 or less where the samples tell none."""
    pairs = combinations(samples, 2)
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if a[0] != b[0])


def _settled(old: int, new: float) -> int:
    return old if abs(new - old) <= MOVED * old else max(1, round(new))
