"""What the terminal shows while the run goes on: a live panel, plain lines, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distill.observe.history import History
from distill.observe.record import EvalRecord, Event, StepRecord
from distill.observe.result import percent

PLAIN_INTERVAL_S = 2.0
PHASES = ("rollout", "score", "swap", "train", "publish")
_LEVEL_STYLES = {"info": "dim", "warning": "yellow", "error": "bold red"}


class Progress(Protocol):
    """A display. Called from the run's one thread."""

    def work(self) -> None: ...
    def step(self, record: StepRecord) -> None: ...
    def evaluation(self, record: EvalRecord) -> None: ...
    def event(self, event: Event) -> None: ...
    def close(self) -> None: ...


def open_progress(
    mode: Literal["auto", "live", "plain", "none"], console: Console, clock: Callable[[], float], history: History
) -> Progress:
    """auto: live on a terminal, plain elsewhere."""
    if mode == "none":
        return NoProgress()
    if mode == "live" or (mode == "auto" and console.is_terminal):
        return LiveProgress(console, clock, history)
    return PlainProgress(console, clock, history)


class NoProgress:
    def work(self) -> None: ...
    def step(self, record: StepRecord) -> None: ...
    def evaluation(self, record: EvalRecord) -> None: ...
    def event(self, event: Event) -> None: ...
    def close(self) -> None: ...


class PlainProgress:
    """Lines: a step at most every `interval_s` and the last one, each evaluation, each event."""

    def __init__(
        self, console: Console, clock: Callable[[], float], history: History, interval_s: float = PLAIN_INTERVAL_S
    ) -> None:
        self._console = console
        self._clock = clock
        self._history = history
        self._interval_s = interval_s
        self._last = -interval_s

    def work(self) -> None: ...

    def step(self, record: StepRecord) -> None:
        now = self._clock()
        if now - self._last >= self._interval_s or record.step == self._history.total_steps:
            self._last = now
            self._print(plain_line(record, self._history))

    def evaluation(self, record: EvalRecord) -> None:
        self._print(evaluation_line(record))

    def event(self, event: Event) -> None:
        self._print(f"[{duration(event.time)}] {event.level}: {event.message}")

    def close(self) -> None: ...

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def plain_line(record: StepRecord, history: History) -> str:
    values = record.values
    kl = " ".join(f"{name} {_kl(record, name)}" for name in history.teachers)
    rewards = _rewards(record)
    return (
        f"[{duration(record.time)}] step {record.step}/{history.total_steps}  loss {values['train/loss']:.4f}  "
        f"kl {kl}  {f'reward {rewards}  ' if rewards else ''}tok/s rollout {_rate(record, 'rollout')} "
        f"score {_rate(record, 'score')} train {_rate(record, 'train')}  staleness {values['staleness/max']:.0f}  "
        f"swaps {sum(history.swaps.values())}"
    )


def evaluation_line(record: EvalRecord) -> str:
    parts = [f"accuracy {percent(record.accuracy)} of {record.count}"] if record.accuracy is not None else []
    parts += [f"KL {record.kl:.4f} nat"] if record.kl is not None else []
    return (
        f"evaluation at step {record.step}: {record.who} on {record.domain}: {', '.join(parts) or 'nothing measured'}"
    )


def duration(seconds: float) -> str:
    whole = max(round(seconds), 0)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


def _kl(record: StepRecord, teacher: str) -> str:
    value = record.values.get(f"teacher/kl/{teacher}")
    return "–" if value is None else f"{value:.4f}"


def _rate(record: StepRecord, kind: str) -> str:
    """Tokens/s while this kind of work went on; – when none ended since the step before, as rollout before the last."""
    value = record.values[f"rate/{kind}_tok_s"]
    return f"{value:.0f}" if value else "–"


def _rewards(record: StepRecord) -> str:
    """Mean reward of each domain; empty in a run without outcomes."""
    marks = [(name, value) for name, value in record.values.items() if name.startswith("reward/")]
    return " ".join(f"{name.removeprefix('reward/')} {value:.3f}" for name, value in marks)


