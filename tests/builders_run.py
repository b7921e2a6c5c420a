"""Whole runs on disk, tiny and real, and `distill-run` as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.builders_student import write_student


def start_server(model: Path, folder: Path, name: str, vocab: int) -> tuple[subprocess.Popen[bytes], str]:
    """An embedded server that nobody of ours watches, and its URL."""
    address = folder / f"{name}.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "distill.serving.embedded", "--model-path", str(model), "--device", "cpu"),
            *("--address-file", str(address), "--vocab-size", str(vocab), "--name", name, "--threads", "1"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 120
    while not address.exists():
        assert process.poll() is None and time.monotonic() < end, f"{name} did not start"
        time.sleep(0.1)
    return process, json.loads(address.read_text())["url"]


def write_run(folder: Path, **changes: Any) -> Path:
    """A student and two other random models as its teachers; `changes` are merged into teachers.yaml by section."""
    for seed, name in enumerate(("base", "math", "code")):
        write_student(folder / name, seed=seed)
    for name in ("math", "code"):
        rows = [{"prompt": text, "answer": "a"} for text in ("ab", "ba", "abc", "cab", "bca", "cc", "aab")]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "run": {"name": "tiny", "dir": str(folder / "out")},
        "student": {"model": "base", "lr": 1e-2, "warmup_steps": 0},
        "teachers": {"math": {"model": "math"}, "code": {"model": "code"}},
        "data": [{"path": f"{name}.jsonl", "domain": name} for name in ("math", "code")],
        "rollout": {"max_new_tokens": 6},
        "teacher_manager": {"slots": 1},
        "trainer": {"steps": 3, "batch_size": 8},
        "evaluation": {"data": [{"path": f"{name}.jsonl", "domain": name} for name in ("math", "code")]},
    }
    for section, change in changes.items():
        merge = isinstance(change, dict) and isinstance(values.get(section), dict)
        values[section] = {**values[section], **change} if merge else change
    path = folder / "teachers.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


class Run:
    """A `distill-run` under way, and its folder."""

    def __init__(self, folder: Path, *arguments: str, cwd: Path | None = None, log: Path | None = None) -> None:
        self.folder = folder
        self.log = log or folder.parent / f"{folder.name}.log"
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distill.cli.run", *arguments],
                cwd=cwd or folder.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )

    def wait(self, deadline_s: float) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            self.end()
            raise AssertionError(f"the run did not end in {deadline_s} s\n{self.output()[-3000:]}") from error

    def end(self) -> None:
        if self.process.poll() is None:
            tree = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
            for process in tree:
                process.kill()
            self.process.wait()

    def output(self) -> str:
        return self.log.read_text()

    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row["step"] for row in rows if "train/loss" in row]

    def until(self, condition: Callable[[], object], deadline_s: float) -> None:
        """Wait for a condition while the run goes on."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, f"the run ended early\n{self.output()[-3000:]}"
            assert time.monotonic() < end, f"not reached in {deadline_s} s\n{self.output()[-3000:]}"
            time.sleep(0.1)

    def until_step(self, step: int, deadline_s: float) -> None:
        self.until(lambda: step in self.steps(), deadline_s)

    def server(self, name: str) -> psutil.Process:
        """The process of a model server, found by its name on the command line below this run."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            words = _words(process)
            if "distill.serving.embedded" in words and words[words.index("--name") + 1] == name:
                return process
        raise AssertionError(f"no server {name} is running")

    def student_pid(self, rank: int | None = None) -> int:
        """The process id of the student, or of one of its ranks, as the event log names it."""
        who = "student runs as" if rank is None else f"student rank {rank} runs as"
        lines = [line for line in (self.folder / "events.log").read_text().splitlines() if who in line]
        return int(lines[-1].split()[-1])

    def student(self) -> psutil.Process:
        return psutil.Process(self.student_pid())


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


DEADLINE_S = 150.0
"""For a whole tiny run. It takes 20 seconds; two busy cores with other tests on them make that many times more."""


def finished(folder: Path, *overrides: str, **changes: Any) -> Run:
    """A run of `write_run(folder, **changes)` that went well."""
    run = Run(folder / "out", str(write_run(folder, **changes)), *overrides)
    assert run.wait(DEADLINE_S) == 0, run.output()[-3000:]
    return run
