"""Weight bytes against a slot's budget and against this machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distill.config.compose import load_config
from distill.config.models import RunConfig
from distill.errors import ConfigError, EnvironmentFault
from distill.preflight import inspect, memory
from distill.preflight.inspection import TeacherFolder, inspect_models
from distill.preflight.memory import Need, available_bytes, check_host, holdings, needs, slot_budget
from tests.builders_config import settings, write_model, write_run

PARAMETERS = 2 * 14 * 8 + 8
"""Of a model of `write_model`."""
GB = 10**9


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(settings() | changes)


def teachers(folder: Path) -> dict[str, TeacherFolder]:
    """`big` has 34 ids more than `small`."""
    write_run(folder)
    found: dict[str, TeacherFolder] = {}
    for name, letters in (("small", "abcdefghij="), ("big", "".join(map(chr, range(97, 142))))):
        model = inspect_models(
            load_config(
                folder / "teachers.yaml", [f"teachers.math.model={write_model(folder / name, letters=letters)}"]
            ).config
        ).teachers["math"]
        found[name] = model
    return found


def test_a_teacher_needs_all_its_weights_or_where_they_do_not_fit_what_streaming_takes(tmp_path: Path) -> None:
    found = teachers(tmp_path)
    small, big = (found[name].slot_bytes for name in ("small", "big"))
    assert (small, big) == (PARAMETERS * 4 + 32, (2 * 48 * 8 + 8) * 4 + 32), "32 bytes of a tensor take 64"
    assert needs(found, big) == {"small": Need(small, False), "big": Need(big, False)}
    assert needs(found, small, {"big": 500}) == {"small": Need(small, False), "big": Need(500, True)}
    assert slot_budget(config(), found) == big
    tight = config(teacher_manager={"slot_gb": small / 1e9})
    assert slot_budget(tight, found, {"big": small}) == small
    with pytest.raises(ConfigError, match=rf"\({small} bytes\), and teachers\.big needs {big} bytes \(776 parameters"):
        slot_budget(tight, found)
    with pytest.raises(
        ConfigError, match=rf"teachers\.big needs {small + 1} bytes \(layer by layer, of {big} in all; 776 parameters"
    ):
        slot_budget(tight, found, {"big": small + 1})


def test_every_weight_that_the_run_keeps_in_memory_is_counted(tmp_path: Path) -> None:
    write_run(tmp_path)
    found = load_config(
        tmp_path / "teachers.yaml",
        ["rollout.servers=2", "server.dtype=bfloat16", "server.device=cpu", "student.device=cpu"],
    ).config
    held = holdings(found, inspect_models(found).student, 1000, 2)
    assert [(each.what, each.bytes) for each in held] == [
        ("the student with gradients and moments", PARAMETERS * 16),
        ("2 rollout servers", 2 * PARAMETERS * 2),
        ("1 slot", 1000),
    ]
    assert check_host(found, held, available=PARAMETERS * 20 + 1000) == PARAMETERS * 20 + 1000
    with pytest.raises(EnvironmentFault) as caught:
        check_host(found, held, available=PARAMETERS * 20 + 999)
    assert "not enough memory: the weights of this run take 5.64e-06 GB of this machine's, and" in caught.value.what
    assert "2 rollout servers 9.28e-07 GB, 1 slot 1e-06 GB" in caught.value.why
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("student", "each"),
    [
        ({"optimizer": "adamw_8bit"}, 10),
        ({"lora": {}}, 4),
        ({"lora": {}, "dtype": "bfloat16"}, 2),
        ({"ranks": 2}, 16),
        ({"ranks": 2, "parallel": "ddp"}, 32),
    ],
)
def test_what_a_student_takes_follows_from_how_it_is_trained(
    tmp_path: Path, student: dict[str, Any], each: int
) -> None:
    model = inspect_models(load_config(write_run(tmp_path)).config).student
    (held,) = holdings(config(student={"model": "m"} | student, server={"program": "attach"}), model, 0, 4)
    assert held.bytes == PARAMETERS * each


def test_what_is_on_a_gpu_and_what_is_on_other_machines_takes_none_of_this_ones(tmp_path: Path) -> None:
    write_run(tmp_path)
    found = load_config(tmp_path / "teachers.yaml", ["server.device=cuda:0", "student.device=cpu"]).config
    held = holdings(found, inspect_models(found).student, 10**15, 4)
    assert check_host(found, held, available=GB) == PARAMETERS * 16
    elsewhere = load_config(tmp_path / "teachers.yaml", ["ray_address=auto"]).config
    assert check_host(elsewhere, held, available=1) == 0


def test_a_containers_limit_counts_less_what_is_used_but_for_cached_files(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none") > 0
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 300\ninactive_file 200\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_bytes(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 10**6


def test_a_run_that_the_memory_cannot_hold_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_config(write_run(tmp_path), ["server.device=cpu", "student.device=cpu"]).config
    inspect(found)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(EnvironmentFault, match="not enough memory"):
        inspect(found)
