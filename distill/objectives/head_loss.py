"""The loss of a micro-batch and its gradients from hidden states, a chunk of rows at a time.

Logits over a large vocabulary are the largest tensors of training by far, so they exist for one chunk only: its logits
are computed once, the objective gives dL/dlogits, and that is folded into the gradients of the hidden states and of the
head before the next chunk begins. Three GEMMs in all, as without chunks. The gradients are ready when the loss is; the
backward pass only hands them out. (The idea: "Cut your losses", arXiv 2411.09009; Liger Kernel, arXiv 2410.10989.)

Legend: N rows of a micro-batch, n rows of one teacher, C rows of a chunk, V common vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.objectives.head import Head, HeadGradients, LogitsTransform, gemm_dtype
from distill.objectives.rows import TokenRows
from distill.protocols import Objective

Metrics = dict[str, dict[str, Tensor]]
"""Teacher -> metric -> values (n,)."""

Combine = Callable[[Sequence[TokenRows], Sequence[Tensor]], tuple[TokenRows, Tensor]]
"""How the teachers of a row become one: their rows of a chunk and the rows' weights -> the rows and weights (C,) of the
mixture. Called for every chunk, also where there is one teacher."""


class FullSource(Protocol):
    """Where a teacher's full rows come from, a chunk at a time."""

    def logp(self, keep: slice | Tensor, like_CV: Tensor) -> Tensor:
        """log q (C, V) of its rows `keep`, in rising order, with dtype, device and columns of `like_CV`."""
        ...


@dataclass(frozen=True)
class TeacherLogits:
    """A teacher's full signal as raw logits (n, V or wider). They may lie on the host: a chunk at a time is moved."""

    logits_nV: Tensor

    def logp(self, keep: slice | Tensor, like_CV: Tensor) -> Tensor:
        chunk_CV = self.logits_nV[keep, : like_CV.shape[-1]].to(like_CV.device)
        return chunk_CV.to(like_CV.dtype).log_softmax(-1)


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's full signal as its last hidden states (n, D of the teacher) and its head, on the student's device."""

    hidden_nD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None = None
    logits_transform: LogitsTransform | None = None

    def logp(self, keep: slice | Tensor, like_CV: Tensor) -> Tensor:
        hidden_CD = self.hidden_nD[keep].to(like_CV.device)
        dtype = gemm_dtype(hidden_CD, self.weight_VD)
        head = Head.of(self.weight_VD, self.bias_V, self.logits_transform, vocab_size=like_CV.shape[-1], dtype=dtype)
        return head.logits(hidden_CD).to(like_CV.dtype).log_softmax(-1)


@dataclass(frozen=True)
class TeacherPart:
    """One teacher's rows of a micro-batch."""

    teacher: str
    rows: TokenRows
    """Without logits: `student_logits_NV` is empty, (n, 0). A full signal may lie on the host."""
    index_n: Tensor
    """int64, rising: which of the micro-batch's N rows these are."""
    weights_n: Tensor
    """Constant factor of each row in the loss."""
    full: FullSource | None = None
    """Where the full signal comes from, when it is not `rows.full_logp_NV`."""


def head_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    parts: Sequence[TeacherPart],
    objective: Objective,
    *,
    vocab_size: int,
    chunk_tokens: int,
    logits_transform: LogitsTransform | None = None,
    combine: Combine | None = None,
) -> tuple[Tensor, Metrics]:
    """sum over parts and rows of weight * loss, differentiable once in hidden, weight and bias; and the metrics.

    `weight_VD` may have padded rows beyond `vocab_size`: they are cut off before the softmax and their gradient is
    exactly 0. `logits_transform` is applied to the cut float32 logits and differentiated. GEMMs run in the narrower
    dtype of hidden and weight (autocast's, where it is on), everything else in float32, or in float64 for float64
    inputs. Rows that no part names cost nothing. Where no gradient is wanted (`torch.no_grad()`) none is computed.

    Cost beside the gradients: about four tensors of (chunk_tokens, V), one more with a `logits_transform`.
    Raises what the objective raises; its errors name the rows of `parts`.
    """
    job = _Job(hidden_ND, weight_VD, bias_V, parts, objective, vocab_size, chunk_tokens, logits_transform, combine)
    wanted = tuple(x is not None and x.requires_grad for x in (hidden_ND, weight_VD, bias_V))
    if not (torch.is_grad_enabled() and any(wanted)):
        with torch.no_grad():
            return job.run(None), job.metrics
    loss: Any = _HeadLoss.apply(hidden_ND, weight_VD, bias_V, job, wanted)
    return loss, job.metrics


