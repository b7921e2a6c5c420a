"""Distillation across tokenizers: student and teacher are compared on the byte spans that both spell.

Legend: N response tokens, m tokens of a span. p student, q teacher, mu the distribution that sampled the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from distill.objectives import advantages
from distill.objectives.alignment import NONE
from distill.objectives.corrections import DEFAULT, WeightOnly
from distill.objectives.rows import TokenRows, refuse_ignored, require_finite
from distill.objectives.sampled import check_clip, require_advantage, sampler_logp, token_logp, weight_metrics
from distill.objectives.teacher_rows import require_teacher
from distill.protocols import Contract
from distill.types import Signal, SignalSpec


@dataclass(frozen=True, kw_only=True)
class SpanKL:
    """With d = (sum of log p over a span's tokens) - log q(span): the gradient of d^2/2, or d as a cost of each token.

    Spans come from `alignment.align`: `TokenRows.span_N`, with a span's log q at one of its rows and 0 at the others;
    without spans every token is its own. Tokens outside of all spans have loss 0 and stay in the denominators. The two
    forms have the same gradient and differ in value. Source: the byte-offset spans of TRL's GOLD, as an estimator of
    KL(p || q) like k2 of single tokens.
    """

    form: Literal["k2", "advantage"] = "k2"
    """k2: a span's loss is d^2/2, shared by its tokens. advantage: -A log p of each token, A = -d, constant."""
    advantage_clip: float | None = None
    """advantage: largest |d| of a span in nats; None for no clipping."""
    importance: WeightOnly = DEFAULT
    """none | tis | clamp | icepop, as in `policy_gradient`: a weight for each token."""

    def __post_init__(self) -> None:
        if self.form == "k2":
            refuse_ignored(self, ("advantage_clip",), "with form=k2")
        check_clip(self.advantage_clip)

    @property
    def spec(self) -> SignalSpec:
        return SignalSpec(Signal.SAMPLED)

    @property
    def contract(self) -> Contract:
        return Contract(
            optimises="KL(p || q) of the spans' bytes in expectation over sampled tokens",
            depends_on_action=True,
            source="byte-offset spans of TRL's GOLD; k2 of Schulman, Approximating KL Divergence (2020)",
            couples_tokens=True,
            reads_spans=True,
            reads_sampled_only=True,
        )

    def condition(self, rows: TokenRows, student_logp_N: Tensor) -> TokenRows:
        """`advantage_N`: -d of the token's span, 0 outside of all; `gate_N`: its number of tokens m, 0 outside.

        Raises TeacherError or StudentError, naming a row of the span, where d is not a finite number.
        """
        log_q_N = require_teacher(rows, "teacher_logp_N").to(student_logp_N.dtype)
        span_N = _span_numbers(rows)
        aligned_N = torch.from_numpy(span_N != NONE).to(student_logp_N.device)
        advantage_N = torch.where(aligned_N, log_q_N - student_logp_N, 0.0)
        require_advantage(advantage_N, rows, student_logp_N, log_q_N)
        advantage_N = advantages.along_samples(advantage_N, lambda x, _: _sum_of_span(x, span_N), span_N)
        if self.advantage_clip is not None:
            advantage_N = advantage_N.clamp(-self.advantage_clip, self.advantage_clip)
        tokens_N = torch.from_numpy(_sum_of_span(np.ones(len(span_N)), span_N))
        return replace(rows, advantage_N=advantage_N, gate_N=tokens_N.to(advantage_N))

    def __call__(self, rows: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (N,) and metrics (N,): `kl`, d of the token's span divided by m; `aligned`, 1 inside a span;
        `importance_weight`; `gated_low` and `gated_high`, 1 where the correction leaves the token out.

        Raises TeacherError or StudentError, naming the row and the rule, for a row whose loss is not a finite number.
        """
        assert rows.advantage_N is not None and rows.gate_N is not None, "spans need condition() first"
        log_p_N = token_logp(rows)
        current_N = log_p_N.detach()
        gap_N, tokens_N = -rows.advantage_N.to(current_N), rows.gate_N.to(current_N)
        log_ratio_N = current_N - (sampler_logp(rows) if self.importance.reads_sampler else current_N)
        weight_N = self.importance.weight(log_ratio_N)
        share_N = tokens_N.clamp(min=1.0)
        if self.form == "advantage":
            loss_N = weight_N * gap_N * log_p_N
        else:
            # value d^2 / (2m), gradient d: over a span's tokens they add up to those of d^2/2
            loss_N = weight_N * (gap_N * (log_p_N - current_N) + gap_N.square() / (2.0 * share_N))
        require_finite(loss_N, rows, require_teacher(rows, "teacher_logp_N"))
        metrics = {"kl": gap_N / share_N, "aligned": (tokens_N > 0).to(current_N.dtype)}
        return loss_N, metrics | weight_metrics(weight_N, log_ratio_N)


def _span_numbers(rows: TokenRows) -> advantages.Ints:
    """A number for each token's span that no other sample has, -1 outside of all."""
    if rows.span_N is None:
        return np.arange(len(rows.tokens_N))
    span_N = rows.span_N.cpu().numpy()
    sample_N = advantages.sample_numbers(rows.sample_N, len(span_N))
    aligned_N = span_N != NONE
    numbers_N = np.full(len(span_N), NONE)
    pairs = np.stack([sample_N[aligned_N], span_N[aligned_N]], axis=1)
    numbers_N[aligned_N] = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    return numbers_N


def _sum_of_span(values_N: advantages.Floats, span_N: advantages.Ints) -> advantages.Floats:
    """The sum over a token's span, at each of its tokens; 0 outside of all spans."""
    aligned_N = span_N != NONE
    result_N = np.zeros(len(values_N))
    if aligned_N.any():
        result_N[aligned_N] = np.bincount(span_N[aligned_N], weights=values_N[aligned_N])[span_N[aligned_N]]
    return result_N
