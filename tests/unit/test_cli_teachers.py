"""`distill-run teachers`: schedules of a trace and the costs of a run, as a user asks for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from distill.cli.rates import GivenSpeeds
from distill.cli.run import main
from distill.cli.teachers_outlook import Given, look_ahead
from distill.config import TeacherConfig
from distill.config.compose import load_config
from distill.preflight import inspect
from distill.teacher_manager.timeline.checker import check
from distill.teacher_manager.timeline.reading import read_case
from distill.teacher_manager.timeline.schedule import read_schedule
from tests.builders_config import settings, weights, write_run, write_yaml
from tests.builders_plan import LAYERS, ROWS, TEACHER_BYTES, TEACHER_PARAMS, write_layered_run

TRACES = Path(__file__).parents[1] / "golden" / "data" / "scheduling" / "C"


def test_sim_sets_the_scheduler_beside_the_simple_policies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, log = TRACES / "H_hand01_one_slot.json", tmp_path / "log.json"
    assert main(["teachers", "sim", str(trace), "--log", str(log)]) == 0
    said = capsys.readouterr().out
    case, schedule = read_case(trace), read_schedule(log)
    assert not check(case, schedule)
    assert f"{len(case.jobs)} jobs for {len(case.system.teachers)} teachers on 1 devices" in said
    ends = {name: float(end) for name, end in re.findall(r"^(\w[\w, ]*?) {2,}([\d.]+) s \(", said, re.MULTILINE)}
    assert ends["distill"] == pytest.approx(max(visit.end_ns for visit in schedule.visits) / 1e9, abs=6e-4)
    policies = {"fifo", "oldest_drain", "longest_drain", "barrier"}
    assert ends.keys() == {"distill", "oldest_drain_stream", *policies, *(f"{name}, prefetched" for name in policies)}


def test_sim_alone_leaves_the_simple_policies_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["teachers", "sim", str(TRACES / "H_hand01_one_slot.json"), "--no-simple"]) == 0
    said = capsys.readouterr().out
    assert "\ndistill " in said and "fifo" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["teachers"], "the command line: the following arguments are required: COMMAND"),
        (["teachers", "sin"], "invalid choice: 'sin'"),
        (["teachers", "sim", "nowhere.json"], "nowhere.json"),
        (["teachers", "sim", __file__], "tm-sched/1 is expected"),
        (["teachers", "sim", str(TRACES / "H_hand01_one_slot.json"), "--log", "/dev/null/x"], "--log: /dev/null/x"),
        (["teacher"], "did you mean 'teachers'"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert says in capsys.readouterr().err


# --- plan ----------------------------------------------------------------------------------------------------------

GIVEN = ["server.device=cpu", "--link-gb-per-s", "1e-4", "--disk-gb-per-s", "1e-5", "--device-tflops", "1e-6"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["teachers", "plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_says_what_sharing_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_layered_run(tmp_path)
    said = planned(capsys, str(path), *GIVEN, "--tokens-per-sample", "100", "--step-s", "10")
    assert {name: (speed["value"], speed["source"]) for name, speed in said["speeds"].items()} == {
        "link_bytes_per_s": (1e5, "given"),
        "disk_bytes_per_s": (1e4, "given"),
        "device_flop_per_s": (1e6, "given"),
    }
    math, code = said["teachers"]
    assert (math["name"], math["kind"], math["bytes"], math["layers"]) == ("math", "dense", TEACHER_BYTES, LAYERS)
    assert math["total_params"] == math["active_params"] == TEACHER_PARAMS
    assert math["stream_bytes"] == 2 * 1024 and math["sample_share"] == pytest.approx(2 / 3)
    assert math["swap_s"] == pytest.approx(TEACHER_BYTES / 1e5) and code["first_swap_s"] == pytest.approx(
        TEACHER_BYTES / 1e4
    )
    assert math["break_even_tokens"] == pytest.approx(TEACHER_BYTES * 1e6 / (2 * 1e5 * TEACHER_PARAMS))
    assert said["slots"] == 1 and said["slot_bytes"] == TEACHER_BYTES and not said["resident_together"]
    assert said["swap_s"] == pytest.approx(2 * TEACHER_BYTES / 1e5)
    assert said["load"] == pytest.approx(4 * 100 * 2 * TEACHER_PARAMS / 1e6 / 10)
    assert said["load_limit"] == pytest.approx(1 - 2 * TEACHER_BYTES / 1e5 / 120)
    assert said["least_step_s"] == pytest.approx(10 * said["load"] / said["load_limit"])
    memory = said["host_memory"]
    assert memory["teachers_bytes"] == 2 * 4 * TEACHER_PARAMS and memory["slots_bytes"] == TEACHER_BYTES
    assert memory["needed_bytes"] == memory["teachers_bytes"] + memory["slots_bytes"] + 4 * TEACHER_PARAMS
    changes = {change["name"]: change for change in said["changes"]}
    assert said["expected"]["stall_s"] > 0
    assert changes["slot_gb"]["stall_s"] == 0 and said["cheapest_change"] == "slot_gb"
    for change in changes.values():
        assert change["halves"] == (change["stall_per_sample_s"] <= said["expected"]["stall_per_sample_s"] / 2)


def test_plan_prints_where_each_figure_comes_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_layered_run(tmp_path)
    assert main(["teachers", "plan", str(path), *GIVEN]) == 0
    said = capsys.readouterr().out
    assert "link                0.0001 GB/s (given: command line)" in said
    assert "tokens of a sample  12 (assumed: 4 of a prompt, measured, and rollout.max_new_tokens)" in said
    assert "rho = 1.00 (assumed)" in said and "rho <= 0.9992 = 1 - 101 ms / (1 x 120 s)" in said
    assert f"slots               1 of {TEACHER_BYTES:,} bytes (as the largest teacher needs); they hold not all" in said
    assert "The teachers slow the run: a step takes 178 ms, and 121 ms without waiting for them." in said
    assert "The cheapest that at least halves the stall: teacher_manager.slot_gb=1.012e-05: twice the bytes" in said


def test_plan_measures_what_is_not_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = planned(capsys, str(write_layered_run(tmp_path)), "server.device=cpu", "teacher_manager.slots=2")
    for speed in said["speeds"].values():
        assert speed["source"] == "measured here" and speed["value"] > 1e4 and speed["how"]
    assert said["resident_together"] and said["load_limit"] == 1
    assert [teacher["mode"] for teacher in said["teachers"]] == ["RESIDENT"] * 2
    assert said["expected"]["loads_per_step"] == 0 and said["cheapest_change"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the following arguments are required: teachers.yaml"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["teachers.yaml", "student.lrr=1"], "student.lrr"),
        (["teachers.yaml", "--step-s", "0"], "argument --step-s: '0' is no number above 0"),
        (["teachers.yaml", "--link-gb-per-s", "fast"], "argument --link-gb-per-s: 'fast' is no number above 0"),
        (["teachers.yaml", "--tokens-per-sample", "1.5"], "'1.5' is no whole number above 0"),
        (["teachers.yaml", "--speed", "1"], "unrecognized arguments: --speed"),
        (["teachers.yaml", "teacher_manager.slot_gb=1e-6"], "teacher_manager.slot_gb is 1e-06"),
        (["unmade.yaml"], "is not made yet, so the teachers have no size"),
        (["flat"], "none of its 3 tensors belongs to a layer"),
    ],
)
def test_plan_says_what_is_wrong(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "flat")
    tensors = {name.replace("model.layers.0.", ""): each for name, each in weights(ROWS).items()}
    save_file(tensors, tmp_path / "flat" / "experts" / "math" / "model.safetensors")
    write_layered_run(tmp_path)
    (tmp_path / "prepare.py").touch()
    write_yaml(tmp_path, settings() | {"prepare": {"script": "prepare.py", "output": "made"}}, "unmade.yaml")
    monkeypatch.chdir(tmp_path)
    assert main(["teachers", "plan", *words]) == 2
    assert says in capsys.readouterr().err


def test_plan_knows_adapters_and_the_base_that_they_share(tmp_path: Path) -> None:
    config = load_config(write_layered_run(tmp_path), ["server.device=cpu"]).config
    for name in config.teachers:
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        layer = "base_model.model.model.layers.0.mlp"
        tensors = {f"{layer}.lora_A.weight": np.ones((2, 8)), f"{layer}.lora_B.weight": np.ones((32, 2))}
        save_file({key: each.astype(np.float32) for key, each in tensors.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    teachers = {
        name: TeacherConfig(model=tmp_path / "adapters" / name, base=tmp_path / "base") for name in config.teachers
    }
    given = Given(GivenSpeeds(link_bytes=1e5, disk_bytes=1e5, device_flops=1e6))
    config = config.model_copy(update={"teachers": teachers})
    outlook = look_ahead(config, inspect(config), given)
    base, *adapters = outlook.teachers
    assert (base.kind, base.mode, base.bytes, base.sample_share) == ("base", "BASE", TEACHER_BYTES, 0)
    assert [(each.name, each.kind, each.mode, each.bytes) for each in adapters] == [
        ("math", "lora", "LORA", 64 + 256),
        ("code", "lora", "LORA", 64 + 256),
    ]
    assert adapters[0].active_params == TEACHER_PARAMS + 80 and adapters[0].swap_s == pytest.approx(320 / 1e5)
    assert outlook.slot_bytes == TEACHER_BYTES + 320 and not outlook.resident_together
    assert outlook.expected.streams == 0


def test_plan_writes_nothing_so_a_folder_that_holds_a_run_is_no_obstacle(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_layered_run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("{}")
    assert main(["teachers", "plan", str(path), f"run.dir={tmp_path / 'out'}", *GIVEN]) == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["result.json"]
