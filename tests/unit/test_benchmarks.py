"""The benchmarks compare like with like, and start. Their figures are no matter of tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import Turns, require_packages, run_case, write_plot
from benchmarks.head_loss import KERNEL, OBJECTIVES, Case, main, measure, prepare
from benchmarks.teachers_house import Shape, build_house, serve
from benchmarks.teachers_report import break_even, break_even_tokens
from benchmarks.teachers_sharing import PRESSURE, case_of, make_trace, predict
from benchmarks.teachers_swaps import Speed, choices, open_client, swaps
from tests.builders_kernels import install_stand_in

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_chunked_and_the_plain_computation_of_a_benchmark_give_the_same_gradients(objective: str) -> None:
    gradients = []
    for chunk in (0, 3):
        step, leaves = prepare(Case(objective, 8, 200, 16, chunk, 2, "float32", "cpu"))
        step()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


def test_the_benchmark_of_the_kernel_computes_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(monkeypatch)
    gradients = []
    for chunk in (3, KERNEL):
        step, leaves = prepare(Case("sampled", 8, 200, 16, chunk, 2, "float32", "cpu"))
        step()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured on Linux only")
def test_a_case_reports_its_peak_memory_and_the_time_of_every_repeat() -> None:
    found = measure(Case("logits", 64, 50_000, 16, 64, 3, "float32", "wall"))
    assert len(found["seconds"]) == 3
    # student's logits, teacher's and the gradient are 12.8 MB each
    assert found["bytes"] > 20e6


@pytest.mark.parametrize("module", ["benchmarks.head_loss", "benchmarks.versus_trl"])
def test_a_benchmark_explains_itself(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--threads" in done.stdout


def test_an_interpreter_without_a_package_is_named_with_what_to_install() -> None:
    require_packages(sys.executable, ["torch"], install="torch")
    with pytest.raises(SystemExit) as caught:
        require_packages(sys.executable, ["torch", "no_such_package"], install="no-such-package")
    lacks, fix = str(caught.value).splitlines()
    assert lacks == f"error: {sys.executable} lacks no_such_package"
    assert f"{sys.executable} -m pip install no-such-package" in fix


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"{tmp_path / 'python'} does not run"):
        require_packages(str(tmp_path / "python"), ["torch"], install="torch")


def test_a_case_that_fails_shows_its_last_words_and_not_its_numbers() -> None:
    with pytest.raises(SystemExit) as caught:
        run_case("benchmarks.no_such_module", {"steps": 3, "answers": [[0] * 1000]}, threads=1)
    text = str(caught.value)
    assert "steps=3, answers of 1" in text and "No module named benchmarks.no_such_module" in text
    assert "0, 0" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="it says what is missing where no GPU is")
def test_the_benchmark_of_the_kernel_asks_for_a_gpu_first() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        main(["kernel"])


def test_every_process_of_a_benchmark_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    turns = Turns(2)
    turns.start("plain")
    turns.start("chunks of 64")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("] 1 of 2: plain") and second.endswith("] 2 of 2: chunks of 64")


def test_a_plot_has_a_line_of_all_points_for_every_series(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    write_plot(path, [("one", "tokens", {"a": [(1, 1.0), (2, 2.0)], "b": [(1, 3.0), (2, 4.0)]})], y_label="seconds")
    text = path.read_text()
    assert text.count("<circle") == 4
    assert text.count("<polyline") == 3


def test_a_random_teacher_server_swaps_scores_and_streams_for_the_benchmark_of_teachers(tmp_path: Path) -> None:
    house = build_house(tmp_path, 3, Shape(hidden=64, layers=2, vocab=64))

    async def measured() -> tuple[dict[str, Any], dict[str, Any]]:
        cold = await swaps(house, "disk", 1)
        with serve(house, room=2.2) as served:
            client = await open_client(served)
            try:
                return cold, await choices(client, house, [32, 64], 32, 2)
            finally:
                await client.close()

    cold, found = asyncio.run(measured())
    assert len(cold["seconds"]) == 3 and cold["read_bytes"] >= 0
    assert {len(found["load"])} | {len(each) for how in ("resident", "streamed") for each in found[how].values()} == {2}


def test_the_simulated_trace_of_teachers_is_the_measured_one_and_no_schedule_beats_its_bound(tmp_path: Path) -> None:
    house = build_house(tmp_path, 4, Shape(hidden=64, layers=2, vocab=64))
    active, size = house.costs.active_params, house.costs.bytes
    speed = Speed(flops_per_s=2e3 * active, call_s=0.0)  # 1000 tokens/s
    trace = make_trace(house, speed, visit=256, length=64, rounds=8, load_s=0.256)
    assert trace.tokens == 4 * 256 * 8
    assert trace.arrivals[-1][0] == pytest.approx(7 * 4 * 0.256 * PRESSURE)
    budget = round(2.2 * size)
    case = case_of(house, trace, speed, size / 0.256, budget)
    assert sum(job.tokens for job in case.jobs) == trace.tokens + 4 * 64
    outcome, bound_s = predict(house, trace, speed, link_bytes_per_s=size / 0.256, budget_bytes=budget, loads=0)
    assert bound_s == pytest.approx(4 * 256 * 8 / 1000, rel=1e-6)
    assert bound_s <= outcome.makespan_s < 1.3 * bound_s and outcome.loads + outcome.streams > 0
    _, by_loads_s = predict(house, trace, speed, link_bytes_per_s=size / 0.256, budget_bytes=budget, loads=100)
    assert by_loads_s == pytest.approx(25.6)


def test_the_measured_break_even_of_teachers_that_follow_the_formula_is_the_formulas() -> None:
    costs = {"total_params": 100, "active_params": 100, "layers": 4, "bytes": 400}
    resident = {tokens: [tokens * 1e-3] * 3 for tokens in (128, 256)}  # 1000 tokens/s, and a load of 0.512 s
    streamed = {tokens: [0.512 + seconds[0] / 4] * 3 for tokens, seconds in resident.items()}
    found = {
        "teacher": costs,
        "speed": {"flops_per_s": 2 * 100 * 1000},
        "link_bytes_per_s": 400 / 0.512,
        "choices": {"load": [0.512] * 3, "resident": resident, "streamed": streamed},
    }
    assert break_even_tokens(found) == pytest.approx(512)
    for row in break_even(found):
        assert row["measured"] == pytest.approx(row["formula"], rel=0.01)
        assert row["formula"] == pytest.approx(0.512 / (0.512 - row["tokens"] * 0.75e-3), rel=0.01)
