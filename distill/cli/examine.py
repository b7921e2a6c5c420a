"""`distill-run doctor`: the report of `distill.doctor` as a table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distill.cli.program import show
from distill.doctor import Report, look_at_machine, look_at_run

_COLOURS = {"ok": "green", "FAIL": "bold red", "-": "yellow"}


def examine(path: Path | None, overrides: Sequence[str] = ()) -> int:
    """Print the report. Returns 0, or the exit code of the first thing that would stop the run."""
    report = Report()
    watched = sys.stderr is not None and sys.stderr.isatty()
    with Console(stderr=True).status("looking at this machine") if watched else contextlib.nullcontext():
        look_at_machine(report)
        if path is not None:
            look_at_run(report, path, overrides)
    table = Table("", "what", "found", show_lines=bool(report.failed))
    for state, name, text in report.rows:
        table.add_row(f"[{_COLOURS[state]}]{state}[/]", escape(name), escape(text))
    show(table)
    return report.failed[0].exit_code if report.failed else 0
