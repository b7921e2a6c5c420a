"""The parameters that learn, as the optimiser sees them: always float32, whatever the model computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping

import torch
from torch import Tensor, nn

from distill.errors import ConfigError


class Parameters:
    """Name -> what the optimiser steps on.

    In float32 these are the model's own parameters. In lower precision each has a float32 master beside it: gradients
    are added up there, micro-batch by micro-batch, the optimiser steps on it, and the model gets its rounding. A small
    step would be lost in a bfloat16 weight, which has 8 significant bits.
    """

    def __init__(self, model: nn.Module, *, keep_all: bool = False) -> None:
        """`keep_all`: the model's files do not hold them as they are, because adapters are merged there."""
        self._keep_all = keep_all
        self._live = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.named: dict[str, nn.Parameter] = {}
        for name, parameter in self._live.items():
            if parameter.dtype == torch.float32:
                self.named[name] = parameter
                continue
            self.named[name] = nn.Parameter(parameter.detach().float())
            parameter.register_post_accumulate_grad_hook(_hand_over_to(self.named[name]))

    @property
    def _masters(self) -> dict[str, nn.Parameter]:
        return {name: master for name, master in self.named.items() if master is not self._live[name]}

    @property
    def kept(self) -> dict[str, nn.Parameter]:
        """Those that a checkpoint must hold beside the model's files."""
        return self.named if self._keep_all else self._masters

    def values(self) -> list[nn.Parameter]:
        return list(self.named.values())

    def zero_grad(self) -> None:
        for parameter in (*self._live.values(), *self.named.values()):
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the model the rounding of its masters."""
        for name, master in self._masters.items():
            self._live[name].copy_(master)

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Set all of them. Raises ConfigError where names or shapes differ."""
        _require_same(self.named, values, "float32 weights (student.lora, student.dtype)")
        for name, value in values.items():
            self.named[name].copy_(value)
        self.write_back()

    @contextlib.contextmanager
    def replaced_by(self, values: Mapping[str, Tensor]) -> Generator[None]:
        """The model computes with `values` inside the block, and with exactly what it had before after it."""
        before = {name: parameter.detach().clone() for name, parameter in self._live.items()}
        try:
            with torch.no_grad():
                for name, parameter in self._live.items():
                    parameter.copy_(values[name])
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._live.items():
                    parameter.copy_(before[name])


def _require_same(own: Mapping[str, Tensor], values: Mapping[str, Tensor], kind: str) -> None:
    """Raise ConfigError unless both have the same names and shapes. `kind` says what they are."""
    strange = own.keys() ^ values.keys() or {name for name in own if own[name].shape != values[name].shape}
    if strange:
        raise ConfigError(
            f"checkpoint: its {kind} do not fit this student, {min(strange)} for one",
            why="it is of a student with other settings",
            fix="resume with the student section that the run was started with",
        )


def _hand_over_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hand_over


class Average:
    """An exponential moving average of the parameters: a <- decay * a + (1 - decay) * p after each step.

    It starts at the weights that training starts from. Source: Polyak and Juditsky 1992, in its exponential form.
    """

    def __init__(self, parameters: Parameters, decay: float) -> None:
        self._parameters = parameters
        self._decay = decay
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.named.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self._parameters.named.items():
            # a + (1 - decay) (p - a): a value that never changes is averaged to itself, without rounding
            self.values[name].lerp_(parameter, 1.0 - self._decay)

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        _require_same(self.values, values, "averaged weights (student.ema_decay)")
        for name, value in values.items():
            self.values[name].copy_(value)
