"""What a checkpoint holds beside the Hugging Face folder: `kind/parameter` -> tensor, and the way back.

`master`: float32 weights that the folder holds rounded or merged; `average`: the moving average; every other kind is
the optimiser's own, such as `exp_avg`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from distill.errors import ConfigError
from students.hf.checkpoint import Saved
from students.hf.optim import State, restore_state, state_of
from students.hf.parameters import Average, Parameters

MERGED_RTOL = 1e-2
"""How far rounding may move a merged weight on another machine, as a share of the tensor's largest: bfloat16's 2^-8."""


def training_state(
    parameters: Parameters, optimizer: torch.optim.Optimizer, average: Average | None
) -> dict[str, Tensor]:
    """All that a step depends on and the model's own weights do not say."""
    tensors = {
        f"{kind}/{name}": tensor for kind, named in _kept(parameters, average).items() for name, tensor in named.items()
    }
    for name, state in state_of(optimizer, parameters.named).items():
        tensors |= {f"{key}/{name}": tensor for key, tensor in state.items()}
    return tensors


def _kept(parameters: Parameters, average: Average | None) -> dict[str, Mapping[str, Tensor]]:
    return {"master": parameters.kept, "average": {} if average is None else average.values}


def restore_training(
    saved: Saved, parameters: Parameters, optimizer: torch.optim.Optimizer, average: Average | None
) -> None:
    """The inverse of `training_state`. Raises ConfigError for the state of a student with other settings."""
    kept = _kept(parameters, average)
    for kind, own in kept.items():
        if bool(own) != (kind in saved.kinds):
            raise ConfigError(
                f"checkpoint: it has {'no ' if own else ''}{kind} weights",
                why="student.lora, student.dtype and student.ema_decay decide which there are",
                fix="resume with the student section that the run was started with",
            )
    if kept["master"]:
        parameters.restore(saved.named("master", parameters.named))
    if average is not None:
        average.restore(saved.named("average", parameters.named))
    state: State = {}
    for key in saved.kinds:
        if key not in kept:
            for name, tensor in saved.named(key, parameters.named).items():
                state.setdefault(name, {})[key] = tensor
    restore_state(optimizer, parameters.named, state)


def first_difference(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first of `weights` that is another one in the safetensors files of `folder`, if any."""
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
    found: str | None = None
    for name, tensor in weights:
        if found is None:
            stored, ours = places[name].get_tensor(name).float(), tensor.cpu().float()
            if not bool((stored - ours).abs().max() <= MERGED_RTOL * ours.abs().max()):
                found = name
    return found
