"""How full rows travel: as rows of V log-probabilities, or as hidden states of D numbers and a head kept once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config import RunConfig
from distill.errors import ConfigError
from distill.preflight.folder import read_json
from distill.protocols import HeadFolder
from distill.types import Signal, SignalSpec

LEAST_ROW_BYTES = 1 << 16
"""Rows shorter than this stay rows unless the user says otherwise: making them anew costs the student one more matrix
product, and there is little to win."""
ROW_ITEMSIZE = 4
_HIDDEN_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOUCHES_HEAD = ("lm_head", "embed", "wte")


@dataclass(frozen=True, slots=True)
class FullRows:
    """What the teachers are asked for where the objective wants full rows."""

    heads: Mapping[str, HeadFolder]
    """For each teacher; empty where rows are sent."""
    why: str = ""
    """For the log; empty where the objective wants no full rows."""

    def asked(self, spec: SignalSpec) -> SignalSpec:
        """What is asked of a teacher for an objective's `spec`."""
        return SignalSpec(Signal.HIDDEN) if self.heads else spec


def choose_full_rows(config: RunConfig, spec: SignalSpec, vocab_size: int) -> FullRows:
    """`vocab_size`: of the student's tokenizer, which is every teacher's where full rows are compared.

    Raises ConfigError for teacher_manager.full_rows=hidden where that cannot be.
    """
    setting = config.teacher_manager.full_rows
    if spec.signal is not Signal.FULL:
        if setting == "hidden":
            raise ConfigError(
                "teacher_manager.full_rows is hidden, and the objective asks for no full rows",
                why="hidden states stand for whole rows of the vocabulary",
                fix="leave teacher_manager.full_rows out, or remove objective.support",
            )
        return FullRows({})
    itemsize = _HIDDEN_ITEMSIZE[config.server.dtype]
    obstacles = list(_obstacles(config))
    found = {name: _head_of(name, config) for name in config.teachers}
    obstacles += [found_or_why for found_or_why in found.values() if isinstance(found_or_why, str)]
    heads = {name: head for name, head in found.items() if not isinstance(head, str)}
    if setting == "rows":
        return FullRows({}, f"full rows are sent: {ROW_ITEMSIZE * vocab_size} bytes a token")
    if obstacles and setting == "hidden":
        raise ConfigError(
            f"teacher_manager.full_rows is hidden, and {obstacles[0]}",
            why="the student makes the rows itself from the teacher's last hidden states and its head",
            fix="set teacher_manager.full_rows=rows, or leave it out",
        )
    row = ROW_ITEMSIZE * vocab_size
    widest = max((size for _, size in heads.values()), default=0) * itemsize
    figures = f"{widest} bytes a token as hidden states, {row} as rows"
    if setting == "hidden" or (not obstacles and widest < row and row >= LEAST_ROW_BYTES):
        return FullRows({name: head for name, (head, _) in heads.items()}, f"hidden states are sent: {figures}")
    reason = obstacles[0] if obstacles else figures
    return FullRows({}, f"full rows are sent: {reason}")


def _obstacles(config: RunConfig) -> list[str]:
    program, backend = config.server.program, config.student.backend
    # of attached servers nobody knows before the run which program they are: whoever says hidden says that they can
    able = program == "embedded" or (program == "attach" and config.teacher_manager.full_rows == "hidden")
    obstacles = [] if able else [f"server.program is {program}, which gives no hidden states"]
    return obstacles if backend == "hf" else [*obstacles, f"student.backend is {backend}, which keeps no heads"]


def _head_of(name: str, config: RunConfig) -> tuple[HeadFolder, int] | str:
    """Where its head is, and its D; or why it has none that the student could use."""
    teacher = config.teachers[name]
    folder, role = teacher.model, f"teachers.{name}.model"
    if folder is None:
        return f"teachers.{name} is served elsewhere, and its head is in no file here"
    if (folder / "adapter_config.json").is_file():
        adapter = read_json(folder / "adapter_config.json", role)
        touched = _touched(adapter)
        if touched:
            return f"the adapter of teachers.{name} changes {touched}, so its head is in no file"
        folder = Path(teacher.base or adapter.get("base_model_name_or_path") or folder)
    settings = read_json(folder / "config.json", role)
    text: dict[str, Any] = {**settings, **settings.get("text_config", {})}
    sizes = [text[key] for key in ("hidden_size", "n_embd", "d_model") if isinstance(text.get(key), int)]
    if not sizes:
        return f"config.json of teachers.{name} does not say how many numbers a hidden state has"
    return HeadFolder(folder, config.server.dtype, teacher.temperature), sizes[0]


def _touched(adapter: Mapping[str, Any]) -> str:
    """A module of an adapter that the head is made of; empty where there is none."""
    names: list[str] = []
    for key in ("target_modules", "modules_to_save"):
        value = adapter.get(key) or []
        names += [value] if isinstance(value, str) else value
    return next((name for name in names if any(part in name for part in _TOUCHES_HEAD)), "")
