"""What nobody would write on purpose: values of the wrong kind, sizes beyond all measure, files without an end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from distill.config.compose import load_config
from distill.config.document import MOST_VALUES
from distill.errors import ConfigError
from tests.builders_config import settings, write_yaml

RUN = "student: {model: b}\nteachers: {t: {model: m}}\ndata: [{path: d.jsonl, domain: t}]\n"
DEEP = 3000


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def write(folder: Path, text: str, name: str = "teachers.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


NO_EFFECT = [
    ("teachers={}", "an empty mapping changes nothing", "~teachers.KEY"),
    ("teachers={math: {}}", "an empty mapping changes nothing", "~teachers.math.KEY"),
    ("trainer={}", "an empty mapping changes nothing", "~trainer.KEY"),
    ("~student", "student cannot be removed", "student=NAME"),
    ("~objective.name", "objective cannot be removed", "objective=NAME"),
    ("objective=", "takes the name of an implementation", "objective.KEY=VALUE"),
    ("~trainer.steps=4", "takes no value", "write ~trainer.steps"),
    ("~observe", "~observe: the file does not set it", ""),
]


@pytest.mark.parametrize(("override", "what", "hint"), NO_EFFECT, ids=[row[0] for row in NO_EFFECT])
def test_an_override_that_would_change_nothing_is_refused(tmp_path: Path, override: str, what: str, hint: str) -> None:
    said = refusal(write_yaml(tmp_path, settings()), override)
    assert what in said and hint in said and said.startswith("the command line: ")


@pytest.mark.parametrize("override", ["student.lora={}", "objective.outcome={}"])
def test_an_empty_mapping_asks_for_all_defaults_of_what_the_file_does_not_have(tmp_path: Path, override: str) -> None:
    values = settings() | {"rollout": {"samples_per_prompt": 2}}
    section, key = override.removesuffix("={}").split(".")
    for written in ({}, {key: None}):
        config = load_config(
            write_yaml(tmp_path, values | {section: values.get(section, {}) | written}), [override]
        ).config
        made = getattr(getattr(config, section), key)
        assert made is not None and made == type(made)()
    held = {"r": 4} if key == "lora" else {"weight": 2.0}
    said = refusal(write_yaml(tmp_path, values | {section: values.get(section, {}) | {key: held}}), override)
    assert "an empty mapping changes nothing" in said


WRONG_KINDS = [
    ("trainer.steps=true", "trainer.steps must be a whole number, and is true"),
    ("trainer.steps=3.0", "trainer.steps must be a whole number, and is 3.0"),
    ("student.lr=true", "student.lr must be a number, and is true"),
    ("student.gradient_checkpointing=1", "student.gradient_checkpointing must be true or false, and is 1"),
    ("student.betas=[1]", "student.betas must be a list of 2 numbers, and is [1]"),
    ("student.betas=[0.9,0.9,0.9]", "student.betas must be no longer than 2"),
    ("student.betas=[0.9,1.5]", "student.betas.1 must be in [0, 1), and is 1.5"),
    ("student.model=", "student.model must be a path, and is ''"),
    ("resume=", "resume must be not empty"),
    ("teachers=[]", "teachers must be a mapping of names to settings, and is []"),
    ("teachers=", "teachers must be a mapping of names to settings, and is empty"),
    ("trainer=5", "trainer must be a mapping of settings, and is 5"),
    ("run.dir=/", "run.dir is /, the root of the file system"),
    ("run.name=..", "run.name must be a name of letters"),
    ("résumé=1", "unknown key résumé"),
    ("trainer.stéps=1", "unknown key trainer.stéps"),
    ("+teachers.é.model=x", "a key here can hold ASCII characters only"),
    ("student..lr=1", "has an empty key"),
    ("=5", "has an empty key"),
    ("+++student.lr=1", "begins with '+++'"),
    ("objective=:x", "does not say where a objective is"),
    ("rollout.top_k=0", "rollout.top_k is 0, which leaves no token to draw"),
    (f"trainer.steps={'[' * DEEP}{']' * DEEP}", "the value of trainer.steps is too large or too deep"),
    (f"trainer.steps={'9' * 5000}", "the value of trainer.steps is too large or too deep"),
]


@pytest.mark.parametrize(("override", "says"), WRONG_KINDS, ids=[row[0][:30] for row in WRONG_KINDS])
def test_a_value_of_the_wrong_kind_is_named_with_the_right_one(tmp_path: Path, override: str, says: str) -> None:
    said = refusal(write_yaml(tmp_path, settings()), override)
    assert said.startswith(f"the command line: {says}") or (says in said and "the command line" in said)


@pytest.mark.parametrize("value", ['"5"', "true", "3.5", "[5]", "null"])
def test_in_the_file_too_only_a_number_is_a_number(tmp_path: Path, value: str) -> None:
    said = refusal(write(tmp_path, f"{RUN}trainer: {{steps: {value}}}\n"))
    assert f"{tmp_path}/teachers.yaml:4: trainer.steps must be a whole number, and is" in said
    assert ("without quotes" in said) == (value == '"5"')


def test_a_number_is_no_text_and_a_whole_number_is_a_number(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, RUN.replace("domain: t", "domain: 5")))
    assert "teachers.yaml:3: data.0.domain must be a text, and is 5" in said
    assert load_config(write(tmp_path, f"{RUN}rollout: {{temperature: 2}}\n")).config.rollout.temperature == 2.0


@pytest.mark.parametrize(
    "override",
    [
        "mesh.bucket_mb=1e12",
        "rollout.max_new_tokens=1000000000000",
        "rollout.timeout_s=1e12",
        "trainer.steps=100000000",
        "trainer.batch_size=3000000000",
        "rollout.servers=1000000",
        "teacher_manager.slot_gb=1e30",
        "student.lr=1e12",
        "student.threads=100000",
        "server.max_restarts=1e10",
    ],
)
def test_sizes_beyond_all_measure_are_refused(tmp_path: Path, override: str) -> None:
    name = override.partition("=")[0]
    assert f"the command line: {name} must be" in refusal(write_yaml(tmp_path, settings()), override)


@pytest.mark.parametrize("path", ['"a\\0b"', "a" * 300, "a/" * 2100])
def test_a_path_that_the_system_could_not_open_is_refused_with_its_key(tmp_path: Path, path: str) -> None:
    said = refusal(write(tmp_path, RUN.replace("model: b", f"model: {path}")))
    assert "teachers.yaml:1: student.model must be a path" in said


def bomb(levels: int = 8) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


ENDLESS = {
    "an alias bomb": (bomb() + RUN, f"holds more than {MOST_VALUES} values"),
    "an alias of itself": ("a: &a [*a]\n" + RUN, "nested too deeply"),
    "a merge of itself": ("a: &a {<<: *a}\n" + RUN, "nested too deeply"),
    "deep lists": (f"{RUN}x: {'[' * DEEP}{']' * DEEP}\n", "nested too deeply"),
    "deep mappings": (f"{RUN}x: {'{a: ' * DEEP}1{'}' * DEEP}\n", "nested too deeply"),
    "a file that includes itself": ("defaults: [distill, teachers, _self_]\n" + RUN, "leads back to"),
    "a value made of itself": (RUN + "run: {name: '${run.name}'}\n", "run.name: Recursive interpolation"),
    "a number of thousands of digits": (
        f"{RUN}trainer: {{steps: {'9' * 5000}}}\n",
        "a number or a date that cannot be",
    ),
    "a 13th month": (f"{RUN}x: 2026-13-01\n", "unknown key x"),
}


@pytest.mark.parametrize(("text", "says"), ENDLESS.values(), ids=ENDLESS)
def test_a_file_without_an_end_is_refused_at_once(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    began = time.process_time()
    said = refusal(path)
    assert says in said and str(path) in said
    assert time.process_time() - began < 5, "written out, the bomb would take hours"


def test_an_included_file_is_read_as_carefully(tmp_path: Path) -> None:
    write(tmp_path, bomb(), "part.yaml")
    main = write(tmp_path, "defaults: [distill, part, _self_]\n" + RUN)
    assert f"{tmp_path}/part.yaml holds more than" in refusal(main)
    write(tmp_path, "defaults: [teachers]\n", "part.yaml")
    assert f"{tmp_path}/part.yaml:1: its defaults list leads back to {main}" in refusal(main)
    write(tmp_path, "trainer:\n  steps: 3\n  steps: 4\n", "part.yaml")
    assert f"{tmp_path}/part.yaml:3: the key trainer.steps is given twice" in refusal(main)
    write(tmp_path, "trainer: {steps: 3}\n", "part.yaml")
    assert load_config(main).config.trainer.steps == 3


def test_a_group_of_the_users_own_is_read_as_carefully(tmp_path: Path) -> None:
    (tmp_path / "objective").mkdir()
    write(tmp_path / "objective", "name: jsd\nbeta: 0.1\nbeta: 0.2\n", "mine.yaml")
    said = refusal(write(tmp_path, RUN), "objective=mine")
    assert f"{tmp_path}/objective/mine.yaml:3: the key beta is given twice" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RUN + "server: embedded\n", "teachers.yaml:4: server must be a mapping of settings, and is 'embedded'"),
        (RUN + "server: [embedded]\n", "teachers.yaml:4: server must be a mapping of settings"),
        (RUN + "objective: {name: ''}\n", "teachers.yaml:4: objective.name must be the name of an implementation"),
        (RUN + "objective:\n", "teachers.yaml:4: objective must be a mapping of settings, and is null"),
        ("defaults: [5]\n" + RUN, "teachers.yaml:1: 5 cannot stand in a defaults list"),
        (RUN + "run: {dir: here}\nresume: there\n", "one of the two would be ignored"),
    ],
)
def test_a_section_of_the_wrong_kind_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(write(tmp_path, text))


def test_a_file_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "teachers.yaml")
    assert "a pipe, a socket or a device" in refusal(tmp_path / "teachers.yaml")


def test_a_list_or_a_mapping_on_the_command_line_takes_the_place_of_either(tmp_path: Path) -> None:
    def teachers_of(override: str) -> Any:
        data = [{"path": "x", "domain": "math", "teachers": {"math": 0.5, "code": 0.5}}]
        return load_config(write_yaml(tmp_path, settings() | {"data": data}), [override]).config.data[0].teachers

    assert teachers_of("data.0.teachers=[code,math]") == ["code", "math"]
    assert teachers_of("data.0.teachers={math: 1, code: 2}") == {"math": 1.0, "code": 2.0}
    with pytest.raises(ConfigError, match=r"teachers\.code is named by no entry"):
        teachers_of("data.0.teachers={math: 1}")
