"""The run in numbers: result.json and the table that ends the run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from distill.observe.history import History

RESULT_FILE = "result.json"
REPORT_FILE = "report.html"


def summary(history: History, status: str, *, wall_s: float, run_dir: Path, export_dir: Path | None) -> dict[str, Any]:
    """What result.json holds. Accuracies are shares; what was not measured is null."""
    counters = history.counters
    busy = history.timeline.seconds()
    return {
        "status": status,
        "run": history.run_name,
        "steps": counters.version,
        "version": counters.version,
        "domains": {
            row.domain: {"base": row.base, "teacher": row.teacher, "student": row.student} for row in history.domains()
        },
        "teachers": {
            name: {
                domain: mark
                for domain in history.domain_teachers
                if (mark := history.accuracy(name, domain)) is not None
            }
            for name in history.teachers
        },
        "kl": {
            row.domain: {"first": curve[0][1], "last": curve[-1][1]}
            for row in history.domains()
            if (curve := history.curve(row.domain, "kl"))
        },
        "weight_updates": counters.weight_updates,
        "teacher_swaps": sum(history.swaps.values()),
        "swaps": dict(history.swaps),
        "slots": {
            **asdict(history.slots),
            "stall_share": history.slots.stall_share,
            "cache_hit_share": history.slots.cache_hit_share,
        },
        "max_staleness_seen": counters.max_staleness,
        "samples": counters.samples,
        "tokens": counters.tokens,
        "quarantined": {
            "samples": sum(history.quarantined.values()),
            "teachers": {name: count for name, count in history.quarantined.items() if name},
        },
        "wall_s": wall_s,
        "busy_s": busy,
        "overlap": history.timeline.overlap() / wall_s if wall_s > 0 else 0.0,
        "peak_memory_gb": counters.peak_memory_bytes / 1e9,
        "export_dir": str(export_dir) if export_dir else None,
        "run_dir": str(run_dir),
    }


def write_result(run_dir: Path, result: dict[str, Any]) -> Path:
    """Write result.json at once or not at all."""
    path = run_dir / RESULT_FILE
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def final_table(history: History, result: dict[str, Any]) -> Table:
    """What the run ends with: a row a domain."""
    table = Table(title=f"{history.run_name}: {result['status']} after {result['steps']} steps", title_justify="left")
    table.add_column("domain")
    for name in ("base", "teacher", "student", "student / teacher"):
        table.add_column(name, justify="right")
    for row in history.domains():
        teacher = f"{percent(row.teacher)} ({row.teacher_name})" if row.teacher is not None else "–"
        table.add_row(row.domain, percent(row.base), teacher, percent(row.student), percent(row.ratio))
    return table


def closing_lines(result: dict[str, Any]) -> list[str]:
    """What stands below the table: the run in a line, and where everything is."""
    return [*([] if ended_early(result) else _figures(result)), *_places(result)]


def ended_early(result: dict[str, Any]) -> bool:
    """The run ended before it had learnt or measured anything: it has no figures to show."""
    marks = [mark for row in result["domains"].values() for mark in row.values()]
    return result["status"] != "done" and not result["steps"] and all(mark is None for mark in marks)


def _figures(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['weight_updates']} weight updates, {result['teacher_swaps']} teacher swaps, "
        f"{result['samples']} samples, {result['tokens']} tokens in {result['wall_s']:.0f} s; "
        f"{percent(result['overlap'])} of it overlapped; peak {result['peak_memory_gb']:.2f} GB"
    ]
    slots = result["slots"]
    if slots["loads"]:
        lines.append(
            f"teacher slots: {slots['load_bytes'] / 1e9:.3g} GB loaded in {slots['load_s']:.1f} s, "
            f"{percent(slots['stall_share'])} of the time in which a teacher was wanted stood still"
        )
    if slots["cache_tokens_found"]:
        lines.append(
            f"score cache: {slots['cache_requests_found']} of {slots['cache_requests']} samples were found whole, "
            f"{percent(slots['cache_hit_share'])} of the tokens had not to be scored again"
        )
    lines += [f"{count} samples went on without teacher {name}" for name, count in slots["dropped"].items()]
    lines += [
        f"KL to the teacher, {domain}: {ends['first']:.4f} -> {ends['last']:.4f} nat"
        for domain, ends in result["kl"].items()
    ]
    quarantined = result["quarantined"]["samples"]
    if quarantined:
        lines.append(f"{quarantined} samples could not be used and were set aside: quarantine.jsonl says why")
    if not result["domains"]:
        lines.append("evaluation.data names no held-out prompts: accuracy was not measured")
    return lines


def _places(result: dict[str, Any]) -> list[str]:
    folder = Path(result["run_dir"])
    student = [f"student  {result['export_dir']}"] if result["export_dir"] else []
    return [
        *student,
        f"result   {folder / RESULT_FILE}",
        f"metrics  {folder / 'metrics.jsonl'}",
        f"report   {folder / REPORT_FILE}",
    ]
