"""What is done at the head: the loss of a micro-batch under an objective, and what is told of it per teacher.

Legend: S samples of a batch, N trained tokens of a micro-batch, n those that one teacher scored, V common vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.config.models import ObjectiveConfig
from distill.objectives import kernels
from distill.objectives.head_loss import Metrics, TeacherPart, head_loss, sampled_logp, sampled_loss
from distill.objectives.mixture import combine
from distill.objectives.outcome import outcome_advantages
from distill.objectives.reductions import row_weights
from distill.protocols import Objective
from distill.types import Batch
from students.hf.batching import Lesson, MicroBatch
from students.hf.head import HeadInput
from students.hf.teacher_heads import TeacherHeads


def lessons_of(batch: Batch, rules: ObjectiveConfig) -> dict[str, Lesson]:
    """Sample id -> its lesson, for all samples that count: a trained token, and a domain whose weight is not 0. Factors
    and outcomes are of the whole batch. Empty where no sample counts.

    Raises ConfigError for domain weights that do not fit the batch, StudentError for a missing reward.
    """
    samples = [item.sample for item in batch.samples]
    weights_S = row_weights(
        rules.reduction,
        loss_tokens=[sample.loss_tokens for sample in samples],
        domains=[sample.domain for sample in samples],
        trajectories=[sample.trajectory for sample in samples],
        domain_weights=rules.domain_weights,
    ).tolist()
    outcomes = [None] * len(samples) if rules.outcome is None else outcome_advantages(samples, rules.outcome)
    return {
        item.sample.id: Lesson(item, weight, outcome)
        for item, weight, outcome in zip(batch.samples, weights_S, outcomes, strict=True)
        if item.sample.loss_tokens and weight
    }


@dataclass(frozen=True)
class HeadJob:
    """Turns what reaches the head into the loss of one micro-batch."""

    objective: Objective
    vocab_size: int
    chunk_tokens: int
    mixture: str = "weighted"
    """weighted: the losses of several teachers of a token are added; else their distributions are mixed first."""
    heads: TeacherHeads | None = None
    """Of teachers whose full rows come as hidden states."""
    kernel: bool = False
    """log p of the sampled tokens comes from `kernels.sampled_logp`, which `kernels.choose` let through."""

    def loss(self, micro: MicroBatch, at: HeadInput) -> tuple[Tensor, Metrics]:
        """The sum of weight * loss over tokens and teachers, and the metrics per teacher.

        Raises what the objective raises.
        """
        dtype = torch.float64 if at.hidden_ND.dtype == torch.float64 else torch.float32
        parts = micro.teacher_parts(self.objective.spec, dtype=dtype, heads=self.heads)
        logp_N = self._by_kernel(micro, at) if self.kernel else None
        if self.objective.contract.couples_tokens:
            parts = self._conditioned(micro, at, parts, logp_N)
        mix = None if self.mixture == "weighted" else partial(combine, self.mixture)
        if logp_N is not None:
            return sampled_loss(logp_N, parts, self.objective, combine=mix)
        return head_loss(at.hidden_ND, at.weight_VD, at.bias_V, parts, self.objective, combine=mix, **self._how(at))

    def _how(self, at: HeadInput) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "chunk_tokens": self.chunk_tokens, "logits_transform": at.transform}

    def _by_kernel(self, micro: MicroBatch, at: HeadInput) -> Tensor:
        return kernels.sampled_logp(
            at.hidden_ND,
            at.weight_VD,
            at.bias_V,
            micro.tokens_N,
            vocab_size=self.vocab_size,
            softcap=None if at.transform is None else at.transform.cap,
        )

    def _conditioned(
        self, micro: MicroBatch, at: HeadInput, parts: list[TeacherPart], logp_N: Tensor | None
    ) -> list[TeacherPart]:
        """First pass over whole samples, for objectives with gates or returns along a sample. `logp_N`: log p of the
        sampled tokens, where it is known already."""
        objective: Any = self.objective
        if logp_N is None:
            logp_N = sampled_logp(at.hidden_ND, at.weight_VD, at.bias_V, micro.tokens_N, **self._how(at))
        logp_N = logp_N.detach()
        if self.mixture == "arithmetic":
            # gates and returns are about the mixture, so they must see it; mixing equal rows again changes nothing
            parts = _mixed_before(parts, len(micro.tokens_N))
        return [
            replace(part, rows=objective.condition(part.rows, logp_N[part.index_n.to(logp_N.device)])) for part in parts
        ]


def _mixed_before(parts: list[TeacherPart], count: int) -> list[TeacherPart]:
    """Every teacher's log q of the sampled tokens replaced by that of the arithmetic mixture. `count`: N."""
    total_N = torch.zeros(count, dtype=torch.float64)
    mixed_N = torch.full((count,), -torch.inf, dtype=torch.float64)
    for part in parts:
        weights_n, logq_n = part.weights_n.double().cpu(), part.rows.teacher_logp_N.double().cpu()
        total_N[part.index_n] += weights_n
        mixed_N[part.index_n] = torch.logaddexp(mixed_N[part.index_n], logq_n + weights_n.log())
    mixed_N -= total_N.log()
    return [
        replace(part, rows=replace(part.rows, teacher_logp_N=mixed_N[part.index_n].to(part.rows.teacher_logp_N)))
        for part in parts
    ]


@dataclass
class Tally:
    """Loss and metrics of some micro-batches, per teacher: sums over its tokens."""

    loss: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    sums: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def add(self, loss: Tensor, metrics: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.loss += float(loss.detach())
        for teacher, its_metrics in metrics.items():
            count = max((len(values_n) for values_n in its_metrics.values()), default=0)
            self.tokens[teacher] = self.tokens.get(teacher, 0) + count
            mine = self.sums.setdefault(teacher, {})
            for name, values_n in its_metrics.items():
                mine[name] = mine.get(name, 0.0) + float(values_n.double().sum())

    def plain(self) -> dict[str, Any]:
        """As numbers and texts, to be sent to other ranks."""
        return vars(self)

    @classmethod
    def total(cls, parts: Sequence[Mapping[str, Any]]) -> Tally:
        """The sum of what ranks said with `plain`."""
        total = cls()
        for part in parts:
            total.loss += part["loss"]
            for teacher, tokens in part["tokens"].items():
                total.tokens[teacher] = total.tokens.get(teacher, 0) + tokens
            for teacher, sums in part["sums"].items():
                mine = total.sums.setdefault(teacher, {})
                for name, value in sums.items():
                    mine[name] = mine.get(name, 0.0) + value
        return total

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics that some teacher has."""
        return list(dict.fromkeys(name for sums in self.sums.values() for name in sums))

    def means(self, metric: str) -> dict[str, float]:
        """Teacher -> token mean of `metric`, where it is known."""
        return {teacher: sums[metric] / self.tokens[teacher] for teacher, sums in self.sums.items() if metric in sums}
