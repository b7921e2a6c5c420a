"""The optimiser, its state by parameter name, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distill.config.models import StudentConfig
from distill.errors import ConfigError, MissingDependency
from students.hf.quiet import quiet_bitsandbytes

State = dict[str, dict[str, Tensor]]
"""Parameter name -> the optimiser's tensors for it."""


def build_optimizer(
    named: Mapping[str, nn.Parameter], config: StudentConfig, *, embeddings: Collection[str]
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) that decays matrices only, and not the `embeddings`, the head among them.

    A decayed norm or bias shrinks what it scales, not what it fits. Rows of an embedding or a head that no token of a
    batch uses have no gradient to hold against decay: they would shrink step by step, those beyond the vocabulary too.
    OLMo 2 (arXiv 2501.00656) leaves embeddings out for stability. Raises MissingDependency.
    """
    decayed = [p for name, p in named.items() if p.ndim >= 2 and name not in embeddings]
    spared = [p for name, p in named.items() if p.ndim < 2 or name in embeddings]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw_8bit":
        return _adamw_8bit(groups, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _adamw_8bit(groups: list[dict[str, Any]], config: StudentConfig) -> torch.optim.Optimizer:
    """AdamW with block-wise quantised moments, 2 bytes a parameter instead of 8 (arXiv 2110.02861)."""
    quiet_bitsandbytes()
    try:
        # an extra, which may be missing; its stubs do not export what it documents
        from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]
    except ImportError as error:
        raise MissingDependency(
            "student.optimizer: adamw_8bit needs bitsandbytes, which cannot be imported",
            why=str(error),
            fix="pip install 'distill-engine[adam8bit]', or use student.optimizer=adamw",
        ) from error
    optimizer: Any = AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return optimizer


def state_of(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> State:
    """What the optimiser remembers; empty before the first step. Numbers become tensors without dimensions."""
    return {
        name: {key: _kept(key, value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in named.items()
        if parameter in optimizer.state
    }


def _kept(key: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    # bitsandbytes' quantisation maps are one small tensor for all parameters, and files hold no tensor twice
    return tensor.clone() if key.startswith("qmap") else tensor


def restore_state(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], state: State) -> None:
    """The inverse of `state_of`. Raises ConfigError for tensors of other parameters or of another optimiser."""
    expected = "exp_avg" if isinstance(optimizer, torch.optim.AdamW) else "state1"
    for name, tensors in state.items():
        parameter = named.get(name)
        if parameter is None or expected not in tensors or tensors[expected].shape != parameter.shape:
            raise ConfigError(
                f"checkpoint: the optimiser's state of {name} has no place in this student",
                why="it is of another model, or of another student.optimizer",
                fix="resume with the student section that the run was started with",
            )
        # AdamW of torch counts steps in a float32 tensor, that of bitsandbytes in a number
        optimizer.state[parameter] = {key: _placed(key, tensor, parameter) for key, tensor in tensors.items()}


def _placed(key: str, tensor: Tensor, parameter: nn.Parameter) -> Tensor | int:
    return int(tensor) if key == "step" and not tensor.is_floating_point() else tensor.to(parameter.device)


def lr_at(step: int, config: StudentConfig, total_steps: int) -> float:
    """Learning rate of optimiser step `step`, counted from 0.

    Rises over `warmup_steps` steps to the peak, then falls so that it would be `lr_final_ratio` of it at step
    `total_steps`, the first that there is not: also the last step teaches, where that ratio is 0.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    falling = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / falling)
    share_left = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.lr_final_ratio + (1.0 - config.lr_final_ratio) * share_left)
