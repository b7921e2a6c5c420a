"""Layers of well-known models with their backward passes written out: less memory, fewer passes over it, same values.

transformers writes a layer as single operations, and autograd keeps what each of them read. Most of that is cheap to
compute again from the rest:

  RMSNorm     keeps its input and one number a token, not float32 copies of its input before and after scaling
  SwiGLU MLP  keeps what the projections gate and up gave, not four tensors of their width
  linear      keeps what it always kept, and multiplies with `distill.objectives.gemm`, where that is the faster way

A layer is recognised by its class; everything else in the model stays what it is. Names, weights and hooks do not
change, only the layers' `forward`. Elementwise work goes through blocks of rows that fit a cache: on a CPU a pass over
memory costs more than the arithmetic in it, and small temporary tensors leave small holes in the heap.

Legend: N tokens (all leading dimensions), n those of a block, D width of a row, I width inside the MLP, O outputs.
"""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from distill.modeling.packed_attention import PROBE_RTOL, PROBE_RTOL_LOW
from distill.objectives.fused import row_blocks
from distill.objectives.gemm import by_onednn, product

PROBE_TOKENS = 8

_log = logging.getLogger(__name__)


class RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps), normalised in float32 (arXiv 1910.07467), in transformers' order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND = _rows(x)
        out_ND = torch.empty_like(x_ND)
        scale_N1 = torch.empty_like(x_ND[:, :1], dtype=torch.float32)
        for block in row_blocks(x_ND):
            x_nD = x_ND[block].float()
            scale_N1[block] = torch.rsqrt(x_nD.pow(2).mean(-1, keepdim=True) + eps)
            out_ND[block] = weight_D * (x_nD * scale_N1[block]).to(x.dtype)
        ctx.save_for_backward(x, weight_D, scale_N1)
        return out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """With h = x * scale and g = grad * weight: dx = scale * (g - h * mean(g * h)), dweight = sum of grad * h."""
        x, weight_D, scale_N1 = ctx.saved_tensors
        x_ND, grad_ND, wide_D = _rows(x), _rows(grad), weight_D.float()
        grad_x_ND = torch.empty_like(x_ND)
        grad_weight_D = torch.zeros_like(wide_D)
        for block in row_blocks(x_ND):
            normed_nD = x_ND[block].float() * scale_N1[block]
            grad_nD = grad_ND[block].float()
            both_nD = grad_nD * normed_nD
            grad_weight_D += both_nD.sum(0)
            mean_n1 = (both_nD @ wide_D)[:, None] / len(wide_D)
            inner_nD = torch.mul(grad_nD, wide_D, out=both_nD)
            grad_x_ND[block] = inner_nD.sub_(normed_nD.mul_(mean_n1)).mul_(scale_N1[block])
        return grad_x_ND.view(x.shape), grad_weight_D.to(weight_D.dtype), None


