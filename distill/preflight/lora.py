"""The layers that `student.lora.targets` names, held against those that are in the student's files.

peft looks for them when the model is loaded. Here the same is asked of names alone, and of each target by itself: one
that fits nothing would be ignored beside another that does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from distill.config.models import LoraConfig
from distill.errors import ConfigError
from distill.preflight.folder import ModelFolder
from distill.registry import did_you_mean

_PREFIXES = ("", "model.", "transformer.", "gpt_neox.", "backbone.")
"""What the names of modules may have before those of the file: a base model that was saved alone leaves its own out."""


def check_targets(lora: LoraConfig, student: ModelFolder) -> None:
    """Raises ConfigError for a target that fits no layer of the student."""
    if lora.targets == "all-linear":
        return
    if isinstance(lora.targets, str):
        _check_expression(lora.targets, student)
        return
    for target in lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in student.layers):
            raise ConfigError(
                f"student.lora.targets: {target!r} fits no layer of {student.path}",
                why="a target is the end of a layer's name, from a dot on",
                fix=did_you_mean(target, _ends(student.layers, parts=target.count(".") + 1)),
            )


def _check_expression(targets: str, student: ModelFolder) -> None:
    if any(re.fullmatch(targets, prefix + name) for prefix in _PREFIXES for name in student.layers):
        return
    raise ConfigError(
        f"student.lora.targets: the expression {targets!r} fits no layer of {student.path}",
        why=f"a text is a regular expression for whole names, such as {student.layers[-1]}" if student.layers else "",
        fix=f"for ends of names write a list, [{targets}], or an expression such as .*{targets}",
    )


def _ends(layers: Sequence[str], parts: int) -> set[str]:
    """The last parts of their names, without those that differ by a number only."""
    ends = {".".join(name.split(".")[-parts:]) for name in layers}
    return {end for end in ends if not end[0].isdigit()}
