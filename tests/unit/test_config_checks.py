"""Checks that span several keys of a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from distill.config.checks import check
from distill.config.models import RunConfig
from distill.errors import ConfigError
from tests.builders_config import settings


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(settings() | changes)


def attach(rollout: list[str], teacher: list[str], **more: Any) -> dict[str, Any]:
    return {"program": "attach", "rollout_urls": rollout, "teacher_urls": teacher, **more}


MATH = {"path": "m.jsonl", "domain": "math"}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("a misspelt teacher", {"data": [{"path": "x", "teachers": ["maht"]}]}, "did you mean 'math'"),
    ("no teacher in a list", {"data": [{"path": "x", "teachers": []}]}, "data.0.teachers is empty"),
    (
        "a weight of zero",
        {"data": [{"path": "x", "teachers": {"math": 0, "code": 1}}]},
        "data.0.teachers.math must be more than 0",
    ),
    (
        "a weight that float32 has no room for",
        {"data": [{"path": "x", "teachers": {"math": 1e300, "code": 1}}]},
        "data.0.teachers.math must be between 1e-06 and 1e+06, and is 1e+300",
    ),
    (
        "a weight that is lost in float32",
        {"teachers": {"math": {"model": "m", "weight": 1e-300}, "code": {"model": "c"}}},
        "teachers.math.weight must be between 1e-06 and 1e+06, and is 1e-300",
    ),
    (
        "domain weights without end",
        {"objective": {"reduction": "domain_balanced", "domain_weights": {"math": 1e308, "code": 1e308}}},
        "objective.domain_weights.code must be between 1e-06 and 1e+06, and is 1e+308",
    ),
    (
        "an outcome too light to count",
        {"objective": {"name": "policy_gradient", "outcome": {"weight": 1e-9, "baseline": "none"}}},
        "objective.outcome.weight must be between 1e-06 and 1e+06, and is 1e-09",
    ),
    (
        "a teacher without work",
        {"data": [{"path": "x", "teachers": ["math"]}]},
        "teachers.code is named by no entry of data",
    ),
    ("a name with a slash", {"teachers": {"a/b": {"model": "x"}}}, "'a/b' holds other characters"),
    ("a domain with a slash", {"data": [MATH, {"path": "x", "domain": "a/b"}]}, "'a/b', which is more than letters"),
    (
        "a temperature that the server would not know",
        {
            "teachers": {"math": {"model": "m", "temperature": 0.5}, "code": {"model": "c"}},
            "server": {"program": "sglang"},
        },
        "teachers.math.temperature is 0.5, and SGLang scores at 1",
    ),
    (
        "too many slots",
        {"teacher_manager": {"slots": 3}},
        "teacher_manager.slots is 3, and the number of teachers only 2",
    ),
    (
        "too few URLs",
        {"server": attach(["http://a:1"], [])},
        "server.teacher_urls names 0 servers, and teacher_manager.slots is 1",
    ),
    ("an address without http", {"server": attach(["a:1"], ["http://b:1"])}, "'a:1' is not the address of a server"),
    (
        "one server for two jobs",
        {"server": attach(["http://a:1"], ["http://a:1"])},
        "both a rollout and a teacher server",
    ),
    ("arguments for nothing", {"server": attach(["http://a:1"], ["http://b:1"], args=["--x"])}, "which starts nothing"),
    ("URLs without attach", {"server": {"rollout_urls": ["http://a:1"]}}, "but server.program is 'embedded'"),
    ("ports beyond the last", {"server": {"port": 65535}}, "take at most 65534"),
    ("a broken batch", {"rollout": {"samples_per_prompt": 3}}, "take 3 or 6"),
    ("a store smaller than a batch", {"store": {"capacity": 3}}, "store.capacity is 3, less than one batch (4)"),
    (
        "an outcome without a group",
        {"objective": {"name": "policy_gradient", "outcome": {}}},
        "rollout.samples_per_prompt is 1, and objective.outcome compares a reward",
    ),
    (
        "an outcome without a batch",
        {
            "objective": {"name": "policy_gradient", "outcome": {"baseline": "batch"}},
            "trainer": {"steps": 1, "batch_size": 1},
        },
        "trainer.batch_size is 1, and objective.outcome compares a reward",
    ),
    (
        "a weight that another mix ignores",
        {"objective": {"outcome": {"mix": "loss", "weight": 2.0, "baseline": "none"}}},
        "objective.outcome.weight has no effect with mix=loss",
    ),
    (
        "a deviation that divides nothing",
        {"objective": {"outcome": {"mix": "loss", "baseline": "batch", "use_std": False, "ddof": 0}}},
        "objective.outcome.ddof has no effect with use_std=false",
    ),
    (
        "an outcome of an unknown grader",
        {"objective": {"outcome": {"grader": "exact_macth", "baseline": "none"}}},
        "objective.outcome.grader: there is no grader 'exact_macth'",
    ),
    ("evaluation of nothing", {"evaluation": {"every": 5}}, "evaluation.every is given, but evaluation.data is empty"),
    (
        "a held-out domain with a typo",
        {"evaluation": {"data": [{"path": "x", "domain": "maht"}]}},
        "did you mean 'math'",
    ),
    (
        "a constant schedule that ends",
        {"student": {"model": "x", "lr_schedule": "constant", "lr_final_ratio": 0.1}},
        "no final learning rate",
    ),
    ("a project without wandb", {"observe": {"wandb_project": "x"}}, "wandb is not in observe.sinks"),
    ("a beta of one", {"student": {"model": "x", "betas": [0.9, 1.0]}}, "student.betas.1 must be in [0, 1)"),
    (
        "a temperature that servers take for none",
        {"rollout": {"temperature": 1e-9}},
        "rollout.temperature is 1e-09, and what is below 1e-06 is taken for 0 by servers",
    ),
    (
        "domain weights without their reduction",
        {"objective": {"domain_weights": {"math": 1, "code": 2}}},
        "objective.domain_weights has no effect with objective.reduction=token_mean",
    ),
    (
        "a weight for a domain with a typo",
        {"objective": {"reduction": "domain_balanced", "domain_weights": {"maht": 1, "code": 1}}},
        "did you mean 'math'",
    ),
    (
        "a domain without a weight",
        {"objective": {"reduction": "domain_balanced", "domain_weights": {"math": 1}}},
        "objective.domain_weights has none for the domain 'code'",
    ),
    (
        "domain weights of nothing",
        {"objective": {"reduction": "domain_balanced", "domain_weights": {"math": 0, "code": 0}}},
        "leaves every domain out",
    ),
    (
        "a mixture of one teacher",
        {
            "data": [{"path": "x", "teachers": ["math"]}, {"path": "y", "teachers": ["code"]}],
            "objective": {"mixture": "geometric"},
        },
        "objective.mixture is geometric, but every sample has a single teacher",
    ),
    (
        "a teacher named twice",
        {"data": [{"path": "x", "teachers": ["math", "code", "math"]}]},
        "data.0.teachers names 'math' twice",
    ),
    (
        "a held-out teacher named twice",
        {"evaluation": {"data": [{"path": "x", "domain": "math", "teachers": ["math", "math"]}]}},
        "evaluation.data.0.teachers names 'math' twice",
    ),
    (
        "a weight that no entry uses",
        {
            "teachers": {"math": {"model": "m", "weight": 2.0}, "code": {"model": "c"}},
            "data": [{"path": "x", "teachers": {"math": 0.5, "code": 0.5}}],
        },
        "teachers.math.weight has no effect",
    ),
    (
        "a mean of segments where there are none",
        {"objective": {"reduction": "segment_mean"}},
        "every answer is a single sample: it would be the same as seq_mean",
    ),
    (
        "tokens of segments where there are none",
        {"objective": {"reduction": "segment_token"}},
        "every answer is a single sample: it would be the same as token_mean",
    ),
    ("an unknown sink", {"observe": {"sinks": ["jsonl", "tensorbord"]}}, "did you mean 'tensorboard'"),
    ("an unknown scheduler", {"teacher_manager": {"scheduler": "anounced"}}, "did you mean 'announced'"),
    ("an unknown grader", {"evaluation": {"grader": "exact"}}, "there is no grader 'exact'"),
    ("an unknown store", {"store": {"name": "memry"}}, "there is no store 'memry'"),
    ("an unknown student", {"student": {"model": "x", "backend": "hff"}}, "there is no student 'hff'"),
]


@pytest.mark.parametrize(("changes", "says"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(**changes))
    assert says in str(caught.value)


def test_the_smallest_run_passes() -> None:
    check(config())


def test_attached_servers_with_one_address_each_pass() -> None:
    check(config(server=attach(["http://a:1"], ["http://b:1/"])))


def test_a_class_of_the_users_own_is_a_name_too() -> None:
    check(config(teacher_manager={"scheduler": "mine.sched:Mine"}, observe={"sinks": ["mine.sinks:Print"]}))


def test_a_store_of_the_users_own_may_hold_segments() -> None:
    check(config(store={"name": "mine.store:Mine"}, objective={"reduction": "segment_mean"}))


def test_a_weight_counts_where_one_entry_leaves_it_to_the_teacher() -> None:
    teachers = {"math": {"model": "m", "weight": 2.0}, "code": {"model": "c"}}
    check(config(teachers=teachers, data=[{"path": "x", "teachers": {"code": 1}}, {"path": "y", "teachers": ["math"]}]))


def test_a_held_out_domain_may_name_its_teachers() -> None:
    check(config(evaluation={"data": [{"path": "x", "domain": "unseen", "teachers": ["math"]}]}))


def test_domains_and_teachers_that_rows_name_are_not_guessed_at() -> None:
    weights = {"reduction": "domain_balanced", "domain_weights": {"chem": 1}}
    check(config(data=[{"path": "x"}], objective={**weights, "mixture": "arithmetic"}))


def test_all_findings_are_told_at_once_with_their_places() -> None:
    broken = config(rollout={"samples_per_prompt": 3}, store={"capacity": 1}, observe={"wandb_project": "x"})
    with pytest.raises(ConfigError) as caught:
        check(broken, where=lambda key: f"[{key[0]}]")
    text = str(caught.value)
    assert text.startswith("3 things") and "[trainer]: " in text and "[store]: " in text and "[observe]: " in text
