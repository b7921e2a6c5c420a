"""The benchmarks compare like with like, and start. Their figures are no matter of tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common import Turns, require_packages, run_case, write_plot
from benchmarks.head_loss import KERNEL, OBJECTIVES, Case, main, measure, prepare
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
