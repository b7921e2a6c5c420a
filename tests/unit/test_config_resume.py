"""What a resumed run must share with the one before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from distill.config.checks import check
from distill.config.models import RunConfig
from distill.config.resume import FIXED, FREE, Change, changes, patterns, settings_of
from distill.config.schema import KeyPath, members
from tests.builders_config import settings


def config(**others: Any) -> RunConfig:
    read = RunConfig.model_validate(settings() | others)
    check(read)
    return read


def keys_of(model: type[BaseModel], at: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of a run, with * for names and numbers. A section that takes any key is one."""
    if model.model_config.get("extra") == "allow":
        yield (*at, "*")
        return
    for name, field in model.model_fields.items():
        sections = list(sections_in(field.annotation, (*at, name)))
        for section, place in sections:
            yield from keys_of(section, place)
        if not sections:
            yield (*at, name)


def sections_in(annotation: Any, at: KeyPath) -> Iterator[tuple[type[BaseModel], KeyPath]]:
    for kind in members(annotation):
        if get_origin(kind) in (list, dict):
            yield from sections_in(get_args(kind)[-1], (*at, "*"))
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind, at


def test_every_key_of_a_run_is_said_to_be_fixed_or_free() -> None:
    fixed, free = set(patterns(FIXED)), set(patterns(FREE))
    assert not fixed & free
    assert fixed | free == set(keys_of(RunConfig)), "sort new keys into distill/config/resume.py, and take old ones out"


def differences(one: RunConfig, other: RunConfig) -> list[Change]:
    return list(changes(settings_of(one), json.loads(json.dumps(settings_of(other)))))


def teachers_at(temperature: float) -> dict[str, Any]:
    return {name: {"model": f"./experts/{name}", "temperature": temperature} for name in ("math", "code")}


JSD = {"name": "jsd", "beta": 0.5, "scaled": False, "support": "full", "form": "tail", "k": 0}
PG = {"name": "policy_gradient"}
TIS = {"name": "tis", "cap": 2.0}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"objective": {"name": "jsd"}}, {"objective": JSD}),
    ({"objective": {"name": "jsd", "beta": 1}}, {"objective": {"name": "jsd", "beta": 1.0}}),
    ({}, {"objective": {"name": "reverse_kl", "mixture": "weighted", "reduction": "token_mean", "outcome": None}}),
    ({"objective": PG | {"importance": "tis"}}, {"objective": PG | {"importance": TIS, "advantage_clip": 5}}),
    ({"student": {"model": "./base"}}, {"student": {"model": "./base", "tokenizer": "./base", "lr": 1e-5}}),
    ({}, {"teachers": {name: {"model": f"./experts/{name}", "weight": 1} for name in ("code", "math")}}),
    (
        {"data": [{"path": "x", "teachers": ["code", "math"]}]},
        {"data": [{"path": "x", "teachers": {"math": 1, "code": 1.0}}]},
    ),
    (
        {"routing": {"rules": [{"match": {"tag": "x"}, "teachers": ["math"]}]}},
        {"routing": {"rules": [{"match": {"tag": "x"}, "teachers": {"math": 1}}], "mix": None}},
    ),
    ({"evaluation": {"data": [{"path": "x"}]}}, {"evaluation": {"data": [{"path": "x"}], "max_new_tokens": 8}}),
]


@pytest.mark.parametrize(("short", "long"), SAME, ids=lambda part: ",".join(part) or "nothing")
def test_a_default_that_is_written_out_is_no_change(short: dict[str, Any], long: dict[str, Any]) -> None:
    assert differences(config(**short), config(**long)) == []


@pytest.mark.parametrize(
    ("before", "after", "says", "allowed"),
    [
        ({}, {"objective": {"support": "teacher_topk", "k": 4}}, "objective.support is 'teacher_topk'", False),
        ({"objective": PG}, {"objective": PG | {"importance": TIS}}, "objective.importance.name is 'tis'", False),
        ({"objective": PG}, {"objective": PG | {"discount": 0.5}}, "objective.discount is 0.5, and was 0.0", False),
        (
            {"student": {"model": "b", "lora": {}}},
            {"student": {"model": "b", "lora": {"export": "adapter"}}},
            "student.lora.export is 'adapter', and was 'merged'",
            True,
        ),
        ({}, {"student": {"model": "./base", "lora": {}}}, "student.lora is {", False),
        ({}, {"prepare": {"script": "a.py", "output": "o"}}, "prepare is {", True),
        ({}, {"evaluation": {"data": [{"path": "x", "domain": "math"}]}}, "evaluation.data.0 is {", False),
        ({}, {"routing": {"default": "math"}}, "routing.default is 'math', and was null", False),
        ({}, {"routing": {"mix": {"math": 1, "code": 2}}}, "routing.mix is {'math': 1.0", False),
        (
            {},
            {"teachers": {"math": {"model": "./experts/math", "context": {"system": "x"}}, "code": {"model": "c"}}},
            "teachers.math.context is {'system': 'x'",
            False,
        ),
        ({}, {"observe": {"sinks": []}}, "observe.sinks is [], and was ['jsonl', 'tensorboard']", True),
        ({}, {"server": {"dtype": "bfloat16"}}, "server.dtype is 'bfloat16'", False),
        ({}, {"teacher_manager": {"full_rows": "rows"}}, "full_rows is 'rows', and was 'auto'", True),
        ({}, {"teachers": teachers_at(0.5)}, "teachers.math.temperature is 0.5, and was null", False),
    ],
)
def test_a_change_is_named_and_judged(before: dict[str, Any], after: dict[str, Any], says: str, allowed: bool) -> None:
    found = differences(config(**after), config(**before))
    assert says in str(found[0]) and found[0].allowed is allowed


def test_of_another_objective_only_what_all_objectives_share_is_compared() -> None:
    before = {"objective": {"name": "jsd", "beta": 0.3, "support": "union", "k": 4, "reduction": "seq_mean"}}
    found = differences(config(objective=PG), config(**before))
    assert [str(change) for change in found] == [
        "objective.name is 'policy_gradient', and was 'jsd'",
        "objective.reduction is 'token_mean', and was 'seq_mean'",
    ]


def test_a_teacher_more_or_less_is_a_change_that_is_not_allowed() -> None:
    one = {"teachers": {"math": {"model": "x"}}, "data": [{"path": "m.jsonl"}]}
    two = {"teachers": {"math": {"model": "x"}, "code": {"model": "y"}}, "data": [{"path": "m.jsonl"}]}
    for found in (differences(config(**one), config(**two)), differences(config(**two), config(**one))):
        assert [(change.key, change.allowed) for change in found] == [(("teachers", "code"), False)]


def test_a_run_from_before_teachers_had_temperatures_goes_on_at_1() -> None:
    old = json.loads(json.dumps(settings_of(config())))
    for teacher in old["teachers"].values():
        del teacher["temperature"]
    assert list(changes(settings_of(config()), old)) == []
    assert [change.allowed for change in changes(settings_of(config(teachers=teachers_at(0.5))), old)] == [False, False]
