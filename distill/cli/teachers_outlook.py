"""What `distill-run teachers plan` knows of a run: sizes from files, speeds, limits by formula, stall by simulation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from distill.cli.rates import ASSUMED, GIVEN, GivenSpeeds, Speeds, find_speeds, on_processor
from distill.config import RunConfig
from distill.errors import ConfigError
from distill.preflight import Preflight
from distill.preflight.inspection import ITEMSIZE
from distill.protocols import WeightCosts
from distill.teacher_manager import Catalogue, Rates, Teacher
from distill.teacher_manager.capacity import (
    Change,
    Expected,
    changes,
    cheapest,
    expect,
    load,
    load_limit,
    placement,
    stays_resident,
    swap_s,
)
from distill.teacher_manager.capacity_loop import Demand
from distill.teacher_manager.timeline.case import NS, Kind, System
from distill.weights.costs import costs_of


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says beside the configuration; None is found out or assumed."""

    speeds: GivenSpeeds
    tokens_per_sample: int | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class TeacherOutlook:
    """One weight object: a teacher, several that read the same files, or a base that only adapters need."""

    name: str
    kind: str
    """dense, moe, lora or base."""
    base: str | None
    bytes: int
    stream_bytes: int | None
    layers: int
    total_params: int
    active_params: int
    sample_share: float
    mode: str
    """How most of its visits will be: RESIDENT, STREAM or LORA; BASE for what is only stood on."""
    why: str
    break_even_tokens: float
    """B*: a visit of so many tokens computes as long as its weights take to come."""
    swap_s: float
    first_swap_s: float
    """From the disk."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the machine that the slots and rollout servers are on."""

    teachers_bytes: int
    """All weights as they are stored: where host memory or the page cache holds them, each is read from disk once."""
    slots_bytes: int
    """Where slots compute on the processor."""
    rollout_bytes: int
    """Likewise: the student in each rollout server."""
    machine_bytes: int
    """Measured here."""

    @property
    def needed_bytes(self) -> int:
        return self.teachers_bytes + self.slots_bytes + self.rollout_bytes


@dataclass(frozen=True, slots=True)
class Outlook:
    speeds: Speeds
    demand: Demand
    tokens_source: str
    step_source: str
    slots: int
    slot_bytes: int
    teachers: tuple[TeacherOutlook, ...]
    resident_together: bool
    write_s: float
    """Seconds of a step in which nobody waits for a teacher."""
    swap_s: float
    load: float
    load_limit: float
    least_step_s: float | None
    """Shorter steps ask for more than the limit; None: no step is long enough."""
    host: HostMemory
    expected: Expected
    changes: tuple[Change, ...]
    cheapest: Change | None


def look_ahead(config: RunConfig, preflight: Preflight, given: Given) -> Outlook:
    """Raises ConfigError for a teacher that no slot can hold or stream, and as the parts do."""
    catalogue = _catalogue(config, preflight)
    costs = [_costs(catalogue, number) for number in range(len(catalogue.items))]
    largest = max((item.files for item in catalogue.items), key=lambda files: files.bytes)
    file = next(iter(largest.tensors.values())).file
    speeds = find_speeds(given.speeds, config.server, file)
    system = _system(config, preflight, catalogue, costs, speeds.rates())
    _refuse_homeless(catalogue, system)
    demand, tokens_source = _demand(config, preflight, catalogue, given)
    limit = load_limit(system, demand)
    expected = expect(system, demand)
    tried = changes(system, demand, expected)
    return Outlook(
        speeds=speeds,
        demand=demand,
        tokens_source=tokens_source,
        step_source=f"{ASSUMED}: as long as the slots compute for it" if given.step_s is None else GIVEN,
        slots=len(system.devices),
        slot_bytes=system.devices[0].budget_bytes,
        teachers=tuple(
            _teacher(catalogue, system, costs[number], demand, expected, number, speeds.disk.value)
            for number in range(len(catalogue.items))
        ),
        resident_together=stays_resident(system),
        write_s=demand.write_s(system),
        swap_s=swap_s(system),
        load=load(system, demand),
        load_limit=limit,
        least_step_s=demand.work_s(system) / len(system.devices) / limit if limit else None,
        host=_host(config, preflight, catalogue, system),
        expected=expected,
        changes=tuple(tried),
        cheapest=cheapest(expected, tried),
    )


def _catalogue(config: RunConfig, preflight: Preflight) -> Catalogue:
    def opened(name: str, folder: Path, vocab_size: int | None) -> Teacher:
        return Teacher.open(name, folder, server_dtype=config.server.dtype, vocab_size=vocab_size)

    sizes = preflight.teacher_vocab_sizes
    teachers = [opened(name, each.folder, sizes[name]) for name, each in preflight.models.teachers.items()]
    under = {name: each.base for name, each in preflight.models.teachers.items() if each.base is not None}
    return Catalogue(teachers, {name: opened(f"base {base.name}", base, None) for name, base in under.items()})


def _costs(catalogue: Catalogue, number: int) -> WeightCosts:
    item = catalogue.items[number]
    base = None if item.base is None else catalogue.items[item.base].files.folder
    return costs_of(item.files.folder, item.files.held_dtype, base)


