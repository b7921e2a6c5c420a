"""The state of devices, links and host memory, and the rules for changing it.

Whoever drives a policy enters every decision and every end here. A decision that breaks a rule raises IllegalDecision
and changes nothing. Ends and failures are the driver's: a simulator ends things when the model says, a run when they
are over. Reports about what was under way on a device when it was lost are the driver's to swallow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from distill.teacher_manager.timeline.case import Job, Kind, System
from distill.teacher_manager.timeline.host_memory import HostMemory
from distill.teacher_manager.timeline.schedule import CopyRow, EvictionRow, Mode, VisitRow


class IllegalDecision(Exception):
    """A policy asked for what the rules forbid: a fault of the policy."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy, or the reading of a stream, and when the model says that the link is idle again."""

    link: int
    device: int
    item: int
    from_disk: bool
    end_ns: int


@dataclass(slots=True)
class DeviceState:
    id: int
    link: int
    free_bytes: int
    resident: dict[int, int] = field(default_factory=dict[int, int])
    """Object -> end of its last copy or of the last visit that used it."""
    coming: int | None = None
    """The object that is being copied to it."""
    visit: VisitRow | None = None
    """Its end is what the model expects."""
    serving: tuple[Job, ...] = ()
    """The jobs of the visit."""
    in_use: frozenset[int] = frozenset()
    """The objects that the visit needs to be resident."""
    lost: bool = False


