"""Which weight object each teacher is served from, and the system that a scheduling policy plans for.

Teachers that read the same files share one object: it is stored, copied and scored once for all of them. The object of
a LoRA adapter stands on that of its base, which may be a teacher too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from distill.errors import TeacherError
from distill.protocols import WeightCosts, WeightSource
from distill.teacher_manager.teachers import Teacher
from distill.teacher_manager.timeline.case import Device, HostTier, Kind, Link, System
from distill.teacher_manager.timeline.case import Teacher as PlannedTeacher


@dataclass(frozen=True, slots=True)
class Item:
    """One weight object. Its index is the teacher id of the policy's system."""

    files: Teacher
    base: int | None
    """Of an adapter: the item of its base."""
    teachers: tuple[str, ...]
    """Who is served from it; empty for a base that is nobody's teacher."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a run assumes before it has measured anything. Bytes and FLOPs per second."""

    device_flops: int
    link_bytes: int
    disk_bytes: int


_LEAST_COPY_S = 0.02
"""No swap is taken to be shorter than this before one was measured: calls and checks take their time too."""

CPU = Rates(device_flops=20 * 10**9, link_bytes=2 * 10**9, disk_bytes=10**9)
CUDA = Rates(device_flops=400 * 10**12, link_bytes=25 * 10**9, disk_bytes=3 * 10**9)


class Catalogue:
    """All items, bases before the adapters that stand on them."""

    def __init__(self, teachers: Sequence[Teacher], bases: Mapping[str, Teacher] | None = None) -> None:
        """`bases`: the base of each teacher that is a LoRA adapter, by the teacher's name."""
        bases = bases or {}
        self.teachers = {teacher.name: teacher for teacher in teachers}
        found: dict[tuple[Path, Path | None, int | None], list[Teacher]] = {}
        for teacher in [*bases.values(), *teachers]:
            base = bases.get(teacher.name)
            found.setdefault(_key(teacher, base), []).append(teacher)
        index = {key: number for number, key in enumerate(found)}
        self.items = tuple(
            Item(
                files=members[0],
                base=index[_key(base, None)] if (base := bases.get(members[0].name)) is not None else None,
                teachers=tuple(each.name for each in members if each.name in self.teachers),
            )
            for members in found.values()
        )
        self.item_of = {name: number for number, item in enumerate(self.items) for name in item.teachers}
        self._teachers_on = Counter(self._ground(number) for number in self.item_of.values())
        """Item without a base -> teachers that it, or an adapter on it, serves."""

    def shares_calls(self, item: int) -> bool:
        """Whether a call may ask it for several teachers, of one sample too: they are one object, or of one base."""
        return self._teachers_on[self._ground(item)] > 1

    def _ground(self, item: int) -> int:
        """The base that it stands on, or itself."""
        base = self.items[item].base
        return item if base is None else base

    @cached_property
    def sources(self) -> tuple[WeightSource, ...]:
        """What servers are to register, in this order."""
        return tuple(
            WeightSource(
                item.files.name,
                item.files.folder,
                item.files.version,
                item.files.vocab_size,
                None if item.base is None else self.items[item.base].files.name,
            )
            for item in self.items
        )

    def check_budget(self, costs: Sequence[WeightCosts], slot: str, budget_bytes: int) -> None:
        """Raises TeacherError when some teacher can neither be resident in the slot, its base included, nor be streamed
        through it. `costs`: by item."""
        for item, cost in zip(self.items, costs, strict=True):
            wanted = cost.bytes + (0 if item.base is None else costs[item.base].bytes)
            streamed = cost.stream_bytes
            if wanted <= budget_bytes or (streamed is not None and streamed <= budget_bytes):
                continue
            layers = "" if streamed is None else f", and {streamed} bytes while it is streamed layer by layer"
            raise TeacherError(
                f"teacher {item.files.name} has {wanted / 1e9:.3f} GB of weights ({wanted} bytes){layers}; "
                f"{slot} holds {budget_bytes / 1e9:.3f} GB ({budget_bytes} bytes)",
                why="it can never be served there",
                fix="raise teacher_manager.slot_gb, or leave it out: it then follows the largest teacher",
            )

    def system(
        self,
        costs: Sequence[WeightCosts],
        budgets: Sequence[int],
        *,
        holds_one: bool,
        rates: Rates,
        host_bytes: int = 0,
    ) -> System:
        """What a policy is told. `costs`: by item; `budgets`: bytes of each slot; `host_bytes`: of the memory tier, 0
        where there is none and the operating system's page cache stands in for it."""
        link_bytes = min(rates.link_bytes, int(max(cost.bytes for cost in costs) / _LEAST_COPY_S))
        return System(
            devices=tuple(
                Device(number, budget, rates.device_flops, link=number, holds_one=holds_one)
                for number, budget in enumerate(budgets)
            ),
            links=tuple(Link(number, link_bytes) for number in range(len(budgets))),
            host=HostTier(host_bytes, rates.disk_bytes) if host_bytes else None,
            teachers=tuple(self._planned(number, costs) for number in range(len(costs))),
        )

    def _planned(self, number: int, costs: Sequence[WeightCosts]) -> PlannedTeacher:
        item, cost = self.items[number], costs[number]
        # a token of an adapter's sample passes through its base too
        active = cost.active_params + (0 if item.base is None else costs[item.base].active_params)
        if item.base is not None:
            kind = Kind.LORA
        elif not item.teachers:
            kind = Kind.BASE
        else:
            kind = Kind.MOE if cost.active_params < cost.total_params else Kind.DENSE
        return PlannedTeacher(
            id=number,
            kind=kind,
            bytes=cost.bytes,
            total_params=cost.total_params,
            active_params=active,
            layers=cost.layers,
            base=item.base,
            stream_bytes=cost.stream_bytes,
            can_stream=cost.stream_bytes is not None,
        )


def _key(teacher: Teacher, base: Teacher | None) -> tuple[Path, Path | None, int | None]:
    return teacher.folder.resolve(), None if base is None else base.folder.resolve(), teacher.vocab_size
