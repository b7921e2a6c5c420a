"""Attention over samples that lie end to end in one row: no token is padding, and no token sees another sample.

Everything else in a decoder acts on each token alone, so only attention must know where samples begin. The samples are
taken apart into groups of similar length; within a group they stand side by side, padded on the right, and causal
attention keeps real tokens from seeing the padding. Positions restart with each sample.

Legend: S samples, T tokens of the row, G samples of a group, L its longest sample, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_flash_attn_2_available

NAME = "distill_packed"
"""Under this name transformers finds `attend`."""
LAYOUT = "packed_layout"
"""Keyword by which a model hands the layout through to its attention. It survives recomputation, which a context
variable would not."""
GROUP_WASTE = 1.5
"""Longest over shortest sample of a group. Attention alone pays for the padding inside a group; more groups are more
kernel calls. What other values cost is in docs/student.md."""
FUSED = "flash_attention_2"
"""FlashAttention's own kernel for packed rows, used in half precision on CUDA where it is installed."""
_LIMITS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Keywords that transformers hands to that kernel."""
KNOWN = frozenset({"position_ids", "use_cache", "output_router_logits", "sliding_window", "softcap", LAYOUT, *_LIMITS})
"""Keywords of an attention call that `attend` understands, or that mean nothing to it. Any other that is set says
that the model's attention is more than ours."""


PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers (config.json: layer_types) in which nothing but attention looks at other tokens."""


class CannotPack(Exception):
    """The model's attention asks for something that packing does not do. Caught where the model is loaded."""


@dataclass(frozen=True)
class Group:
    """Samples of similar length, side by side."""

    gather_GL: Tensor
    """Token of the row at each place; padding repeats the sample's first token, and is never read back."""
    real_GL: Tensor
    """Which places hold a token of a sample."""
    samples: int
    longest: int
    whole: bool
    """No padding: all are equally long."""


class Layout:
    """Where the samples of a packed row begin, and how attention groups them."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.device = device

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def equal(self) -> bool:
        """All samples are equally long: side by side they are a view of the row, without a copy."""
        return len(set(self.lengths)) == 1

    @cached_property
    def position_ids(self) -> Tensor:
        """(1, T), from 0 for each sample."""
        positions = np.concatenate([np.arange(length, dtype=np.int64) for length in self.lengths])
        return torch.from_numpy(positions)[None].to(self.device)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        starts = np.cumsum([0, *self.lengths[:-1]])
        order = sorted(range(len(self.lengths)), key=lambda index: -self.lengths[index])
        groups: list[Group] = []
        while order:
            longest = self.lengths[order[0]]
            count = sum(1 for index in order if longest <= GROUP_WASTE * self.lengths[index])
            members, order = order[:count], order[count:]
            places_1L = np.arange(longest)[None]
            real_GL = places_1L < np.asarray([self.lengths[index] for index in members])[:, None]
            gather_GL = starts[members][:, None] + np.where(real_GL, places_1L, 0)
            groups.append(
                Group(
                    torch.from_numpy(gather_GL).to(self.device),
                    torch.from_numpy(real_GL).to(self.device),
                    len(members),
                    longest,
                    bool(real_GL.all()),
                )
            )
        return tuple(groups)

    @cached_property
    def restore(self) -> Tensor:
        """(T,) where each token of the row stands in the groups' outputs, laid end to end without their padding."""
        order_T = torch.cat([group.gather_GL[group.real_GL] for group in self.groups])
        restore_T = torch.empty_like(order_T)
        restore_T[order_T] = torch.arange(len(order_T), device=self.device)
        return restore_T

    @cached_property
    def model_inputs(self) -> dict[str, Any]:
        """What the model's forward gets beside the ids, whichever attention it has."""
        ends = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)
        limits = dict(zip(_LIMITS, (ends, ends, max(self.lengths), max(self.lengths)), strict=True))
        return {"position_ids": self.position_ids, LAYOUT: self, **limits}


