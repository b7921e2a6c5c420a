"""Whole runs with real processes: a student, a rollout server and a slot, over tiny random models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.builders_run import DEADLINE_S, Run, finished, start_server, write_run
from tests.builders_student import VOCAB, write_experts

pytestmark = pytest.mark.timeout(280)


def weights_digest(run: Run) -> str:
    return hashlib.sha256((run.folder / "student" / "model.safetensors").read_bytes()).hexdigest()


def losses(run: Run) -> list[float]:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_a_run_leaves_a_student_that_transformers_loads_and_a_whole_record(tmp_path: Path) -> None:
    run = finished(tmp_path, trainer={"steps": 4, "checkpoint_every": 2})
    result = run.result()
    assert result["status"] == "done"
    assert (result["steps"], result["weight_updates"], result["samples"]) == (4, 4, 32)
    assert result["teacher_swaps"] >= 2
    assert 0 <= result["max_staleness_seen"] <= 1
    assert set(result["domains"]) == {"math", "code"}
    assert result["peak_memory_gb"] > 0
    exported = Path(result["export_dir"])
    trained, base = load_file(exported / "model.safetensors"), load_file(tmp_path / "base" / "model.safetensors")
    assert trained.keys() == base.keys()
    assert any(not np.array_equal(trained[name], base[name]) for name in base)
    for name in ("report.html", "metrics.jsonl", "config.yaml", "events.log", "canaries.json"):
        assert (run.folder / name).stat().st_size > 0
    assert [path.name for path in sorted((run.folder / "checkpoints").iterdir())] == ["step-00000002", "step-00000004"]

    assert not list(Path("/dev/shm").glob(f"distill-mesh-*-{run.student_pid()}-*")), "shared memory is given back"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in (exported, run.folder / "checkpoints" / "step-00000002" / "student"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
        assert AutoTokenizer.from_pretrained(folder)("ab").input_ids


def test_a_mixture_of_experts_with_adapters_learns_over_the_embedded_server(tmp_path: Path) -> None:
    experts = write_experts(tmp_path / "experts", "mixtral")
    run = finished(
        tmp_path,
        student={"model": "experts", "lora": {"r": 4}, "ema_decay": 0.5},
        trainer={"steps": 2},
        evaluation={"data": []},
    )
    assert (run.result()["status"], run.result()["weight_updates"]) == ("done", 2)
    trained, base = (load_file(folder / "model.safetensors") for folder in (run.folder / "student", experts))
    assert trained.keys() == base.keys()
    changed = [name for name in base if ".experts." in name and not np.array_equal(trained[name], base[name])]
    assert len(changed) == 18, "2 layers of 3 experts of 3 matrices"
    assert "the export holds averaged weights" in (run.folder / "events.log").read_text()


def test_a_synchronous_run_is_reproducible_bit_by_bit_also_over_a_stop(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"trainer": {"steps": 6, "max_staleness": 0, "batch_size": 8}}
    once = finished(tmp_path / "once", **settings)
    assert once.result()["max_staleness_seen"] == 0

    again = Run(tmp_path / "again" / "out", str(write_run(tmp_path / "again", **settings)))
    again.until_step(2, DEADLINE_S)
    again.process.send_signal(signal.SIGTERM)
    assert again.wait(DEADLINE_S) == 128 + signal.SIGTERM, again.output()[-3000:]
    assert again.result()["status"] == "stopped"
    assert "resume=auto" in again.output()
    resumed = Run(again.folder, "teachers.yaml", "resume=auto")
    assert resumed.wait(DEADLINE_S) == 0, resumed.output()[-3000:]

    assert resumed.steps() == [1, 2, 3, 4, 5, 6]
    assert losses(resumed) == losses(once)
    assert weights_digest(resumed) == weights_digest(once)
    result = resumed.result()
    assert (result["status"], result["samples"], result["weight_updates"]) == ("done", 48, 6)


def test_a_run_killed_before_its_first_checkpoint_begins_anew_and_keeps_the_first_try(tmp_path: Path) -> None:
    path = str(write_run(tmp_path, trainer={"steps": 400}))
    run = Run(tmp_path / "out", path)
    run.until_step(2, DEADLINE_S)
    run.process.kill()
    run.process.wait()
    resumed = Run(run.folder, path, "resume=auto", "trainer.steps=2")
    assert resumed.wait(DEADLINE_S) == 0, resumed.output()[-3000:]
    assert f"begins anew; what was there is now in {run.folder / 'earlier-1'}" in resumed.output()
    assert resumed.steps() == [1, 2]
    assert (run.folder / "earlier-1" / "metrics.jsonl").read_text().count("train/loss") >= 2


def test_a_finished_run_is_not_resumed_for_nothing_and_not_overwritten(tmp_path: Path) -> None:
    finished(tmp_path, trainer={"steps": 1})
    for arguments, message in (
        (("resume=out",), "has already trained 1 of 1 steps"),
        ((), "already holds a run"),
        (("resume=out", "trainer.steps=2", "run.seed=9"), "run.seed is 9"),
    ):
        run = Run(tmp_path / "out", "teachers.yaml", *arguments, log=tmp_path / "refused.log")
        assert run.wait(DEADLINE_S) == 2
        assert message in run.output()


def test_servers_of_somebody_else_are_used_and_left_running(tmp_path: Path) -> None:
    write_run(tmp_path)
    started = [start_server(tmp_path / model, tmp_path, model, VOCAB) for model in ("base", "math")]
    try:
        urls = [url for _, url in started]
        run = finished(tmp_path, server={"program": "attach", "rollout_urls": urls[:1], "teacher_urls": urls[1:]})
        assert run.result()["weight_updates"] == 3
        assert not list((run.folder / "weights").iterdir()), "weights that were loaded are removed"
        assert all(process.poll() is None for process, _ in started)
    finally:
        for process, _ in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("override", "message"), [("student.device=cuda", "cuda"), ("server=sglang", "sglang")])
def test_what_the_machine_lacks_is_said_before_anything_is_written(tmp_path: Path, override: str, message: str) -> None:
    run = Run(tmp_path / "out", str(write_run(tmp_path)), override)
    assert run.wait(DEADLINE_S) == 3, run.output()[-3000:]
    assert "Traceback" not in run.output() and message in run.output()
    assert not run.folder.exists()


def test_a_server_that_cannot_start_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    run = Run(tmp_path / "out", str(write_run(tmp_path)), "server.args=[--no-such-flag]", "server.max_restarts=0")
    assert run.wait(DEADLINE_S) == 2, run.output()[-3000:]
    assert "Traceback" not in run.output() and "--no-such-flag" in run.output()
    assert run.result()["status"] == "failed"


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, trainer={"steps": 2})
    command = f"{sys.executable} -m distill.cli.run teachers.yaml"
    for shell in (f"set -o pipefail; {command} | head -1", f"{command} run.dir={tmp_path / 'closed'} >&-"):
        done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, timeout=DEADLINE_S, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr[-2000:]
    for folder in ("out", "closed"):
        assert json.loads((tmp_path / folder / "result.json").read_text())["status"] == "done"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which only root may")
def test_a_disk_that_fills_up_in_a_run_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small)], check=True)
    try:
        settings = {"trainer": {"steps": 4000, "checkpoint_every": 2}, "run": {"dir": str(small / "out")}}
        run = Run(small / "out", str(write_run(tmp_path, **settings)), cwd=tmp_path, log=tmp_path / "full.log")
        run.until_step(1, DEADLINE_S)
        filler = os.open(small / "filler", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(filler, b"0" * 4096)
        os.close(filler)
        assert run.wait(DEADLINE_S) == 3, run.output()[-3000:]
        message = run.output().rpartition("error: ")[2]
        # Whoever writes next meets the full disk, the metrics or the student's checkpoint: each has words of its own.
        assert "no space left" in message.lower() and str(small) in message
        assert "why: " in message and "fix: " in message and "Traceback" not in run.output()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
