"""What the scheduler knows at an instant: the fleet, the demand, and what follows from the two together.

Seconds are floats here: they rank choices. What happens when is the fleet's to say, in whole nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from distill.teacher_manager.planning.demand import Demand
from distill.teacher_manager.planning.homes import Homes
from distill.teacher_manager.planning.settings import Settings
from distill.teacher_manager.timeline.case import NS, System
from distill.teacher_manager.timeline.fleet import Fleet


class Outlook:
    """Answers for one driver's fleet. The scheduler tells it every copy and eviction before the fleet enters it."""

    def __init__(self, system: System, settings: Settings) -> None:
        self.system = system
        self.settings = settings
        self.demand = Demand(system)
        self.now_ns = 0
        self.fleet = Fleet(system)
        self.usable = [0] * len(system.teachers)
        """By teacher: on how many devices all that it needs is resident."""
        self.members: list[list[int]] = [[] for _ in system.teachers]
        """By object: the teachers that need it."""
        for teacher, needs in enumerate(system.needs):
            for item in needs:
                self.members[item].append(teacher)
        self.live = len(system.devices)
        """Devices that are not lost."""
        self._smallest_bytes = min(teacher.bytes for teacher in system.teachers)
        self._there: list[dict[int, int]] = [{} for _ in system.devices]
        """By device: resident objects as the events told, and since when (ns)."""
        self._coming_to: dict[int, int] = {}
        """By device: what is being copied to it."""
        self._coming: list[set[int]] = [set() for _ in system.teachers]
        """By object: the devices to which it is being copied."""
        self._homes = Homes(system)
        self.retime(system)

    # What changes.

    def retime(self, system: System) -> None:
        """Other speeds. Raises ValueError where more differs."""
        if not system.has_shape_of(self.system):
            raise ValueError("the system differs from the planner's in more than its speeds")
        self.system = system
        self._rate = [each.flops_per_s for each in system.devices]
        self.rate = sum(rate for device, rate in enumerate(self._rate) if self._homes.lives(device))
        """Of all devices that are not lost, together."""
        self._copy_s = [[each.bytes / link.bytes_per_s for each in system.teachers] for link in system.links]
        """By link and object: from host memory."""
        for queue in self.demand.queues:
            queue.retimed()

    def copy_starts(self, device: int, item: int) -> None:
        self._coming[item].add(device)
        self._coming_to[device] = item

    def copy_ended(self, device: int, item: int) -> None:
        self.copy_failed(device, item)
        self._there[device][item] = self.now_ns
        for teacher in self.members[item]:
            self.usable[teacher] += self._is_usable(device, teacher)

    def copy_failed(self, device: int, item: int) -> None:
        self._coming[item].discard(device)
        self._coming_to.pop(device, None)

    def evicts(self, device: int, item: int) -> None:
        for teacher in self.members[item]:
            self.usable[teacher] -= self._is_usable(device, teacher)
        del self._there[device][item]

    def lost(self, device: int) -> None:
        for item in list(self._there[device]):
            self.evicts(device, item)
        if device in self._coming_to:
            self.copy_failed(device, self._coming_to[device])
        self._homes.lost(device)
        self.live -= 1
        self.rate -= self._rate[device]

    def back(self, device: int) -> None:
        self._homes.back(device)
        self.live += 1
        self.rate += self._rate[device]

    def _is_usable(self, device: int, teacher: int) -> bool:
        """As the events told: `fleet` may be ahead of them."""
        return all(item in self._there[device] for item in self.system.needs[teacher])

    # What is.

    def work_s(self, work: float, device: int) -> float:
        return work / self._rate[device]

    def fits(self, device: int, teacher: int) -> bool:
        return self._homes.fits(device, teacher)

    def fits_all(self, device: int) -> bool:
        """Whether it could hold any teacher."""
        return self._homes.fits_all(device)

    def can_stream(self, device: int, teacher: int) -> bool:
        """Whether the device could stream it if it were empty."""
        return self._homes.streams(device, teacher)

    def has_home(self, teacher: int) -> bool:
        """Whether any device that is not lost can hold it or stream it."""
        return self._homes.has(teacher)

    def is_roomy(self, device: int) -> bool:
        """Whether something may come without anything going."""
        state = self.fleet.devices[device]
        if self.system.devices[device].holds_one:
            return not state.resident and state.visit is None
        return state.free_bytes >= self._smallest_bytes

    def is_idle(self, device: int) -> bool:
        return self.fleet.devices[device].visit is None

    def copy_s(self, device: int, teacher: int) -> float:
        """Time on the link until the teacher is usable there."""
        fleet, link = self.fleet, self.fleet.devices[device].link
        total = 0.0
        for item in fleet.missing(device, teacher):
            from_disk = self.system.host is not None and fleet.reads_disk(item)
            total += self.system.copy_ns(item, link, from_disk=True) / NS if from_disk else self._copy_s[link][item]
        return total

    def may_stream(self, device: int, teacher: int) -> bool:
        """Whether a stream of the teacher could start on the idle device now, but for room."""
        return (
            self._homes.streams(device, teacher)
            and not self.demand.resident_jobs[teacher]
            and bool(self.fleet.missing(device, teacher))
            and self.fleet.devices[device].coming != teacher
            and self.fleet.can_transfer(device, teacher)
        )

    def has_room(self, device: int, teacher: int) -> bool:
        """Whether all that it misses there fits without an eviction."""
        wanted = sum(self.system.teachers[item].bytes for item in self.fleet.missing(device, teacher))
        return wanted <= self.fleet.devices[device].free_bytes

    def holders(self, teacher: int) -> int:
        """Devices on which it is usable, or will be with the copy that is under way."""
        count = self.usable[teacher]
        for item in self.system.needs[teacher]:
            for device in self._coming[item]:
                count += all(each in (item, teacher) for each in self.fleet.missing(device, teacher))
        return count

    def ready(self, device: int) -> Iterator[int]:
        """The teachers that a visit could serve there now."""
        queues, needs = self.demand.queues, self.system.needs
        for item in self.fleet.devices[device].resident:
            for teacher in self.members[item]:
                if queues[teacher].jobs and needs[teacher][-1] == item and not self.fleet.missing(device, teacher):
                    yield teacher

    def ready_s(self, device: int, without: Collection[int] = ()) -> float:
        """Work that the device can go on with: the rest of its visit and its share of the queues that are ready there,
        as if the objects `without` were gone."""
        visit = self.fleet.devices[device].visit
        total = max(0, visit.end_ns - self.now_ns) / NS if visit is not None else 0.0
        for teacher in self.ready(device):
            if not any(item in without for item in self.system.needs[teacher]):
                total += self.work_s(self.demand.queues[teacher].work, device) / self.usable[teacher]
        return total

    def claim(self, item: int) -> tuple[int, int]:
        """(queued, announced) work of the teachers that need the object."""
        queues = [self.demand.queues[teacher] for teacher in self.members[item]]
        return sum(queue.work for queue in queues), sum(queue.announced_work for queue in queues)

    def worth(self, item: int) -> float:
        """Of keeping the object on one device: its share of the work that needs it."""
        queued, announced = self.claim(item)
        return (queued + self.settings.announced_share * announced) / max(1, len(self.fleet.holders[item]))

    def first_deadline_ns(self, items: Iterable[int]) -> float:
        """Of the jobs that need one of the objects; infinite if there are none."""
        queues = (self.demand.queues[teacher] for item in items for teacher in self.members[item])
        return min((queue.first_deadline_ns() for queue in queues if queue.jobs), default=math.inf)

    def victims(self, device: int, teacher: int) -> list[int] | None:
        """What must go so that all that the teacher misses fits: least worth per byte first, and nothing in vain. None:
        it cannot be made to fit now."""
        if self.system.devices[device].holds_one:
            state = self.fleet.devices[device]
            return list(state.resident) if state.visit is None else None
        wanted = sum(self.system.teachers[item].bytes for item in self.fleet.missing(device, teacher))
        kept = self.system.needs[teacher]
        movable = [
            item
            for item in self.fleet.devices[device].resident
            if item not in kept and not self.fleet.is_in_use(device, item)
        ]
        return self.least_worth(device, wanted, movable)

    def is_turn_over(self, device: int, teacher: int, victims: Iterable[int]) -> bool:
        """Whether a teacher that no device holds has waited for so long that residents go for it although they have
        work: each of them had its turn."""
        queue, copies = self.demand.queues[teacher], self.settings.turn_copies
        if not copies or not queue.jobs or self.holders(teacher):
            return False
        turn_s = copies * self.copy_s(device, teacher)
        there_s = [(self.now_ns - self._there[device][item]) / NS for item in victims]
        return queue.waited_s(self.now_ns) / len(queue.jobs) >= turn_s and min(there_s, default=turn_s) >= turn_s

    def least_worth(self, device: int, wanted: int, movable: list[int]) -> list[int] | None:
        """Of `movable`, what to evict for `wanted` bytes."""
        teachers, free = self.system.teachers, self.fleet.devices[device].free_bytes
        chosen: list[int] = []
        if free >= wanted:
            return chosen
        for item in sorted(movable, key=lambda item: (self.worth(item) / teachers[item].bytes, item)):
            chosen.append(item)
            free += teachers[item].bytes
            if free >= wanted:
                break
        else:
            return None
        for item in chosen[::-1]:
            if free - teachers[item].bytes >= wanted:
                chosen.remove(item)
                free -= teachers[item].bytes
        return chosen
