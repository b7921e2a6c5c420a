"""The observer: what it writes, counts, remembers over a resume, and prints."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distill.config import ObserveConfig
from distill.errors import MissingDependency
from distill.observe.memory import MemoryWatch
from distill.observe.metrics import METRICS, check_names, metric
from distill.observe.progress import duration
from distill.observe.sinks import read_metrics
from distill.protocols import Sink
from distill.registry import load
from distill.types import ScoredSample
from tests.builders_observe import TEACHERS, evaluated, observer, scored, tell_step, wind


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def printed(mode: str, *, terminal: bool = False) -> tuple[ObserveConfig, Console, io.StringIO]:
    out = io.StringIO()
    config = ObserveConfig.model_validate({"sinks": ["jsonl"], "progress": mode})
    return config, Console(file=out, width=100, force_terminal=terminal), out


def test_observe_loads_neither_torch_nor_ray_nor_tensorflow() -> None:
    code = (
        "import sys, distill.observe; print([m for m in ('torch', 'ray', 'tensorflow', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_metric_outside_the_table_is_refused() -> None:
    check_names(["train/loss", "teacher/kl/math", "eval/teacher_accuracy/a/b/with/slashes"])
    assert metric("teacher/kl/math") is METRICS["teacher/kl/<teacher>"]
    assert metric("reward/math") is METRICS["reward/<domain>"]
    for name in ("train/los", "teacher/kl", "teacher/kl/", "teacher/kl_/math", "loss", "reward", "reward/"):
        with pytest.raises(KeyError, match=name):
            metric(name)


def test_the_documentation_holds_the_table_of_metrics() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    rows = [f"| `{name}` | {item.unit} | {item.reduction} | {item.help} |" for name, item in METRICS.items()]
    assert [line for line in text.splitlines() if line.startswith("| `") and line.count("|") == 5] == rows


def test_rewards_are_means_a_domain_and_what_was_set_aside_is_counted(tmp_path: Path) -> None:
    def rewarded(ordinal: int, domain: str, reward: float | None) -> ScoredSample:
        item = scored(ordinal)
        return replace(item, sample=replace(item.sample, domain=domain, reward=reward))

    seen = observer(tmp_path)
    batch = [rewarded(0, "sums", 1.0), rewarded(1, "sums", 0.5), rewarded(2, "programs", 0.0), rewarded(3, "x", None)]
    tell_step(seen, 1, batch, set_aside={"math": 2, "": 1})
    tell_step(seen, 2)
    seen.quarantined({"math": 2, "": 1})
    result = seen.finish("done")
    first, second = lines_of(tmp_path)
    assert {name: value for name, value in first.items() if name.startswith("reward/")} == {
        "reward/sums": 0.75,
        "reward/programs": 0.0,
    }
    assert (first["quarantine/samples"], first["teacher/quarantined/math"]) == (3, 2)
    assert second["quarantine/samples"] == 0 and not any(name.startswith("reward/") for name in second)
    assert result["quarantined"] == {"samples": 3, "teachers": {"math": 2}}
    report = (tmp_path / "report.html").read_text()
    assert all(title in report for title in ("Reward", "Samples set aside", "set aside"))


def test_a_step_becomes_one_line_with_its_values(tmp_path: Path) -> None:
    seen = observer(tmp_path)
    tell_step(seen, 1, loss=0.75, kl={"math": 0.25}, tokens=12, objective={"gated_low": {"code": 0.125}})
    tell_step(seen, 2)
    first, second = lines_of(tmp_path)
    assert (first["step"], second["step"]) == (1, 2)
    assert first["train/loss"] == 0.75
    assert first["teacher/kl/math"] == 0.25
    assert first["objective/gated_low/code"] == 0.125
    assert first["train/tokens"] == 12
    assert first["train/response_tokens"] == 4
    assert first["store/size"] == 7
    assert (first["publish/seconds"], first["publish/bytes"], first["publish/receivers"]) == (0.1, 4e6, 1)
    assert first["memory/student_peak_gb"] == 1.0
    assert "teacher/kl/code" not in first
    check_names(set(first) - {"step", "time"})


def test_a_value_that_is_not_finite_is_null_and_the_line_stays_json(tmp_path: Path) -> None:
    seen = observer(tmp_path)
    tell_step(seen, 1, loss=float("nan"), grad_norm=float("inf"))
    (line,) = lines_of(tmp_path)
    assert line["train/loss"] is None
    assert line["train/grad_norm"] is None
    assert "train/loss" not in read_metrics(tmp_path / "metrics.jsonl")


def test_staleness_is_counted_from_the_version_before_the_step(tmp_path: Path) -> None:
    seen = observer(tmp_path)
    tell_step(seen, 6, [scored(0, versions=[5, 5]), scored(1, versions=[3, 5]), scored(2, versions=[4, 4])])
    (line,) = lines_of(tmp_path)
    assert line["staleness/max"] == 2
    assert line["staleness/mean"] == 1.0
    assert seen.finish("done")["max_staleness_seen"] == 2


def test_rates_and_busy_seconds_come_from_the_spans_since_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = wind(monkeypatch)
    seen = observer(tmp_path)
    seen.add_span("rollout", 1000.0, 1004.0, "rollout-0", 300)
    seen.add_span("rollout", 1002.0, 1006.0, "rollout-1", 300)
    seen.add_span("score", 1005.0, 1007.0, "math", 500)
    clock.now = 1006.0
    with seen.span("train", amount=80) as span:
        clock.now = 1008.0
    assert span.seconds == 2.0
    with seen.span("publish") as span:
        span.amount = 4e6
        clock.now = 1009.0
    clock.now = 1010.0
    tell_step(seen, 1)
    clock.now = 1011.0
    tell_step(seen, 2)
    first, second = lines_of(tmp_path)
    assert first["rate/rollout_tok_s"] == 100
    assert first["rate/score_tok_s"] == 250
    assert first["rate/train_tok_s"] == 40
    assert first["time/step_s"] == 10
    assert (first["time/rollout_s"], first["time/score_s"], first["time/swap_s"]) == (6, 2, 0)
    assert first["time/wait_samples_s"] == 7
    assert (second["time/step_s"], second["time/rollout_s"], second["rate/rollout_tok_s"]) == (1, 0, 0)
    assert second["time/wait_samples_s"] == 1
    # rollout and score together 5..6, score and train together 6..7
    assert seen.finish("done")["overlap"] == pytest.approx(2 / 11)


def test_a_block_that_raises_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wind(monkeypatch)
    seen = observer(tmp_path)
    with pytest.raises(ValueError, match="broken"), seen.span("train"):
        clock.now += 3
        raise ValueError("broken")
    assert seen.finish("failed")["busy_s"] == {"train": 3.0}


def test_a_kind_of_work_that_is_not_known_is_refused(tmp_path: Path) -> None:
    seen = observer(tmp_path)
    with pytest.raises(AssertionError, match="dance"):
        seen.add_span("dance", 0.0, 1.0)


def test_the_result_holds_every_figure_of_the_run(tmp_path: Path) -> None:
    seen = observer(tmp_path)
    evaluated(seen, "base", "sums", 0.4, kl=1.5)
    evaluated(seen, "base", "programs", 0.2)
    evaluated(seen, "math", "sums", 0.98)
    evaluated(seen, "code", "programs", 0.9)
    evaluated(seen, "style", "programs", 0.95)
    evaluated(seen, "style", "sums", 0.1)
    for version in (1, 2, 3):
        tell_step(seen, version, swaps={"math": version, "code": 1})
    evaluated(seen, "student", "sums", 0.7, step=2, kl=0.9)
    evaluated(seen, "student", "sums", 0.96, step=3, kl=0.3)
    result = seen.finish("done", export_dir=tmp_path / "student")
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "done"
    assert result["domains"] == {
        "sums": {"base": 0.4, "teacher": 0.98, "student": 0.96},
        "programs": {"base": 0.2, "teacher": 0.95, "student": None},
    }
    assert result["teachers"] == {
        "math": {"sums": 0.98},
        "code": {"programs": 0.9},
        "style": {"sums": 0.1, "programs": 0.95},
    }
    assert result["kl"] == {"sums": {"first": 1.5, "last": 0.3}}
    assert (result["steps"], result["version"], result["weight_updates"]) == (3, 3, 3)
    assert (result["samples"], result["tokens"], result["teacher_swaps"]) == (3, 60, 4)
    assert result["export_dir"] == str(tmp_path / "student")
    assert result["run_dir"] == str(tmp_path)
    assert 0.01 < result["peak_memory_gb"] < 100
    assert "error" not in result
    assert [line["eval/accuracy/sums"] for line in lines_of(tmp_path) if "eval/accuracy/sums" in line] == [
        0.4,
        0.7,
        0.96,
    ]
    assert [line["eval/teacher_accuracy/math/sums"] for line in lines_of(tmp_path)[2:3]] == [0.98]


def test_a_failed_run_leaves_its_error(tmp_path: Path) -> None:
    result = observer(tmp_path).finish("failed", error="rollout-0 died\n  fix: give it memory")
    assert result["error"] == "rollout-0 died\n  fix: give it memory"
    assert (result["status"], result["steps"], result["export_dir"]) == ("failed", 0, None)
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_that_failed_before_it_learnt_anything_prints_only_where_to_look(tmp_path: Path) -> None:
    _, console, out = printed("none")
    observer(tmp_path, console=console).finish("failed", error="rollout-0 died")
    places = ["result", "metrics", "report"]
    assert [line.split()[0] for line in out.getvalue().splitlines()] == places


def test_a_run_that_failed_after_a_measurement_prints_it(tmp_path: Path) -> None:
    _, console, out = printed("none")
    seen = observer(tmp_path, console=console)
    evaluated(seen, "base", "sums", 0.25)
    seen.finish("failed", error="rollout-0 died")
    assert "made-up: failed after 0 steps" in out.getvalue() and "25.0 %" in out.getvalue()


def test_a_kl_that_is_no_number_is_told_and_left_out_of_result_and_report(tmp_path: Path) -> None:
    watching = observer(tmp_path)
    for step, kl in ((0, math.inf), (2, 0.5), (4, math.nan), (6, 0.25)):
        evaluated(watching, "student" if step else "base", "sums", None, step=step, kl=kl)
    result = watching.finish("done")
    assert result["kl"] == {"sums": {"first": 0.5, "last": 0.25}}
    assert json.loads((tmp_path / "result.json").read_text())["kl"] == result["kl"]
    told = [line for line in (tmp_path / "events.log").read_text().splitlines() if " warning " in line]
    assert len(told) == 2 and "base to its teacher is inf" in told[0] and "student to its teacher is nan" in told[1]
    assert (tmp_path / "report.html").exists()


def test_a_resumed_run_counts_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wind(monkeypatch)
    first = observer(tmp_path)
    evaluated(first, "base", "sums", 0.4)
    first.event("warning", "rollout-0 died")
    first.add_span("rollout", 1000.0, 1008.0, "rollout-0", 100)
    first.add_span("swap", 1001.0, 1002.0, "math", 5)
    first.add_span("score", 1002.0, 1004.0, "math", 100)
    clock.now = 1010.0
    tell_step(first, 1, [scored(0, versions=[0]), scored(1, versions=[-1])], swaps={"math": 1, "code": 2})
    state = json.loads(json.dumps(first.state()))
    clock.now = 1015.0
    tell_step(first, 2, swaps={"math": 9, "code": 9})  # after the checkpoint: lost, and done again

    clock.now = 5000.0
    second = observer(tmp_path, resumed_from=1)
    second.restore(state)
    assert second.clock() == 10.0
    assert second.evaluated("base")
    assert not second.evaluated("student")
    second.add_span("train", 5001.0, 5003.0, "", 100)
    second.add_span("score", 5002.0, 5003.0, "math", 100)
    clock.now = 5010.0
    tell_step(second, 2, swaps={"math": 3})
    result = second.finish("done")
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 2]
    assert lines_of(tmp_path)[-1]["time/step_s"] == 10.0
    assert lines_of(tmp_path)[-1]["time/score_s"] == 1.0
    assert lines_of(tmp_path)[-1]["teacher/swaps/math"] == 4
    assert (result["samples"], result["tokens"], result["weight_updates"]) == (3, 40, 2)
    assert result["swaps"] == {"math": 4, "code": 2, "style": 0}
    assert result["max_staleness_seen"] == 1
    assert result["wall_s"] == 20.0
    assert result["busy_s"] == {"rollout": 8.0, "swap": 1.0, "score": 3.0, "train": 2.0}
    assert result["overlap"] == pytest.approx(3.0 / 20.0)
    assert result["domains"]["sums"]["base"] == 0.4
    page = (tmp_path / "report.html").read_text()
    assert "rollout-0 died" in page
    assert "math: 1.00 to 4.00 s, loaded in 1.00 s" in page
    assert "math: 12.00 to 13.00 s" in page


def test_a_run_that_starts_anew_drops_what_was_there(tmp_path: Path) -> None:
    tell_step(observer(tmp_path), 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')  # killed while it wrote
    assert set(read_metrics(tmp_path / "metrics.jsonl")["train/loss"][0]) == {1.0}
    again = observer(tmp_path)
    tell_step(again, 1, loss=0.125)
    assert [line["train/loss"] for line in lines_of(tmp_path)] == [0.125]


def test_tensorboard_reads_the_scalars_back_and_forgets_what_is_done_again(tmp_path: Path) -> None:
    config = ObserveConfig(progress="none")
    first = observer(tmp_path, config=config)
    for version in (1, 2, 3):
        tell_step(first, version, loss=float(version))
    first.finish("failed")
    second = observer(tmp_path, config=config, resumed_from=2)
    tell_step(second, 3, loss=30.0)
    evaluated(second, "student", "sums", 0.5, step=2)
    second.finish("done")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [(event.step, event.value) for event in read.Scalars("eval/accuracy/sums")] == [(2, 0.5)]
    assert "teacher/kl/style" in read.Tags()["scalars"]


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_each_sink_is_one_by_the_protocol(name: str, tmp_path: Path) -> None:
    sink = load("sink", name)(tmp_path, ObserveConfig(), "run", 0)
    assert isinstance(sink, Sink)
    sink.close()


def test_wandb_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency) as caught:
        observer(tmp_path, config=ObserveConfig(sinks=["wandb"], progress="none"))
    assert "distill-engine[wandb]" in str(caught.value)


class _Wandb:
    """What WandbSink uses of wandb, written down."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}
        self.defined: dict[str, Any] = {}
        self.logged: list[dict[str, float]] = []
        self.finished = False

    def init(self, **settings: Any) -> _Wandb:
        self.opened = settings
        return self

    def define_metric(self, name: str, **settings: Any) -> None:
        self.defined[name] = settings

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_steps_as_values_under_an_id_that_a_resume_finds_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [_Wandb(), _Wandb()]
    for run in runs:
        monkeypatch.setitem(sys.modules, "wandb", run)  # pyright: ignore[reportArgumentType]
        config = ObserveConfig(sinks=["wandb"], progress="none", wandb_project="merging")
        seen = observer(tmp_path, config=config)
        tell_step(seen, 4)
        evaluated(seen, "student", "sums", 0.5, step=3)
        seen.finish("done")
    assert runs[0].opened["project"] == "merging"
    assert runs[0].opened["id"] == runs[1].opened["id"]
    assert runs[0].defined["teacher/kl/*"] == {"step_metric": "step", "summary": "mean"}
    assert [values["step"] for values in runs[0].logged] == [4, 3]
    assert runs[0].logged[1] == {"eval/accuracy/sums": 0.5, "step": 3}
    assert runs[0].finished


