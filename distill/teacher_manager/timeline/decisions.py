"""What a policy is told and what it answers. There is no clock here: the same policy object runs on a virtual clock and
on the wall clock.

A driver (the simulator, or the manager of a run) does this at each instant at which something happened:

    for decision in policy.decide(now_ns, events, fleet):
        carry it out and enter it in `fleet`

Each decision is carried out before the next one is asked for: a policy that is a generator finds `fleet` up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from distill.teacher_manager.timeline.case import Job

if TYPE_CHECKING:
    from distill.teacher_manager.timeline.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Announced:
    """A rollout started. Its job will arrive at an unknown time with about `expected_tokens`."""

    rollout: int
    """A key for its arrival. It is no job id and says nothing about the order of arrivals."""
    teacher: int
    expected_tokens: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rollout ended: its job waits for a visit and everything about it is known. It need not have been announced."""

    rollout: int
    job: Job
    group: int = -1
    """Jobs of one group stand beside each other in a visit: they share a prompt. -1: of no group."""
    resident: bool = False
    """Only a resident teacher can do it: it is not streamed."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An announced rollout whose job will not arrive. One that is not under way changes nothing."""

    rollout: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody wants this waiting job any more. A job on a visit is left to the visit."""

    job: int


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """The object is resident and the link idle."""

    link: int
    device: int
    item: int


@dataclass(frozen=True, slots=True)
class LinkReleased:
    """A streaming visit has read its last layer: the link is idle, the visit goes on."""

    link: int


@dataclass(frozen=True, slots=True)
class VisitEnded:
    """The jobs are done and the device is free."""

    device: int
    teacher: int
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """The object did not come, its room is free again and the link idle."""

    link: int
    device: int
    item: int


@dataclass(frozen=True, slots=True)
class VisitFailed:
    """The device is free. `jobs` wait again; all others of the visit are done."""

    device: int
    teacher: int
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """Residents, copy and visit there are gone, and all jobs of the visit wait again. Nothing may be decided for it."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceBack:
    """A lost device may be used again. It is empty."""

    device: int


Event = (
    Announced
    | Arrived
    | Withdrawn
    | Dropped
    | CopyEnded
    | CopyFailed
    | LinkReleased
    | VisitEnded
    | VisitFailed
    | DeviceLost
    | DeviceBack
)


@dataclass(frozen=True, slots=True)
class Copy:
    """Bring one object to a device whose free budget holds it, over its idle link."""

    device: int
    item: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Give up a resident object that no visit uses. It takes no time."""

    device: int
    item: int


@dataclass(frozen=True, slots=True)
class Visit:
    """Serve arrived jobs of a teacher whose objects are all resident, in this order."""

    device: int
    teacher: int
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """Serve arrived jobs layer by layer over the idle link, without becoming resident."""

    device: int
    teacher: int
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """Ask again at `at_ns` even if nothing happens before. It holds until `decide` is next called."""

    at_ns: int


Decision = Copy | Evict | Visit | Stream | Wake


class Policy(Protocol):
    """Knows the `System` it was made for and what events told it, and nothing else."""

    def decide(self, now_ns: int, events: Sequence[Event], fleet: Fleet) -> Iterable[Decision]:
        """Called once at an instant at which something happened, after all of it is entered in `fleet`, with `events`
        in the order in which they happened (in a simulation ends, announcements, arrivals); called at time 0 in any
        case, and never twice for one `now_ns`. `fleet` is for reading.

        Where there is a disk, copies come before streams: what host memory drops depends on the order."""
        ...
