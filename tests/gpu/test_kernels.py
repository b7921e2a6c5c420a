"""cut-cross-entropy's kernel on a CUDA device, held against our portable loss.

Legend: N rows, V common vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distill.objectives import kernels
from distill.objectives.head_loss import TeacherPart, head_loss, sampled_logp, sampled_loss
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.rows import TokenRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
N, V, PADDED, D = 300, 5120, 5133, 192
EPSILON = 2.0**-8
"""Of bfloat16, in which both multiply gradients."""


@pytest.mark.parametrize("cap", [None, 30.0])
def test_the_kernel_gives_the_log_p_loss_and_gradients_of_the_portable_loss(cap: float | None) -> None:
    if kernels.why_unusable():
        pytest.skip(kernels.why_unusable())
    torch.manual_seed(0)
    leaves = [torch.randn(N, D), 2 * torch.randn(PADDED, D) * D**-0.5, torch.randn(PADDED)]
    leaves = [leaf.cuda().bfloat16().requires_grad_() for leaf in leaves]
    tokens_N = torch.randint(V, (N,)).cuda()
    rows = TokenRows(
        student_logits_NV=torch.empty(N, 0).cuda(),
        tokens_N=tokens_N,
        behaviour_logp_N=torch.full((N,), -8.0).cuda(),
        teacher_logp_N=-10 * torch.rand(N).cuda(),
    )
    part = TeacherPart("teacher", rows, torch.arange(N), torch.rand(N).cuda())
    transform = None if cap is None else lambda logits: cap * torch.tanh(logits / cap)
    how: Any = {"vocab_size": V, "chunk_tokens": 64, "logits_transform": transform}

    logp_N = kernels.sampled_logp(*leaves, tokens_N, vocab_size=V, softcap=cap)
    torch.testing.assert_close(logp_N.detach(), sampled_logp(*leaves, tokens_N, **how), rtol=1e-5, atol=1e-4)
    objective = PolicyGradient()
    loss, metrics = sampled_loss(logp_N, [part], objective)
    want, want_metrics = head_loss(*leaves, [part], objective, **how)
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(metrics["teacher"]["kl"], want_metrics["teacher"]["kl"], rtol=1e-4, atol=1e-4)
    got, wanted = torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves)
    for gradient, right in zip(got, wanted, strict=True):
        assert float((gradient - right).float().abs().max()) <= 2 * EPSILON * float(right.float().abs().max())
    assert not got[1][V:].any(), "rows beyond the vocabulary learn nothing"
