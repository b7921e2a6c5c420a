"""The distill-run program: what it imports, prints and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.markup import escape
from rich.table import Table

import distill.config.compose
import distill.doctor
from distill.cli.plan import size
from distill.cli.program import show
from distill.cli.run import main, quick_start
from distill.config.compose import load_config
from distill.config.options import resolved
from distill.errors import RunStopped, ServerError
from tests.builders_config import settings, write_checkpoint, write_run, write_tokenizer, write_yaml

ROOT = Path(distill.__file__).parents[1]
HEAVY = {"torch", "ray", "transformers", "hydra", "omegaconf", "pydantic", "numpy", "rich", "aiohttp"}


def python(*arguments: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "program",
    [
        "import distill",
        "from distill.cli.run import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from distill.cli.run import main\nmain(['--version'])",
    ],
    ids=["import distill", "--help", "--version"],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(program: str) -> None:
    report = (
        f"\nimport sys, time\nprint('HEAVY', sorted(set(sys.modules) & {HEAVY!r}))\nprint('CPU', time.process_time())"
    )
    done = python("-c", program + report)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    # Processor time, not the clock: another process on the machine does not change it.
    assert float(done.stdout.rpartition("CPU ")[2]) < 0.5


def test_help_shows_the_ways_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for part in ("teachers.yaml", "student.lr=1e-5", "doctor", "schema", "--dry-run", "--cfg", "exit codes"):
        assert part in text


def test_cfg_job_prints_the_whole_run_and_it_can_be_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_yaml(tmp_path, settings())
    assert main([str(path), "student.lr=2e-4", "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["student"]["lr"] == 2e-4 and printed["trainer"]["max_staleness"] == 1
    assert printed["objective"]["support"] == "full", "also what the objective's class has by itself"
    again = load_config(write_yaml(tmp_path / "again", printed)).config
    assert resolved(again) == resolved(load_config(path, ["student.lr=2e-4"]).config) == printed


def test_the_file_may_come_anywhere_and_a_folder_stands_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_yaml(tmp_path, settings())
    for arguments in (
        ["--cfg", "job", "run.seed=5", str(tmp_path)],
        ["~teachers.code", str(tmp_path), "run.seed=5", "--cfg=job", "data.1.teachers=[math]"],
    ):
        assert main(arguments) == 0
        assert yaml.safe_load(capsys.readouterr().out)["run"]["seed"] == 5


def test_without_a_file_the_quick_start_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert quick_start().parts[-2:] == ("quickstart", "teachers.yaml")
    assert main(["--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"]["name"] == "quickstart"


def test_a_dry_run_before_the_recipe_was_prepared_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path))
    assert main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "Not made yet" in out and "of 192 samples" in out
    assert list(tmp_path.iterdir()) == [], "a dry run makes nothing"


def test_the_plan_shows_how_the_student_trains_and_what_differs_from_the_run_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = {"model": "./base", "lr": 2e-4, "warmup_steps": 1, "ranks": 2, "device": "cpu", "dtype": "bfloat16"}
    objective = {"name": "policy_gradient", "importance": "tis", "reduction": "seq_mean"}
    path = write_run(tmp_path, student=student | {"lora": {"targets": ["lm_head"]}}, objective=objective)
    write_checkpoint(tmp_path / "run", 2, load_config(path).config)
    asked = [f"resume={tmp_path / 'run'}", "student.ranks=1", "student.lr=1e-4"]
    assert main([str(path), "--dry-run", *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    plan = {line[:18].strip(): line[18:].strip() for line in lines}
    assert plan["start"] == f"goes on at step 2 of 3 in {tmp_path / 'run'}"
    assert plan["other than before"] == "student.lr is 0.0001, and was 0.0002"
    assert plan[""] == "student.ranks is 1, and was 2"
    assert plan["student ranks"] == "1; bfloat16 on cpu"
    assert plan["weights that learn"] == "LoRA: r=16, alpha=32.0, dropout=0.0, targets=['lm_head'], export=merged"
    assert plan["optimizer"] == "adamw, lr 0.0001 after 1 steps of warm-up, linear towards 0 at step 3"
    assert plan["its settings"].endswith("iw_gain=0.0, importance={name: tis, cap: 2.0}")
    assert (plan["reduction"], plan["mixture"], plan["outcome"]) == ("seq_mean", "weighted", "none")
    assert plan["loss kernel"] == "auto"
    assert all(line == line.rstrip() for line in lines), "nobody copies blanks"
    assert main([str(path), "--dry-run", "student.lora=null", "objective=reverse_kl", "objective.outcome=null"]) == 0
    assert "student ranks       2, fsdp; bfloat16 on cpu\nweights that learn  all\n" in capsys.readouterr().out


def test_what_is_piped_is_not_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("what", "found")
    table.add_row("peft", escape("not installed: LoRA students. pip install 'distill-engine[lora]'"))
    show(table)
    assert "not installed: LoRA students. pip install 'distill-engine[lora]'" in capsys.readouterr().out


def test_the_schema_is_valid_json_with_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "teachers" in schema["required"]
    assert schema["$defs"]["TeacherConfig"]["properties"]["model"]["description"] == "Hugging Face folder"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dryrun"], "unrecognized arguments: --dryrun"),
        (["--cfg", "hydra"], "--cfg"),
        (["docter"], "did you mean 'doctor'"),
        (["a.yaml", "b.yaml"], "neither a second file"),
        (["--version", "x"], "--version stands alone, and 'x' would be ignored"),
        (["--dry-run", "--cfg", "job"], "print different things"),
        (["schema", "x.yaml"], "schema makes no use of x.yaml"),
        (["schema", "trainer.steps=3"], "schema makes no use of trainer.steps=3"),
        (["doctor", "trainer.steps=3"], "doctor makes no use of trainer.steps=3"),
        (["doctor", "x.yaml", "--dry-run"], "doctor makes no use of --dry-run"),
        (["a=b.yaml"], "there is no file"),
        (["trainer.steps"], "settings are written trainer.steps=VALUE"),
        ([""], "an argument is empty"),
    ],
)
def test_a_wrong_command_line_is_a_configuration_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ServerError("it died", why="a reason", fix="a way"), 4, "error: it died\n  why: a reason\n  fix: a way\n"),
        (RunStopped("stopped, and saved"), 130, "stopped, and saved\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (ZeroDivisionError("ours"), 1, "ZeroDivisionError: ours\n\nThis is a fault of Distill"),
    ],
    ids=["DistillError", "RunStopped", "KeyboardInterrupt", "a bug"],
)
def test_every_end_has_its_exit_code(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(distill.config.compose, "load_config", fail)
    assert main(["--cfg", "job"]) == code
    err = capsys.readouterr().err
    assert err.endswith(says) if code != 1 else says in err
    assert ("Traceback" in err) == (code == 1)


OUTPUTS = [["schema"], ["--help"], ["--version"], ["--cfg", "job"]]


@pytest.mark.parametrize("arguments", [*OUTPUTS, ["--dry-run"]], ids=" ".join)
def test_a_reader_who_leaves_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = python("-m", "distill.cli.run", *arguments, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [*OUTPUTS, ["--dry-run"]], ids=" ".join)
def test_an_output_that_is_full_is_a_fault_of_the_machine(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = python("-m", "distill.cli.run", *arguments, stdout=full.fileno())
    assert done.returncode == 3
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


def test_a_terminal_that_knows_ascii_only_gets_ascii() -> None:
    done = python("-X", "utf8=0", "-c", ASCII_ONLY)
    assert done.returncode == 0, done.stderr
    assert "+---" in done.stdout and "\\u2264" in done.stdout


ASCII_ONLY = """
import io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="ascii")
from rich.table import Table
from distill.cli.program import show
table = Table("what")
table.add_row("\u2264")
show(table)
"""


def test_the_doctor_tells_of_the_machine_and_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = write_run(tmp_path)
    assert main(["doctor", str(path)]) == 0
    out = capsys.readouterr().out
    for part in ("torch", "/dev/shm", "one vocabulary of 14 ids", "3 prompts", "not run on this hardware"):
        assert part in out
    assert "cut_cross_entropy" in out and "loss kernel" in out
    assert "│ ok " in out and "[/]" not in out, "colours are for terminals"
    assert "FAIL" not in out


def test_the_doctor_goes_on_behind_the_first_failure(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    write_tokenizer(tmp_path / "experts/math", "zyx")
    report = distill.doctor.Report()
    distill.doctor.look_at_run(report, path, ["resume=nowhere"])
    states = {name: state for state, name, _ in report.rows}
    assert states["resume"] == states["tokenizers"] == "FAIL"
    assert states["models"] == states["disk"] == states["ports"] == "ok"
    assert "prompts" not in states, "they cannot be measured without a vocabulary"


def test_a_package_that_crashes_on_import_is_a_row() -> None:
    report = distill.doctor.Report()
    distill.doctor._probe(report, "crashing", "import os; os.kill(os.getpid(), 11)")  # pyright: ignore[reportPrivateUsage]
    distill.doctor._probe(report, "absent", "import no_such_package")  # pyright: ignore[reportPrivateUsage]
    assert "killed by signal 11" in report.rows[0][2] and "No module named 'no_such_package'" in report.rows[1][2]
    assert not report.failed


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (2_618_880, "2.619 MB"), (1.5e9, "1.5 GB"), (3e12, "3 TB")]
)
def test_bytes_are_written_in_powers_of_ten(count: float, text: str) -> None:
    assert size(count) == text
