"""Parts of the user's own, programs and devices: what does not fit is refused before anything is started."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from distill.config.models import RunConfig
from distill.errors import ConfigError, DistillError, EnvironmentFault, MissingDependency
from distill.preflight import programs
from distill.preflight.parts import INTERFACES, check_part, check_parts
from distill.preflight.programs import check_programs
from distill.registry import KINDS
from tests.builders_config import settings

HERE = "tests.unit.test_preflight_parts"


class Nothing:
    """No part of anything."""


class OwnSink:
    def __init__(self, folder: Any, config: Any, run_name: str, resumed_from: int) -> None: ...
    def write(self, step: int, values: Any) -> None: ...
    def close(self) -> None: ...


class SinkWithoutArguments(OwnSink):
    def __init__(self) -> None: ...


def own_grader(text: str, answer: str, finished: bool) -> float:
    return float(text == answer and finished)


NUMBER = 5


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(settings() | changes)


@pytest.mark.parametrize(
    ("kind", "target"), [(kind, name) for kind in INTERFACES for name in KINDS[kind]], ids=lambda part: str(part)
)
def test_every_registered_part_fits_the_interface_that_users_parts_must_have(kind: str, target: str) -> None:
    try:
        check_part(kind, kind, KINDS[kind][target])
    except MissingDependency as missing:
        pytest.skip(missing.what)


def test_parts_of_the_users_own_that_fit_are_accepted() -> None:
    check_parts(config(evaluation={"grader": f"{HERE}:own_grader"}, observe={"sinks": [f"{HERE}:OwnSink"]}))


WRONG = [
    ({"teacher_manager": {"scheduler": "json:dump"}}, "teacher_manager.scheduler: json:dump is no scheduler"),
    ({"teacher_manager": {"scheduler": f"{HERE}:Nothing"}}, "is no scheduler: it has no decide, retime"),
    ({"evaluation": {"grader": "json:loads"}}, "cannot be called with (text, answer, finished)"),
    ({"evaluation": {"grader": f"{HERE}:NUMBER"}}, "is neither a class nor a function, but int"),
    ({"observe": {"sinks": ["jsonl", "json:loads"]}}, "observe.sinks.1: json:loads is no sink"),
    ({"observe": {"sinks": [f"{HERE}:Nothing"]}}, "is no sink: it has no write, close"),
    ({"observe": {"sinks": [f"{HERE}:SinkWithoutArguments"]}}, "cannot be called with (folder, config"),
    ({"store": {"name": f"{HERE}:Nothing"}}, "is no store: it has no put"),
    ({"student": {"model": "b", "backend": "json:loads"}}, "student.backend: json:loads is no class, but function"),
    ({"student": {"model": "b", "backend": f"{HERE}:Nothing"}}, "is no student: it has no step"),
    ({"server": {"program": f"{HERE}:Nothing"}}, "is no server: it has no start"),
    ({"objective": {"name": "json:nothing"}}, "json has no 'nothing'"),
    ({"objective": {"name": "no_such_module_at_all:x"}}, "no module 'no_such_module_at_all'"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=[row[1][:40] for row in WRONG])
def test_a_part_that_is_not_what_its_place_needs_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parts(config(**changes))
    assert says in str(caught.value)


def test_a_module_that_fails_to_import_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_module_of_a_user.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError"):
        check_parts(config(objective={"name": "failing_module_of_a_user:Loss"}))


def test_a_sink_without_its_package_is_noticed_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="wandb needs the package"):
        check_parts(config(observe={"sinks": ["wandb"]}))


@pytest.mark.parametrize(
    ("server", "error", "says"),
    [
        ({"python": "/nope"}, ConfigError, "server.python: /nope is not a program"),
        ({"python": "/bin/true"}, EnvironmentFault, "/bin/true cannot tell: exit code 0"),
        ({"python": sys.executable}, None, ""),
    ],
)
def test_the_interpreter_of_the_servers_is_asked(
    server: dict[str, Any], error: type[DistillError] | None, says: str
) -> None:
    if error is None:
        assert check_programs(config(server=server)) == ""
        return
    with pytest.raises(error) as caught:
        check_programs(config(server=server))
    assert says in str(caught.value)


def test_an_interpreter_without_the_program_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho torch .\n")
    python.chmod(0o755)
    with pytest.raises(MissingDependency, match="has no torch"):
        check_programs(config(server={"python": python}))


def test_an_absent_sglang_is_noticed_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"has no sglang") as caught:
        check_programs(config(server={"program": "sglang"}))
    assert "distill-engine[sglang]" in caught.value.fix


@pytest.mark.parametrize(
    ("student", "package", "extra"),
    [({"lora": {}}, "peft", "lora"), ({"optimizer": "adamw_8bit"}, "bitsandbytes", "adam8bit")],
)
def test_an_absent_package_of_the_student_is_noticed_before_the_run(
    student: dict[str, Any], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find(name))
    wanted = config(student={"model": "b", **student})
    with pytest.raises(MissingDependency, match=f"needs the package '{package}', which is not installed") as caught:
        check_programs(wanted)
    assert f"pip install 'distill-engine[{extra}]'" in caught.value.fix and caught.value.exit_code == 3
    assert check_programs(config()) == "", "nothing is asked of a student that needs neither"


@pytest.mark.parametrize(
    ("there", "device", "fits"),
    [(0, "cuda", False), (1, "cuda", True), (1, "cuda:1", False), (8, "cuda:7", True), (0, "cpu", True)],
)
@pytest.mark.parametrize("section", ["student", "server"])
def test_a_device_that_is_not_there_is_a_fault_of_the_machine(
    section: str, there: int, device: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_ask", lambda key, interpreter, *program: str(there))
    wanted = config(**{section: {"device": device} | ({"model": "b"} if section == "student" else {})})
    if fits:
        assert check_programs(wanted) == ""
        return
    with pytest.raises(EnvironmentFault, match=f"{section}.device is {device}, and torch sees {there} CUDA device"):
        check_programs(wanted)


def test_on_a_cluster_the_machines_of_the_processes_are_not_known_yet() -> None:
    note = check_programs(config(ray_address="auto", student={"model": "b", "device": "cuda:99"}))
    assert "were not looked at" in note
