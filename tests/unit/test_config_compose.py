"""Composition: the file, the groups and the command line, and what is said of mistakes in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from distill.cli.run import quick_start
from distill.config import document
from distill.config.compose import LoadedConfig, load_config
from distill.config.explain import located
from distill.config.json_schema import json_schema
from distill.config.models import RunConfig
from distill.config.options import resolved
from distill.config.overrides import read_overrides
from distill.config.resume import settings_of
from distill.config.schema import UnknownKey, annotation_at, describe, dotted, split
from distill.errors import ConfigError
from distill.objectives.build import build_objective
from distill.registry import KINDS
from tests.builders_config import settings, write_yaml


def load(folder: Path, *overrides: str, **changes: Any) -> LoadedConfig:
    return load_config(write_yaml(folder, settings() | changes), overrides)


def refusal(folder: Path, *overrides: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides, **changes)
    text = str(caught.value)
    assert "append to your config" not in text, "Hydra's own advice must not reach the user"
    return text


def test_a_file_without_a_defaults_list_is_the_same_run_as_with_it(tmp_path: Path) -> None:
    plain = load(tmp_path)
    assert load(tmp_path, defaults=["distill", "_self_"]).config == plain.config
    assert plain.config.objective.name == "reverse_kl"


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective=jsd", "objective.beta=0.3", "student.lr=2e-4"],
        ["objective.support=union", "objective.k=4", "objective.outcome={mix: loss}", "student.lora.r=4"],
        ["objective=policy_gradient", "objective.importance=tis", "objective.reduction=seq_mean"],
        ["objective=policy_gradient", "objective.importance={name: sao, variant: through}"],
        *([f"objective={name}"] for name in KINDS["objective"]),
    ],
    ids=" ".join,
)
def test_the_resolved_configuration_composes_to_itself(tmp_path: Path, overrides: list[str]) -> None:
    first = load(tmp_path, *overrides, rollout={"samples_per_prompt": 2}).config
    again = load_config(write_yaml(tmp_path / "elsewhere", resolved(first)), []).config
    assert resolved(again) == resolved(first) and settings_of(again) == settings_of(first)
    assert again.model_copy(update={"objective": first.objective}) == first
    assert build_objective(again.objective) == build_objective(first.objective)


def test_the_resolved_configuration_holds_what_the_objectives_class_has_by_itself(tmp_path: Path) -> None:
    importance = {"name": "tis", "cap": 2.0}
    objective = resolved(load(tmp_path, "objective=policy_gradient", "objective.importance=tis").config)["objective"]
    assert (objective["name"], objective["mixture"]) == ("policy_gradient", "weighted")
    assert (objective["advantage_clip"], objective["importance"]) == (5.0, importance)
    assert resolved(load(tmp_path).config)["objective"]["support"] == "full"


def test_a_group_on_the_command_line_replaces_the_objective_of_the_file(tmp_path: Path) -> None:
    block = {"name": "reverse_kl", "support": "teacher_topk", "k": 8}
    chosen = load(tmp_path, "objective=jsd", "objective.beta=0.3", objective=block).config.objective
    assert (chosen.name, chosen.options) == ("jsd", {"beta": 0.3})
    assert load(tmp_path, "objective.beta=0.3", "objective=jsd", objective=block).config.objective.options == {
        "beta": 0.3
    }
    assert load(tmp_path, "objective.name=jsd", objective=block).config.objective.options == {}
    assert load(tmp_path, objective=block).config.objective.options == {"support": "teacher_topk", "k": 8}


def test_another_objective_keeps_what_all_objectives_share(tmp_path: Path) -> None:
    block = {"name": "reverse_kl", "support": "teacher_topk", "k": 8, "reduction": "seq_mean"}
    chosen = load(tmp_path, "objective=jsd", objective=block).config.objective
    assert (chosen.name, chosen.reduction, chosen.options) == ("jsd", "seq_mean", {})


def test_a_group_of_a_shared_section_keeps_the_other_settings_of_the_file(tmp_path: Path) -> None:
    server = load(tmp_path, "server=sglang", server={"program": "embedded", "threads": 2}).config.server
    assert (server.program, server.threads) == ("sglang", 2)
    student = load(tmp_path, "student=hf").config.student
    assert student.model == tmp_path / "base"


@pytest.mark.parametrize("entry", [{"objective": "jsd"}, {"override objective": "jsd"}])
def test_a_group_is_chosen_in_the_defaults_list(tmp_path: Path, entry: dict[str, str]) -> None:
    assert load(tmp_path, defaults=["distill", entry, "_self_"]).config.objective.name == "jsd"
    chosen = load(tmp_path, defaults=["distill", entry, "_self_"], objective={"beta": 0.2}).config.objective
    assert (chosen.name, chosen.options) == ("jsd", {"beta": 0.2})


def test_an_objective_that_is_chosen_twice_in_the_file_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, defaults=["distill", {"objective": "jsd"}, "_self_"], objective={"name": "forward_kl"})
    assert "'forward_kl' here, 'jsd' in the defaults list" in said


def test_a_group_beside_the_users_file_is_found(tmp_path: Path) -> None:
    write_yaml(tmp_path / "objective", {"name": "jsd", "beta": 0.9}, "mine.yaml")
    assert load(tmp_path, "objective=mine").config.objective.options == {"beta": 0.9}


def test_a_class_of_the_users_own_needs_no_group(tmp_path: Path) -> None:
    for overrides, changes in ((["objective=my.loss:Loss"], {}), ([], {"objective": {"name": "my.loss:Loss"}})):
        chosen = load(tmp_path, *overrides, "objective.x=1", **changes).config.objective
        assert (chosen.name, chosen.options) == ("my.loss:Loss", {"x": 1})


def test_paths_are_relative_to_whoever_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    teachers = {"math": {"model": "~/math"}, "code": {"model": "/abs/code"}}
    loaded = load(
        tmp_path / "run", "student.model=../base", "data.0.path=x.jsonl", "resume=last", teachers=teachers
    ).config
    assert loaded.student.model == tmp_path / "base"
    assert [source.path for source in loaded.data] == [here / "x.jsonl", tmp_path / "run" / "code.jsonl"]
    assert (loaded.teachers["math"].model, loaded.teachers["code"].model) == (home / "math", Path("/abs/code"))
    assert loaded.resume == str(here / "last")


@pytest.mark.parametrize(
    "name", ["a b", "a,b", "a=b", "(1)", "it's", "~x", "123", "back\\slash", "a\\", "\\'", "{x}", "é"]
)
def test_a_path_on_the_command_line_needs_no_quotes(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, f"student.model=/models/{name}").config.student.model == Path("/models") / name


def test_interpolations_reach_other_keys_the_environment_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BASE", "/models/base")
    config = load(
        tmp_path,
        student={"model": "${oc.env:BASE}"},
        teachers={"math": {"model": "${distill_cache:quick}/math"}, "code": {"model": "${student.model}"}},
    ).config
    assert config.student.model == config.teachers["code"].model == Path("/models/base")
    assert config.teachers["math"].model == tmp_path / "cache" / "quick" / "math"


def test_a_failing_interpolation_names_its_key(tmp_path: Path) -> None:
    said = refusal(tmp_path, student={"model": "${oc.env:DISTILL_NO_SUCH_VARIABLE}"})
    assert "student.model" in said and "DISTILL_NO_SUCH_VARIABLE" in said
    assert "student.model" in refusal(tmp_path, student={"model": "${nowhere.to.find}"})
    assert "student.model" in refusal(tmp_path, student={"model": "???"})


def test_a_teacher_is_added_and_removed_on_the_command_line(tmp_path: Path) -> None:
    config = load(
        tmp_path, "+teachers.chem.model=/m/chem", "+teachers.chem.weight=2", "data.0.teachers=[chem,math]"
    ).config
    assert config.teachers["chem"].model == Path("/m/chem") and config.teachers["chem"].weight == 2
    assert list(load(tmp_path, "~teachers.code", "data.1.teachers=[math]").config.teachers) == ["math"]


WRONG_OVERRIDES = [
    ("student.lrr=1", "unknown key student.lrr", "student.lr"),
    ("+student.lrr=1", "unknown key student.lrr", "student.lr"),
    ("++student.lrr=1", "unknown key student.lrr", "student.lr"),
    ("studnet.lr=1", "unknown key studnet.lr", "did you mean student?"),
    ("~student.lrr", "unknown key student.lrr", "student.lr"),
    ("teachers.maht.weight=3", "there is no teacher 'maht'", "did you mean teachers.math?"),
    ("teachers.zzzzzzzz.weight=3", "there is no teacher 'zzzzzzzz'", "+teachers.zzzzzzzz.weight=3 adds one"),
    ("teachers.math.wieght=3", "unknown key teachers.math.wieght", "teachers.math.weight"),
    ("student.lr.x=1", "unknown key student.lr.x", "single value"),
    ("data.9.path=x", "data.9.path", "the file has 2"),
    ("objective=jds", "there is no objective 'jds'", "'jsd'"),
    ("server=sglan", "there is no server 'sglan'", "'sglang'"),
    ("student.lr", "not key=value", "student.lr=VALUE"),
    ("~data.0", "one entry of a list cannot be removed", "data=[...]"),
    ("student.lr=1,2", "several values", "student.lr=[1,2]"),
    ("trainer.steps={", "cannot read", "quotes"),
    ("hydra.run.dir=x", "not a setting of a run", "known:"),
    ("student@x=hf", "not a setting of a run", "known:"),
    ("student=null", "takes the name of an implementation", "student.KEY=VALUE"),
    ("objective={name: jsd}", "takes the name of an implementation", "objective.KEY=VALUE"),
    ("trainer.steps=many", "trainer.steps must be a whole number, and is 'many'", ""),
    ("trainer.steps=1.5", "trainer.steps must be a whole number, and is 1.5", ""),
    ("student.lr=-1", "student.lr must be more than 0, and is -1", ""),
    ("student.lr=nan", "student.lr must be", ""),
    ("student.lr=inf", "student.lr must be a finite number", ""),
    ("student.dtype=fp16", "student.dtype must be one of 'float32' or 'bfloat16'", ""),
    ("student.device=gpu", "student.device must be auto, cpu, cuda or cuda:N", ""),
    ("data.0.teachers=3", "data.0.teachers must be a list of names or a mapping of names to numbers, and is 3", ""),
    ("data.0.teachers={math: x}", "data.0.teachers", "x"),
    ("rollout.top_p=2", "rollout.top_p must be at most 1, and is 2", ""),
    ("~data", "data is missing", ""),
]


@pytest.mark.parametrize(("override", "what", "hint"), WRONG_OVERRIDES, ids=[row[0] for row in WRONG_OVERRIDES])
def test_a_wrong_override_is_named_with_the_nearest_right_one(
    tmp_path: Path, override: str, what: str, hint: str
) -> None:
    said = refusal(tmp_path, override)
    assert what in said and hint in said
    if not override.startswith("~"):
        assert "the command line" in said


def test_an_unknown_key_of_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    said = refusal(tmp_path, student={"model": "./base", "lerning_rate": 1})
    assert f"{tmp_path}/teachers.yaml:3: unknown key student.lerning_rate" in said
    said = refusal(tmp_path, teachers={"math": {"model": "m", "wieght": 2}})
    assert "teachers.yaml:6: unknown key teachers.math.wieght" in said and "did you mean teachers.math.weight?" in said


def test_every_mistake_of_the_file_is_listed_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, studnet={"model": "x"}, trainer={"steps": "x", "batch_size": 0})
    assert "3 things" in said and "did you mean student?" in said
    assert "trainer.steps must be a whole number" in said and "trainer.batch_size must be more than 0" in said


def test_mistakes_are_listed_in_the_order_of_the_files_lines(tmp_path: Path) -> None:
    text = (
        "observe: {wandb_project: x}\nstudent: {model: b, lr_schedule: constant, lr_final_ratio: 0.5}\n"
        "trainer: {batch_size: 3}\nrollout: {samples_per_prompt: 2}\n"
        "teachers: {t: {model: m}}\ndata: [{path: d.jsonl}]\n"
    )
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["store.capacity=1"])
    places = [line.split(": ")[0] for line in caught.value.what.splitlines() if line.startswith("- ")]
    assert places == [f"- {path}:1", f"- {path}:2", f"- {path}:3", "- the command line"]


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["objective.importance.cap=3"], "set objective.importance.name=tis; or to "),
        (["objective.importance.variant=through"], "set objective.importance.name=sao"),
        (["objective.importance={}"], "set objective.importance.name=none; or to "),
    ],
)
def test_settings_of_a_correction_that_is_not_named_are_told_whose_they_are(
    tmp_path: Path, overrides: list[str], hint: str
) -> None:
    said = refusal(tmp_path, "objective=policy_gradient", *overrides)
    assert "objective.importance" in said and hint in said


def test_wrong_keys_of_the_objective_are_listed_with_the_others_and_their_lines(tmp_path: Path) -> None:
    objective = {"name": "policy_gradient", "importance": {"name": "tis", "cpa": 3, "cap": "2"}, "discont": 0.5}
    said = refusal(tmp_path, "objective.iw_gain=true", trainer={"step": 3}, objective=objective)
    for each in (
        "teachers.yaml:16: unknown key trainer.step\n    did you mean trainer.steps?",
        "teachers.yaml:21: unknown key objective.importance.cpa\n    did you mean objective.importance.cap?",
        "teachers.yaml:22: objective.importance.cap must be a number, and is '2'",
        "teachers.yaml:23: unknown key objective.discont\n    did you mean objective.discount?",
        "- the command line: objective.iw_gain must be a number, and is true",
    ):
        assert each in said
    assert "5 things" in said


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("objective.beta: must be less", "{0}/teachers.yaml:17: "),
        ("objective.k is missing", "{0}/teachers.yaml:15: "),
        ("objective: teaches nothing", "{0}/teachers.yaml:15: "),
        ("trainer.steps is 3", "the command line: "),
        ("evaluation.grader is odd", ""),
        ("rows.jsonl:3: no answer", ""),
        ("'objective.beta' is odd", ""),
    ],
)
def test_an_error_about_a_key_gets_its_place(tmp_path: Path, what: str, place: str) -> None:
    values = settings() | {"objective": {"name": "jsd", "beta": 0.5}}
    del values["trainer"]
    loaded = load_config(write_yaml(tmp_path, values), ["trainer.steps=3"])
    with pytest.raises(ConfigError) as caught, located(loaded.written):
        raise ConfigError(what, why="so")
    assert str(caught.value) == f"{place.format(tmp_path)}{what}\n  why: so"


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    values = settings()
    del values["student"]["model"]
    with pytest.raises(ConfigError, match=r"student\.model is missing"):
        load_config(write_yaml(tmp_path, values), [])


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "teachers.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("student: {model: a\nteachers: b\n", r"teachers.yaml:2: not valid YAML"),
        (
            "student:\n  model: a\n  model: b\n",
            r"teachers.yaml:3: the key student.model is given twice, first on line 2",
        ),
        ("a: 1\na: 2\n", r"teachers.yaml:2: the key a is given twice"),
        ("", r"holds no settings"),
        ("- a\n", r"holds no settings"),
        ("student: {model: a}\n\tx: 1\n", r"teachers.yaml:2: not valid YAML"),
        ("student: {model: a}\nhydra: {run: {dir: x}}\n", r"teachers.yaml:2: of Hydra's own settings"),
        ("defaults: [distil, _self_]\nstudent: {model: a}\n", r"distil"),
    ],
)
def test_a_file_that_is_not_a_run_is_refused_with_the_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_config(write(tmp_path, text), [])


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    write_yaml(tmp_path, settings())
    with pytest.raises(ConfigError, match=r"did you mean .*/teachers\.yaml\?"):
        load_config(tmp_path / "teacher.yaml", [])
    with pytest.raises(ConfigError, match=r"the last one of it that does"):
        load_config(tmp_path / "no" / "such" / "x.yaml", [])
    with pytest.raises(ConfigError, match=r"without a teachers\.yaml"):
        (tmp_path / "empty").mkdir()
        load_config(tmp_path / "empty", [])


def test_a_folder_stands_for_the_file_in_it(tmp_path: Path) -> None:
    write_yaml(tmp_path, settings())
    assert load_config(tmp_path, []).source == tmp_path / "teachers.yaml"


def test_composing_twice_leaves_nothing_behind(tmp_path: Path) -> None:
    load(tmp_path / "a", "objective=jsd", observe={"sinks": ["jsonl"]})
    second = load(tmp_path / "b").config
    assert (
        second.objective.name == "reverse_kl"
        and second.observe == RunConfig.model_validate(second.model_dump()).observe
    )
    assert second.observe.sinks == ["jsonl", "tensorboard"]


@given(st.lists(st.one_of(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers(0, 99)), min_size=1, max_size=5))
def test_a_key_path_survives_being_written_with_dots(path: list[str | int]) -> None:
    assert split(dotted(path)) == tuple(path)


@given(st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable()))
def test_any_text_of_a_path_reaches_hydra_as_it_is(text: str) -> None:
    (setting,) = read_overrides([f"student.model=/{text}"], teachers=[], data=0, has_section=lambda key: False).settings
    assert OverridesParser.create().parse_override(setting).value() == f"/{text}"


def test_the_schema_knows_every_key_that_the_models_have() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == {*RunConfig.model_fields, "defaults", "hydra"}
    assert schema["$defs"]["StudentConfig"]["properties"]["lr"]["description"] == "peak learning rate"
    assert schema["additionalProperties"] is False


def verdicts(values: Any) -> list[str]:
    """What the schema has against a file."""
    validator = jsonschema.Draft202012Validator(json_schema())
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(values)]


QUICK_START = document.read(quick_start()).values


def test_the_schema_is_a_schema_and_accepts_the_quick_start() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert verdicts(QUICK_START) == []


RIGHT_OBJECTIVES: list[dict[str, Any]] = [
    {"name": "reverse_kl", "support": "union", "k": 4, "form": "corrected"},
    {"name": "skew_kl", "direction": "reverse", "alpha": 0},
    {"name": "policy_gradient", "importance": "tis", "advantage_clip": None, "reduction": "seq_mean"},
    {"name": "policy_gradient", "importance": {"name": "sao", "variant": "through"}, "outcome": {"mix": "advantage"}},
    {"name": "span_kl", "importance": "icepop", "form": "advantage"},
    {"name": "my.loss:Loss", "anything": [1]},
    {"beta": 0.5, "reduction": "seq_mean"},
]


@pytest.mark.parametrize("objective", RIGHT_OBJECTIVES, ids=str)
def test_the_schema_accepts_what_a_run_does(objective: dict[str, Any]) -> None:
    assert verdicts(settings() | {"objective": objective}) == []


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "jsd", "bta": 0.5},
        {"name": "jsd", "beta": "0.5"},
        {"name": "jsd", "scaled": 1},
        {"name": "jsd", "support": "half"},
        {"name": "jds"},
        {"name": "forward_kl", "beta": 0.5},
        {"name": "policy_gradient", "estimator": "k4"},
        {"name": "policy_gradient", "importance": "tsi"},
        {"name": "policy_gradient", "importance": {"cap": 2.0}},
        {"name": "policy_gradient", "importance": {"eps_low": 0.5}},
        {"name": "policy_gradient", "importance": {"name": "tis", "low": 2.0}},
        {"name": "sampled_kl", "importance": "sao"},
        {"name": "jsd", "mixture": "harmonic"},
        {"bta": 0.5},
    ],
    ids=str,
)
def test_the_schema_refuses_what_a_run_does(objective: dict[str, Any]) -> None:
    assert verdicts(QUICK_START | {"objective": objective})


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    parts = {"RunConfig": schema} | {name: part for name, part in schema["$defs"].items() if part.get("properties")}
    assert {"StudentConfig", "LoraConfig", "OutcomeConfig", "MeshConfig"} < set(parts)
    bare = [
        f"{name}.{key}"
        for name, part in parts.items()
        for key, value in part["properties"].items()
        if not value.get("description") and "const" not in value  # the name that tells a correction's kind
    ]
    assert not bare, "give the field a description, or a text below it in an objective's class"


def test_the_schema_describes_every_setting_of_every_objective() -> None:
    sections = {section["title"]: section for section in json_schema()["$defs"]["ObjectiveConfig"]["oneOf"]}
    assert set(KINDS["objective"]) < set(sections)
    for name in KINDS["objective"]:
        own = {key: value for key, value in sections[name]["properties"].items() if key != "name"}
        bare = [key for key, value in own.items() if not value.get("description")]
        assert not bare, f"{name}: a text below the field says what it is"
        assert all("default" in value for value in own.values())
    sao = json_schema()["$defs"]["SAO"]["properties"]
    assert sao["variant"]["enum"] == ["detached", "through", "surrogate"] and sao["eps_high"]["default"] == 5.0


def test_annotations_are_found_by_key_path() -> None:
    assert describe(annotation_at(("data", 0, "path"))) == "a path"
    assert describe(annotation_at(("data", 0, "teachers", "math"))) == "a number"
    with pytest.raises(UnknownKey) as caught:
        annotation_at(("data", "path"))
    assert caught.value.path == ("data", "path")


@pytest.mark.parametrize("name", ["1", "no", "null"])
def test_a_teacher_whose_name_is_no_text_for_yaml_is_refused_with_quotes_as_the_way_out(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(f"student: {{model: b}}\nteachers:\n  {name}: {{model: m}}\ndata: [{{path: d.jsonl}}]\n")
    with pytest.raises(ConfigError, match=rf"t.yaml:3: the key teachers.{name} is not a text") as caught:
        load_config(path)
    assert f'"{name}"' in caught.value.fix


def test_a_file_that_would_replace_the_defaults_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "teachers.yaml"
    path.write_text("student: {model: b}\nteachers: {t: {model: m}}\ndata: [{path: d.jsonl}]\n")
    (tmp_path / "distill.yaml").write_text("trainer: {steps: 7}\n")
    with pytest.raises(ConfigError, match="would stand in for the defaults"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "targets"),
    [
        ("student.lora.targets=[q_proj,v_proj]", ["q_proj", "v_proj"]),
        ("student.lora.targets=.*[qv]_proj", ".*[qv]_proj"),
    ],
)
def test_layers_are_a_list_or_an_expression_as_in_the_file(tmp_path: Path, override: str, targets: Any) -> None:
    lora = load(tmp_path, override).config.student.lora
    assert lora is not None and lora.targets == targets


@pytest.mark.parametrize("targets", ["(", "", "[]", "[q_proj,'']"])
def test_layers_that_can_be_none_are_refused(tmp_path: Path, targets: str) -> None:
    assert "student.lora.targets" in refusal(tmp_path, f"student.lora.targets={targets}")
