"""The optimiser and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from distill.config.models import StudentConfig


def build_optimizer(model: nn.Module, config: StudentConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only: a decayed norm or bias shrinks what it scales, not what it fits."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def lr_at(step: int, config: StudentConfig, total_steps: int) -> float:
    """Learning rate of optimiser step `step`, counted from 0.

    Rises over `warmup_steps` steps to the peak, then goes to `lr_final_ratio` of it at step `total_steps - 1`, and
    stays there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    falling = max(1, total_steps - 1 - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / falling)
    share_left = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.lr_final_ratio + (1.0 - config.lr_final_ratio) * share_left)
