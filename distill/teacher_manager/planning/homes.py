"""Which devices can take which teacher at all. Devices of one kind are counted, not listed: a fleet has few kinds."""

from __future__ import annotations

from distill.teacher_manager.timeline.case import System


class Homes:
    """Kinds of devices differ in budget and in whether they hold one object. Lost devices are no home."""

    def __init__(self, system: System) -> None:
        kinds: dict[tuple[int, bool], int] = {}
        self._kind = [kinds.setdefault((each.budget_bytes, each.holds_one), len(kinds)) for each in system.devices]
        """By device."""
        examples = [self._kind.index(kind) for kind in range(len(kinds))]
        teachers = range(len(system.teachers))
        self._fits = [[system.fits(teacher, device) for teacher in teachers] for device in examples]
        """By kind and teacher."""
        self._fits_all = [all(fits) for fits in self._fits]
        self._streams = [[system.streams(teacher, device) for teacher in teachers] for device in examples]
        self._live = [self._kind.count(kind) for kind in range(len(kinds))]
        """By kind: its devices that are not lost."""
        self._lost: set[int] = set()

    def lost(self, device: int) -> None:
        self._lost.add(device)
        self._live[self._kind[device]] -= 1

    def back(self, device: int) -> None:
        self._lost.remove(device)
        self._live[self._kind[device]] += 1

    def lives(self, device: int) -> bool:
        return device not in self._lost

    def fits(self, device: int, teacher: int) -> bool:
        return self._fits[self._kind[device]][teacher]

    def fits_all(self, device: int) -> bool:
        return self._fits_all[self._kind[device]]

    def streams(self, device: int, teacher: int) -> bool:
        """Whether the device could stream it if it were empty."""
        return self._streams[self._kind[device]][teacher]

    def has(self, teacher: int) -> bool:
        """Whether a device is left that can hold it or stream it."""
        return any(
            live and (self._fits[kind][teacher] or self._streams[kind][teacher]) for kind, live in enumerate(self._live)
        )