def test_plain_progress_prints_steps_now_and_then_and_every_evaluation_and_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = wind(monkeypatch)
    config, console, out = printed("plain")
    seen = observer(tmp_path, config=config, console=console, total_steps=5)
    for version in range(1, 6):
        clock.now += 0.9
        tell_step(seen, version, loss=0.5, kl={"math": 0.125})
    evaluated(seen, "student", "sums", 0.875, step=5, kl=0.25)
    seen.event("warning", "rollout-1 died [and] came back")
    seen.event("debug", "a detail")
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["[00:01] step 1/5", "[00:04] step 4/5", "[00:04] step 5/5"]
    assert "loss 0.5000" in lines[0]
    assert "kl math 0.1250 code – style –" in lines[0]
    assert lines[3] == "evaluation at step 5: student on sums: accuracy 87.5 % of 100, KL 0.2500 nat"
    assert lines[4] == "[00:04] warning: rollout-1 died [and] came back"
    assert len(lines) == 5
    assert "debug   a detail" in (tmp_path / "events.log").read_text()


def test_plain_progress_names_rewards_and_says_no_rate_of_what_did_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wind(monkeypatch)
    config, console, out = printed("plain")
    seen = observer(tmp_path, config=config, console=console)
    seen.add_span("train", 1000.0, 1002.0, "", 80)
    item = scored(0)
    tell_step(seen, 1, [replace(item, sample=replace(item.sample, reward=0.25))])
    assert "  reward sums 0.250  tok/s rollout – score – train 40  " in out.getvalue()


