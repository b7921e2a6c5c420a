"""Files of answers scored by real servers: values, routing, a broken row, a job that is killed and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.builders_run import DEADLINE_S, write_run
from tests.builders_student import VOCAB, write_student

pytestmark = pytest.mark.timeout(280)

PROMPTS = ("ab", "ba", "abc", "cab", "bca", "cc", "aab")


def three_teachers(folder: Path) -> Path:
    """A run of three teachers on one slot, which holds one of them."""
    folder.mkdir(exist_ok=True)
    write_student(folder / "poetry", seed=7)
    teachers = {name: {"model": name} for name in ("math", "code", "poetry")}
    data = [{"path": "math.jsonl", "domain": name} for name in teachers]
    return write_run(folder, teachers=teachers, data=data, evaluation={"data": []})


def answers(count: int) -> list[dict[str, Any]]:
    domains = ("math", "code", "poetry")
    return [
        {
            "id": f"a{index}",
            "prompt": PROMPTS[index % 7],
            "domain": domains[index % 3],
            "response": "abcab"[: 2 + index % 4],
            "source": {"page": index},
        }
        for index in range(count)
    ]


def write_answers(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(run: Path, source: Path, output: Path, *words: str) -> list[str]:
    arguments = ["teachers", "score", str(run), "--input", str(source), "--output", str(output), *words]
    return [sys.executable, "-m", "distill.cli.run", *arguments]


def score(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def forward(folder: Path, prompt: list[int], response: list[int]) -> np.ndarray:
    """(R, V): the log-probabilities of each token of the response, over the tokenizer's ids."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, :VOCAB]
    return torch.log_softmax(logits, dim=-1).numpy()


def test_each_row_is_scored_by_its_teacher_as_a_forward_pass_does(tmp_path: Path) -> None:
    run, output = three_teachers(tmp_path / "run"), tmp_path / "scores.parquet"
    rows = answers(12)
    rows[5]["teacher"] = ["math", "poetry"]
    rows[6] |= {"response_ids": [4, 3, 2], "response": None}
    source = write_answers(tmp_path / "answers.jsonl", rows)
    done = score(run, source, output, "--signal", "topk", "--k", "3", "--keep", "source", "--window", "6")
    assert done.returncode == 0, done.stderr
    assert "12 of 12 rows" in done.stdout and "swaps" in done.stdout
    assert not output.with_name("scores.parquet.partial").exists()
    found = pq.read_table(output).to_pylist()
    wanted = [(row["id"], name) for row in rows for name in row.get("teacher", [row["domain"]])]
    assert [(row["id"], row["teacher"]) for row in found] == wanted
    assert pq.ParquetFile(output).num_row_groups == 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "base")
    for row in found:
        asked = rows[row["line"] - 1]
        assert row["prompt_ids"] == tokenizer(asked["prompt"]).input_ids
        spelled = asked.get("response_ids") or tokenizer(asked["response"], add_special_tokens=False).input_ids
        assert row["response_ids"] == spelled
        assert json.loads(row["source"]) == asked["source"]
        expected = forward(tmp_path / "run" / row["teacher"], row["prompt_ids"], spelled)
        own = expected[np.arange(len(spelled)), spelled]
        assert row["logprobs"] == pytest.approx(own, abs=1e-4)
        assert (row["tokens"], row["mean_logprob"]) == (len(spelled), pytest.approx(own.mean(), abs=1e-4))
        best = np.argsort(-expected, axis=1)[:, :3]
        assert [sorted(ids) for ids in row["topk_ids"]] == [sorted(ids) for ids in best.tolist()]
        known = np.take_along_axis(expected, np.asarray(row["topk_ids"]), axis=1)
        assert np.asarray(row["topk_logprobs"]) == pytest.approx(known, abs=1e-2)  # float16 on their way
        assert np.exp(row["log_tail"]) == pytest.approx(1 - np.exp(known).sum(axis=1), abs=1e-3)


def test_a_row_too_long_ends_the_job_with_its_line_and_the_mended_file_is_another_job(tmp_path: Path) -> None:
    run, output = three_teachers(tmp_path / "run"), tmp_path / "scores.parquet"
    rows = answers(8)
    rows[6]["response"] = "a" * 70
    source = write_answers(tmp_path / "answers.jsonl", rows)
    words = ("--teacher", "code", "--window", "4", "--json-errors")
    broken = score(run, source, output, *words)
    assert broken.returncode == 2
    said = json.loads(broken.stderr.splitlines()[-1])
    assert said["error"] == "ConfigError" and f"{source}:7" in said["what"] and "70" in said["what"]
    assert not output.exists()
    partial = output.with_name("scores.parquet.partial")
    assert sum(pq.read_metadata(part).num_rows for part in partial.glob("part-*")) == 6
    again = score(run, source, output, *words)
    assert again.returncode == 2 and "--resume" in json.loads(again.stderr)["fix"]
    write_answers(source, answers(8))
    changed = score(run, source, output, *words, "--resume")
    assert changed.returncode == 2 and "--input is not as it was" in json.loads(changed.stderr)["what"]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_job_that_ends_early_goes_on_behind_what_it_scored(tmp_path: Path, number: int) -> None:
    run, output = three_teachers(tmp_path / "run"), tmp_path / "scores.parquet"
    rows = answers(600)
    source = write_answers(tmp_path / "answers.jsonl", rows)
    partial = output.with_name("scores.parquet.partial")
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command(run, source, output, "--window", "8"), stdout=log, stderr=log)
    end = time.monotonic() + DEADLINE_S
    while len(list(partial.glob("part-*.parquet"))) < 3:
        assert job.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.02)
    tree = psutil.Process(job.pid).children(recursive=True)
    os.kill(job.pid, number)
    if number == signal.SIGKILL:
        for process in tree:
            if process.is_running():
                process.kill()
    assert job.wait(60) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert not output.exists()
    written = sum(pq.read_metadata(part).num_rows for part in partial.glob("part-*.parquet"))
    assert 12 <= written < 600
    done = score(run, source, output, "--window", "200", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"goes on behind {written} rows" in done.stderr
    found = pq.read_table(output).to_pylist()
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    for row in (found[0], found[written - 1], found[written], found[-1]):
        logp = forward(tmp_path / "run" / row["teacher"], row["prompt_ids"], row["response_ids"])
        own = logp[np.arange(len(logp)), row["response_ids"]]
        assert row["logprobs"] == pytest.approx(own, abs=1e-4)
