"""Small drawings as inline SVG: lines over steps, lanes over time. Colours are CSS classes of the page (c0 … c8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup, escape

Point = tuple[float, float]
Format = Callable[[float], str]
COLOURS = 8


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve. `style` is a CSS class beside the colour: "" or "dashed" or "dotted"."""

    name: str
    points: Sequence[Point]
    colour: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    start: float
    end: float
    colour: str
    title: str = ""
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    bars: Sequence[Bar]


def colour(index: int) -> str:
    return f"c{index % COLOURS}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that lie in [low, high]; steps are 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """Short, for an axis: 0.02, 1.5, 12k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    return f"{value:.10g}"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Data coordinates -> pixels of one drawing."""

    width: float
    height: float
    x: Point
    y: Point
    left: float = 50
    right: float = 14
    top: float = 10
    bottom: float = 26

    def px(self, value: float) -> float:
        low, high = self.x
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def py(self, value: float) -> float:
        low, high = self.y
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)

    def open(self, label: str) -> str:
        return f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(label)}">'

    def x_axis(self, form: Format, count: int, unit: str, whole: bool) -> Iterable[str]:
        base = self.height - self.bottom
        for value in ticks(*self.x, count):
            if not whole or value == int(value):
                at = self.px(value)
                yield f'<text class="tick" x="{at:.1f}" y="{base + 16:.1f}" text-anchor="middle">{form(value)}</text>'
        yield f'<line class="axis" x1="{self.left}" x2="{self.width - self.right}" y1="{base}" y2="{base}"/>'
        yield f'<text class="tick" x="{self.left - 12}" y="{base + 16:.1f}" text-anchor="end">{escape(unit)}</text>'

    def y_axis(self, form: Format) -> Iterable[str]:
        for value in ticks(*self.y, 4):
            at = self.py(value)
            yield f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield f'<text class="tick" x="{self.left - 6}" y="{at + 4:.1f}" text-anchor="end">{form(value)}</text>'


def line_chart(
    label: str,
    lines: Sequence[Line],
    *,
    form: Format = number,
    x_unit: str = "step",
    y_range: Point | None = None,
    width: float = 560,
    height: float = 220,
) -> Markup:
    """Curves over steps, "" when there is no point. Without `y_range` the axis holds all points and zero."""
    points = [point for line in lines for point in line.points]
    if not points:
        return Markup("")
    frame = _Frame(width, height, _widened([x for x, _ in points]), y_range or _padded([y for _, y in points]))
    parts = [frame.open(label), *frame.y_axis(form), *frame.x_axis(number, 6, x_unit, whole=True)]
    for line in lines:
        parts += _curve(frame, line, form)
    return Markup("".join([*parts, "</svg>"]))


def _curve(frame: _Frame, line: Line, form: Format) -> Iterable[str]:
    if not line.points:
        return
    at = [(frame.px(x), frame.py(min(max(y, frame.y[0]), frame.y[1]))) for x, y in line.points]
    if len(at) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        yield f'<path class="line {line.colour} {line.style}" d="{path}"/>'
    if len(at) <= 40 and not line.style:
        for (x, y), (step, value) in zip(at, line.points, strict=True):
            title = f"{escape(line.name)}: {form(value)} at {number(step)}"
            yield f'<circle class="dot {line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{title}</title></circle>'


def lanes(label: str, rows: Sequence[Lane], start: float, end: float, *, width: float = 1160) -> Markup:
    """Rows of bars over the seconds from `start` to `end`; bars that a pixel cannot part are drawn as one."""
    if not rows or end <= start:
        return Markup("")
    row_height = 26
    frame = _Frame(width, row_height * len(rows) + 34, (start, end), (0, 1), left=120, top=4, bottom=30)
    parts = [frame.open(label)]
    for value in ticks(start, end, 10):
        at = frame.px(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{frame.height - frame.bottom:.1f}"/>')
    for index, row in enumerate(rows):
        top = 4 + index * row_height
        name = f"<title>{escape(row.name)}</title>{escape(_shortened(row.name))}"
        parts.append(f'<text class="lane" x="{frame.left - 10}" y="{top + 17}" text-anchor="end">{name}</text>')
        for bar in _merged(row.bars, start, end, (end - start) / (width - frame.left - frame.right)):
            parts.append(_rectangle(frame, bar, top + 3, row_height - 6))
    parts += frame.x_axis(seconds, 10, "s", whole=False)
    return Markup("".join([*parts, "</svg>"]))


def _rectangle(frame: _Frame, bar: Bar, top: float, height: float) -> str:
    x, wide = frame.px(bar.start), max(frame.px(bar.end) - frame.px(bar.start), 0.8)
    faint = f' opacity="{bar.opacity:.2f}"' if bar.opacity < 1 else ""
    shape = f'class="bar {bar.colour}" x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{height}" rx="2"{faint}'
    return f"<rect {shape}><title>{escape(bar.title)}</title></rect>"


def _merged(bars: Sequence[Bar], start: float, end: float, pixel: float) -> list[Bar]:
    """The bars within the window; those narrower than two pixels join a neighbour of their look within a pixel."""
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        if bar.end < start or bar.start > end:
            continue
        low, high = max(bar.start, start), min(bar.end, end)
        last = found[-1] if found else None
        if last is not None and high - low < 2 * pixel and low - last.end < pixel and _alike(last, bar):
            title = last.title if last.title == bar.title else ""
            found[-1] = replace(last, end=max(last.end, high), title=title)
        else:
            found.append(replace(bar, start=low, end=high))
    return found


def _alike(one: Bar, other: Bar) -> bool:
    return (one.colour, one.opacity) == (other.colour, other.opacity)


def _shortened(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"


def _widened(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _padded(values: Sequence[float]) -> Point:
    low, high = min([0.0, *values]), max([0.0, *values])
    room = 0.05 * (high - low) or 0.5
    return (low - room if low < 0 else 0.0, high + room)
