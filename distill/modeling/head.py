"""From hidden states to logits. N rows, D hidden size, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def logits(model: Any, hidden_ND: Tensor, vocab_size: int) -> Tensor:
    """float32 logits (N, V) of a transformers model: rows of its head from `vocab_size` on are padding, and cut before
    anything is normalised."""
    config = model.config
    logits_NV = model.get_output_embeddings()(hidden_ND)[:, :vocab_size].float()
    if scale := getattr(config, "logits_scaling", None):
        logits_NV = logits_NV / scale
    if scale := getattr(config, "logit_scale", None):
        logits_NV = logits_NV * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits_NV = torch.tanh(logits_NV / cap) * cap
    return logits_NV