def test_the_live_panel_shows_the_run_on_a_terminal(tmp_path: Path) -> None:
    config, console, out = printed("auto", terminal=True)
    seen = observer(tmp_path, config=config, console=console)
    evaluated(seen, "base", "sums", 0.25)
    tell_step(seen, 1, loss=0.5, kl={"math": 0.125})
    tell_step(seen, 2, loss=0.25, kl={"math": 0.0625})
    seen.event("warning", "rollout-1 died")
    text = out.getvalue()
    for shown in ("made-up", "step 2/10", "loss 0.2500", "0.0625", "33.3 %", "25.0 %", "rollout-1 died", "left"):
        assert shown in text
    seen.finish("stopped")
    assert "made-up: stopped after 2 steps" in out.getvalue()


def test_no_progress_prints_only_the_final_table(tmp_path: Path) -> None:
    config, console, out = printed("none")
    seen = observer(tmp_path, config=config, console=console)
    tell_step(seen, 1)
    evaluated(seen, "student", "sums", 0.5)
    assert out.getvalue() == ""
    evaluated(seen, "math", "sums", 1.0)
    seen.finish("done", export_dir=Path("/exported/student"))
    text = out.getvalue()
    assert "50.0 %" in text
    assert "100.0 % (math)" in text
    assert "/exported/student" in text
    assert f"report   {tmp_path / 'report.html'}" in text.splitlines()
    assert f"metrics  {tmp_path / 'metrics.jsonl'}" in text.splitlines()


