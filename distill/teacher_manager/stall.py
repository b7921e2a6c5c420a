"""How long slots stood still although something was waiting: the time that sharing slots costs a run."""

from __future__ import annotations

from dataclasses import dataclass

from distill.teacher_manager.timeline.fleet import Fleet


@dataclass(frozen=True, slots=True)
class SlotTimes:
    """Seconds, summed over the slots."""

    busy_s: float = 0.0
    """On a visit."""
    stalled_s: float = 0.0
    """On no visit while a job waited, as `timeline.metrics` counts it for a schedule."""
    idle_s: float = 0.0
    """Nothing waited."""


class Stall:
    """Told after every change of the fleet."""

    def __init__(self, slots: int) -> None:
        self._busy = self._stalled = self._idle = 0.0
        self._since: float | None = None
        self._working = 0
        self._resting = slots
        self._waiting = False

    def see(self, fleet: Fleet, now: float) -> None:
        """`now` in seconds: from here on it is as the fleet says."""
        self._pass_to(now)
        self._working = sum(device.visit is not None for device in fleet.devices)
        self._resting = len(fleet.devices) - self._working
        self._waiting = bool(fleet.waiting)

    def times(self, now: float) -> SlotTimes:
        self._pass_to(now)
        return SlotTimes(self._busy, self._stalled, self._idle)

    def _pass_to(self, now: float) -> None:
        if self._since is not None:
            passed = now - self._since
            self._busy += passed * self._working
            if self._waiting:
                self._stalled += passed * self._resting
            else:
                self._idle += passed * self._resting
        self._since = now
