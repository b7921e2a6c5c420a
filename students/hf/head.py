"""Work of ours in the place of a model's head: it gets the hidden states of the tokens that count, and gives the loss.

The work happens inside the model's forward pass, while the head's weight is at hand: a sharded model has it whole only
then. Logits of a whole micro-batch never exist.

Legend: B samples, T tokens of a row, N rows that the head is wanted for, V common vocabulary, D hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.errors import ConfigError
from distill.objectives.head import ScaledAndCapped

CHECK_TOKENS = 8
CHECK_RTOL = 1e-4
"""Largest difference between the model's own logits and ours, as a share of their largest, that rounding may leave in
float32."""
CHECK_RTOL_LOW = 3e-2
"""The same in bfloat16, which has 8 significant bits."""


@dataclass(frozen=True)
class HeadInput:
    """What the head would have been applied to, and its weights: `logits = transform(hidden @ weight.T + bias)`."""

    hidden_ND: Tensor
    weight_VD: Tensor
    """May have rows beyond the vocabulary."""
    bias_V: Tensor | None
    transform: ScaledAndCapped | None

    def nothing(self) -> Tensor:
        """A loss of zero that still gives every weight a gradient: ranks must agree on which weights have one."""
        biases = () if self.bias_V is None else (self.bias_V[:1],)
        parts = (self.hidden_ND[:1], self.weight_VD[:1], *biases)
        return torch.stack([part.float().sum() for part in parts]).sum() * 0.0


class ReplacedHead:
    """The head of one model. Outside of `doing` the model is as it always was."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ConfigError for a head that is no plain linear layer."""
        head: Any = model.get_output_embeddings()
        if getattr(head, "weight", None) is None or head.weight.ndim != 2:
            raise ConfigError(
                f"student.model: the head of {type(model).__name__} is a {type(head).__name__}, not a linear layer",
                why="the loss is computed in chunks from the head's weight",
            )
        self._head = head
        self._result: Tensor | None = None
        self.transform = logits_transform(model.config)
        # before any wrapper's own hooks, so that they see the loss as the model's output
        model.register_forward_hook(self._output)

    @contextlib.contextmanager
    def doing(self, rows_N: Tensor, work: Callable[[HeadInput], Tensor]) -> Generator[None]:
        """In the block the model's forward pass returns what `work` returns for the flattened positions `rows_N`."""

        def instead(hidden_BTD: Tensor) -> Tensor:
            hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, rows_N)
            self._result = work(HeadInput(hidden_ND, self._head.weight, self._head.bias, self.transform))
            # stands where logits would; what the model does to it is not looked at
            return hidden_BTD.new_zeros((1, 1, 1))

        self._head.forward = instead
        try:
            yield
        finally:
            del self._head.forward
            self._result = None

    def _output(self, _module: torch.nn.Module, _args: tuple[Any, ...], _output: Any) -> Tensor | None:
        return self._result


def logits_transform(config: Any) -> ScaledAndCapped | None:
    """What models of this configuration do to their logits after the head, as far as transformers has names for it."""
    text = config.get_text_config()

    def number(name: str) -> float | None:
        value = getattr(text, name, None)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere; Falcon-H1; Muse
        scale *= number(name) or 1.0
    scale /= number("logits_scaling") or 1.0  # Granite
    cap = number("final_logit_softcapping")  # Gemma 2 and later
    return None if scale == 1.0 and cap is None else ScaledAndCapped(scale, cap)


@torch.no_grad()
def require_known_logits(model: PreTrainedModel, head: ReplacedHead, vocab_size: int) -> None:
    """Push a few tokens through the model and through its head as we know it. Raises ConfigError where they differ."""
    device = next(model.parameters()).device
    ids_1T = (torch.arange(CHECK_TOKENS, device=device) * 5 % vocab_size)[None]

    def logits(at: HeadInput) -> Tensor:
        raw_NV = torch.nn.functional.linear(at.hidden_ND, at.weight_VD, at.bias_V).float()
        return raw_NV if at.transform is None else at.transform(raw_NV)

    was_training = model.training
    model.eval()
    try:
        own_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :, :vocab_size].float()
        with head.doing(torch.arange(CHECK_TOKENS, device=device), logits):
            ours: Any = model(input_ids=ids_1T, use_cache=False)
        ours = ours[:, :vocab_size]
    finally:
        model.train(was_training)
    if not bool(own_TV.isfinite().all()):
        raise ConfigError(
            f"student.model: the logits of {type(model).__name__} hold NaN or infinity before the first step",
            why="its weights do, or overflow: nothing can be learnt from there",
            fix="check the weights of student.model; float16 weights of some models overflow",
        )
    difference = float((own_TV - ours).abs().max() / own_TV.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    if not difference <= (CHECK_RTOL if model.dtype == torch.float32 else CHECK_RTOL_LOW):
        raise ConfigError(
            f"student.model: {type(model).__name__} does something to its logits that is not known here: "
            f"they differ by {difference:.2g} of the largest",
            why="the loss is computed in chunks from hidden states and head, which must give the model's own logits",
            fix="use a model whose config.json names its scale or cap of logits "
            "final_logit_softcapping, logit_scale, logits_scaling or lm_head_multiplier",
        )
