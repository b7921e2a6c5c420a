"""The last linear layer of a language model, applied to a chunk of rows at a time: logits, and the way back.

Legend: C rows of a chunk, N rows in all, V common vocabulary, D hidden; a head may have padded rows beyond V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.objectives.gemm import by_onednn, product

LogitsTransform = Callable[[Tensor], Tensor]
"""What a model does to its logits after the head, element by element: a scale, a soft cap."""


@dataclass(frozen=True)
class ScaledAndCapped:
    """cap * tanh(scale * logits / cap), or scale * logits without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.cap is None:
            return logits * self.scale
        return self.cap * torch.tanh(logits * (self.scale / self.cap))


HALF = (torch.bfloat16, torch.float16)

VOCABULARY_BLOCK = 8192
"""Columns whose gradient is multiplied at once where the GEMM's result is not float32 and is added up beside it: large
enough for a GEMM to run at its full speed, small enough for the two temporary blocks not to count."""


def gemm_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """In what the head multiplies: autocast's dtype where it is on, else the narrower of the two."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return min(hidden.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)


def matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in float32 for half precision inputs. CUDA never rounds the sums to half; the CPU's GEMM does, once."""
    if a.dtype not in HALF:
        return product(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


@dataclass(frozen=True)
class Head:
    """The head cut to the common vocabulary, in the dtype of its GEMMs."""

    weight_VD: Tensor
    bias_V: Tensor | None
    transform: LogitsTransform | None

    @classmethod
    def of(
        cls,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        transform: LogitsTransform | None,
        *,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> Head:
        """Detached, without the padded rows. The weight is copied only where it has another dtype."""
        assert weight_VD.shape[0] >= vocab_size, f"the head has {weight_VD.shape[0]} rows, fewer than {vocab_size}"
        bias = None if bias_V is None else bias_V.detach()[:vocab_size]
        return cls(weight_VD.detach()[:vocab_size].to(dtype), bias, transform)

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32 if self.weight_VD.dtype in HALF else self.weight_VD.dtype

    def raw_logits(self, hidden_CD: Tensor) -> Tensor:
        """(C, V) before the transform, float32 or float64, fresh memory."""
        raw_CV = matmul_wide(hidden_CD.to(self.weight_VD.dtype), self.weight_VD.T)
        return raw_CV if self.bias_V is None else raw_CV.add_(self.bias_V)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """(C, V) as the model means them, without a gradient."""
        raw_CV = self.raw_logits(hidden_CD)
        return raw_CV if self.transform is None else self.transform(raw_CV)


class HeadGradients:
    """dL/dhidden, dL/dweight and dL/dbias, added up chunk by chunk; None where nobody asked.

    Sums over chunks are float32 or float64, whatever the weights are; padded rows of the head keep exactly 0.
    """

    def __init__(
        self, head: Head, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: tuple[bool, bool, bool]
    ) -> None:
        self._head = head
        self._dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        wide = head.logits_dtype
        self._hidden_ND = torch.zeros_like(hidden_ND) if wanted[0] else None
        self._weight_VD = torch.zeros_like(weight_VD, dtype=wide) if wanted[1] else None
        self._bias_V = torch.zeros_like(bias_V, dtype=wide) if wanted[2] and bias_V is not None else None

    def add(self, rows: slice | Tensor, hidden_CD: Tensor, grad_CV: Tensor) -> None:
        """`grad_CV`: dL/d(raw logits) of the chunk that `rows` names; no row may be named twice."""
        vocab_size = self._head.weight_VD.shape[0]
        if self._bias_V is not None:
            self._bias_V[:vocab_size] += grad_CV.sum(0)
        if self._head.weight_VD.dtype in HALF or by_onednn(grad_CV):
            self._add_in_blocks(rows, hidden_CD, grad_CV)
            return
        if self._hidden_ND is not None:
            self._hidden_ND[rows] = (grad_CV @ self._head.weight_VD).to(self._hidden_ND.dtype)
        if self._weight_VD is not None:
            self._weight_VD[:vocab_size].addmm_(grad_CV.T, hidden_CD.to(self._weight_VD.dtype))

    def _add_in_blocks(self, rows: slice | Tensor, hidden_CD: Tensor, grad_CV: Tensor) -> None:
        weight_VD = self._head.weight_VD
        # float16 cannot hold the small gradients of a mean over many tokens; bfloat16 has float32's range
        dtype = torch.float32 if weight_VD.dtype is torch.float16 else weight_VD.dtype
        hidden_CD = hidden_CD.to(dtype)
        total_CD = torch.zeros_like(hidden_CD, dtype=grad_CV.dtype)
        for start in range(0, weight_VD.shape[0], VOCABULARY_BLOCK):
            block = slice(start, min(start + VOCABULARY_BLOCK, weight_VD.shape[0]))
            grad_CB = grad_CV[:, block].to(dtype).contiguous()
            if self._hidden_ND is not None:
                total_CD += matmul_wide(grad_CB, weight_VD[block].to(dtype))
            if self._weight_VD is not None:
                self._weight_VD[block] += matmul_wide(grad_CB.T, hidden_CD)
        if self._hidden_ND is not None:
            self._hidden_ND[rows] = total_CD.to(self._hidden_ND.dtype)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the dtypes of hidden, weight and bias. Call once, at the end."""
        sums = (self._hidden_ND, self._weight_VD, self._bias_V)
        hidden, weight, bias = (
            total if total is None or dtype is None else total.to(dtype)
            for total, dtype in zip(sums, self._dtypes, strict=True)
        )
        return hidden, weight, bias
