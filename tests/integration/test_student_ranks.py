"""A run whose student trains in two processes, over the death of one and a change of how they share the model."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.builders_run import Run, write_run

pytestmark = pytest.mark.timeout(280)
DEADLINE_S = 150.0


@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_rank_ends_the_run_at_once_by_name_and_sharded_ranks_go_on_to_the_end(tmp_path: Path) -> None:
    path = write_run(
        tmp_path,
        student={"ranks": 2, "parallel": "ddp"},
        trainer={"steps": 400, "checkpoint_every": 1},
        evaluation={"kl": True, "teachers": False},
    )
    run = Run(tmp_path / "out", str(path))
    run.until_step(2, DEADLINE_S)
    pids = [run.student_pid(rank) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    assert run.wait(DEADLINE_S) == 4, run.output()[-3000:]
    took = time.monotonic() - killed
    message = run.output().rpartition("error: ")[2]
    assert "student rank 1: its process died" in message and "resume=auto" in message
    assert "Traceback" not in run.output()
    assert not Path(f"/proc/{pids[0]}").exists(), "the other rank was ended too"
    assert took < DEADLINE_S / 2, "far less than the time for which a rank would wait for the other"

    done = run.steps()[-1]
    resumed = Run(run.folder, str(path), "resume=auto", "student.parallel=fsdp", f"trainer.steps={done + 2}")
    assert resumed.wait(DEADLINE_S) == 0, resumed.output()[-3000:]
    assert resumed.steps() == list(range(1, done + 3))
    result = resumed.result()
    assert (result["status"], result["weight_updates"]) == ("done", done + 2)
    assert all(np.isfinite(value) for domain in result["kl"].values() for value in domain.values())
    trained = load_file(Path(result["export_dir"]) / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert trained.keys() == base.keys()
    assert any(not np.array_equal(trained[name], base[name]) for name in base)
    assert not list(Path("/dev/shm").glob(f"distill-mesh-*-{resumed.student_pid(0)}-*")), "shared memory is given back"
