"""What the benchmarks share: a fresh process a case, peak memory, the machine's line, tables and a plot."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
MB = 1e6
LAST_WORDS = 12
"""Lines of a failed process's messages that are shown."""


def run_case(module: str, case: Mapping[str, Any], *, threads: int, python: str = sys.executable) -> dict[str, Any]:
    """Run `python -m module --case JSON` in a fresh process; its result is the JSON on the last line it prints."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-m", module, "--case", json.dumps(dict(case))],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = "\n".join(done.stderr.splitlines()[-LAST_WORDS:])
        raise SystemExit(f"error: {module} ended with {done.returncode}, the case was {_brief(case)}:\n{words}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _brief(case: Mapping[str, Any]) -> str:
    """The case without its lists of numbers."""
    return ", ".join(
        f"{name} of {len(value)}" if isinstance(value, list | dict) else f"{name}={value}"
        for name, value in case.items()
    )


def require_packages(python: str, packages: Sequence[str], *, install: str) -> None:
    """End the benchmark when this interpreter does not run, or lacks one of the packages; imports none of them."""
    code = "import sys, importlib.util as u; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
    try:
        done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"error: {python} does not run as a Python interpreter: {error}") from error
    if missing := done.stdout.split():
        raise SystemExit(
            f"error: {python} lacks {', '.join(missing)}\n  fix: {python} -m pip install {install}, "
            "or name the interpreter of an environment that has them"
        )


class Turns:
    """A line on standard error for each process that a benchmark starts: how many of them, and since when."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._started = 0
        self._began = time.monotonic()

    def start(self, what: str) -> None:
        self._started += 1
        seconds = round(time.monotonic() - self._began)
        clock = f"{seconds // 60:02d}:{seconds % 60:02d}"
        print(f"[{clock}] {self._started} of {self._total}: {what}", file=sys.stderr, flush=True)


class PeakMemory:
    """The largest resident memory of this process between `start` and `stop`, above what it held at the start (Linux).

    The kernel's own high-water mark is reset and read, so nothing is missed between two samples.
    """

    def start(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed, and would be used again without being seen
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def stop(self) -> int:
        """Bytes above the start."""
        return _status("VmHWM") - self._before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}: peak memory is measured on Linux only")


def machine_line(threads: int, packages: Sequence[str] = ("torch",)) -> str:
    """One line that a figure needs beside it."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GB; Python {platform.python_version()}, {versions}; "
        f"{threads} threads; load average at the start {load}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], unit: str = "s") -> str:
    """Median, and the smallest and largest in brackets."""
    return f"{median(values):.3g} {unit} [{min(values):.3g}, {max(values):.3g}]"


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, aligned to be read as it is."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print(f"\n{title}\n")
    for line in [head, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    sys.stdout.flush()


def write_plot(
    path: Path,
    panels: Sequence[tuple[str, str, Mapping[str, Sequence[tuple[float, float]]]]],
    *,
    y_label: str,
) -> None:
    """An SVG of log-log line charts side by side: panels of (title, x label, name -> points)."""
    width, height, margin = 420, 300, 55
    colours = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(panels)}" height="{height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (title, x_label, series) in enumerate(panels):
        points = [point for line in series.values() for point in line]
        xs, ys = _Axis([x for x, _ in points]), _Axis([y for _, y in points])
        left, top, right, bottom = number * width + margin, 30, (number + 1) * width - 15, height - 45

        def place(x: float, y: float, xs: _Axis = xs, ys: _Axis = ys, box: Any = (left, top, right, bottom)) -> str:
            x0, y0, x1, y1 = box
            return f"{x0 + xs.at(x) * (x1 - x0):.1f},{y1 - ys.at(y) * (y1 - y0):.1f}"

        out.append(f'<text x="{left}" y="18" font-weight="bold">{escape(title)}</text>')
        out.append(f'<text x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>')
        out.append(f'<text x="{left - 45}" y="{top - 2}">{escape(y_label)}</text>')
        out.append(f'<polyline points="{left},{top} {left},{bottom} {right},{bottom}" fill="none" stroke="#888"/>')
        for x in sorted({x for x, _ in points}):
            at = place(x, ys.low).split(",")[0]
            out.append(f'<text x="{at}" y="{bottom + 14}" text-anchor="middle">{x:g}</text>')
        for y in (ys.low, (ys.low * ys.high) ** 0.5, ys.high):
            at = place(xs.low, y).split(",")[1]
            out.append(f'<text x="{left - 5}" y="{at}" text-anchor="end">{y:.2g}</text>')
        for colour, (name, line) in zip(colours, series.items(), strict=False):
            path_points = " ".join(place(x, y) for x, y in line)
            out.append(f'<polyline points="{path_points}" fill="none" stroke="{colour}" stroke-width="2"/>')
            out += [
                f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>'
                for p in path_points.split()
            ]
            legend = top + 14 * (1 + list(series).index(name))
            out.append(f'<text x="{left + 10}" y="{legend}" fill="{colour}">{escape(name)}</text>')
    path.write_text("\n".join([*out, "</svg>"]) + "\n")


class _Axis:
    """A logarithmic axis over the values given."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = min(values), max(values)

    def at(self, value: float) -> float:
        """0 at the smallest value, 1 at the largest."""
        from math import log

        return log(value / self.low) / log(self.high / self.low) if self.high > self.low else 0.5