class Linear(torch.autograd.Function):
    """x @ weight.T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_OD)
        return _linear(_rows(x), weight_OD, bias_O).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_OD = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_NO = _rows(grad)
        return (
            product(grad_NO, weight_OD).view(*grad.shape[:-1], -1) if wants_x else None,
            product(grad_NO.T, _rows(x)) if wants_weight else None,
            grad_NO.sum(0) if wants_bias else None,
        )


class Swiglu(torch.autograd.Function):
    """silu(gate) * up (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(gate, up)
        return _swiglu(_rows(gate), _rows(up)).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        grad_gate_NI, grad_up_NI = _swiglu_backward(_rows(grad), _rows(gate), _rows(up))
        return grad_gate_NI.view(gate.shape), grad_up_NI.view(up.shape)


class SwigluDown(torch.autograd.Function):
    """(silu(gate) * up) @ weight.T + bias. What is multiplied is never whole, and is computed again for the weight."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight_DI: Tensor, bias_D: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(gate, up, weight_DI)
        gate_NI, up_NI = _rows(gate), _rows(up)
        out_ND = gate_NI.new_empty((len(gate_NI), len(weight_DI)))
        for block in row_blocks(gate_NI):
            out_ND[block] = _linear(silu(gate_NI[block]).mul_(up_NI[block]), weight_DI, bias_D)
        return out_ND.view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up, weight_DI = ctx.saved_tensors
        *_, wants_weight, wants_bias = ctx.needs_input_grad
        grad_ND, gate_NI, up_NI = _rows(grad), _rows(gate), _rows(up)
        grad_weight_DI = product(grad_ND.T, _swiglu(gate_NI, up_NI)) if wants_weight else None
        grad_gate_NI, grad_up_NI = _swiglu_backward(product(grad_ND, weight_DI), gate_NI, up_NI)
        grad_bias_D = grad_ND.sum(0) if wants_bias else None
        return grad_gate_NI.view(gate.shape), grad_up_NI.view(up.shape), grad_weight_DI, grad_bias_D


def _linear(x_ND: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    if not by_onednn(x_ND):
        return linear(x_ND, weight_OD, bias_O)
    out_NO = product(x_ND, weight_OD.T)
    return out_NO if bias_O is None else out_NO.add_(bias_O)


def _swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    out_NI = torch.empty_like(gate_NI)
    for block in row_blocks(gate_NI):
        torch.mul(silu(gate_NI[block]), up_NI[block], out=out_NI[block])
    return out_NI


def _swiglu_backward(grad_NI: Tensor, gate_NI: Tensor, up_NI: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dgate and dL/dup."""
    grad_gate_NI, grad_up_NI = torch.empty_like(gate_NI), torch.empty_like(up_NI)
    for block in row_blocks(gate_NI):
        gate_nI, grad_nI = gate_NI[block], grad_NI[block]
        torch.mul(grad_nI, silu(gate_nI), out=grad_up_NI[block])
        grad_gate_NI[block] = torch.ops.aten.silu_backward(grad_nI * up_NI[block], gate_nI)
    return grad_gate_NI, grad_up_NI


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


def _linear_forward(self: Any, x: Tensor) -> Tensor:
    return Linear.apply(x, self.weight, self.bias)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    if type(down) is nn.Linear:
        return SwigluDown.apply(gate, up, down.weight, down.bias)
    return down(Swiglu.apply(gate, up))  # it has adapters


_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Folder of the family in transformers -> how the names of its classes begin."""
_FORWARDS: dict[str, Any] = {"RMSNorm": _rms_norm_forward, "MLP": _mlp_forward}
"""How they go on -> the lean forward pass."""
_SILU = ("SiLUActivation", "SiLU")


@torch.no_grad()
def lean(model: PreTrainedModel, vocab_size: int) -> str | None:
    """Give every layer that is known here its lean forward pass, after a few tokens gave the same through both.

    Returns None, or why the model stays as it was. Before the model is spread over ranks.
    """
    forwards = {module: forward for module in model.modules() if (forward := _lean_forward(module)) is not None}
    if not forwards:
        return f"{type(model).__name__} has no layer of {', '.join(_FAMILIES.values())}"
    if by_onednn(next(model.parameters())):
        head = model.get_output_embeddings()  # the loss takes its place
        forwards |= {each: _linear_forward for each in model.modules() if type(each) is nn.Linear and each is not head}
    own_1TD = _hidden(model, vocab_size)
    for module, forward in forwards.items():
        module.forward = MethodType(forward, module)
    difference = float((own_1TD - _hidden(model, vocab_size)).abs().max() / own_1TD.abs().max())
    if difference <= (PROBE_RTOL if model.dtype == torch.float32 else PROBE_RTOL_LOW):
        return None
    for module in forwards:
        del module.forward
    reason = f"hidden states of {type(model).__name__} differ by {difference:.2g} between lean layers and its own"
    _log.warning("student.lean_layers: not used, because %s", reason)
    return reason


def _lean_forward(module: nn.Module) -> Any | None:
    """The lean forward pass of a layer of a known class; None for any other."""
    place, _, name = type(module).__module__.removeprefix("transformers.models.").partition(".modeling_")
    if place != name or place not in _FAMILIES:
        return None
    kind = type(module).__name__.removeprefix(_FAMILIES[place])
    if kind == "MLP" and type(getattr(module, "act_fn", None)).__name__ not in _SILU:
        return None
    return _FORWARDS.get(kind)


def _hidden(model: PreTrainedModel, vocab_size: int) -> Tensor:
    """The last hidden states of a few tokens, (1, T, D) in float32."""
    ids_1T = (torch.arange(PROBE_TOKENS, device=model.device) * 5 % vocab_size)[None]
    base: Any = model.base_model
    was_training = model.training
    model.eval()
    try:
        return base(input_ids=ids_1T, use_cache=False)[0].float()
    finally:
        model.train(was_training)
