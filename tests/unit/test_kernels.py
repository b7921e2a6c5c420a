"""Which code computes log p of the sampled tokens, and that the kernel's place in the loss gives what ours gives.

Legend: N rows of a micro-batch, V common vocabulary, D hidden.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.config.models import ObjectiveConfig, RunConfig
from distill.errors import ConfigError, DistillError, MissingDependency, StudentError
from distill.objectives import build_objective, kernels
from distill.objectives.divergence import ReverseKL
from distill.objectives.head_loss import TeacherPart, head_loss, sampled_logp, sampled_loss
from distill.objectives.kernels import Choice, Head, choose
from distill.objectives.mixture import combine
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.sampled_kl import SampledKL
from distill.preflight.programs import check_loss_kernel
from students.hf.backend import HFStudent
from tests.builders_config import settings
from tests.builders_kernels import install_stand_in
from tests.builders_student import VOCAB, make_batch, student_config, write_student
from tests.unit.test_head_loss import N, V, inputs, overlapping, softcap
from tests.unit.test_student_sampled import SECTIONS, batch_for

GOOD = Head("cuda", "bfloat16", sampled_only=True, vocab_size=500, transform=(1.0, None), capability=(9, 0))
MISFITS = {
    "objective": (replace(GOOD, sampled_only=False), "the objective looks at more"),
    "dtype": (replace(GOOD, dtype="float32"), "the student computes in float32"),
    "scale": (replace(GOOD, transform=(0.5, None)), "multiplies its logits by 0.5"),
    "scale and cap": (replace(GOOD, transform=(0.5, 30.0), vocab_size=512), "multiplies its logits by 0.5"),
    "cap": (replace(GOOD, transform=(1.0, 30.0)), "500 tokens leave such columns"),
    "device": (replace(GOOD, device="cpu"), "the student is on the cpu"),
    "age": (replace(GOOD, capability=(7, 5)), "compute capability 7.5"),
}
FITS = {
    "all known": GOOD,
    "half precision": replace(GOOD, dtype="float16"),
    "cap over whole blocks": replace(GOOD, transform=(1.0, 30.0), vocab_size=512),
    "nothing known": Head(None, "bfloat16", sampled_only=True),
    "the oldest that will do": replace(GOOD, capability=(8, 0)),
}


def there() -> str:
    return ""


def absent() -> str:
    return "cut-cross-entropy is not installed"


def never() -> str:
    raise AssertionError("nobody is to ask whether it is installed")


@pytest.mark.parametrize("head", [pytest.param(head, id=name) for name, head in FITS.items()])
@pytest.mark.parametrize("asked", ["auto", "cut_cross_entropy"])
def test_a_kernel_that_fits_and_is_there_is_used_whether_asked_for_or_not(asked: Any, head: Head) -> None:
    assert choose(asked, head, there) == Choice(True, "")


@pytest.mark.parametrize(("head", "why"), [pytest.param(*row, id=name) for name, row in MISFITS.items()])
def test_one_that_does_not_fit_is_left_alone_by_auto_and_an_error_where_it_was_asked_for(head: Head, why: str) -> None:
    choice = choose("auto", head, never)
    assert not choice.kernel and why in choice.why
    with pytest.raises(ConfigError) as caught:
        choose("cut_cross_entropy", head, never)
    assert kernels.KEY in caught.value.what and why in caught.value.why and "auto" in caught.value.fix


def test_one_that_is_not_there_is_left_alone_by_auto_and_an_error_where_it_was_asked_for() -> None:
    assert choose("auto", GOOD, absent) == Choice(False, absent())
    with pytest.raises(MissingDependency) as caught:
        choose("cut_cross_entropy", GOOD, absent)
    assert caught.value.why == absent() and "pip install" in caught.value.fix


@pytest.mark.parametrize("head", [GOOD, *(head for head, _ in MISFITS.values())])
def test_portable_asks_nothing(head: Head) -> None:
    assert choose("portable", head, never) == Choice(False, "student.loss_kernel=portable")


def test_every_way_to_fall_short_is_found_whatever_else_falls_short() -> None:
    """All combinations of good and bad members: the kernel is used for the one that is good in all."""
    members = {
        "device": ("cuda", "cpu"),
        "dtype": ("bfloat16", "float32"),
        "sampled_only": (True, False),
        "transform": ((1.0, None), (2.0, None), (1.0, 30.0)),
        "capability": ((8, 0), (7, 0)),
    }
    for values in itertools.product(*members.values()):
        head = Head(**dict(zip(members, values, strict=True)), vocab_size=300)  # pyright: ignore[reportArgumentType]
        for installed in (there, absent):
            good = values == tuple(options[0] for options in members.values()) and installed is there
            assert choose("auto", head, installed).kernel == good, (head, installed)


def test_a_release_without_exact_sums_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(e: Tensor, c: Tensor, targets: Tensor, reduction: str = "mean", filter_eps: float | None = None) -> None:
        del e, c, targets, reduction, filter_eps

    install_stand_in(monkeypatch)
    assert kernels.why_unusable() == ""
    install_stand_in(monkeypatch, old)
    assert kernels.why_unusable().endswith("too old: it has no bias, accum_e_fp32, accum_c_fp32")
    monkeypatch.delitem(sys.modules, kernels.PACKAGE)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _: None)
    assert kernels.why_unusable() == kernels.why_absent() == "cut-cross-entropy is not installed"


SAMPLED: list[Any] = [PolicyGradient(), PolicyGradient(advantage_clip=None, power=0.5), SampledKL(estimator="k3")]


def scored(part: TeacherPart, **changes: Any) -> TeacherPart:
    """What such objectives are given of a teacher: log q of the sampled tokens alone."""
    nothing_else = dict.fromkeys(("topk_ids_NK", "topk_logp_NK", "log_tail_N", "full_logp_NV"))
    return replace(part, rows=replace(part.rows, **nothing_else, **changes))


@pytest.mark.parametrize("objective", SAMPLED, ids=lambda it: type(it).__name__)
@pytest.mark.parametrize("capped", [False, True], ids=["plain", "softcap"])
@pytest.mark.parametrize("mixture", [None, "arithmetic"])
def test_the_loss_from_the_kernels_log_p_is_the_one_from_logits(
    objective: Any, capped: bool, mixture: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stand_in(monkeypatch)
    given, parts = inputs(), overlapping()
    tokens_N = torch.zeros(N, dtype=torch.int64)
    for part in parts:  # a row has one sampled token, whoever scored it
        tokens_N[part.index_n] = part.rows.tokens_N
    parts = [scored(part, tokens_N=tokens_N[part.index_n]) for part in parts]
    mix = None if mixture is None else lambda rows, weights: combine(mixture, rows, weights)

    cap = 3.0 if capped else None
    logp_N = kernels.sampled_logp(given.hidden_ND, given.weight_VD, given.bias_V, tokens_N, vocab_size=V, softcap=cap)
    transform = softcap if capped else None
    how: Any = {"vocab_size": V, "chunk_tokens": 4, "logits_transform": transform}
    ours_N = sampled_logp(given.hidden_ND, given.weight_VD, given.bias_V, tokens_N, **how)
    torch.testing.assert_close(logp_N.detach(), ours_N, rtol=1e-12, atol=1e-12)

    loss, metrics = sampled_loss(logp_N, parts, objective, combine=mix)
    want, want_metrics = head_loss(given.hidden_ND, given.weight_VD, given.bias_V, parts, objective, combine=mix, **how)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics, want_metrics, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(loss, given.leaves)
    torch.testing.assert_close(got, torch.autograd.grad(want, given.leaves), rtol=1e-10, atol=1e-12)
    assert not got[1][V:].any(), "rows beyond the vocabulary learn nothing"


def test_half_precision_heads_give_float32_log_p_and_gradients_in_their_own_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_stand_in(monkeypatch)
    given = inputs(torch.bfloat16)
    tokens_N = torch.arange(N)
    logp_N = kernels.sampled_logp(given.hidden_ND, given.weight_VD, given.bias_V, tokens_N, vocab_size=V)
    ours_N = sampled_logp(given.hidden_ND, given.weight_VD, given.bias_V, tokens_N, vocab_size=V, chunk_tokens=4)
    assert logp_N.dtype == torch.float32
    # the CPU's half precision GEMM rounds our logits once, to 8 bits
    torch.testing.assert_close(logp_N.detach(), ours_N, rtol=2e-2, atol=2e-2)
    assert [g.dtype for g in torch.autograd.grad(logp_N.sum(), given.leaves)] == [torch.bfloat16] * 3


def test_rows_that_no_teacher_scored_leave_a_loss_of_zero_that_can_be_differentiated() -> None:
    logp_N = torch.full((3,), torch.nan, requires_grad=True)
    loss, metrics = sampled_loss(logp_N, [], PolicyGradient())
    loss.backward()
    assert float(loss.detach()) == 0.0 and metrics == {}
    assert logp_N.grad is not None and not logp_N.grad.any()


def test_a_log_p_that_is_no_number_is_the_students_fault_and_names_the_row() -> None:
    parts = [scored(part) for part in overlapping()]
    logp_N = torch.full((N,), -1.0, dtype=torch.float64)
    logp_N[2] = torch.nan
    with pytest.raises(StudentError, match=r"teacher math, row 2 of the micro-batch's row 2: .*NaN"):
        sampled_loss(logp_N, parts, PolicyGradient())


def test_an_objective_that_reads_logits_has_no_business_there() -> None:
    with pytest.raises(AssertionError, match="ReverseKL reads logits"):
        sampled_loss(torch.zeros(3), [], ReverseKL())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_student(tmp_path_factory.mktemp("student"))


@pytest.mark.parametrize("section", [*SECTIONS, {"name": "policy_gradient", "mixture": "arithmetic"}], ids=str)
def test_a_students_step_by_the_kernel_is_the_step_without(
    section: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = ObjectiveConfig.model_validate(section)
    objective = build_objective(rules)
    batch = batch_for(objective)
    steps = []
    for used in (False, True):
        with monkeypatch.context() as patch:
            install_stand_in(patch)
            patch.setattr(kernels, "choose", lambda *_, used=used: Choice(used, ""))
            student = HFStudent(
                student_config(model, max_grad_norm=1e9), seed=0, total_steps=5, vocab_size=VOCAB, rules=rules
            )
            kl = student.evaluate(batch, objective)
            steps.append((student.step(batch, objective), kl))
    (ours, our_kl), (kernel, its_kl) = steps
    assert kernel.loss == pytest.approx(ours.loss, rel=1e-5, abs=1e-6)
    assert kernel.grad_norm == pytest.approx(ours.grad_norm, rel=1e-5)
    for teacher, value in ours.kl.items():
        assert kernel.kl[teacher] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert its_kl == pytest.approx(our_kl, rel=1e-5, abs=1e-6)


def test_a_student_asked_for_a_kernel_that_it_cannot_use_does_not_start(model: Path) -> None:
    for changes, says in (({}, "computes in float32"), ({"dtype": "bfloat16"}, "the student is on the cpu")):
        config = student_config(model, device="cpu", loss_kernel="cut_cross_entropy", **changes)
        with pytest.raises(ConfigError) as caught:
            HFStudent(config, seed=0, total_steps=5, vocab_size=VOCAB)
        assert says in caught.value.why


def test_a_student_says_why_it_uses_no_kernel(model: Path) -> None:
    student = HFStudent(student_config(model, device="cpu"), seed=0, total_steps=5, vocab_size=VOCAB)
    assert "computes in float32" in student.loss_kernel(PolicyGradient()).why
    assert "the objective looks at more" in student.loss_kernel(ReverseKL()).why
    student.step(make_batch(PolicyGradient().spec), PolicyGradient())


def run_config(**student: Any) -> RunConfig:
    wanted = settings()
    return RunConfig.model_validate(wanted | {"student": wanted["student"] | student})


WRONG: list[tuple[dict[str, Any], Any, type[DistillError], str]] = [
    ({"dtype": "bfloat16"}, ReverseKL(), ConfigError, "the objective looks at more"),
    ({}, PolicyGradient(), ConfigError, "computes in float32"),
    ({"dtype": "bfloat16", "device": "cpu"}, PolicyGradient(), ConfigError, "the student is on the cpu"),
]


@pytest.mark.parametrize(("student", "objective", "kind", "why"), WRONG, ids=[row[3] for row in WRONG])
def test_a_run_that_asks_for_the_kernel_in_vain_is_refused_before_it_starts(
    student: dict[str, Any], objective: Any, kind: type[DistillError], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stand_in(monkeypatch)
    with pytest.raises(kind) as caught:
        check_loss_kernel(run_config(loss_kernel="cut_cross_entropy", **student), objective)
    assert why in caught.value.why


def test_a_run_that_asks_for_a_kernel_which_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_absent", absent)
    config = run_config(loss_kernel="cut_cross_entropy", dtype="bfloat16", device="cuda")
    with pytest.raises(MissingDependency, match="not there"):
        check_loss_kernel(config, PolicyGradient())
    assert check_loss_kernel(run_config(dtype="bfloat16", device="cuda"), PolicyGradient()) == ""


def test_a_run_says_that_it_will_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(monkeypatch)
    note = check_loss_kernel(run_config(dtype="bfloat16", device="cuda:1"), PolicyGradient())
    assert "cut-cross-entropy's kernel" in note
    assert check_loss_kernel(run_config(dtype="bfloat16", device="cpu"), PolicyGradient()) == ""
    assert check_loss_kernel(run_config(device="cuda"), PolicyGradient()) == ""
    assert (
        check_loss_kernel(run_config(dtype="bfloat16", device="cuda", loss_kernel="portable"), PolicyGradient()) == ""
    )


INTERPRETED = """
import json, types, torch, triton, triton.language as tl
import cut_cross_entropy.tl_utils as helpers
from distill.objectives import kernels

