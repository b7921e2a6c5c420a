"""From the `objective` section of a configuration to an objective."""

from __future__ import annotations

from typing import Any

import pytest

from distill.config.models import ObjectiveConfig
from distill.errors import ConfigError
from distill.objectives import build_objective
from distill.objectives.divergence import JSD, ReverseKL
from distill.objectives.policy_gradient import PolicyGradient
from distill.types import Signal, SignalSpec


def build(**section: Any) -> Any:
    return build_objective(ObjectiveConfig.model_validate(section))


def test_a_name_and_its_settings_become_the_dataclass() -> None:
    assert build(name="jsd", beta=0.25) == JSD(beta=0.25)
    assert build(name="reverse_kl", support="teacher_topk", k=8) == ReverseKL(support="teacher_topk", k=8)
    assert build(name="policy_gradient", importance="tis", advantage_clip=None) == PolicyGradient(
        importance="tis", advantage_clip=None
    )


def test_the_default_is_reverse_kl_over_the_full_vocabulary() -> None:
    assert build() == ReverseKL()
    assert build().spec == SignalSpec(Signal.FULL)


def test_an_objective_says_what_it_needs_from_a_teacher() -> None:
    assert build(name="jsd", support="teacher_topk", k=8).spec == SignalSpec(Signal.TOPK, 8)
    assert build(name="policy_gradient").spec == SignalSpec(Signal.SAMPLED)


def test_numbers_written_as_text_are_read_as_numbers() -> None:
    assert build(name="jsd", beta="0.25").beta == 0.25


def test_an_objective_of_the_users_own_is_named_by_its_module() -> None:
    assert build(name="distill.objectives.divergence:JSD", beta=0.1) == JSD(beta=0.1)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "reverse_lk"}, "did you mean 'reverse_kl'"),
        ({"name": "jsd", "bta": 0.5}, "objective.bta: jsd has no such setting"),
        ({"name": "jsd", "bta": 0.5}, "did you mean 'beta'"),
        ({"name": "jsd", "beta": "half"}, "objective.beta: Input should be a valid number"),
        ({"name": "jsd", "beta": 2}, "objective.beta: must be between 0 and 1"),
        (
            {"name": "policy_gradient", "importance": "cap"},
            "objective.importance: Input should be 'none', 'tis' or 'band'",
        ),
        ({"name": "reverse_kl", "support": "student_topk", "k": 4}, "objective.support: student_topk is not available"),
        ({"name": "pathlib:Path"}, "is not a dataclass"),
        ({"name": "distill.types:SignalSpec", "signal": "full"}, "does not implement Objective"),
    ],
)
def test_what_is_wrong_with_the_section_is_said_with_its_key(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**section)
    assert message in str(caught.value)