def test_memory_counts_children_and_watched_processes_once() -> None:
    code = "import sys; held = bytearray(60_000_000); print('held', flush=True); sys.stdin.read()"
    watch = MemoryWatch()
    before = watch.sample()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        grown = watch.sample() - before
        watch.watch([child.pid])
        again = watch.sample() - before
    finally:
        child.communicate(timeout=30)
    assert 50e6 < grown < 200e6
    assert abs(again - grown) < 30e6
    assert watch.sample() < before + 30e6
    assert watch.peak_bytes >= before + 50e6


@pytest.mark.parametrize(("seconds", "text"), [(0, "00:00"), (61.4, "01:01"), (3600, "1:00:00"), (-1, "00:00")])
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_every_teacher_is_in_the_swap_counts(tmp_path: Path) -> None:
    seen = observer(tmp_path)
    tell_step(seen, 1, swaps={"code": 2})
    (line,) = lines_of(tmp_path)
    assert {name: line[f"teacher/swaps/{name}"] for name in TEACHERS} == {"math": 0, "code": 2, "style": 0}


@pytest.mark.parametrize("stream", ["full", "left", "closed"])
def test_a_run_goes_on_without_its_terminal(stream: str) -> None:
    """Standard output that is full, whose reader has left, or that was never there."""
    program = (
        "from distill.observe.observer import run_console\n"
        "for _ in range(3): run_console().print('a line')\n"
        "import os; os.write(2, b'went on')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    output = {"full": full, "left": writer, "closed": None}[stream]
    command = [sys.executable, "-c", program]
    if output is None:
        command = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    os.close(full)
    assert (done.returncode, done.stderr) == (0, b"went on")
