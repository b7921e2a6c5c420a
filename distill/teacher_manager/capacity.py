"""What sharing slots will cost a run, before it starts: formulas for the limits, the scheduler on a virtual clock for
the stall, and the change that would halve it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from distill.teacher_manager.capacity_loop import Demand, draw, run
from distill.teacher_manager.timeline.break_even import Placement
from distill.teacher_manager.timeline.case import NS, System
from distill.teacher_manager.timeline.metrics import measure
from distill.teacher_manager.timeline.schedule import Mode

STEPS = 8
"""Simulated steps."""
WARM = 2
"""Of them are not counted: the slots are empty at first."""
SEEDS = (0, 1, 2)
NO_STALL = 1e-3
"""A share of stall below this is none."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A step in steady state, the mean of several simulations. Seconds of slots are summed over the slots."""

    step_s: float
    busy_s: float
    stall_s: float
    """A slot stands still although a sample waits for a teacher, and what streams take beyond their work."""
    samples: int
    loads: float
    streams: float
    late_share: float
    """Of all scores: those after their deadline."""
    streamed_share: Mapping[int, float]
    """Item -> share of its visits that stream it."""

    @property
    def stall_share(self) -> float:
        """Of the time in which a slot works or stands still: what a run reports as its stall."""
        wanted = self.busy_s + self.stall_s
        return self.stall_s / wanted if wanted else 0.0

    @property
    def stall_per_sample_s(self) -> float:
        return self.stall_s / self.samples


@dataclass(frozen=True, slots=True)
class Change:
    """Something that could be otherwise, and what that would come to."""

    name: str
    what: str
    """As one would do it."""
    expected: Expected
    halves: bool
    """At most half the stall for each sample."""


# --- formulas ------------------------------------------------------------------------------------------------------


def placement(system: System, item: int, device: int = 0) -> Placement:
    """The item on that device: break-even tokens and the time of a copy."""
    teacher, where = system.teachers[item], system.devices[device]
    return Placement(
        total_params=teacher.total_params,
        active_params=teacher.active_params,
        layers=teacher.layers,
        bytes=teacher.bytes,
        flops_per_s=where.flops_per_s,
        bytes_per_s=system.links[where.link].bytes_per_s,
    )


def swap_s(system: System) -> float:
    """Σc: seconds in which every object is copied once over one link."""
    return sum(placement(system, teacher.id).copy_ns for teacher in system.teachers) / NS


def stays_resident(system: System) -> bool:
    """All objects have room together: each with its adapters on one slot, the largest first, where it fits first."""
    groups = Counter[int]()
    for teacher in system.teachers:
        groups[teacher.id if teacher.base is None else teacher.base] += teacher.bytes
    free = [device.budget_bytes for device in system.devices]
    places = [1 if device.holds_one else len(groups) for device in system.devices]
    for _, size in groups.most_common():
        slot = next((slot for slot, room in enumerate(free) if size <= room and places[slot]), None)
        if slot is None:
            return False
        free[slot] -= size
        places[slot] -= 1
    return True


def load(system: System, demand: Demand) -> float:
    """ρ: share of the slots' time that scoring takes. 1 where a step is as long as the slots compute for it."""
    return demand.work_s(system) / (len(system.devices) * demand.write_s(system))


def load_limit(system: System, demand: Demand) -> float:
    """The largest ρ at which no sample need wait longer than the deadline D: 1 - Σc / (slots D).

    A server that goes round all queues, empties each and takes c for each change needs Σc / (1 - ρ) for a round; slots
    share the changes. 1 where all stay resident; 0 where the changes alone take longer than D.
    """
    if stays_resident(system):
        return 1.0
    return max(0.0, 1 - swap_s(system) / (len(system.devices) * demand.deadline_s))


# --- simulation ----------------------------------------------------------------------------------------------------


