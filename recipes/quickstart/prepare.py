"""Make what the quick start needs: a tokenizer, a base, three experts, prompts to train on and held-out ones.

    python prepare.py --output DIR [--seed N]

DIR appears only when it is complete and every figure of `Figures` was measured on the held-out questions. Exit code 1
says which figure was missed. Takes one to two minutes on two idle cores, and longer where a base misses its window and
is made anew. The same seed gives the same files on the same kind of processor.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a process: reproducible, and two experts train side by side
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from domains import DOMAINS, Row, Split, split, write_rows
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from tinymodel import make_model, make_tokenizer
from training import EXPERTS, BaseRecipe, MissedWindow, Report, accuracy, train_base
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

TRIES = 5
PHASES = 3
"""Base, experts, measuring."""
EXPERT_PROCESSES = (("roman",), ("sort", "rev"))
EXPERT_DEADLINE_S = 900.0


@dataclass(frozen=True)
class Figures:
    """What base and experts must reach on held-out questions, so that there is something to merge."""

    base_at_most: float = 0.50
    own_at_least: float = 0.95
    other_at_most: float = 0.70

    def misses(self, base: Mapping[str, float], experts: Mapping[str, Mapping[str, float]]) -> list[str]:
        """A sentence for each figure that was missed."""
        found = [
            f"the base answers {score:.1%} of {domain}; at most {self.base_at_most:.0%} leaves something to learn"
            for domain, score in base.items()
            if score > self.base_at_most
        ]
        for name, scores in experts.items():
            for domain, score in scores.items():
                if domain == name and score < self.own_at_least:
                    found.append(
                        f"expert {name} answers {score:.1%} of its own domain; wanted: {self.own_at_least:.0%}"
                    )
                elif domain != name and score > self.other_at_most:
                    found.append(
                        f"expert {name} answers {score:.1%} of {domain}; wanted: at most {self.other_at_most:.0%}"
                    )
        return found


class Display:
    """What is being made, how far it is and since when: a bar a phase on a terminal, lines elsewhere.

    A line elsewhere stands for the start of a phase, each quarter of it, and its end.
    """

    def __init__(self, phases: int) -> None:
        self._phases = phases
        self._console = Console(stderr=True, highlight=False)
        percent = TextColumn("{task.percentage:>3.0f}%")
        columns = (TextColumn("{task.description}"), BarColumn(), percent, TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._began = time.monotonic()
        self._quarter = 0
        self._name = ""
        self._bar: TaskID | None = None

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        elapsed = round(time.monotonic() - self._began)
        self._console.print(f"[{elapsed // 60:02d}:{elapsed % 60:02d}] {text}", markup=False, soft_wrap=True)

    def phase(self, number: int, name: str) -> None:
        """From here on this is done; a phase that comes again begins at 0."""
        self._name, self._quarter = f"{number} of {self._phases}, {name}", 0
        if not self._console.is_terminal:
            self.say(f"{self._name}: begins")
        self._bar = self._bars.add_task(self._name, total=None)

    def advance(self, done: int, total: int) -> None:
        assert self._bar is not None
        self._bars.update(self._bar, completed=done, total=total)
        quarter = 4 * done // total
        if not self._console.is_terminal and self._quarter < quarter < 4:
            self.say(f"{self._name}: {100 * done // total}%")
        self._quarter = quarter

    def end(self, how: str) -> None:
        """The phase is over: what came of it, or why it was not enough."""
        assert self._bar is not None
        self._bars.remove_task(self._bar)
        self.say(f"{self._name}: {how}")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_base(root: Path, splits: Mapping[str, Split], seed: int, report: Report) -> None:
    """Train a base into its window and save it. Raises MissedWindow."""
    tokenizer = make_tokenizer()
    model = make_model(seed)
    train_base(model, tokenizer, splits, seed, BaseRecipe(), report)
    save(model, tokenizer, root / "base")


def make_experts(root: Path, seed: int, data_seed: int, report: Report) -> None:
    """Train the experts in two processes. Raises RuntimeError, with the process's own words, when one fails."""
    options = ["--root", str(root), "--seed", str(seed), "--data-seed", str(data_seed)]
    done, total = dict.fromkeys(EXPERTS, 0), sum(recipe.steps for recipe in EXPERTS.values())
    one_at_a_time = threading.Lock()

    def count(expert: str, steps: int) -> None:
        with one_at_a_time:
            done[expert] = steps
            report(sum(done.values()), total)

    workers = [_Worker(names, options, count) for names in EXPERT_PROCESSES]
    deadline = time.monotonic() + EXPERT_DEADLINE_S
    try:
        for worker in workers:
            worker.finish(deadline)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