class Fleet:
    """Policies read `devices`, `transfers`, `holders` and `waiting` and call the questions; only drivers change it."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.devices = [DeviceState(each.id, each.link, each.budget_bytes) for each in system.devices]
        self.transfers: list[Transfer | None] = [None] * len(system.links)
        """By link: what it carries."""
        self.holders: list[set[int]] = [set() for _ in system.teachers]
        """By object: the devices on which it is resident."""
        self.waiting: dict[int, Job] = {}
        """Jobs that arrived and whose visit has not started, by id."""
        self._host = HostMemory(system.host, system.teachers)
        self._streamed_ns = -1
        """Start of the last stream."""

    # Questions.

    def missing(self, device: int, teacher: int) -> list[int]:
        """What a visit needs and the device does not hold, in the order in which it is copied."""
        resident = self.devices[device].resident
        return [item for item in self.system.needs[teacher] if item not in resident]

    def reads_disk(self, item: int) -> bool:
        """Whether a transfer that starts now would read the disk."""
        return not self._host.holds(item)

    def can_transfer(self, device: int, item: int) -> bool:
        """Whether the link, and the disk where it is needed, are idle."""
        if self.transfers[self.devices[device].link] is not None:
            return False
        return self._host.holds(item) or not self._host.disk_is_busy

    def is_in_use(self, device: int, item: int) -> bool:
        return item in self.devices[device].in_use

    # Changes: each checks its rules first.

    def arrive(self, job: Job) -> None:
        self.waiting[job.id] = job

    def drop(self, job: int) -> None:
        """Nobody wants the waiting job any more."""
        del self.waiting[job]

    def start_copy(self, device: int, item: int, now_ns: int) -> CopyRow:
        state = self._device(device)
        if not 0 <= item < len(self.system.teachers):
            raise IllegalDecision(f"copy of object {item}: there is no such object")
        what = f"copy of object {item} to device {device} at {now_ns} ns"
        if item in state.resident or item == state.coming:
            raise IllegalDecision(f"{what}: it is there, or coming")
        if self.system.devices[device].holds_one and (state.resident or state.visit is not None):
            held = f"it holds {sorted(state.resident)}" if state.visit is None else "it is on a visit"
            raise IllegalDecision(f"{what}: a device that holds one object must be empty and idle; {held}")
        wanted = self.system.teachers[item].bytes
        if wanted > state.free_bytes:
            raise IllegalDecision(f"{what}: it has {wanted} bytes, {state.free_bytes} are free")
        if self.system.host is not None and now_ns == self._streamed_ns:
            raise IllegalDecision(
                f"{what}: at one instant copies start before streams; a schedule's rows tell no other"
            )
        self._require_idle_link(state, item, what)
        from_disk = self._host.begin(item, now_ns)
        end_ns = now_ns + self.system.copy_ns(item, state.link, from_disk=from_disk)
        self.transfers[state.link] = Transfer(state.link, device, item, from_disk, end_ns)
        state.free_bytes -= wanted
        state.coming = item
        return CopyRow(state.link, device, item, now_ns, end_ns, int(from_disk))

    def end_copy(self, copy: CopyRow, now_ns: int) -> None:
        state = self.devices[copy.device]
        assert state.coming == copy.item
        self.end_transfer(copy.link, now_ns)
        state.coming = None
        state.resident[copy.item] = now_ns
        self.holders[copy.item].add(copy.device)

    def fail_copy(self, copy: CopyRow, now_ns: int) -> None:
        """The object did not come: its room is free, the link idle."""
        state = self.devices[copy.device]
        assert state.coming == copy.item
        self._fail_transfer(copy.link)
        state.coming = None
        state.free_bytes += self.system.teachers[copy.item].bytes

    def end_transfer(self, link: int, now_ns: int) -> None:
        """The link is idle again. `end_copy` does it for a copy; of a stream it comes before the end of the visit."""
        transfer = self.transfers[link]
        assert transfer is not None
        self._host.end(transfer.item, now_ns, from_disk=transfer.from_disk)
        self.transfers[link] = None

    def evict(self, device: int, item: int, now_ns: int) -> EvictionRow:
        state = self._device(device)
        what = f"eviction of object {item} from device {device} at {now_ns} ns"
        if item not in state.resident:
            raise IllegalDecision(f"{what}: it is {'still coming' if item == state.coming else 'not there'}")
        if self.is_in_use(device, item):
            raise IllegalDecision(f"{what}: a visit uses it")
        del state.resident[item]
        state.free_bytes += self.system.teachers[item].bytes
        self.holders[item].discard(device)
        return EvictionRow(device, item, now_ns)

    def start_visit(self, device: int, teacher: int, jobs: tuple[int, ...], now_ns: int) -> VisitRow:
        """Jobs may also be for teachers that share a forward pass with `teacher`."""
        state = self._device(device)
        what = f"visit to teacher {teacher} on device {device} at {now_ns} ns"
        self._require_visit(state, teacher, jobs, what, alone=False)
        teachers = dict.fromkeys([teacher, *(self.waiting[id].teacher for id in jobs)])
        missing = {item for each in teachers for item in self.missing(device, each)}
        if missing:
            raise IllegalDecision(f"{what}: objects {sorted(missing)} are not resident")
        end_ns = now_ns + self.system.devices[device].call_ns + self._take(state, jobs)
        state.in_use = frozenset(item for each in teachers for item in self.system.needs[each])
        state.visit = VisitRow(device, teacher, Mode.RESIDENT, now_ns, end_ns, jobs)
        return state.visit

    def start_stream(self, device: int, teacher: int, jobs: tuple[int, ...], now_ns: int) -> VisitRow:
        """The link's release is in `transfers`."""
        state = self._device(device)
        what = f"stream of teacher {teacher} on device {device} at {now_ns} ns"
        self._require_visit(state, teacher, jobs, what, alone=True)
        if self.system.teachers[teacher].kind not in (Kind.DENSE, Kind.MOE):
            raise IllegalDecision(f"{what}: only dense and moe teachers are streamed")
        if self.system.devices[device].holds_one or not self.system.teachers[teacher].can_stream:
            raise IllegalDecision(f"{what}: the device, or the teacher, cannot be streamed")
        buffers = self.system.stream_bytes(teacher)
        if buffers > state.free_bytes:
            raise IllegalDecision(f"{what}: its buffers take {buffers} bytes, {state.free_bytes} are free")
        self._require_idle_link(state, teacher, what)
        from_disk = self._host.begin(teacher, now_ns)
        times = self.system.stream_times(teacher, device, self._take(state, jobs), from_disk=from_disk)
        self.transfers[state.link] = Transfer(state.link, device, teacher, from_disk, now_ns + times.link_ns)
        state.free_bytes -= buffers
        self._streamed_ns = now_ns
        end_ns = now_ns + self.system.devices[device].call_ns + times.length_ns
        state.visit = VisitRow(device, teacher, Mode.STREAM, now_ns, end_ns, jobs)
        return state.visit

    def end_visit(self, device: int, now_ns: int) -> None:
        """A stream whose reading was not ended before has read its last layer now."""
        if self._is_reading(device):
            self.end_transfer(self.devices[device].link, now_ns)
        self._free(device, now_ns)

    def fail_visit(self, device: int, jobs: Collection[int], now_ns: int) -> None:
        """`jobs` of the visit wait again, the others are done. What it used is still resident."""
        state = self.devices[device]
        again = [job for job in state.serving if job.id in jobs]
        assert len(again) == len(set(jobs))
        if self._is_reading(device):
            self._fail_transfer(state.link)
        self._free(device, now_ns)
        self.waiting.update((job.id, job) for job in again)

    def lose(self, device: int, now_ns: int) -> tuple[int, ...]:
        """All that was there is gone. The jobs that wait again: those of its visit."""
        state = self.devices[device]
        assert not state.lost
        again = tuple(job.id for job in state.serving)
        if state.visit is not None:
            self.fail_visit(device, again, now_ns)
        if state.coming is not None:
            self._fail_transfer(state.link)
        for item in state.resident:
            self.holders[item].discard(device)
        budget = self.system.devices[device].budget_bytes
        self.devices[device] = DeviceState(device, state.link, budget, lost=True)
        return again

    def restore(self, device: int) -> None:
        """A lost device may be used again. It is empty."""
        assert self.devices[device].lost
        self.devices[device].lost = False

    def retime(self, system: System) -> None:
        """Other speeds from now on. What is under way keeps its expected end. Raises ValueError where more differs."""
        if not system.has_shape_of(self.system):
            raise ValueError("the system differs from the fleet's in more than its speeds")
        self.system = system

    def _is_reading(self, device: int) -> bool:
        """Whether its visit is a stream that holds the link."""
        state = self.devices[device]
        transfer = self.transfers[state.link]
        mine = transfer is not None and transfer.device == device and state.coming is None
        return mine and state.visit is not None

    def _fail_transfer(self, link: int) -> None:
        transfer = self.transfers[link]
        assert transfer is not None
        self._host.fail(transfer.item, from_disk=transfer.from_disk)
        self.transfers[link] = None

    def _free(self, device: int, now_ns: int) -> None:
        """Its visit is over."""
        state = self.devices[device]
        assert state.visit is not None
        if state.visit.mode is Mode.STREAM:
            state.free_bytes += self.system.stream_bytes(state.visit.teacher)
        for item in state.in_use:
            state.resident[item] = now_ns
        state.visit, state.serving, state.in_use = None, (), frozenset()

    def _device(self, device: int) -> DeviceState:
        if not 0 <= device < len(self.devices):
            raise IllegalDecision(f"there is no device {device}")
        if self.devices[device].lost:
            raise IllegalDecision(f"device {device} is lost")
        return self.devices[device]

    def _require_idle_link(self, state: DeviceState, item: int, what: str) -> None:
        if not self.can_transfer(state.id, item):
            busy = "the disk" if self.transfers[state.link] is None else f"link {state.link}"
            raise IllegalDecision(f"{what}: {busy} is busy")

    def _require_visit(self, state: DeviceState, teacher: int, jobs: Iterable[int], what: str, *, alone: bool) -> None:
        if state.visit is not None:
            raise IllegalDecision(f"{what}: it is on a visit to teacher {state.visit.teacher}")
        seen: set[int] = set()
        for id in jobs:
            job = self.waiting.get(id)
            if job is None or id in seen:
                raise IllegalDecision(f"{what}: job {id} has not arrived, or was given out")
            if job.teacher != teacher and (alone or not self.system.share_a_pass(job.teacher, teacher)):
                raise IllegalDecision(f"{what}: job {id} is for teacher {job.teacher}")
            seen.add(id)
        if not seen:
            raise IllegalDecision(f"{what}: it has no jobs")

    def _take(self, state: DeviceState, jobs: Iterable[int]) -> int:
        """Takes the jobs from `waiting`; the sum of their services in ns."""
        state.serving = tuple(self.waiting.pop(id) for id in jobs)
        return sum(self.system.service_ns(job.tokens, job.teacher, state.id) for job in state.serving)
