"""The quick start under other objectives: which reach its figures, and in how many steps.

    python -m benchmarks.quickstart_objectives                  # all of them, one after another
    python -m benchmarks.quickstart_objectives jsd reverse_kl --steps 360

The figure of a domain is reached when the student has 95 % of its teacher's accuracy on held-out questions; a run has
reached its figures when all domains have, at an evaluation and at the end.

A run of 180 steps takes as long as `distill-run`, one to four minutes on two cores; `policy_gradient` has 600. The
first run also prepares the recipe's models, once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import LAST_WORDS, ROOT, Turns, machine_line

REACHED = 0.95
"""Share of the teacher's accuracy."""


@dataclass(frozen=True)
class Variant:
    """One objective, and what of the recipe must fit it."""

    objective: dict[str, Any]
    overrides: tuple[str, ...] = ()
    steps: int = 180
    """The recipe's own, unless the objective is known to need more."""


VARIANTS = {
    "reverse_kl": Variant({"name": "reverse_kl"}),
    "reverse_kl-student_topk": Variant({"name": "reverse_kl", "support": "student_topk", "k": 16, "form": "tail"}),
    "jsd": Variant({"name": "jsd"}),
    "forward_kl-topk": Variant({"name": "forward_kl", "support": "teacher_topk", "k": 8, "form": "tail"}),
    "policy_gradient": Variant({"name": "policy_gradient"}, ("student.lr=5e-4",), steps=600),
}


@dataclass(frozen=True)
class Outcome:
    status: str
    reached_at: int | None
    """The first evaluation at which every domain had reached its figure."""
    shares: dict[str, float]
    """Domain -> accuracy of the student at the end, as a share of its teacher's."""
    wall_s: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="variant", help=f"of {', '.join(VARIANTS)}; default: all")
    parser.add_argument("--steps", type=int, help="optimiser steps of each run; default: what the objective needs")
    parser.add_argument("--seed", type=int, default=0, help="run.seed")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="override for every run")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    console = Console(width=120)
    console.print(machine_line(1))
    settings = ", ".join([f"run.seed={options.seed}", *options.set])
    columns = ("objective", "changed in the recipe", "reached at step", "student / teacher at the end", "run")
    table = Table(*columns, title=f"quick start, {settings}; reached: {REACHED:.0%} of each teacher")
    names = options.variants or list(VARIANTS)
    turns = Turns(len(names))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            steps = options.steps or VARIANTS[name].steps
            changes = [*VARIANTS[name].overrides, f"trainer.steps={steps}"]
            turns.start(f"{name}, {', '.join(changes)}")
            overrides = [*changes, f"run.seed={options.seed}", *options.set]
            found = run(VARIANTS[name].objective, overrides, Path(folder) / name)
            shares = "  ".join(f"{domain} {share:.3f}" for domain, share in found.shares.items())
            reached = f"{found.reached_at} of {steps}" if found.reached_at else f"not in {steps}"
            reached = reached if found.status == "done" else found.status
            table.add_row(name, "\n".join(changes), reached, shares, f"{found.wall_s:.0f} s")
            console.print(f"{name}: {reached}; {shares}")
    console.print(table)


def run(objective: dict[str, Any], overrides: Sequence[str], folder: Path) -> Outcome:
    """One quick start in a process of its own. Ends the benchmark when it fails."""
    command = [sys.executable, "-m", "distill.cli.run", str(ROOT / "recipes" / "quickstart" / "teachers.yaml")]
    settings = [f"objective.{key}={value}" for key, value in objective.items() if key != "name"]
    done = subprocess.run(
        [*command, f"objective={objective['name']}", *settings, f"run.dir={folder}", *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = "\n".join((done.stderr or done.stdout).splitlines()[-LAST_WORDS:])
        raise SystemExit(f"error: the run of {folder.name} ended with {done.returncode}:\n{words}")
    result = json.loads((folder / "result.json").read_text())
    domains = result["domains"]
    shares = {name: domain["student"] / domain["teacher"] for name, domain in domains.items()}
    teachers = {name: domain["teacher"] for name, domain in domains.items()}
    return Outcome(result["status"], first_reached(folder / "metrics.jsonl", teachers), shares, result["wall_s"])


def first_reached(metrics: Path, teachers: dict[str, float]) -> int | None:
    """The first step whose evaluation has every domain at its figure."""
    by_step: dict[int, dict[str, float]] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        for key, value in row.items():
            if key.startswith("eval/accuracy/"):
                by_step.setdefault(row["step"], {})[key.removeprefix("eval/accuracy/")] = value
    for step, accuracy in sorted(by_step.items()):
        if all(accuracy.get(name, 0.0) >= REACHED * teacher for name, teacher in teachers.items()):
            return step
    return None


if __name__ == "__main__":
    main()