@triton.jit
def log1p(a):
    return tl.log(1.0 + a)

@triton.jit
def tanh(a):
    return 2.0 * tl.sigmoid(2.0 * a) - 1.0

# the interpreter has no functions of the device's library
helpers.tl_libdevice = types.SimpleNamespace(log1p=log1p, tanh=tanh)
torch.cuda.is_bf16_supported = lambda *_: True
torch.manual_seed(0)
worst = []
for rows, vocab, padded, width, cap in ((5, 300, 307, 64, None), (130, 256, 256, 48, 3.0)):
    leaves = [torch.randn(rows, width), torch.randn(padded, width) * width**-0.5, torch.randn(padded)]
    leaves = [leaf.half().requires_grad_() for leaf in leaves]
    tokens, weights = torch.randint(vocab, (rows,)), torch.randn(rows)
    logp = kernels.sampled_logp(*leaves, tokens, vocab_size=vocab, softcap=cap)
    grads = torch.autograd.grad((logp * weights).sum(), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = exact[0] @ exact[1][:vocab].T + exact[2][:vocab]
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    want = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    wanted = torch.autograd.grad((want * weights).sum(), exact)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads, wanted)]
    worst.append([float((logp - want).abs().max()), max(errors), bool(grads[1][vocab:].any())])
print(json.dumps([kernels.why_unusable(), worst]))
"""


@pytest.mark.skipif(kernels.why_unusable() != "", reason=kernels.why_unusable())
def test_the_real_kernel_run_by_tritons_interpreter_gives_exact_log_p_and_gradients() -> None:
    """In float16: the interpreter reads bfloat16 as integers."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    unusable, worst = json.loads(done.stdout.splitlines()[-1])
    assert unusable == ""
    for log_p, gradient, padded_rows_learn in worst:
        assert log_p < 1e-5
        assert gradient < 2e-3  # as far as float16 tells two numbers apart
        assert not padded_rows_learn