def attend(
    module: torch.nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sample of a packed row, (1, T, H, D); an attention function of transformers.

    Raises CannotPack where the model asks for something else.
    """
    layout = options.get(LAYOUT)
    strange = sorted(name for name, value in options.items() if name not in KNOWN and value is not None)
    if strange or attention_mask is not None or not isinstance(layout, Layout):
        what = ", ".join(strange) or ("an attention mask" if attention_mask is not None else "no layout passed on")
        raise CannotPack(f"{type(module).__name__} wants {what}")
    if not getattr(module, "is_causal", True) or query_1HTD.shape[-2] != layout.tokens:
        raise CannotPack(f"{type(module).__name__} is not causal self-attention")
    rows = [tensor_1HTD[0].transpose(0, 1) for tensor_1HTD in (query_1HTD, key_1HTD, value_1HTD)]
    if layout.equal:
        beside = [row_THD.unflatten(0, (len(layout.lengths), -1)).transpose(1, 2) for row_THD in rows]
        return _attend_group(module, beside, layout.lengths[0], dropout, scaling, options).flatten(0, 1)[None], None
    outputs: list[Tensor] = []
    for group in layout.groups:
        apart = [
            row_THD.index_select(0, group.gather_GL.flatten()).unflatten(0, group.gather_GL.shape).transpose(1, 2)
            for row_THD in rows
        ]
        out_GLHD = _attend_group(module, apart, group.longest, dropout, scaling, options)
        outputs.append(out_GLHD.flatten(0, 1) if group.whole else out_GLHD[group.real_GL])
    return torch.cat(outputs).index_select(0, layout.restore)[None], None


def _attend_group(
    module: torch.nn.Module,
    apart: Sequence[Tensor],
    longest: int,
    dropout: float,
    scaling: float | None,
    options: Mapping[str, Any],
) -> Tensor:
    query_GHLD, key_GHLD, value_GHLD = apart
    window, softcap = options.get("sliding_window"), options.get("softcap")
    mask_LL = None
    if softcap is not None or (window is not None and longest > window):
        places_L = torch.arange(longest, device=query_GHLD.device)
        back_LL = places_L[:, None] - places_L[None, :]
        mask_LL = (back_LL >= 0) & (back_LL < (window or longest))
    if softcap is None:
        mask = None if mask_LL is None else mask_LL[None, None]
        out_GLHD, _ = sdpa_attention_forward(
            module, query_GHLD, key_GHLD, value_GHLD, mask, dropout=dropout, scaling=scaling, is_causal=mask is None
        )
        return out_GLHD
    # fused attention knows no cap on its scores
    groups = getattr(module, "num_key_value_groups", 1)
    key_GHLD, value_GHLD = repeat_kv(key_GHLD, groups), repeat_kv(value_GHLD, groups)
    scale = query_GHLD.shape[-1] ** -0.5 if scaling is None else scaling
    scores_GHLL = softcap * torch.tanh(query_GHLD @ key_GHLD.transpose(-1, -2) * (scale / softcap))
    assert mask_LL is not None
    shares_GHLL = scores_GHLL.masked_fill(~mask_LL, -torch.inf).softmax(-1, dtype=torch.float32).to(query_GHLD.dtype)
    shares_GHLL = torch.nn.functional.dropout(shares_GHLL, dropout, module.training)
    return (shares_GHLL @ value_GHLD).transpose(1, 2)


AttentionInterface.register(NAME, attend)

PROBE_LENGTHS = (5, 3, 4)
PROBE_RTOL = 1e-4
"""Largest difference of hidden states, as a share of their largest value, that rounding may leave in float32."""
PROBE_RTOL_LOW = 3e-2
"""The same in bfloat16, which has 8 significant bits."""


@torch.no_grad()
def pack(model: PreTrainedModel, vocab_size: int) -> str | None:
    """Switch the model to packed attention, after it gave the same for a few tokens packed and alone.

    Returns None, or why the model cannot be packed; then it is as before.
    """
    reason = _built_otherwise(model)
    if reason is not None:
        return reason
    before: Any = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]: it has no other name
    was_training = model.training
    model.eval()
    try:
        for name in _implementations(model):
            model.set_attn_implementation(before)
            reason = _try(model, name, vocab_size)
            if reason is None:
                return None
    finally:
        model.train(was_training)
    model.set_attn_implementation(before)
    return reason


def _built_otherwise(model: PreTrainedModel) -> str | None:
    """What a few short samples would not show, above all in bfloat16: a state or a window along the row."""
    kind: Any = type(model)
    if getattr(kind, "_is_stateful", False):
        return f"{kind.__name__} carries a state along the row"
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if layers - PACKED_LAYERS:
        return f"{kind.__name__} has layers of {', '.join(sorted(layers - PACKED_LAYERS))}"
    if not getattr(kind, "_supports_flash_attn", False):
        # those that do hand their window to the attention function; others may keep it in a mask
        return f"the attention of {kind.__name__} does not go through transformers' interface in full"
    return None


def _implementations(model: PreTrainedModel) -> list[str]:
    fused = model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16)
    return [FUSED, NAME] if fused and is_flash_attn_2_available() else [NAME]


def _try(model: PreTrainedModel, name: str, vocab_size: int) -> str | None:
    """Set the model's attention and compare. Returns why it does not do."""
    base: Any = model.base_model
    layout = Layout(PROBE_LENGTHS, model.device)
    ids_1T = (torch.arange(layout.tokens, device=model.device) * 7 % vocab_size)[None]
    try:
        parts = ids_1T.split(list(layout.lengths), dim=1)
        alone_1TD = torch.cat([base(input_ids=part, use_cache=False)[0] for part in parts], dim=1)
        model.set_attn_implementation(name)
        packed_1TD = base(input_ids=ids_1T, use_cache=False, **layout.model_inputs)[0]
        return _difference(alone_1TD, packed_1TD)
    except CannotPack as error:
        return str(error)
    except (ImportError, TypeError, ValueError, RuntimeError, KeyError) as error:  # a model that is built otherwise
        return f"{type(error).__name__}: {error}"


def _difference(alone_1TD: Tensor, packed_1TD: Tensor) -> str | None:
    rtol = PROBE_RTOL if alone_1TD.dtype == torch.float32 else PROBE_RTOL_LOW
    largest = float((alone_1TD.float() - packed_1TD.float()).abs().max() / alone_1TD.float().abs().max())
    if largest <= rtol:
        return None
    return f"its hidden states differ by {largest:.2g} between packed and single samples"
