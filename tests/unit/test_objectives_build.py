"""From the `objective` section of a configuration to an objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distill.config.models import ObjectiveConfig
from distill.errors import ConfigError
from distill.objectives import build_objective
from distill.objectives.corrections import TruncatedImportanceSampling
from distill.objectives.divergence import JSD, ReverseKL
from distill.objectives.policy_gradient import PolicyGradient
from distill.types import Signal, SignalSpec, Support


def build(**section: Any) -> Any:
    return build_objective(ObjectiveConfig.model_validate(section))


def test_a_name_and_its_settings_become_the_dataclass() -> None:
    assert build(name="jsd", beta=0.25) == JSD(beta=0.25)
    assert build(name="reverse_kl", support="teacher_topk", k=8) == ReverseKL(support="teacher_topk", k=8)
    assert build(name="policy_gradient", importance="tis", advantage_clip=None) == PolicyGradient(
        importance=TruncatedImportanceSampling(), advantage_clip=None
    )


def test_the_default_is_reverse_kl_over_the_full_vocabulary() -> None:
    assert build() == ReverseKL()
    assert build().spec == SignalSpec(Signal.FULL)


def test_an_objective_says_what_it_needs_from_a_teacher() -> None:
    assert build(name="jsd", support="teacher_topk", k=8).spec == SignalSpec(Signal.TOPK, 8)
    union = build(name="skew_kl", support="union", k=8).spec
    assert (union.support, union.columns, union.student_k) == (Support.UNION, 16, 8)
    assert build(name="policy_gradient").spec == SignalSpec(Signal.SAMPLED)


@pytest.mark.parametrize(
    "section",
    [
        {"mixture": "geometric"},
        {"mixture": "arithmetic", "support": "student_topk", "k": 4},
        {"mixture": "arithmetic", "name": "policy_gradient"},
        {"mixture": "arithmetic", "name": "total_variation", "reduction": "seq_mean"},
    ],
)
def test_what_all_objectives_share_is_none_of_their_settings(section: dict[str, Any]) -> None:
    own = {key: value for key, value in section.items() if key not in ("mixture", "reduction")}
    assert build(**section) == build(**own)


def test_an_objective_of_the_users_own_is_named_by_its_module() -> None:
    assert build(name="distill.objectives.divergence:JSD", beta=0.1) == JSD(beta=0.1)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "reverse_lk"}, "did you mean 'reverse_kl'"),
        ({"name": "jsd", "bta": 0.5}, "unknown key objective.bta"),
        ({"name": "jsd", "bta": 0.5}, "did you mean objective.beta?"),
        ({"name": "jsd", "redaction": "seq_mean"}, "did you mean objective.reduction?"),
        ({"name": "jsd", "beta": "half"}, "objective.beta must be a number, and is 'half'"),
        ({"name": "jsd", "beta": 2}, "objective.beta: must be between 0 and 1"),
        (
            {"name": "policy_gradient", "importance": "cap"},
            "objective.importance: there is no 'cap'",
        ),
        ({"name": "reverse_kl", "support": "teacher_topk"}, "objective.k: must be at least 1"),
        ({"name": "reverse_kl", "tail": False}, "unknown key objective.tail"),
        ({"name": "skew_kl", "direction": "both"}, "objective.direction must be one of 'forward' or 'reverse', and is"),
        ({"mixture": "geometric", "support": "student_topk", "k": 4}, "geometric needs the full vocabulary"),
        ({"name": "policy_gradient", "mixture": "geometric"}, "geometric needs the full vocabulary"),
        ({"mixture": "arithmetic", "support": "teacher_topk", "k": 4}, "arithmetic needs support=full or student_topk"),
        ({"mixture": "arithmetic", "support": "union", "k": 4}, "arithmetic needs support=full or student_topk"),
        ({"name": "pathlib:Path"}, "is not a dataclass"),
        ({"name": "distill.types:SignalSpec", "signal": "full"}, "does not implement Objective"),
    ],
)
def test_what_is_wrong_with_the_section_is_said_with_its_key(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**section)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"name": "reverse_kl", "support": "teacher_topk", "k": True}, "objective.k"),
        ({"name": "reverse_kl", "support": "teacher_topk", "k": "4"}, "objective.k"),
        ({"name": "reverse_kl", "support": "teacher_topk", "k": 4.0}, "objective.k"),
        ({"name": "jsd", "beta": True}, "objective.beta"),
        ({"name": "jsd", "scaled": 1}, "objective.scaled"),
        ({"name": "policy_gradient", "advantage_clip": "5"}, "objective.advantage_clip"),
    ],
)
def test_numbers_and_truth_values_are_what_they_are_written_as(options: dict[str, Any], at: str) -> None:
    with pytest.raises(ConfigError, match=at):
        build_objective(ObjectiveConfig.model_validate(options))


def test_a_whole_number_stands_for_a_number() -> None:
    assert build_objective(ObjectiveConfig.model_validate({"name": "jsd", "beta": 1})) == JSD(beta=1)


def test_all_wrong_keys_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build(
            name="policy_gradient", advantage_clp=3, discount="0.9", importance={"name": "tis", "cpa": 2, "cap": True}
        )
    said = str(caught.value)
    assert said.startswith("4 things in the configuration are wrong:\n")
    for each in (
        "unknown key objective.advantage_clp\n    did you mean objective.advantage_clip?",
        "objective.discount must be a number, and is '0.9'",
        "unknown key objective.importance.cpa\n    did you mean objective.importance.cap?",
        "objective.importance.cap must be a number, and is true",
    ):
        assert f"- {each}" in said


def test_a_correction_out_of_range_does_not_hide_a_wrong_key_beside_it() -> None:
    with pytest.raises(ConfigError, match=r"unknown key objective\.advantage_clp"):
        build(name="policy_gradient", importance={"name": "tis", "cap": 0.5}, advantage_clp=3)


@dataclass(frozen=True)
class OfTheUser(JSD):
    """An objective whose settings are of kinds that the shipped ones do not have."""

    ids: tuple[int, ...] = ()
    table: Path | None = None
    names: list[str] = field(default_factory=lambda: ["a"])
    must: int = field(kw_only=True)


OWN = f"{__name__}:OfTheUser"


def test_an_objective_of_the_users_own_takes_lists_for_tuples_and_texts_for_paths() -> None:
    assert build(name=OWN, ids=[1, 2], table="x", must=1) == OfTheUser(ids=(1, 2), table=Path("x"), must=1)


@dataclass(frozen=True)
class WithoutItsTypes(JSD):
    mystery: NotImported | None = None  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def test_a_class_whose_types_are_not_there_is_refused_with_the_name() -> None:
    with pytest.raises(ConfigError, match=r"settings of WithoutItsTypes cannot be read: name 'NotImported'"):
        build(name=f"{__name__}:WithoutItsTypes")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "objective.must is missing"),
        ({"must": 1, "ids": [1, "2"]}, "objective.ids.1 must be a whole number, and is '2'"),
        ({"must": 1, "table": 5}, "objective.table must be a path, and is 5"),
        ({"must": 1, "names": "b"}, "objective.names must be a list of names, and is 'b'"),
    ],
)
def test_settings_of_the_users_own_are_as_strict(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name=OWN, **options)
    assert says in str(caught.value)


@pytest.mark.parametrize("options", [{"name": "skew_kl", "alpha": 0.9999999999}, {"name": "jsd", "beta": 1e-9}])
def test_a_share_that_float32_cannot_tell_from_the_end_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="objective"):
        build_objective(ObjectiveConfig.model_validate(options))


ICEPOP_PPO = {"name": "icepop_ppo", "eps": 0.1}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "jsd", "beta": 0.0, "scaled": True}, "objective.scaled: has no effect with beta=0"),
        ({"name": "jsd", "beta": 1, "scaled": True}, "objective.scaled: has no effect with beta=1"),
        ({"importance": ICEPOP_PPO}, "objective.importance.eps (icepop_ppo): has no effect"),
        ({"importance": {"name": "decoupled_ppo", "eps": 0.9}}, "objective.importance.eps (decoupled_ppo): has no"),
        ({"importance": {"name": "decoupled_ppo", "alpha": 1.0}}, "objective.importance.alpha=1 (decoupled_ppo): has"),
        (
            {"importance": {"name": "decoupled_ppo", "alpha": 0, "cap": 2.0}},
            "objective.importance.cap (decoupled_ppo): has no effect with alpha=0",
        ),
        ({"importance": ICEPOP_PPO, "outcome": {}}, "objective.importance.eps (icepop_ppo): has no effect"),
        ({"advantage_clip": 1e-300}, "objective.advantage_clip: must be between 1e-06 and 1e+06, got 1e-300"),
        ({"advantage_clip": 1e300}, "objective.advantage_clip: must be between 1e-06 and 1e+06, got 1e+300"),
        ({"iw_gain": 1e300}, "objective.iw_gain: must be between 0 and 1e+06, got 1e+300"),
        ({"iw_gain": 1e-300}, "objective.iw_gain: must be 0 or at least 1e-06, got 1e-300"),
        ({"power": 1e-300}, "objective.power: must be 0 or at least 1e-09, got 1e-300"),
        ({"discount": 1e-300}, "objective.discount: must be 0 or at least 1e-06, got 1e-300"),
    ],
)
def test_settings_that_would_do_nothing_in_a_run_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**{"name": "policy_gradient", **section})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("own", "refused"),
    [
        ({"estimator": "k3"}, "estimator"),
        ({"reference": "sampler"}, "reference"),
        ({"power": 0.5}, "power"),
        ({"advantage_clip": None}, "advantage_clip"),
        ({"discount": 1.0}, "discount"),
        ({"iw_gain": 0.5}, "iw_gain"),
        ({"importance": "tis"}, None),
        ({"advantage_clip": 5.0, "discount": 0.0}, None),
    ],
)
def test_without_a_weight_of_the_teachers_settings_of_their_advantage_are_refused(
    own: dict[str, Any], refused: str | None
) -> None:
    alone = {"name": "policy_gradient", **own, "outcome": {"teacher_weight": 0.0}}
    if refused is None:
        assert build(**alone) is not None
        return
    with pytest.raises(
        ConfigError, match=rf"objective\.{refused}: has no effect with objective\.outcome\.teacher_weight"
    ):
        build(**alone)
    build(**{**alone, "outcome": {"teacher_weight": 0.5}})
    build(**{**alone, "outcome": {"mix": "loss"}})


@pytest.mark.parametrize(
    "section",
    [
        {"name": "jsd", "beta": 0.5, "scaled": True},
        {"name": "jsd", "beta": 1.0, "scaled": False},
        {"name": "policy_gradient", "importance": {"name": "decoupled_ppo", "alpha": 0.5, "eps": 0.1, "cap": 3.0}},
        {"name": "policy_gradient", "importance": {"name": "decoupled_ppo", "cap": 3.0, "eps": 0.2, "alpha": None}},
        {"name": "policy_gradient", "importance": {"name": "icepop_ppo", "high": 4.0, "eps": 0.2}},
    ],
)
def test_settings_that_do_something_and_defaults_written_out_are_taken(section: dict[str, Any]) -> None:
    assert build(**section) is not None