@dataclass(slots=True)
class _Pace:
    """Steps of this process, for the time that is left."""

    first_step: int | None = None
    first_time: float = 0.0

    def left_s(self, record: StepRecord, total: int) -> float | None:
        if self.first_step is None:
            self.first_step, self.first_time = record.step, record.time
        done = record.step - self.first_step
        return (record.time - self.first_time) / done * (total - record.step) if done else None


class LiveProgress:
    """A panel that is drawn anew a few times a second. Drawn in the run's thread: rich's own only repeats it."""

    def __init__(self, console: Console, clock: Callable[[], float], history: History, interval_s: float = 0.3) -> None:
        self._clock = clock
        self._history = history
        self._interval_s = interval_s
        self._pace = _Pace()
        self._left_s: float | None = None
        self._drawn = 0.0
        self._live = Live(self._draw(), console=console, auto_refresh=False, transient=True)
        self._live.start()

    def work(self) -> None:
        if time.monotonic() - self._drawn >= self._interval_s:
            self._update()

    def step(self, record: StepRecord) -> None:
        self._left_s = self._pace.left_s(record, self._history.total_steps)
        self._update()

    def evaluation(self, record: EvalRecord) -> None:
        self._update()

    def event(self, event: Event) -> None:
        self._update()

    def close(self) -> None:
        self._update()
        self._live.stop()

    def _update(self) -> None:
        self._live.update(self._draw(), refresh=True)

    def _draw(self) -> RenderableType:
        self._drawn = time.monotonic()
        return panel(self._history, self._clock(), self._left_s)


def panel(history: History, now: float, left_s: float | None) -> RenderableType:
    """The whole display at one moment."""
    parts: list[RenderableType] = [_head(history, now, left_s)]
    if history.last is not None:
        parts += [_numbers(history, history.last), _teachers(history, history.last)]
    parts.append(_phases(history, now))
    if any(row.student is not None or row.base is not None for row in history.domains()):
        parts.append(_accuracies(history))
    parts += [
        Text(
            f"[{duration(event.time)}] {event.message}",
            style=_LEVEL_STYLES[event.level],
            no_wrap=True,
            overflow="ellipsis",
        )
        for event in list(history.events)[-3:]
    ]
    return Panel(Group(*parts), title=f"distill · {history.run_name}", title_align="left", border_style="blue")


def _head(history: History, now: float, left_s: float | None) -> RenderableType:
    step = history.counters.version
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    left = "starting" if not step else f"{duration(left_s)} left" if left_s is not None else ""
    bar = ProgressBar(total=history.total_steps, completed=step)
    grid.add_row(f"step {step}/{history.total_steps}", bar, f"{duration(now)}  {left}")
    return grid


def _numbers(history: History, record: StepRecord) -> RenderableType:
    values, rewards = record.values, _rewards(record)
    return Text(
        f"loss {values['train/loss']:.4f} · {f'reward {rewards} · ' if rewards else ''}"
        f"tok/s rollout {_rate(record, 'rollout')}, score {_rate(record, 'score')}, train {_rate(record, 'train')} · "
        f"staleness {values['staleness/max']:.0f} · swaps {sum(history.swaps.values())} · "
        f"{values['memory/peak_gb']:.1f} GB"
    )


def _teachers(history: History, record: StepRecord) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("teacher")
    for name in ("KL", "token share", "queue age", "swaps"):
        table.add_column(name, justify="right")
    for name in history.teachers:
        age = record.values.get(f"teacher/queue_age_s/{name}")
        table.add_row(
            name,
            _kl(record, name),
            percent(record.values.get(f"teacher/token_share/{name}")),
            "–" if age is None else f"{age:.1f} s",
            str(history.swaps.get(name, 0)),
        )
    return table


def _phases(history: History, now: float) -> RenderableType:
    """Where the time went: the share of the run in which each kind of work was going on."""
    busy = history.timeline.seconds()
    shares = [f"{kind} {100 * busy.get(kind, 0.0) / now:.0f} %" if now > 0 else kind for kind in PHASES]
    return Text("busy  " + " · ".join(shares), style="cyan")


def _accuracies(history: History) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("domain")
    for name in ("base", "teacher", "student"):
        table.add_column(name, justify="right")
    for row in history.domains():
        table.add_row(row.domain, percent(row.base), percent(row.teacher), percent(row.student))
    return table
