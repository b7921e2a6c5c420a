"""report.html: the run as one self-contained page, readable with no network. Every drawing is inline SVG."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from distill.observe.history import DomainRow, History
from distill.observe.metrics import Reduction, metric
from distill.observe.progress import duration
from distill.observe.record import Span
from distill.observe.result import REPORT_FILE, percent
from distill.observe.sinks import read_metrics
from distill.observe.svg import Bar, Lane, Line, Point, colour, lanes, line_chart, number
from distill.observe.svg import share as share_tick
from distill.observe.timeline import union

Series = Mapping[str, tuple["array[float]", "array[float]"]]
CURVE_POINTS = 300
SEEN_VISITS = 1_000
SHARE_BARS = 250
WINDOW_STEPS = 8
"""Steps that the zoomed timeline shows, taken from the middle of the spans that are kept."""
PHASE_COLOURS = {"rollout": "c0", "score": "c1", "swap": "c7", "train": "c4", "publish": "c2", "wait_samples": "c8"}


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    note: str
    drawing: Markup
    legend: Sequence[Line] = ()
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    figures: Sequence[Figure]
    columns: int = 2


def write_report(run_dir: Path, history: History, result: Mapping[str, Any], metrics: Path, config_text: str) -> Path:
    """Write report.html into the run's folder. Takes a run of any length, also one that failed at once."""
    path = run_dir / REPORT_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(render(history, result, read_metrics(metrics), config_text), encoding="utf-8")
    partial.replace(path)
    return path


def render(history: History, result: Mapping[str, Any], series: Series, config_text: str) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(percent=percent, duration=duration, nats=lambda value: f"{value:.4f}")
    sections = [
        Section("Accuracy on held-out prompts", _drawn(_accuracy(history)), columns=3),
        Section("Learning", _drawn(_learning(history, series))),
        Section("Time", _drawn(_time(history, result, series))),
    ]
    return environment.get_template("report.html.j2").render(
        result=result,
        rows=history.domains(),
        tiles=_tiles(result),
        sections=[section for section in sections if section.figures],
        events=list(history.events),
        config_text=config_text,
    )


def _drawn(figures: Sequence[Figure]) -> list[Figure]:
    """Those with something to show."""
    return [figure for figure in figures if figure.drawing]