class _Worker:
    """One process of experts.py: it counts an expert's steps that are done, and its errors are kept."""

    def __init__(self, names: tuple[str, ...], options: list[str], count: Callable[[str, int], None]) -> None:
        self._names = names
        self._count = count
        self._errors: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("experts.py")), *names, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._progress, self._complaints)]
        for reader in self._readers:
            reader.start()

    def _progress(self) -> None:
        for line in self.process.stdout or ():
            event: dict[str, Any] = json.loads(line)
            self._count(event["expert"], event["done"])

    def _complaints(self) -> None:
        self._errors.extend(self.process.stderr or ())

    def finish(self, deadline: float) -> None:
        code = self.process.wait(timeout=max(1.0, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join(timeout=5.0)
        if code != 0:
            raise RuntimeError(
                f"training of {', '.join(self._names)} ended with {code}:\n" + "".join(self._errors[-20:])
            )


def measure(folder: Path, tokenizer: PreTrainedTokenizerFast, splits: Mapping[str, Split]) -> dict[str, float]:
    """Accuracy of a saved model on the held-out questions of every domain."""
    rows: list[Row] = [each.domain.row(question) for each in splits.values() for question in each.held_out]
    return accuracy(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer, rows)


def percents(scores: Mapping[str, float]) -> str:
    return "  ".join(f"{domain} {score:.1%}" for domain, score in scores.items())


def make_models(
    root: Path, splits: Mapping[str, Split], seed: int, data_seed: int, display: Display
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """One try at base and experts: accuracies by model, and what they miss. What misses leaves out what comes later."""
    tokenizer = make_tokenizer()
    display.phase(1, f"base of seed {seed}, {BaseRecipe().most_steps} steps at most")
    try:
        make_base(root, splits, seed, display.advance)
    except MissedWindow as missed:
        display.end("missed its window")
        return {}, [str(missed)]
    base = measure(root / "base", tokenizer, splits)
    display.end(percents(base))
    if misses := Figures().misses(base, {}):
        return {}, misses
    display.phase(2, f"experts {', '.join(EXPERTS)} from this base")
    make_experts(root, seed, data_seed, display.advance)
    display.end("trained")
    display.phase(3, "experts on held-out questions")
    experts: dict[str, dict[str, float]] = {}
    for name in EXPERTS:
        experts[name] = measure(root / "experts" / name, tokenizer, splits)
        display.advance(len(experts), len(EXPERTS))
    display.end("  ".join(f"{name} {scores[name]:.1%}" for name, scores in experts.items()) + ", each of its own")
    return {"base": base, **experts}, Figures().misses(base, experts)


def make_all(root: Path, seed: int, display: Display) -> dict[str, Any]:
    """Fill `root` and return the manifest. A base or an expert that misses a figure is made again with another seed."""
    splits = {name: split(domain, seed) for name, domain in DOMAINS.items()}
    make_tokenizer().save_pretrained(root / "tokenizer")
    for name, each in splits.items():
        write_rows(root / "train" / f"{name}.jsonl", each.domain, each.train)
        write_rows(root / "heldout" / f"{name}.jsonl", each.domain, each.held_out)
    misses: list[str] = []
    for attempt in range(TRIES):
        if misses:
            display.say(f"try {attempt + 1} of {TRIES}, with another seed, because {'; '.join(misses)}")
        model_seed = seed + 1000 * attempt
        accuracies, misses = make_models(root, splits, model_seed, seed, display)
        if not misses:
            return {"seed": seed, "model_seed": model_seed, "accuracy": accuracies}
    raise SystemExit(
        f"the quick start's models missed their figures with {TRIES} seeds; with the last one:\n  "
        + "\n  ".join(misses)
        + "\nfix: run prepare.py with another --seed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quick start's tokenizer, base, experts and prompts.")
    parser.add_argument("--output", type=Path, required=True, help="folder to fill; an older one is replaced")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    output: Path = args.output.resolve()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    began = time.monotonic()
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with Display(PHASES) as display:
        display.say(f"preparing the quick start's base and experts in {output}: once, a minute or two")
        manifest = make_all(partial, args.seed, display)
    manifest["seconds"] = round(time.monotonic() - began, 1)
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)
    for model, scores in manifest["accuracy"].items():
        print(f"{model:>6}: {percents(scores)}")


if __name__ == "__main__":
    main()