def expect(system: System, demand: Demand, seeds: Sequence[int] = SEEDS) -> Expected:
    """The mean over the seeds. Raises ValueError for a teacher that no slot can hold or stream."""
    if homeless := system.homeless():
        raise ValueError(f"no slot can hold or stream teacher {homeless[0]}")
    found = [_steady(system, demand, seed) for seed in seeds]
    return Expected(
        step_s=fmean(each.step_s for each in found),
        busy_s=fmean(each.busy_s for each in found),
        stall_s=fmean(each.stall_s for each in found),
        samples=demand.batch_size,
        loads=fmean(each.loads for each in found),
        streams=fmean(each.streams for each in found),
        late_share=fmean(each.late_share for each in found),
        streamed_share={
            item: fmean(each.streamed_share.get(item, 0.0) for each in found) for item in sorted(demand.shares())
        },
    )


def _steady(system: System, demand: Demand, seed: int) -> Expected:
    """What the later steps add to the first ones, a step."""
    steps = [draw(demand, seed, step) for step in range(STEPS)]
    first = measure(*run(system, demand, steps[:WARM]))
    case, schedule = run(system, demand, steps)
    whole = measure(case, schedule)
    visits = Counter(visit.teacher for visit in schedule.visits)
    streams = Counter(visit.teacher for visit in schedule.visits if visit.mode is Mode.STREAM)

    def added(name: str) -> float:
        return max(0, getattr(whole, name) - getattr(first, name)) / (STEPS - WARM)

    return Expected(
        step_s=added("makespan_ns") / NS,
        busy_s=added("compute_ns") / NS,
        stall_s=added("exposed_stall_ns") / NS,
        samples=demand.batch_size,
        loads=added("loads"),
        streams=added("streams"),
        late_share=whole.missed_deadlines / len(case.jobs),
        streamed_share={item: streams[item] / visits[item] for item in visits},
    )


def changes(system: System, demand: Demand, expected: Expected, seeds: Sequence[int] = SEEDS) -> list[Change]:
    """What else could be done, the cheapest first: memory, a device, another machine; last what changes the training.

    The student stays as fast as it is.
    """
    demand = replace(demand, step_s=demand.write_s(system))
    slots, budget = len(system.devices), system.devices[0].budget_bytes
    batch = 2 * demand.batch_size
    tried = [
        (
            "slot_gb",
            f"teacher_manager.slot_gb={gigabytes(2 * budget)}: twice the bytes of a slot",
            wider(system),
            demand,
        ),
        ("slots", f"teacher_manager.slots={slots + 1}: one device more", with_one_slot_more(system), demand),
        ("link", "a link to the device twice as fast", with_faster_link(system), demand),
        ("batch_size", f"trainer.batch_size={batch}: half the updates for the same samples", system, larger(demand)),
    ]
    found = [(name, what, expect(other, wanted, seeds)) for name, what, other, wanted in tried]
    half = expected.stall_per_sample_s / 2
    return [Change(name, what, each, each.stall_per_sample_s <= half) for name, what, each in found]


def gigabytes(count: int) -> str:
    """In about four figures, and never less than the bytes when it is read again."""
    step = 10 ** max(0, len(str(count)) - 4)
    text = f"{-(-count // step) * step / 1e9:.4g}"
    return text if int(float(text) * 1e9) >= count else f"{(-(-count // step) + 1) * step / 1e9:.4g}"


def cheapest(expected: Expected, tried: Sequence[Change]) -> Change | None:
    """The first change that at least halves the stall; None where none does, or there is none to halve."""
    if expected.stall_share < NO_STALL:
        return None
    return next((change for change in tried if change.halves), None)


def wider(system: System) -> System:
    devices = tuple(msgspec.structs.replace(each, budget_bytes=2 * each.budget_bytes) for each in system.devices)
    return replace(system, devices=devices)


def with_one_slot_more(system: System) -> System:
    """With a link of its own, as all have."""
    device, link = system.devices[0], system.links[0]
    return replace(
        system,
        devices=(*system.devices, msgspec.structs.replace(device, id=len(system.devices), link=len(system.links))),
        links=(*system.links, msgspec.structs.replace(link, id=len(system.links))),
    )


def with_faster_link(system: System) -> System:
    links = tuple(msgspec.structs.replace(link, bytes_per_s=2 * link.bytes_per_s) for link in system.links)
    return replace(system, links=links)


def larger(demand: Demand) -> Demand:
    """Twice the samples a step, in twice the time."""
    step_s = None if demand.step_s is None else 2 * demand.step_s
    return replace(demand, batch_size=2 * demand.batch_size, prompts=2 * demand.prompts, step_s=step_s)
