"""The run's observer: takes what happened, and writes metrics, the display, result.json and report.html."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from distill.config import ObserveConfig
from distill.observe.history import History
from distill.observe.memory import MemoryWatch
from distill.observe.metrics import check_names
from distill.observe.progress import open_progress
from distill.observe.record import KINDS, LEVELS, EvalRecord, Event, Span, StepRecord
from distill.observe.report import write_report
from distill.observe.result import closing_lines, ended_early, final_table, summary, write_result
from distill.observe.sinks import METRICS_FILE
from distill.observe.timeline import union
from distill.protocols import PublishResult, Sink, TeacherFigures
from distill.registry import load
from distill.types import ScoredSample, StepResult

EVENTS_FILE = "events.log"


class _Output:
    """Standard output, whose reader may leave (`distill-run | head`) or whose disk may fill: then nothing is said."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._leave()

    def _leave(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_console() -> Console:
    """A console on standard output. Without any (`>&-`) it is silent."""
    stream = cast(TextIO | None, sys.stdout)
    return Console(file=cast(TextIO, _Output(stream)) if stream is not None else None)


class Observer:
    """What one looks at. Lives in the controller, is called from its one thread, and never waits for anything.

    `domain_teachers` names the teachers of each domain, `config_text` is shown in the report. `resumed_from` is the
    step of the checkpoint whose `state()` is about to be restored, 0 for a new run. Metrics go to metrics.jsonl
    whatever `config.sinks` says. Raises MissingDependency for a sink whose package is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        config: ObserveConfig,
        *,
        run_name: str,
        total_steps: int,
        teachers: Sequence[str],
        domain_teachers: Mapping[str, Sequence[str]],
        resumed_from: int = 0,
        config_text: str = "",
        console: Console | None = None,
    ) -> None:
        self._origin = time.monotonic()
        self._run_dir = run_dir
        self._config_text = config_text
        self._console = console or run_console()
        self._history = History(run_name, total_steps, tuple(teachers), dict(domain_teachers))
        run_dir.mkdir(parents=True, exist_ok=True)
        sinks = dict.fromkeys(["jsonl", *config.sinks])
        self._sinks: list[Sink] = [load("sink", name)(run_dir, config, run_name, resumed_from) for name in sinks]
        self._log = (run_dir / EVENTS_FILE).open("a", encoding="utf-8", buffering=1)
        self._since_step: list[Span] = []
        self._step_ended = 0.0
        self._busy_before: dict[str, float] = {}
        self._memory = MemoryWatch()
        self._memory.start()
        self._progress = open_progress(config.progress, self._console, self.clock, self._history)

    def clock(self) -> float:
        """Seconds since the run began, over all resumes."""
        return time.monotonic() - self._origin

    @contextlib.contextmanager
    def span(self, kind: str, label: str = "", amount: float = 0) -> Generator[Span]:
        """Measure a block; `amount` of what it yields may be set until the end. A block that raises is measured too."""
        assert kind in KINDS, f"{kind!r} is not in distill.observe.record.KINDS"
        span = Span(kind, self.clock(), label=label, amount=amount)
        try:
            yield span
        finally:
            span.end = self.clock()
            self._take(span)

    def add_span(self, kind: str, start: float, end: float, label: str = "", amount: float = 0, /) -> None:
        """A span that someone else measured, in seconds of time.monotonic."""
        assert kind in KINDS, f"{kind!r} is not in distill.observe.record.KINDS"
        self._take(Span(kind, start - self._origin, end - self._origin, label, amount))

    def watch_pids(self, pids: Iterable[int]) -> None:
        """Count the memory of these processes and their descendants, which are not below this one."""
        self._memory.watch(pids)

    def step(
        self,
        result: StepResult,
        samples: Sequence[ScoredSample],
        *,
        set_aside: Mapping[str, int],
        queue_age_s: Mapping[str, float],
        swaps: Mapping[str, int],
        slots: TeacherFigures,
        publish: PublishResult | None,
        store_size: int,
    ) -> None:
        """One optimiser step was done on these samples, and its weights were published.

        `set_aside` counts what the batch lacks by the teacher at fault ("": no teacher). `queue_age_s` and `swaps` are
        per teacher, the swaps counted since this process began, as is all of `slots`.
        """
        history, counters, now = self._history, self._history.counters, self.clock()
        lags = [result.version - 1 - item.sample.oldest_version for item in samples]
        history.count_swaps(swaps)
        history.count_slots(slots)
        counters.version = result.version
        counters.samples += len(samples)
        counters.tokens += result.tokens
        counters.weight_updates += publish is not None
        counters.max_staleness = max([counters.max_staleness, *lags])
        self._update_memory()
        values = {
            **_train_metrics(result, samples, lags),
            **_reward_metrics(samples),
            "quarantine/samples": float(sum(set_aside.values())),
            **{f"teacher/quarantined/{name}": float(count) for name, count in set_aside.items() if name},
            **self._work_metrics(now),
            **{f"teacher/queue_age_s/{name}": age for name, age in queue_age_s.items()},
            **{f"teacher/swaps/{name}": float(count) for name, count in history.swaps.items()},
            **{f"teacher/dropped/{name}": float(count) for name, count in history.slots.dropped.items()},
            "slots/stall_share": history.slots.stall_share,
            **({"teacher/cache_hit_share": history.slots.cache_hit_share} if history.slots.cache_requests else {}),
            "slots/load_bytes": float(history.slots.load_bytes),
            "slots/streams": float(history.slots.streams),
            "store/size": float(store_size),
            "memory/peak_gb": counters.peak_memory_bytes / 1e9,
        }
        if publish is not None:
            values["publish/seconds"] = publish.seconds
            values["publish/bytes"] = float(publish.bytes)
            values["publish/receivers"] = float(len(publish.committed))
        self._since_step, self._step_ended = [], now
        history.last = StepRecord(result.version, now, values)
        self._write(result.version, values)
        self._progress.step(history.last)

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation of base, student or a teacher on one domain was done. A KL that is not finite is told, and left
        out."""
        if record.kl is not None and not math.isfinite(record.kl):
            self.event(
                "warning",
                f"evaluation at step {record.step}, domain {record.domain}: the KL of {record.who} to its teacher is "
                f"{record.kl}, so one of them gives probability 0 to what the other may write; it is left out",
            )
            record = replace(record, kl=None)
        self._history.evals.append(record)
        own = record.who in ("base", "student")
        accuracy = f"eval/accuracy/{record.domain}" if own else f"eval/teacher_accuracy/{record.who}/{record.domain}"
        values = {accuracy: record.accuracy, f"eval/kl/{record.domain}": record.kl}
        self._write(record.step, {name: value for name, value in values.items() if value is not None})
        self._progress.evaluation(record)

    def swapped(self, counts: Mapping[str, int], slots: TeacherFigures, /) -> None:
        """Each teacher was loaded so many times since this process began, steps or not, and what came of it."""
        self._history.count_swaps(counts)
        self._history.count_slots(slots)

    def quarantined(self, counts: Mapping[str, int], /) -> None:
        """So many samples of the whole run were set aside, by the teacher at fault ("": no teacher)."""
        self._history.quarantined = dict(counts)

    def evaluated(self, who: str) -> bool:
        """There is an evaluation of "base", "student" or this teacher, made now or before a resume."""
        return self._history.evaluated(who)

    def event(self, level: str, message: str, /) -> None:
        """A line for the person who runs it: debug (only in events.log), info, warning or error."""
        assert level in LEVELS, f"{level!r} is not in distill.observe.record.LEVELS"
        event = Event(self.clock(), level, message)
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level:<7} {message}\n")
        if level != "debug":
            self._history.events.append(event)
            self._progress.event(event)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for `restore`: plain JSON."""
        self._update_memory()
        return self._history.state(self.clock())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier process' `state()`. Comes right after construction."""
        self._history.restore(state)
        self._origin = time.monotonic() - float(state["clock"])
        self._step_ended = self.clock()
        self._busy_before = self._history.timeline.seconds()

    def finish(self, status: str, *, export_dir: Path | None = None, error: str | None = None) -> dict[str, Any]:
        """Close everything, write result.json and report.html, print the final table; returns what result.json holds.

        `status` is done, stopped or failed; `error` says why it is not done.
        """
        self._memory.stop()
        self._update_memory()
        self._progress.close()
        for opened in (*self._sinks, self._log):
            # On a full disk the write before has failed and ended the run; the result is still worth a try.
            with contextlib.suppress(OSError):
                opened.close()
        result = summary(self._history, status, wall_s=self.clock(), run_dir=self._run_dir, export_dir=export_dir)
        if error is not None:
            result["error"] = error
        write_result(self._run_dir, result)
        write_report(self._run_dir, self._history, result, self._run_dir / METRICS_FILE, self._config_text)
        if result["domains"] and not ended_early(result):
            self._console.print(final_table(self._history, result))
        for line in closing_lines(result):
            self._console.print(Text(line), soft_wrap=True)  # a path stays in one piece
        return result

    def _take(self, span: Span) -> None:
        self._history.add_span(span)
        self._since_step.append(span)
        self._progress.work()

    def _update_memory(self) -> None:
        counters = self._history.counters
        counters.peak_memory_bytes = max(counters.peak_memory_bytes, self._memory.peak_bytes)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        check_names(values)
        for sink in self._sinks:
            sink.write(step, values)

    def _work_metrics(self, now: float) -> dict[str, float]:
        """Rates and busy seconds of the spans that ended since the last step."""
        values: dict[str, float] = {"time/step_s": now - self._step_ended}
        for kind in ("rollout", "score", "train"):
            spans = [span for span in self._since_step if span.kind == kind]
            busy = union((span.start, span.end) for span in spans).seconds
            values[f"rate/{kind}_tok_s"] = sum(span.amount for span in spans) / busy if busy else 0.0
        busy_until_now = self._history.timeline.seconds()
        for kind in ("rollout", "score", "swap", "train", "publish"):
            values[f"time/{kind}_s"] = busy_until_now.get(kind, 0.0) - self._busy_before.get(kind, 0.0)
        self._busy_before = busy_until_now
        own = union(
            (span.start, span.end) for span in self._since_step if span.kind in ("train", "publish", "checkpoint")
        )
        working = sum(high - low for low, high in own.within(self._step_ended, now))
        values["time/wait_samples_s"] = max(values["time/step_s"] - working, 0.0)
        return values


def _reward_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for item in samples:
        if item.sample.reward is not None:
            rewards.setdefault(item.sample.domain, []).append(item.sample.reward)
    return {f"reward/{domain}": sum(marks) / len(marks) for domain, marks in rewards.items()}


def _train_metrics(result: StepResult, samples: Sequence[ScoredSample], lags: Sequence[int]) -> dict[str, float]:
    values = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "train/samples": float(len(samples)),
        "train/tokens": float(result.tokens),
        "train/response_tokens": sum(len(item.sample.response_ids) for item in samples) / max(len(samples), 1),
        "staleness/max": float(max(lags, default=0)),
        "staleness/mean": sum(lags) / max(len(lags), 1),
        "memory/student_peak_gb": result.peak_memory_bytes / 1e9,
    }
    for family in ("kl", "entropy_gap", "token_share"):
        values |= {f"teacher/{family}/{name}": value for name, value in getattr(result, family).items()}
    for metric, means in result.objective.items():
        values |= {f"objective/{metric}/{name}": value for name, value in means.items()}
    return values
