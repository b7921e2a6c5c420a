"""Attention over samples that lie end to end in one row: no token is padding, and no token sees another sample.

Everything else in a decoder acts on each token alone, so only attention must know where samples begin. The samples are
taken apart into groups of similar length; within a group they stand side by side, padded on the right, and causal
attention keeps real tokens from seeing the padding. Positions restart with each sample.

A sample may continue another one of the row, its prefix: it sees all of that one's tokens before its own, and its
positions go on from there. So a prompt that many responses share lies in the row once. Prefixes have no prefix.

Legend: S samples, T tokens of the row, G samples of a group, L its longest sample, P tokens of its members' prefixes,
K = P + L, H heads, D head size.
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
    """Samples of similar length, with prefixes of the same length, side by side."""

    gather_GL: Tensor
    """Token of the row at each place; padding repeats the sample's first token, and is never read back."""
    real_GL: Tensor
    """Which places hold a token of a sample."""
    keys_GK: Tensor
    """Token of the row at each place that a member looks at: its prefix, then itself."""
    whole: bool
    """No padding: all are equally long."""


class Layout:
    """Where the samples of a packed row begin, and how attention groups them.

    `prefixes`: for each sample the index of the one that it continues, or -1.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, prefixes: Sequence[int] = ()) -> None:
        self.lengths = tuple(lengths)
        self.prefixes = tuple(prefixes) or (-1,) * len(self.lengths)
        self.device = device

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def shares(self) -> bool:
        """Some sample continues another."""
        return any(prefix >= 0 for prefix in self.prefixes)

    @cached_property
    def equal(self) -> bool:
        """All samples are equally long: side by side they are a view of the row, without a copy."""
        return len(set(self.lengths)) == 1 and not self.shares

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Tokens of each sample's prefix."""
        return tuple(self.lengths[prefix] if prefix >= 0 else 0 for prefix in self.prefixes)

    @cached_property
    def position_ids(self) -> Tensor:
        """(1, T), from 0 for each sample, or from the end of its prefix."""
        spans = zip(self.before, self.lengths, strict=True)
        positions = np.concatenate([np.arange(before, before + length, dtype=np.int64) for before, length in spans])
        return torch.from_numpy(positions)[None].to(self.device)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        groups: list[Group] = []
        for before in sorted(set(self.before)):
            alike = [index for index in range(len(self.lengths)) if self.before[index] == before]
            order = sorted(alike, key=lambda index: -self.lengths[index])
            while order:
                longest = self.lengths[order[0]]
                count = sum(1 for index in order if longest <= GROUP_WASTE * self.lengths[index])
                members, order = order[:count], order[count:]
                groups.append(self._group(members, longest, before))
        return tuple(groups)

    def _group(self, members: Sequence[int], longest: int, before: int) -> Group:
        starts = np.cumsum([0, *self.lengths[:-1]])
        places_1L = np.arange(longest)[None]
        real_GL = places_1L < np.asarray([self.lengths[index] for index in members])[:, None]
        gather_GL = starts[members][:, None] + np.where(real_GL, places_1L, 0)
        first_G = starts[[self.prefixes[index] for index in members]]  # of no meaning where `before` is 0
        keys_GK = np.concatenate([first_G[:, None] + np.arange(before)[None], gather_GL], axis=1)
        return Group(
            torch.from_numpy(gather_GL).to(self.device),
            torch.from_numpy(real_GL).to(self.device),
            torch.from_numpy(keys_GK).to(self.device),
            bool(real_GL.all()),
        )

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
        if self.shares:  # which only `attend` knows
            return {"position_ids": self.position_ids, LAYOUT: self}
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
        return _attend_group(module, beside, dropout, scaling, options).flatten(0, 1)[None], None
    outputs: list[Tensor] = []
    for group in layout.groups:
        places = (group.gather_GL, group.keys_GK, group.keys_GK)
        apart = [_apart(row_THD, places_GK) for row_THD, places_GK in zip(rows, places, strict=True)]
        out_GLHD = _attend_group(module, apart, dropout, scaling, options)
        outputs.append(out_GLHD.flatten(0, 1) if group.whole else out_GLHD[group.real_GL])
    return torch.cat(outputs).index_select(0, layout.restore)[None], None


def _apart(row_THD: Tensor, places_GK: Tensor) -> Tensor:
    return row_THD.index_select(0, places_GK.flatten()).unflatten(0, places_GK.shape).transpose(1, 2)


def _attend_group(
    module: torch.nn.Module,
    apart: Sequence[Tensor],
    dropout: float,
    scaling: float | None,
    options: Mapping[str, Any],
) -> Tensor:
    query_GHLD, key_GHKD, value_GHKD = apart
    longest, seen = query_GHLD.shape[2], key_GHKD.shape[2]
    window, softcap = options.get("sliding_window"), options.get("softcap")
    mask_LK = None
    if softcap is not None or seen > longest or (window is not None and seen > window):
        places_K = torch.arange(seen, device=query_GHLD.device)
        back_LK = places_K[seen - longest :, None] - places_K[None, :]
        mask_LK = (back_LK >= 0) & (back_LK < (window or seen))
    if softcap is None:
        mask = None if mask_LK is None else mask_LK[None, None]
        out_GLHD, _ = sdpa_attention_forward(
            module, query_GHLD, key_GHKD, value_GHKD, mask, dropout=dropout, scaling=scaling, is_causal=mask is None
        )
        return out_GLHD
    # fused attention knows no cap on its scores
    groups = getattr(module, "num_key_value_groups", 1)
    key_GHKD, value_GHKD = repeat_kv(key_GHKD, groups), repeat_kv(value_GHKD, groups)
    scale = query_GHLD.shape[-1] ** -0.5 if scaling is None else scaling
    scores_GHLK = softcap * torch.tanh(query_GHLD @ key_GHKD.transpose(-1, -2) * (scale / softcap))
    assert mask_LK is not None
    shares_GHLK = scores_GHLK.masked_fill(~mask_LK, -torch.inf).softmax(-1, dtype=torch.float32).to(query_GHLD.dtype)
    shares_GHLK = torch.nn.functional.dropout(shares_GHLK, dropout, module.training)
    return (shares_GHLK @ value_GHKD).transpose(1, 2)


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
    reason = built_otherwise(model)
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


@torch.no_grad()
def why_not(model: PreTrainedModel, vocab_size: int) -> str | None:
    """Why `attend` does not give what the model gives for a few tokens alone, or None if it does. The model, which is
    in its evaluation mode, stays as it is."""
    before: Any = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]: it has no other name
    try:
        return built_otherwise(model) or _try(model, NAME, vocab_size)
    finally:
        model.set_attn_implementation(before)


def built_otherwise(model: PreTrainedModel) -> str | None:
    """Why the model cannot be packed, as far as its class and its config tell, or None. These are things that a few
    short samples would not show, above all in bfloat16: a state or a window along the row."""
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