def _system(
    config: RunConfig, preflight: Preflight, catalogue: Catalogue, costs: list[WeightCosts], rates: Rates
) -> System:
    """As the scheduler of the run is told, with the speeds that are known here."""
    whole = [
        cost.bytes + (0 if item.base is None else costs[item.base].bytes)
        for item, cost in zip(catalogue.items, costs, strict=True)
    ]
    budget = preflight.models.slot_bytes if config.teacher_manager.slot_gb is not None else max(whole)
    system = catalogue.system(
        costs,
        [budget] * config.teacher_manager.slots,
        holds_one=config.server.program != "embedded",
        rates=rates,
    )
    links = tuple(msgspec.structs.replace(link, bytes_per_s=rates.link_bytes) for link in system.links)
    return replace(system, links=links)


def _refuse_homeless(catalogue: Catalogue, system: System) -> None:
    if homeless := system.homeless():
        needs = system.needs[homeless[0]]
        size, budget = sum(system.teachers[item].bytes for item in needs), system.devices[0].budget_bytes
        raise ConfigError(
            f"teacher_manager.slot_gb: a slot of {budget} bytes neither holds nor streams "
            f"{' over '.join(catalogue.items[item].files.name for item in reversed(needs))}, which takes {size} bytes",
            fix="raise teacher_manager.slot_gb, or leave it out: it then follows the largest teacher",
        )


def _demand(config: RunConfig, preflight: Preflight, catalogue: Catalogue, given: Given) -> tuple[Demand, str]:
    """The demand, and where its tokens come from."""
    rows = preflight.prompts.rows
    routes = Counter(tuple(sorted({catalogue.item_of[name] for name in row.teachers})) for row, _ in rows)
    tokens, source = given.tokens_per_sample, GIVEN
    if tokens is None:
        prompt = sum(len(ids) for _, ids in rows) / len(rows)
        tokens = round(prompt + config.rollout.max_new_tokens)
        source = f"{ASSUMED}: {prompt:.0f} of a prompt, measured, and rollout.max_new_tokens"
    trainer = config.trainer
    demand = Demand(
        routes=tuple((items, count / len(rows)) for items, count in sorted(routes.items())),
        batch_size=trainer.batch_size,
        prompts=max(1, trainer.batch_size // config.rollout.samples_per_prompt),
        tokens_per_sample=tokens,
        max_staleness=trainer.max_staleness,
        visit_tokens=config.teacher_manager.call_tokens if trainer.max_staleness else 0,
        deadline_s=config.teacher_manager.deadline_s,
        step_s=given.step_s,
    )
    return demand, source


def _teacher(
    catalogue: Catalogue,
    system: System,
    cost: WeightCosts,
    demand: Demand,
    expected: Expected,
    number: int,
    disk_bytes_per_s: float,
) -> TeacherOutlook:
    item, there, planned = catalogue.items[number], placement(system, number), system.teachers[number]
    mode, why = _mode(catalogue, system, expected.streamed_share, number)
    return TeacherOutlook(
        name=", ".join(item.teachers) or item.files.name,
        kind=planned.kind.value,
        base=None if item.base is None else catalogue.items[item.base].files.name,
        bytes=cost.bytes,
        stream_bytes=cost.stream_bytes,
        layers=cost.layers,
        total_params=cost.total_params,
        active_params=planned.active_params,
        sample_share=demand.shares().get(number, 0.0),
        mode=mode,
        why=why,
        break_even_tokens=there.break_even_tokens,
        swap_s=there.copy_ns / NS,
        first_swap_s=max(there.copy_ns / NS, cost.bytes / disk_bytes_per_s),
    )


def _mode(catalogue: Catalogue, system: System, streamed: Mapping[int, float], number: int) -> tuple[str, str]:
    planned, device = system.teachers[number], system.devices[0]
    if planned.kind is Kind.BASE:
        return "BASE", "adapters stand on it; nobody asks it"
    if planned.base is not None:
        over = catalogue.items[planned.base].files.name
        return "LORA", f"an adapter over {over}: only its own bytes come and go while that stays"
    if not system.fits(number, 0):
        return "STREAM", f"larger than a slot; {system.stream_bytes(number)} bytes of buffers are not"
    if stays_resident(system):
        return "RESIDENT", "all have room together: loaded once"
    share = streamed.get(number, 0.0)
    if share > 0.5:
        return "STREAM", f"{share:.0%} of its simulated visits: it is seldom used twice before it has to go"
    if device.holds_one:
        return "RESIDENT", f"takes turns: {device.budget_bytes} bytes hold one teacher at a time"
    return "RESIDENT", "takes turns" + (f"; {share:.0%} of its simulated visits are streamed" if share else "")


def _host(config: RunConfig, preflight: Preflight, catalogue: Catalogue, system: System) -> HostMemory:
    stored = sum(tensor.nbytes for item in catalogue.items for tensor in item.files.tensors.values())
    held = on_processor(config.server)
    student = preflight.models.student.loaded_bytes(ITEMSIZE[config.server.dtype])
    return HostMemory(
        teachers_bytes=stored,
        slots_bytes=sum(device.budget_bytes for device in system.devices) if held else 0,
        rollout_bytes=student * config.rollout.servers if held else 0,
        machine_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
