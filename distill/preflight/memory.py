"""Weight bytes against the memory that is to hold them: slots of teachers, and this machine's own memory.

Only weights and the optimiser are counted, and each of them for certain, so nothing is refused that could run; caches,
activations and the programs themselves come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from distill.config import RunConfig
from distill.errors import ConfigError, EnvironmentFault
from distill.preflight.folder import ModelFolder
from distill.preflight.programs import device_type

if TYPE_CHECKING:
    from distill.preflight.inspection import TeacherFolder

_GRADIENT, _MASTER, _MOMENTS, _SMALL_MOMENTS = 4, 4, 8, 2
"""Bytes a trained parameter: float32, float32, AdamW's two in float32, and in 8 bits."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """What one teacher takes of a slot at least, and how."""

    bytes: int
    streamed: bool
    """It does not fit whole: its layers pass through one after another."""


def needs(
    teachers: Mapping[str, TeacherFolder], budget: int, stream_bytes: Mapping[str, int] | None = None
) -> dict[str, Need]:
    """Teacher -> what it takes of a slot of `budget` bytes: all its weights where they fit, else what streaming them
    takes. `stream_bytes`: for teachers that can be streamed, the bytes that must be there at one time."""
    found: dict[str, Need] = {}
    for name, teacher in teachers.items():
        streamed = (stream_bytes or {}).get(name)
        whole = teacher.slot_bytes <= budget or streamed is None
        found[name] = Need(teacher.slot_bytes, False) if whole else Need(streamed or 0, True)
    return found


def slot_budget(
    config: RunConfig, teachers: Mapping[str, TeacherFolder], stream_bytes: Mapping[str, int] | None = None
) -> int:
    """Bytes of a slot: `teacher_manager.slot_gb`, by default those of the largest teacher.

    Raises ConfigError for a teacher that a slot can hold neither whole nor layer by layer, as `stream_bytes` says.
    """
    slot_gb = config.teacher_manager.slot_gb
    if slot_gb is None:
        return max((teacher.slot_bytes for teacher in teachers.values()), default=0)
    budget = round(slot_gb * 1e9)
    found = needs(teachers, budget, stream_bytes)
    name = max(found, key=lambda name: found[name].bytes, default=None)
    if name is None or found[name].bytes <= budget:
        return budget
    need, teacher = found[name], teachers[name]
    how = f"layer by layer, of {teacher.slot_bytes} in all; " if need.streamed else ""
    raise ConfigError(
        f"teacher_manager.slot_gb is {slot_gb:g} ({budget} bytes), and teachers.{name} needs {need.bytes} bytes "
        f"({how}{teacher.model.parameters} parameters in {config.server.dtype})",
        why="a slot must hold each teacher by itself",
        fix=f"set teacher_manager.slot_gb={round_up(need.bytes / 1e9):g} or more, or another server.dtype",
    )


def round_up(gigabytes: float) -> float:
    """Three figures are enough to read, and never less than was asked for."""
    text = f"{gigabytes:.3g}"
    return float(text) if float(text) >= gigabytes else float(f"{gigabytes * 1.005:.3g}")


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that a run keeps in this machine's memory from its start to its end."""

    what: str
    bytes: int
    device: str = "cpu"
    """Setting of the processes that keep it; on a GPU it is not in this machine's memory."""


def holdings(config: RunConfig, student: ModelFolder, slot_bytes: int, itemsize: int) -> list[Holding]:
    """Of the student, and of the servers that the run starts itself. `itemsize`: bytes a parameter in servers."""
    found = [Holding(*_student(config, student), config.student.device)]
    if config.server.program != "attach":
        servers, slots = config.rollout.servers, config.teacher_manager.slots
        found += [
            Holding(_times(servers, "rollout server"), servers * student.loaded_bytes(itemsize), config.server.device),
            Holding(_times(slots, "slot"), slots * slot_bytes, config.server.device),
        ]
    return found


def _student(config: RunConfig, student: ModelFolder) -> tuple[str, int]:
    settings = config.student
    if settings.lora is not None:
        itemsize = 2 if settings.dtype == "bfloat16" else 4
        return "the student, of which adapters are trained", student.parameters * itemsize
    each = _MASTER + _GRADIENT + (_MOMENTS if settings.optimizer == "adamw" else _SMALL_MOMENTS)
    copies = settings.ranks if settings.parallel == "ddp" else 1
    return "the student with gradients and moments", student.parameters * each * copies


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def check_host(config: RunConfig, held: Sequence[Holding], available: int | None = None) -> int:
    """Bytes of `held` that are in this machine's memory for certain. `available`: default, what this machine has.

    Raises EnvironmentFault when they are more than that. A run in a cluster of its own is not looked at.
    """
    if config.ray_address is not None:
        return 0
    available = available_bytes() if available is None else available
    if sum(each.bytes for each in held) > available:  # a device is asked for only where the answer can change anything
        held = [each for each in held if each.device == "cpu" or device_type(each.device) == "cpu"]
    needed = sum(each.bytes for each in held)
    if needed > available:
        listed = ", ".join(f"{each.what} {each.bytes / 1e9:.3g} GB" for each in held)
        raise EnvironmentFault(
            f"not enough memory: the weights of this run take {needed / 1e9:.3g} GB of this machine's, and "
            f"{available / 1e9:.3g} GB are available",
            why=listed,
            fix="fewer rollout.servers or teacher_manager.slots, a smaller teacher_manager.slot_gb, "
            "server.dtype=bfloat16, student.lora={}, or a machine with more memory",
        )
    return needed


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that new processes can take without swapping: the machine's, or what the container's limit leaves."""
    return min(psutil.virtual_memory().available, _left_in_container(cgroup))


def _left_in_container(cgroup: Path) -> int:
    """Limit less usage, where files that are only cached count as free (cgroup v2). Without a limit, 2^63."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**63
    return 2**63 if limit == "max" else max(int(limit) - used + int(counts.get("inactive_file", 0)), 0)
