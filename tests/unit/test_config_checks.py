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


def routed(rule: dict[str, Any]) -> dict[str, Any]:
    return {"routing": {"rules": [rule]}}


def told(context: dict[str, Any]) -> dict[str, Any]:
    return {"teachers": {"math": {"model": "m", "context": context}, "code": {"model": "c"}}}


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
        {"teacher_manager": {"slots": 3}, "server": {"program": "sglang"}},
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
    ("a rule without anything", routed({}), "routing.rules.0 has neither `match` nor `call`"),
    (
        "a rule with both",
        routed({"match": {"tag": "x"}, "call": "a:b", "teachers": ["math"]}),
        "routing.rules.0 has both `match` and `call`",
    ),
    ("a rule without teachers", routed({"match": {"tag": "x"}}), "routing.rules.0 has no `teachers`"),
    (
        "teachers beside a call",
        routed({"call": "a.b:c", "teachers": ["math"]}),
        "routing.rules.0.teachers has no effect: what a.b:c returns decides",
    ),
    ("a call that names no function", routed({"call": "choose"}), "'choose' does not say where a function is"),
    ("a rule that fits every row", routed({"match": {}, "teachers": ["math"]}), "routing.rules.0.match is empty"),
    (
        "a column without an expression",
        routed({"match": {"column": "source"}, "teachers": ["math"]}),
        "routing.rules.0.match.column has no effect without regex",
    ),
    (
        "a broken expression",
        routed({"match": {"regex": "(?i"}, "teachers": ["math"]}),
        "routing.rules.0.match.regex: '(?i' is no regular expression: missing -, : or )",
    ),
    (
        "an unknown teacher of a rule",
        routed({"match": {"tag": "x"}, "teachers": {"math": 1, "coed": 1}}),
        "routing.rules.0.teachers names 'coed', which is not one of the teachers",
    ),
    (
        "a weight of zero in a rule",
        routed({"match": {"tag": "x"}, "teachers": {"math": 0}}),
        "routing.rules.0.teachers.math must be more than 0, and is 0",
    ),
    ("an unknown default", {"routing": {"default": "mth"}}, "routing.default is 'mth', which is not one of"),
    (
        "rules for no row",
        routed({"match": {"tag": "x"}, "teachers": ["math"]}) | {"data": [{"path": "x", "teachers": ["math", "code"]}]},
        "routing.rules has no effect: every entry of data gives its `teachers`",
    ),
    ("no mix", {"routing": {"mix": {}}}, "routing.mix is empty"),
    ("a mix of unknown teachers", {"routing": {"mix": {"math+chem": 1.0}}}, "routing.mix names 'chem', which is not"),
    (
        "a mix with two shares of one group",
        {"routing": {"mix": {"math+code": 1, "code+math": 2}}},
        "routing.mix has shares for 'math+code' and for 'code+math', the same teachers",
    ),
    (
        "a share that nobody would see",
        {"routing": {"mix": {"math": 1e-4, "code": 1}}},
        "routing.mix.math is 0.0001 of 1.0001, less than 0.001 of all prompts",
    ),
    (
        "epochs beside a mix",
        {"routing": {"mix": {"math": 1, "code": 1}}, "rollout": {"epochs": 3}},
        "rollout.epochs is 3, and with routing.mix there is no epoch",
    ),
    ("an empty context", told({}), "teachers.math.context is empty"),
    (
        "a template without the prompt",
        told({"template": "Answer: {answer}"}),
        "teachers.math.context.template has no {prompt}",
    ),
    (
        "a template with an open brace",
        told({"template": "{prompt} {answer"}),
        "teachers.math.context.template cannot be filled in: expected '}' before end of string",
    ),
    (
        "a template that looks into a column",
        told({"template": "{prompt} {answer.__class__}"}),
        "{answer.__class__} is not the plain name of a column",
    ),
    ("an unknown sink", {"observe": {"sinks": ["jsonl", "tensorbord"]}}, "did you mean 'tensorboard'"),
    ("an unknown scheduler", {"teacher_manager": {"scheduler": "indx"}}, "did you mean 'index'"),
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


def test_a_held_out_domain_may_be_routed_by_a_rule() -> None:
    rule = {"match": {"domain": "unseen"}, "teachers": {"math": 0.3, "code": 0.7}}
    check(config(evaluation={"data": [{"path": "x", "domain": "unseen"}]}, **routed(rule)))


def test_rules_a_mix_and_a_context_pass() -> None:
    rules = [
        {"match": {"tag": "proof"}, "teachers": ["math"]},
        {"match": {"column": "source", "regex": "(?i)python"}, "teachers": {"code": 0.8, "math": 0.2}},
        {"call": "mine.routes:choose"},
    ]
    mix = {"math": 3, "code+math": 1}
    context = {"system": "Be brief.", "template": "{prompt} {{for you: {answer}, {solution}}}"}
    check(config(routing={"rules": rules, "default": "math", "mix": mix}, **told(context)))


def test_domains_and_teachers_that_rows_name_are_not_guessed_at() -> None:
    weights = {"reduction": "domain_balanced", "domain_weights": {"chem": 1}}
    check(config(data=[{"path": "x"}], objective={**weights, "mixture": "arithmetic"}))


def test_all_findings_are_told_at_once_with_their_places() -> None:
    broken = config(rollout={"samples_per_prompt": 3}, store={"capacity": 1}, observe={"wandb_project": "x"})
    with pytest.raises(ConfigError) as caught:
        check(broken, where=lambda key: f"[{key[0]}]")
    text = str(caught.value)
    assert text.startswith("3 things") and "[trainer]: " in text and "[store]: " in text and "[observe]: " in text


@pytest.mark.parametrize(
    ("manager", "says"),
    [
        ({"cache_folder": "scores"}, "teacher_manager.cache_folder"),
        (
            {"cache_disk_gb": 1.0, "cache_mb": 0.0},
            "teacher_manager.cache_disk_gb is 1, but teacher_manager.cache_mb is 0",
        ),
    ],
)
def test_a_cache_that_could_hold_nothing_is_refused(manager: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(teacher_manager=manager))
    assert says in str(caught.value)