def sampled_loss(
    logp_N: Tensor, parts: Sequence[TeacherPart], objective: Objective, *, combine: Combine | None = None
) -> tuple[Tensor, Metrics]:
    """What `head_loss` returns, from the student's log p of the sampled tokens alone; differentiable in `logp_N`.

    For objectives whose contract says `reads_sampled_only`. Raises what the objective raises.
    """
    assert objective.contract.reads_sampled_only, f"{type(objective).__name__} reads logits"
    turns = _Turns(parts, objective, combine)
    # of no rows: it ties the result to log p where no teacher scored anything
    loss = logp_N[:0].sum(dtype=torch.float64)
    for chunk in _chunks(parts, len(logp_N), max(1, len(logp_N))):
        logp_C = logp_N[chunk.rows]
        no_logits_C0 = logp_C.new_empty(len(logp_C), 0)
        for members in turns.of(chunk):
            loss = loss + turns.value(members, no_logits_C0, logp_C)
    return loss.to(logp_N.dtype), turns.metrics


@torch.no_grad()
def sampled_logp(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    tokens_N: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    logits_transform: LogitsTransform | None = None,
) -> Tensor:
    """log p of `tokens_N` (N,), float32 (float64 for float64 inputs), without a gradient: what a SequenceObjective is
    conditioned on. Memory: about two tensors of (chunk_tokens, V)."""
    dtype = gemm_dtype(hidden_ND, weight_VD)
    head = Head.of(weight_VD, bias_V, logits_transform, vocab_size=vocab_size, dtype=dtype)
    logp_N = torch.empty(len(hidden_ND), dtype=head.logits_dtype, device=hidden_ND.device)
    for start in range(0, len(hidden_ND), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        logits_CV = head.logits(hidden_ND[chunk])
        picked_C = logits_CV.gather(-1, tokens_N[chunk, None])[:, 0]
        logp_N[chunk] = picked_C - logits_CV.logsumexp(-1)
    return logp_N


class _HeadLoss(torch.autograd.Function):
    """The forward pass computes the gradients too; the backward pass scales them and hands them out, once."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: its stub takes any arguments
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        job: _Job,
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        gradients = HeadGradients(job.head, hidden_ND, weight_VD, bias_V, wanted)
        loss = job.run(gradients)
        ctx.gradients = gradients.result()
        return loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: its stub takes any arguments
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, ...]:
        # nothing else may hold the gradients when they are returned: autograd then keeps them without a copy
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "head_loss is differentiated once: its gradients are handed out, not kept"
        if float(grad_output) != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad_output)
        return (*gradients, None, None)


class _Job:
    """One call of `head_loss`: what goes in, and the metrics that come out on the way."""

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        parts: Sequence[TeacherPart],
        objective: Objective,
        vocab_size: int,
        chunk_tokens: int,
        logits_transform: LogitsTransform | None,
        combine: Combine | None,
    ) -> None:
        assert chunk_tokens > 0, f"chunk_tokens is {chunk_tokens}"
        dtype = gemm_dtype(hidden_ND, weight_VD)
        self.head = Head.of(weight_VD, bias_V, logits_transform, vocab_size=vocab_size, dtype=dtype)
        self._hidden_ND = hidden_ND.detach()
        self._turns = _Turns(parts, objective, combine)
        self._chunks = list(_chunks(parts, len(hidden_ND), chunk_tokens))

    @property
    def metrics(self) -> Metrics:
        return self._turns.metrics

    def run(self, gradients: HeadGradients | None) -> Tensor:
        """The loss, a scalar in the logits' dtype. Adds dL to `gradients`, where given."""
        device = self._hidden_ND.device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        with torch.autocast(device.type, enabled=False):
            for chunk in self._chunks:
                loss += self._chunk(chunk, gradients)
        return loss.to(self.head.logits_dtype)

    def _chunk(self, chunk: _Chunk, gradients: HeadGradients | None) -> Tensor:
        """One chunk's share of the loss, and of the gradients where given."""
        wanted = gradients is not None
        hidden_CD = self._hidden_ND[chunk.rows]
        raw_CV = self.head.raw_logits(hidden_CD)
        with torch.set_grad_enabled(wanted):
            raw_CV.requires_grad_(wanted)
            logits_CV = raw_CV if self.head.transform is None else self.head.transform(raw_CV)
        loss, total_CV = raw_CV.new_zeros(()), None
        for members in self._turns.of(chunk):
            value, grad_CV = self._turn(members, logits_CV.detach().requires_grad_(wanted))
            loss += value
            if grad_CV is not None:
                total_CV = grad_CV if total_CV is None else total_CV + grad_CV
        if gradients is not None and total_CV is not None:
            if self.head.transform is not None:
                (total_CV,) = torch.autograd.grad(logits_CV, raw_CV, total_CV)
            gradients.add(chunk.rows, hidden_CD, total_CV)
        return loss

    def _turn(self, members: Sequence[_Member], logits_CV: Tensor) -> tuple[Tensor, Tensor | None]:
        """The value of one turn, and dL/dlogits."""
        with torch.set_grad_enabled(logits_CV.requires_grad):
            value = self._turns.value(members, logits_CV)
        if not logits_CV.requires_grad:
            return value, None
        (grad_CV,) = torch.autograd.grad(value, logits_CV)
        return value.detach(), grad_CV


class _Turns:
    """The objective put to the teachers of each chunk in turn, and the metrics that come out on the way."""

    def __init__(self, parts: Sequence[TeacherPart], objective: Objective, combine: Combine | None) -> None:
        self._parts = parts
        self._objective = objective
        self._combine = combine
        self.metrics: Metrics = {part.teacher: {} for part in parts}
        assert len(self.metrics) == len(parts), "each teacher has one part"

    def of(self, chunk: _Chunk) -> Sequence[tuple[_Member, ...]]:
        """Its teachers one by one, or all of them at once where they are combined."""
        return [chunk.members] if self._combine is not None else [(member,) for member in chunk.members]

    def value(self, members: Sequence[_Member], logits_CV: Tensor, logp_C: Tensor | None = None) -> Tensor:
        """sum of weight * loss of the chunk's rows of one teacher, or of all of its teachers combined. `logp_C`: log p
        of the sampled tokens, where the logits are (C, 0)."""
        with torch.no_grad():  # what the teachers say is constant
            rows, weights_C = self._rows(members, logits_CV, logp_C)
        loss_C, metrics = self._objective(rows)
        for member in members:
            self._note(member, metrics)
        return (weights_C * loss_C).sum()

    def _rows(self, members: Sequence[_Member], logits_CV: Tensor, logp_C: Tensor | None) -> tuple[TokenRows, Tensor]:
        rows: list[TokenRows] = []
        weights: list[Tensor] = []
        for member in members:
            part = self._parts[member.part]
            its_rows = replace(part.rows.cut(member.keep, logits_CV), student_logp_N=logp_C)
            if part.full is not None:
                its_rows = replace(its_rows, full_logp_NV=part.full.logp(member.keep, logits_CV))
            rows.append(its_rows)
            weights.append(part.weights_n[member.keep].to(logits_CV))
        if self._combine is not None:
            return self._combine(rows, weights)
        return rows[0], weights[0]

    def _note(self, member: _Member, metrics: dict[str, Tensor]) -> None:
        part = self._parts[member.part]
        for name, values_C in metrics.items():
            mine = self.metrics[part.teacher]
            if name not in mine:
                mine[name] = values_C.new_zeros(len(part.index_n))
            mine[name][member.keep] = values_C


@dataclass(frozen=True)
class _Member:
    """A part that scored the rows of a chunk, and which of its own rows these are."""

    part: int
    keep: slice | Tensor


@dataclass(frozen=True)
class _Chunk:
    rows: slice | Tensor
    """Which of the micro-batch's N rows."""
    members: tuple[_Member, ...]


def _chunks(parts: Sequence[TeacherPart], count: int, chunk_tokens: int) -> Iterator[_Chunk]:
    """Chunks of rows that the same parts scored, so that no part's logits must be picked out of a chunk's."""
    if not parts or not count:
        return
    indices = [part.index_n.cpu().numpy() for part in parts]
    scored_PN = np.zeros((len(parts), count), np.bool_)
    for number, (part, index_n) in enumerate(zip(parts, indices, strict=True)):
        assert len(index_n) == len(part.rows.tokens_N) == len(part.weights_n), f"{part.teacher}: rows do not add up"
        assert not len(index_n) or (index_n[0] >= 0 and index_n[-1] < count), f"{part.teacher}: no such row"
        assert bool((np.diff(index_n) > 0).all()), f"{part.teacher}: index_n does not rise"
        scored_PN[number, index_n] = True
    groups_PG, group_N = np.unique(scored_PN, axis=1, return_inverse=True)
    for group in range(groups_PG.shape[1]):
        its_parts = np.flatnonzero(groups_PG[:, group])
        rows = np.flatnonzero(group_N.reshape(-1) == group)
        if not len(its_parts):
            continue
        for start in range(0, len(rows), chunk_tokens):
            some = rows[start : start + chunk_tokens]
            members = (_Member(int(number), _pick(np.searchsorted(indices[number], some))) for number in its_parts)
            yield _Chunk(_pick(some), tuple(members))


def _pick(rising: NDArray[np.int64]) -> slice | Tensor:
    """A slice where the numbers follow one another: it copies nothing."""
    first, last = int(rising[0]), int(rising[-1])
    if last - first + 1 == len(rising):
        return slice(first, last + 1)
    return torch.from_numpy(rising)
