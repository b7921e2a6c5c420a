"""What a user sees who gets something wrong: the exit code, and a message that says what, where, why and what to do.

Each case is a right run with one thing broken, started as a user would with --dry-run: nothing here needs a model.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distill.cli.run import main
from distill.config.compose import load_config
from distill.config.resume import settings_of
from tests.builders_config import settings, write_jsonl, write_model, write_run, write_tokenizer, write_yaml

TOLD = {"template": "{prompt} {solution}"}
Break = Callable[[Path], "list[str] | None"]
"""Breaks one thing of the run in a folder; returns what to add to the command line."""


@dataclass(frozen=True)
class Case:
    name: str
    breaks: Break
    exit_code: int
    says: tuple[str, ...]
    """Parts of the message: what and where, then why or what to do."""


def change(section: str, values: Any) -> Break:
    """The file with another `section`."""

    def breaks(folder: Path) -> None:
        write_yaml(folder, settings() | {section: values})

    return breaks


def command_line(*arguments: str) -> Break:
    return lambda folder: list(arguments)


def renamed(folder: Path) -> None:
    (folder / "teachers.yaml").rename(folder / "teachers.yml")


def other_tokenizer(folder: Path) -> None:
    write_tokenizer(folder / "experts/math", "abcdefghji=")  # i and j change places


def other_split(folder: Path) -> None:
    write_tokenizer(folder / "experts/math", split="..")


def other_decoder(folder: Path) -> None:
    file = folder / "experts/math/tokenizer.json"
    definition = json.loads(file.read_text())
    file.write_text(json.dumps(definition | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))


def truncated(folder: Path) -> None:
    file = folder / "experts/math/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncated_in_its_header(folder: Path) -> None:
    file = folder / "experts/math/model.safetensors"
    file.write_bytes(file.read_bytes()[:30])


def damaged_header(folder: Path) -> None:
    file = folder / "experts/math/model.safetensors"
    content = bytearray(file.read_bytes())
    content[9:20] = b"\xff" * 11
    file.write_bytes(bytes(content))


def missing_shard(folder: Path) -> None:
    model = folder / "experts/math"
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    names = {
        "lm_head.weight": "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
    }
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def no_teacher_column(folder: Path) -> None:
    write_jsonl(folder / "math.jsonl", [{"prompt": "ab="}, {"promt": "ab="}])


def adapter_without_base(folder: Path) -> None:
    (folder / "experts/math/config.json").unlink()
    (folder / "experts/math/adapter_config.json").write_text("{}")


def broken_json(folder: Path) -> None:
    (folder / "math.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')


def data_pipe(folder: Path) -> None:
    (folder / "math.jsonl").unlink()
    os.mkfifo(folder / "math.jsonl")


def config_pipe(folder: Path) -> None:
    (folder / "experts/math/config.json").unlink()
    os.mkfifo(folder / "experts/math/config.json")


def write_domain(domain: str) -> Break:
    def breaks(folder: Path) -> None:
        change("data", [{"path": "math.jsonl", "teachers": ["math", "code"]}])(folder)
        write_jsonl(folder / "math.jsonl", [{"prompt": "ab=", "domain": domain}])

    return breaks


def finished_run(folder: Path) -> list[str]:
    place = folder / "old/checkpoints/step-00000003"
    (place / "student").mkdir(parents=True)
    (place / "samples.dpk").touch()
    made_with = settings_of(load_config(folder / "teachers.yaml").config)
    (place / "state.json").write_text(json.dumps({"step": 3, "settings": made_with}))
    return ["resume=old"]


CASES = [
    Case("data that are a pipe", data_pipe, 2, ("{0}/math.jsonl is a pipe, a socket or a device",)),
    Case("a model's configuration that is a pipe", config_pipe, 2, ("{0}/experts/math has no config.json",)),
    Case("a domain with a slash", write_domain("a/b"), 2, ("{0}/math.jsonl:1: the domain 'a/b'", "metrics' names")),
    Case("a domain with a line break", write_domain("a\nb"), 2, ("{0}/math.jsonl:1: the domain 'a\\nb'",)),
    Case(
        "a row without an end",
        lambda folder: (folder / "math.jsonl").write_text("[" * 200_000 + "\n") and None,
        2,
        ("{0}/math.jsonl:1: nested too deeply",),
    ),
    Case("resume of a finished run", finished_run, 2, ("{0}/old has already trained 3 of 3 steps",)),
    Case(
        "resume with something else",
        lambda folder: [*finished_run(folder), "trainer.steps=9", "run.seed=1", "rollout.temperature=0.5"],
        2,
        (
            "resume: 2 settings are others than those of {0}/old/checkpoints/step-00000003",
            "- run.seed is 1, and was 0",
            "- rollout.temperature is 0.5, and was 1.0",
        ),
    ),
    Case("a device that is not there", command_line("student.device=cuda:99"), 3, ("student.device is cuda:99",)),
    Case("an interpreter that is none", command_line("server.python=/nope"), 2, ("/nope is not a program",)),
    Case("a part that does not fit", command_line("evaluation.grader=json:loads"), 2, ("json:loads is no grader",)),
    Case("missing file", renamed, 2, ("there is no file {0}/teachers.yaml", "did you mean {0}/teachers.yml?")),
    Case(
        "unknown key",
        change("trainer", {"step": 3}),
        2,
        ("teachers.yaml:", "unknown key trainer.step", "did you mean trainer.steps?"),
    ),
    Case(
        "unknown key on the command line",
        command_line("trainer.stps=3"),
        2,
        ("the command line: unknown key trainer.stps", "trainer.steps?"),
    ),
    Case(
        "unknown teacher on the command line",
        command_line("teachers.maht.weight=2"),
        2,
        ("no teacher 'maht'", "did you mean teachers.math?"),
    ),
    Case(
        "unknown teacher in the data entry",
        change("data", [{"path": "math.jsonl", "domain": "math", "teachers": ["math", "coed"]}]),
        2,
        ("data.0.teachers names 'coed'", "did you mean 'code'?"),
    ),
    Case(
        "unknown teacher in a row",
        lambda folder: (
            write_jsonl(folder / "math.jsonl", [{"prompt": "ab="}, {"prompt": "ab=", "teacher": "mth"}]) and None
        ),
        2,
        ("{0}/math.jsonl:2: 'mth' is not one of the teachers", "did you mean 'math'?"),
    ),
    Case(
        "a domain without a teacher",
        command_line("data.0.domain=physics"),
        2,
        ("math.jsonl:1", "'physics'", "give the data entry its `teachers`"),
    ),
    Case(
        "missing teacher folder",
        command_line("teachers.math.model=experts/mat"),
        2,
        ("teachers.math.model: there is no model folder",),
    ),
    Case(
        "teacher with another tokenizer",
        other_tokenizer,
        2,
        ("teachers.math: its tokenizer", "2 ids differ", "id 11 is 'i' there and 'j' here", "why:"),
    ),
    Case(
        "teacher whose tokenizer splits otherwise", other_split, 2, ("the same ids, but another pre-tokenizer", "fix:")
    ),
    Case(
        "teacher without a tokenizer",
        lambda folder: (
            (folder / "experts/math/tokenizer.json").unlink()
            or (folder / "experts/math/tokenizer_config.json").unlink()
        ),
        2,
        ("teachers.math: no tokenizer in", "give teachers.math.tokenizer"),
    ),
    Case(
        "vocabulary too small",
        lambda folder: write_model(folder / "experts/math", rows=10) and None,
        2,
        ("teachers.math.model: its head has 10 rows, and the tokenizer 14 ids", "fix:"),
    ),
    Case(
        "empty data set",
        lambda folder: write_jsonl(folder / "math.jsonl", []) and None,
        2,
        ("{0}/math.jsonl holds no prompt", "fill the file"),
    ),
    Case(
        "missing data set",
        lambda folder: (folder / "math.jsonl").rename(folder / "maths.jsonl") and None,
        2,
        ("there is no data file {0}/math.jsonl", "did you mean 'maths.jsonl'?"),
    ),
    Case(
        "missing column",
        no_teacher_column,
        2,
        ("{0}/math.jsonl:2: the row has no column 'prompt'", "did you mean 'promt'?"),
    ),
    Case("a row that is not JSON", broken_json, 2, ("{0}/math.jsonl:2: not a JSON object",)),
    Case(
        "a character that the tokenizer cannot spell",
        lambda folder: write_jsonl(folder / "math.jsonl", [{"prompt": "a?"}]) and None,
        2,
        ("{0}/math.jsonl:1: the student's tokenizer refuses this prompt",),
    ),
    Case(
        "prompt longer than the context",
        lambda folder: write_jsonl(folder / "code.jsonl", [{"prompt": "a"}, {"prompt": "a" * 30}]) and None,
        2,
        (
            "{0}/code.jsonl:2: the prompt has 30 tokens",
            "more than the context of 32",
            "rollout.max_new_tokens=2 or less",
        ),
    ),
    Case(
        "chat messages without a template",
        lambda folder: write_jsonl(folder / "code.jsonl", [{"prompt": [{"role": "user", "content": "a"}]}]) and None,
        2,
        ("{0}/code.jsonl:1", "no chat template"),
    ),
    Case(
        "truncated weights",
        truncated,
        4,
        (
            "{0}/experts/math/model.safetensors is damaged: expected {1} bytes, found {2}",
            "a copy that broke off",
            "fix:",
        ),
    ),
    Case(
        "weights that end in their header",
        truncated_in_its_header,
        4,
        ("{0}/experts/math/model.safetensors is not a whole safetensors file",),
    ),
    Case(
        "weights with a damaged header",
        damaged_header,
        4,
        ("the header of {0}/experts/math/model.safetensors is damaged",),
    ),
    Case(
        "a shard that is missing", missing_shard, 4, ("{0}/experts/math/model-00002-of-00002.safetensors is missing",)
    ),
    Case(
        "unknown objective",
        command_line("objective=revers_kl"),
        2,
        ("there is no objective 'revers_kl'", "did you mean 'reverse_kl'?"),
    ),
    Case(
        "unknown objective in the file",
        change("objective", {"name": "jds"}),
        2,
        ("teachers.yaml:", "there is no objective 'jds'", "'jsd'"),
    ),
    Case(
        "unknown objective option",
        command_line("objective=jsd", "objective.bta=0.1"),
        2,
        ("the command line: unknown key objective.bta", "did you mean objective.beta?"),
    ),
    Case(
        "objective option out of range",
        command_line("objective=jsd", "objective.beta=2"),
        2,
        ("the command line: objective.beta: must be between 0 and 1",),
    ),
    Case(
        "objective options that do not go together",
        change("objective", {"name": "jsd", "support": "union"}),
        2,
        ("teachers.yaml:18: objective.k: must be at least 1",),
    ),
    Case(
        "more ids asked for than there are",
        command_line("objective=forward_kl", "objective.support=teacher_topk", "objective.k=50"),
        2,
        ("objective.k is 50, and the vocabulary has 14 ids",),
    ),
    Case(
        "slot smaller than a teacher",
        command_line("teacher_manager.slot_gb=1e-7"),
        2,
        (
            "teacher_manager.slot_gb is 1e-07 (100 bytes)",
            "needs 448 bytes (layer by layer, of 960 in all",
            "teacher_manager.slot_gb=4.48e-07 or more",
        ),
    ),
    Case(
        "a regular expression that is none",
        change("routing", {"rules": [{"match": {"regex": "a["}, "teachers": ["math"]}]}),
        2,
        ("teachers.yaml:21: routing.rules.0.match.regex: 'a[' is no regular expression", "fix:"),
    ),
    Case(
        "a rule of an unknown teacher",
        change("routing", {"rules": [{"match": {"tag": "x"}, "teachers": ["mth"]}]}),
        2,
        ("routing.rules.0.teachers names 'mth'", "did you mean 'math'?"),
    ),
    Case(
        "a rule that calls what is not there",
        change("routing", {"rules": [{"call": "json:chose"}]}),
        2,
        ("routing.rules.0.call: json has no 'chose'",),
    ),
    Case(
        "a row that no rule fits",
        lambda folder: (
            change("routing", {"rules": [{"match": {"tag": "x"}, "teachers": ["math"]}]})(folder)
            or ["data.0.domain=physics"]
        ),
        2,
        ("math.jsonl:1", "none of routing.rules fits (0: tag 'x')", "routing.default"),
    ),
    Case(
        "a context about a column that is not there",
        change("teachers", settings()["teachers"] | {"math": {"model": "./experts/math", "context": TOLD}}),
        2,
        ("teachers.math.context.template names 'solution', and no row of data has such a column",),
    ),
    Case(
        "a tokenizer that makes other text of its tokens",
        other_decoder,
        2,
        ("teachers.math: its tokenizer", "the same ids, but another decoder: null there", "WordPiece"),
    ),
    Case(
        "data that end too early",
        command_line("rollout.epochs=2"),
        2,
        ("the data end after 1 of 3 steps", "rollout.epochs=4"),
    ),
    Case(
        "context beyond the model's",
        command_line("server.context_length=64"),
        2,
        ("server.context_length is 64, and student.model can read 32 tokens",),
    ),
    Case(
        "attach without servers",
        command_line("server=attach"),
        2,
        ("server.rollout_urls names 0 servers, and rollout.servers is 1",),
    ),
    Case("resume of a run that is not there", command_line("resume=outputs/x"), 2, ("resume: there is no run folder",)),
    Case(
        "no end token",
        lambda folder: (
            [write_tokenizer(folder / name, end=None) for name in ("base", "experts/math", "experts/code")] and None
        ),
        2,
        ("no end token", "eos_token"),
    ),
    Case(
        "an adapter",
        adapter_without_base,
        2,
        ("is a LoRA adapter", "name the folder of its base"),
    ),
    Case(
        "no weights",
        lambda folder: (folder / "experts/math/model.safetensors").unlink(),
        2,
        ("has no model.safetensors", "save_pretrained"),
    ),
    Case("a sentence where a file belongs", command_line("teachers"), 2, ("neither a second file nor key=value",)),
]


def weight_bytes(folder: Path) -> int:
    return (folder / "experts/math/model.safetensors").stat().st_size


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def dry_run(folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Outcome:
    code = main([str(folder / "teachers.yaml"), "--dry-run", *arguments])
    return Outcome(code, *capsys.readouterr())


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_input_is_named_with_the_right_exit_code(
    run_folder: Path, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    size = weight_bytes(run_folder)
    arguments = case.breaks(run_folder)
    outcome = dry_run(run_folder, arguments if isinstance(arguments, list) else [], capsys)
    assert outcome.code == case.exit_code, outcome.err
    assert outcome.err.startswith("error: ") and "Traceback" not in outcome.err
    for part in case.says:
        assert part.format(run_folder, size, size - 100) in outcome.err, outcome.err


def test_the_run_that_the_cases_break_is_right(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = dry_run(run_folder, [], capsys)
    assert outcome.code == 0 and outcome.err == ""
    assert "14 ids" in outcome.out and "is right" in outcome.out


def test_a_padded_vocabulary_is_accepted_with_a_note(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(run_folder / "experts/math", rows=64)
    outcome = dry_run(run_folder, [], capsys)
    assert outcome.code == 0
    assert "teachers.math.model: 64 head rows, the tokenizer has 14: the rest is cut before the softmax" in outcome.out


def test_a_port_that_is_taken_is_a_fault_of_the_machine(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = dry_run(run_folder, [f"server.port={port}"], capsys)
    assert outcome.code == 3
    assert f"port {port} on 127.0.0.1 cannot be taken" in outcome.err and "fix:" in outcome.err


def test_an_attached_server_that_does_not_answer_is_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    urls = [f"server.rollout_urls=['{url}']", f"server.teacher_urls=['{url}/']"]
    outcome = dry_run(run_folder, ["server=attach", *urls], capsys)
    assert outcome.code == 4 and f"no server answers at {url}" in outcome.err


@contextmanager
def tiny_disk(folder: Path) -> Iterator[None]:
    """A real file system of 64 kB, where one may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "distill-test", str(folder)]
    if (
        os.geteuid() != 0
        or shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_a_fault_of_the_machine(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        stack.enter_context(tiny_disk(run_folder / "small"))
        outcome = dry_run(run_folder, ["run.dir=small/run", "trainer.keep_checkpoints=50"], capsys)
    assert outcome.code == 3
    assert "no disk space" in outcome.err and "GB free" in outcome.err and "trainer.keep_checkpoints=1" in outcome.err


def test_too_little_room_is_noticed_wherever_the_disk_is(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(run_folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    outcome = dry_run(run_folder, [], capsys)
    assert outcome.code == 3 and "has 1e-06 GB free" in outcome.err


def as_a_user(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distill.cli.run", *arguments]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_program_itself_ends_with_these_exit_codes(run_folder: Path) -> None:
    assert as_a_user(run_folder, "teachers.yaml", "--dry-run").returncode == 0
    unknown = as_a_user(run_folder, "teachers.yaml", "studen.lr=1")
    assert unknown.returncode == 2 and "did you mean student?" in unknown.stderr and "Traceback" not in unknown.stderr
    size = weight_bytes(run_folder)
    truncated(run_folder)
    broken = as_a_user(run_folder, "teachers.yaml", "--dry-run")
    assert broken.returncode == 4 and f"expected {size} bytes, found {size - 100}" in broken.stderr


def test_a_real_start_is_refused_before_anything_is_written(run_folder: Path) -> None:
    truncated(run_folder)
    before = sorted(run_folder.rglob("*"))
    assert as_a_user(run_folder, "teachers.yaml").returncode == 4
    assert sorted(run_folder.rglob("*")) == before
