"""Reductions over ragged rows, through the chunked head that a step uses.

Legend: S rows (samples) of a batch, N their flat tokens, n trained ones, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.objectives.divergence import ReverseKL
from distill.objectives.head_loss import TeacherPart, head_loss
from distill.objectives.reductions import row_weights
from distill.objectives.rows import TokenRows
from tests.golden.objectives.data import Case
from tests.golden.objectives.models import full_rows
from tests.golden.objectives.runner import Evaluate

CHUNK_TOKENS = 4
"""Less than the tokens of the longest row, so that chunks cut through rows."""


@dataclass(frozen=True)
class Ragged:
    """The tokens of a case, rows one after the other, pads gone."""

    hidden_NH: Tensor
    teacher_NV: Tensor
    mask_N: np.ndarray
    row_N: np.ndarray
    rows: int

    @classmethod
    def of(cls, case: Case, precision: str) -> Ragged:
        hidden, teacher = case.tensor("hidden", precision), case.tensor("teacher_logits", precision)
        mask = np.asarray(case.inputs["loss_mask"]).astype(bool)
        if mask.ndim == 2:
            row_N = np.repeat(np.arange(len(mask)), mask.shape[1])
            return cls(hidden.flatten(0, 1), teacher.flatten(0, 1), mask.reshape(-1), row_N, len(mask))
        lengths = np.diff(case.inputs["cu_seqlens"])
        return cls(hidden, teacher, mask, np.repeat(np.arange(len(lengths)), lengths), len(lengths))

    @property
    def counts(self) -> list[int]:
        return np.bincount(self.row_N[self.mask_N], minlength=self.rows).tolist()


def factors(case: Case, counts: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
    """(S,) what each token of a row counts, over all rows or over a batch of some of them."""
    chosen = range(len(counts)) if rows is None else rows
    return row_weights(
        case.params["reduction"],
        loss_tokens=[counts[s] for s in chosen],
        domains=[str(case.inputs["domain"][s]) for s in chosen],
        trajectories=[f"t{case.inputs['trajectory'][s]}" for s in chosen],
        domain_weights=case.params.get("domain_weights"),
    )


def loss_of(batch: Ragged, head_VH: Tensor, weights_S: np.ndarray, rows: Sequence[int]) -> Tensor:
    """What one micro-batch of these rows adds to the loss."""
    trained = np.concatenate([np.flatnonzero((batch.row_N == s) & batch.mask_N) for s in rows] or [[]])
    keep_n = torch.from_numpy(trained.astype(np.int64))
    part = TeacherPart(
        teacher="t",
        rows=teacher_rows(batch.teacher_NV[keep_n]),
        index_n=torch.arange(len(keep_n)),
        weights_n=torch.from_numpy(weights_S)[torch.from_numpy(batch.row_N)[keep_n]],
    )
    return head_loss(
        batch.hidden_NH[keep_n],
        head_VH,
        None,
        [part],
        ReverseKL(),
        vocab_size=len(head_VH),
        chunk_tokens=CHUNK_TOKENS,
    )[0]


def teacher_rows(teacher_nV: Tensor) -> TokenRows:
    """Without logits, which the head makes chunk by chunk. The tokens do not matter to a divergence."""
    zeros_n = teacher_nV.new_zeros(len(teacher_nV))
    return TokenRows(
        student_logits_NV=teacher_nV[:, :0],
        tokens_N=zeros_n.long(),
        behaviour_logp_N=zeros_n,
        teacher_logp_N=zeros_n,
        full_logp_NV=teacher_nV.log_softmax(-1),
    )


def head_of(case: Case, precision: str) -> Tensor:
    return case.tensor("head", precision).T.contiguous().requires_grad_()


def gradient(loss: Tensor, head_VH: Tensor) -> Tensor:
    """(H, V) as the data have the head."""
    if not loss.requires_grad:
        return torch.zeros_like(head_VH).T
    return torch.autograd.grad(loss, head_VH)[0].T


def reduction(case: Case, precision: str) -> dict[str, Any]:
    batch, head_VH = Ragged.of(case, precision), head_of(case, precision)
    loss = loss_of(batch, head_VH, factors(case, batch.counts), range(batch.rows))
    return {"loss": loss.detach(), "grad_head": gradient(loss, head_VH)}


def micro_batch_split(case: Case, precision: str) -> dict[str, Any]:
    """One backward pass a micro-batch; the counts are those of the whole batch."""
    batch, head_VH = Ragged.of(case, precision), head_of(case, precision)
    weights_S = factors(case, batch.counts)
    partial = [loss_of(batch, head_VH, weights_S, rows) for rows in case.params["row_parts"]]
    gradients = [gradient(loss, head_VH) for loss in partial]
    losses = torch.stack([loss.detach() for loss in partial])
    return {"loss": losses.sum(), "partial_losses": losses, "grad_head": torch.stack(gradients).sum(0)}


def row_alone(case: Case, precision: str) -> dict[str, Any]:
    batch, head_VH, row = Ragged.of(case, precision), head_of(case, precision), case.params["row"]
    weights_S = np.zeros(batch.rows)
    weights_S[row] = factors(case, batch.counts, [row])[0]
    loss = loss_of(batch, head_VH, weights_S, [row])
    total = loss_of(batch, head_VH.detach(), np.ones(batch.rows), [row])
    return {"loss": loss.detach(), "grad_head": gradient(loss, head_VH), "loss_sum": total}


def per_token_loss(case: Case, precision: str) -> dict[str, Any]:
    batch, head_VH = Ragged.of(case, precision), head_of(case, precision)
    loss_N, _ = ReverseKL()(full_rows(batch.hidden_NH @ head_VH.detach().T, batch.teacher_NV))
    return {"loss_per_token": loss_N, "mask_count": sum(batch.counts), "rows": batch.rows}


KINDS: dict[str, Evaluate] = {
    "reduction": reduction,
    "padded_batch": reduction,
    "micro_batch_split": micro_batch_split,
    "row_alone": row_alone,
    "per_token_loss": per_token_loss,
}