def _tiles(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    quarantined = result["quarantined"]["samples"]
    return [
        ("weight updates", str(result["weight_updates"])),
        ("teacher swaps", str(result["teacher_swaps"])),
        ("slot stall", percent(result["slots"]["stall_share"])),
        *([("score cache hits", percent(hits))] if (hits := result["slots"]["cache_hit_share"]) else []),
        ("overlap", percent(result["overlap"])),
        ("max staleness", str(result["max_staleness_seen"])),
        ("samples", f"{result['samples']:,}"),
        *([("set aside", f"{quarantined:,}")] if quarantined else []),
        ("tokens", number(result["tokens"])),
        ("wall time", duration(result["wall_s"])),
        ("peak memory", f"{result['peak_memory_gb']:.2f} GB"),
    ]


def _accuracy(history: History) -> list[Figure]:
    """One drawing a domain: the student on its way from the base to the teacher."""
    return [_domain_figure(history, row, index) for index, row in enumerate(history.domains())]


def _domain_figure(history: History, row: DomainRow, index: int) -> Figure:
    student: list[Point] = [(float(step), value) for step, value in history.curve(row.domain, "accuracy")]
    last = max([1.0, float(history.counters.version), *(step for step, _ in student)])
    lines = [Line("student", student, colour(index))]
    if row.teacher is not None:
        lines.append(
            Line(f"teacher {row.teacher_name}", [(0, row.teacher), (last, row.teacher)], colour(index), "dashed")
        )
    if row.base is not None:
        lines.append(Line("base", [(0, row.base), (last, row.base)], "c8", "dotted"))
    drawing = line_chart(f"accuracy on {row.domain}", lines, form=share_tick, y_range=(0, 1), width=400, height=210)
    return Figure(row.domain, "", drawing, lines)


def _learning(history: History, series: Series) -> list[Figure]:
    kl_lines = [
        Line(domain, [(float(step), value) for step, value in history.curve(domain, "kl")], colour(index))
        for index, domain in enumerate(row.domain for row in history.domains())
    ]
    staleness = [Line(name, _points(series, f"staleness/{name}"), c) for name, c in (("max", "c0"), ("mean", "c1"))]
    rewarded = sorted(name for name in series if name.startswith("reward/"))
    rewards = [
        Line(name.removeprefix("reward/"), _points(series, name), colour(index)) for index, name in enumerate(rewarded)
    ]
    set_aside = [Line("samples", _points(series, "quarantine/samples"), "c0")] if history.quarantined else []
    loss = [Line("loss", _points(series, "train/loss"), "c0")]
    norm = [Line("gradient norm", _points(series, "train/grad_norm"), "c4")]
    return [
        _lines(
            "KL per teacher",
            "KL(student ‖ teacher) on the student's own samples, nat",
            _per_teacher(history, series, "kl"),
        ),
        _lines(
            "KL on held-out answers", "KL(student ‖ teacher) per domain on the same answers each time, nat", kl_lines
        ),
        *_objective(history, series),
        _lines("Reward", "mean reward of each domain's samples in a step", rewards),
        _lines("Samples set aside", "in each step; quarantine.jsonl says why", set_aside),
        _lines("Loss", "the objective, mean over response tokens", loss),
        _lines("Gradient norm", "before clipping", norm),
        _lines("Staleness", "weight versions that a batch's oldest tokens lag behind", staleness),
        _lines(
            "Token share per teacher",
            "of each batch's response tokens",
            _per_teacher(history, series, "token_share"),
            share=True,
        ),
    ]


def _time(history: History, result: Mapping[str, Any], series: Series) -> list[Figure]:
    phases = [
        Line(kind.replace("_", " for "), _points(series, f"time/{kind}_s"), tone)
        for kind, tone in PHASE_COLOURS.items()
    ]
    rates = [
        Line(kind, _points(series, f"rate/{kind}_tok_s"), PHASE_COLOURS[kind]) for kind in ("rollout", "score", "train")
    ]
    return [
        _pipeline(history, result),
        _residency(history, result),
        _busy(result),
        _lines("Time per phase", "seconds of each step; phases overlap, so they add up to more than the step", phases),
        _lines("Throughput", "tokens per second while that kind of work goes on", rates),
        _lines(
            "Queue age",
            "how long each teacher's oldest waiting sample has waited, s",
            _per_teacher(history, series, "queue_age_s"),
        ),
    ]


def _pipeline(history: History, result: Mapping[str, Any]) -> Figure:
    """What went on at the same time, zoomed to a few steps."""
    start, end = _window(history.spans)
    shown = [span for span in history.spans if span.end >= start and span.start <= end]
    rows = [Lane(kind, _busy_bars(shown, kind)) for kind in ("rollout", "score", "train", "publish")]
    rows += [Lane(name, _visit_bars(history, name, index)) for index, name in enumerate(history.teachers)]
    note = (
        f"{percent(result['overlap'])} of the run's wall time had at least two of rollout, scoring and training busy. "
        f"Seconds since the start; below, which teacher was resident."
    )
    return Figure(
        "Pipeline, a few steps", note, lanes("pipeline", rows if shown else [], start, end), _swap_legend(), wide=True
    )


def _residency(history: History, result: Mapping[str, Any]) -> Figure:
    """Which teacher was resident when; as shares of the time where single stays would be too narrow to see."""
    first = min((visit.start for visit in history.visits), default=0.0)
    last = max((visit.end for visit in history.visits), default=0.0)
    many = len(history.visits) > SEEN_VISITS
    rows = [
        Lane(name, _resident_shares(history, name, index, first, last) if many else _visit_bars(history, name, index))
        for index, name in enumerate(history.teachers)
    ]
    note = "A bar lasts from a teacher's loading to its last scoring."
    if many:
        note = f"The last {len(history.visits)} stays; the fuller the colour, the longer resident."
    note = f"{result['teacher_swaps']} swaps. {note} Seconds since the start."
    return Figure("Swap timeline", note, lanes("swaps", rows, first, last), () if many else _swap_legend(), wide=True)


def _resident_shares(history: History, teacher: str, index: int, first: float, last: float) -> list[Bar]:
    """The window in equal parts, each as opaque as the share of it in which the teacher was resident."""
    stays = union((visit.start, visit.end) for visit in history.visits if visit.teacher == teacher)
    edges = [first + (last - first) * part / SHARE_BARS for part in range(SHARE_BARS + 1)]
    bars: list[Bar] = []
    for low, high in itertools.pairwise(edges):
        resident = sum(end - start for start, end in stays.within(low, high)) / (high - low)
        title = f"{teacher}: resident {percent(resident)} of {low:.0f} to {high:.0f} s"
        bars.append(Bar(low, high, colour(index), title, round(resident, 2)))
    return bars


def _busy(result: Mapping[str, Any]) -> Figure:
    """How long each kind of work went on in the whole run, beside the wall time."""
    rows = [
        Lane(f"{kind}  {_length(seconds)}", [Bar(0, seconds, PHASE_COLOURS.get(kind, "c8"), f"{seconds:.1f} s")])
        for kind, seconds in sorted(result["busy_s"].items(), key=lambda item: -item[1])
    ]
    rows.append(
        Lane(f"wall  {_length(result['wall_s'])}", [Bar(0, result["wall_s"], "c8", f"{result['wall_s']:.1f} s")])
    )
    drawing = lanes(
        "busy seconds", rows if len(rows) > 1 else [], 0, max(bar.end for row in rows for bar in row.bars), width=560
    )
    return Figure("Where the time went", "seconds in which each kind of work was going on", drawing)


def _length(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 1000 else duration(seconds)


def _swap_legend() -> list[Line]:
    return [Line("loading a teacher", (), PHASE_COLOURS["swap"])]


def _busy_bars(spans: Sequence[Span], kind: str) -> list[Bar]:
    merged = union((span.start, span.end) for span in spans if span.kind == kind).within(0, float("inf"))
    return [Bar(low, high, PHASE_COLOURS[kind], f"{kind}: {low:.2f} to {high:.2f} s") for low, high in merged]


def _visit_bars(history: History, teacher: str, index: int) -> list[Bar]:
    bars: list[Bar] = []
    for visit in history.visits:
        if visit.teacher == teacher:
            title = f"{teacher}: {visit.start:.2f} to {visit.end:.2f} s, loaded in {visit.loaded - visit.start:.2f} s"
            bars.append(Bar(visit.loaded, max(visit.end, visit.loaded), colour(index), title))
            bars.append(Bar(visit.start, visit.loaded, PHASE_COLOURS["swap"], title))
    return bars


def _window(spans: Sequence[Span]) -> Point:
    """From the middle of the kept spans, a few training steps; all of them when there are few."""
    steps = [span for span in spans if span.kind == "train"]
    if len(steps) > WINDOW_STEPS:
        first = (len(steps) - WINDOW_STEPS) // 2
        return steps[first].start, steps[first + WINDOW_STEPS - 1].end
    return min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)


def _per_teacher(history: History, series: Series, family: str) -> list[Line]:
    return [
        Line(name, _points(series, f"teacher/{family}/{name}"), colour(index))
        for index, name in enumerate(history.teachers)
    ]


def _objective(history: History, series: Series) -> list[Figure]:
    """A picture for each further metric of the objective."""
    names = dict.fromkeys(name.split("/")[1] for name in series if name.startswith("objective/"))
    return [
        _lines(
            name.replace("_", " ").capitalize(),
            f"of the objective, mean over each teacher's tokens: objective/{name}/…",
            [
                Line(teacher, _points(series, f"objective/{name}/{teacher}"), colour(index))
                for index, teacher in enumerate(history.teachers)
            ],
        )
        for name in names
    ]


def _lines(title: str, note: str, lines: Sequence[Line], *, share: bool = False) -> Figure:
    drawn = [line for line in lines if line.points]
    drawing = line_chart(title, drawn, form=share_tick, y_range=(0, 1)) if share else line_chart(title, drawn)
    return Figure(title, note, drawing, drawn if len(drawn) > 1 else ())


def _points(series: Series, name: str) -> list[Point]:
    """A metric's curve; a long run is made short by the metric's own reduction (a sum becomes a mean per step)."""
    if name not in series:
        return []
    steps, values = (np.asarray(column) for column in series[name])
    if len(steps) <= CURVE_POINTS:
        return [(float(step), float(value)) for step, value in zip(steps, values, strict=True)]
    groups = zip(np.array_split(steps, CURVE_POINTS), np.array_split(values, CURVE_POINTS), strict=True)
    reduce = _REDUCE[metric(name).reduction]
    return [(float(at[-1]), reduce(group)) for at, group in groups]


_REDUCE: dict[Reduction, Callable[[NDArray[np.float64]], float]] = {
    "mean": lambda group: float(group.mean()),
    "sum": lambda group: float(group.mean()),
    "max": lambda group: float(group.max()),
    "last": lambda group: float(group[-1]),
}
