"""Divergences over the full vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from distill.objectives.divergence import JSD, ForwardKL, ReverseKL, SkewKL, TotalVariation
from distill.protocols import Objective
from tests.golden.objectives.data import Case
from tests.golden.objectives.models import full_rows, logits, loss_and_gradient
from tests.golden.objectives.runner import Evaluate, Mismatch, deviation


def objective_of(kind: str, params: Mapping[str, Any], **support: Any) -> Objective:
    """The objective that a name of the data means."""
    match kind:
        case "fkl":
            return ForwardKL(**support)
        case "rkl":
            return ReverseKL(**support)
        case "jsd" | "scaled_jsd":
            return JSD(beta=params["beta"], scaled=kind == "scaled_jsd", **support)
        case "skew_fkl" | "skew_rkl":
            return SkewKL(alpha=params["alpha"], direction="forward" if kind == "skew_fkl" else "reverse", **support)
        case "tv":
            return TotalVariation(**support)
        case _:
            raise KeyError(kind)


def divergence(case: Case, precision: str) -> dict[str, Tensor]:
    objective = objective_of(case.kind, case.params)
    live = live_rows(case)

    def loss_of(student_NV: Tensor) -> Tensor:
        teacher_NV = logits(case, "teacher_logits", precision)
        return objective(full_rows(student_NV[live], teacher_NV[live]))[0]

    got = loss_and_gradient(case, precision, loss_of)
    claim_same_value(case, got, precision)
    gradient = got["grad_student_logits"]
    if not bool((gradient[..., case.params["V"] :] == 0).all()):
        raise Mismatch("the gradient in padded columns is not exactly 0")
    # only the live rows of a case with a mask have a value; the others have no row
    live_gradient = gradient.reshape(-1, gradient.shape[-1])[live]
    return got | {"value_live": got["value"], "grad_student_logits_live": live_gradient}


def live_rows(case: Case) -> Any:
    """Which rows are trained: what selects them out of N."""
    if "loss_mask" not in case.inputs:
        return slice(None)
    return np.flatnonzero(np.asarray(case.inputs["loss_mask"]).reshape(-1))


def claim_same_value(case: Case, got: Mapping[str, Tensor], precision: str) -> None:
    """Where the case says that another one has the same value, the product must give that one's too."""
    if "same_value_as" in case.params:
        other = case.siblings[case.params["same_value_as"]]
        ratio = deviation(got["value"], other.expect["value"], *case.tol[precision])
        if ratio > 1.0:
            raise Mismatch(f"value: {ratio:.3g} times the tolerance from that of {other.id}")


KINDS: dict[str, Evaluate] = dict.fromkeys(
    ("fkl", "rkl", "jsd", "scaled_jsd", "skew_fkl", "skew_rkl", "tv"), divergence
)
