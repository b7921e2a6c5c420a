"""What `--dry-run` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Column, Table

from distill.cli.program import show
from distill.config import RunConfig
from distill.config.compose import LoadedConfig
from distill.preflight import Preflight, TeacherFolder
from distill.run_folder import foresee


def size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def print_plan(loaded: LoadedConfig, preflight: Preflight) -> None:
    """Everything was checked: say what the run will do and what it will cost."""
    config, plan = loaded.config, preflight.plan
    models = preflight.models
    total = sum(teacher.slot_bytes for teacher in models.teachers.values())
    swaps = (
        f"about {plan.swaps_per_step} a step, {plan.swaps_per_step * plan.steps} in the run"
        if plan.swaps_per_step
        else "none"
    )
    epochs = f"{plan.epochs:.2f} epochs of {preflight.prompts.stream.prompts_per_epoch}"
    rows = {
        "file": str(loaded.source),
        "start": _start(config),
        "student": f"{models.student.path} ({models.student.architecture}, {models.student.parameters:,} parameters)",
        "objective": f"{config.objective.name}: {preflight.objective.contract.optimises}",
        "steps": f"{plan.steps:,} of {config.trainer.batch_size} samples, staleness <= {config.trainer.max_staleness}",
        "samples": f"{plan.samples:,} of {plan.prompts:,} prompts, {epochs}",
        "tokens": f"{plan.max_tokens:,} response tokens at most",
        "longest prompt": f"{preflight.prompts.longest} tokens",
        "context": f"{models.context_length} tokens ({models.tightest})",
        "vocabulary": f"{preflight.vocab_size} ids, tokenizer {preflight.vocabulary.fingerprint[:12]}",
        "teacher slots": f"{config.teacher_manager.slots} of {size(models.slot_bytes)}; teachers take {size(total)}",
        "swaps": swaps,
        "weight update": f"{size(plan.update_bytes)} a step, to {config.rollout.servers} rollout server(s)",
        "disk": f"{size(preflight.disk_bytes)} for checkpoints and export",
        "held-out prompts": ", ".join(f"{name} {len(prompts)}" for name, prompts in preflight.prompts.held_out.items())
        or "none",
    }
    notes = [f"note: {note}" for note in preflight.notes]
    end = "Everything that can be checked without loading a model is right."
    show(_teachers(preflight), _pairs(rows), *notes, end)


def print_unprepared(loaded: LoadedConfig, notes: Sequence[str]) -> None:
    """The recipe's script has not made models and prompts yet: say what the configuration alone tells."""
    config = loaded.config
    assert config.prepare is not None
    rows = {
        "file": str(loaded.source),
        "start": _start(config),
        "student": str(config.student.model),
        "teachers": ", ".join(config.teachers),
        "teacher slots": str(config.teacher_manager.slots),
        "objective": config.objective.name,
        "steps": f"{config.trainer.steps:,} of {config.trainer.batch_size} samples",
        "samples": f"{config.trainer.steps * config.trainer.batch_size:,}",
    }
    end = (
        f"Not made yet: {config.prepare.output}. "
        f"The run first starts {config.prepare.script}, and then checks models and prompts."
    )
    show(_pairs(rows), *(f"note: {note}" for note in notes), end)


def _start(config: RunConfig) -> str:
    """From which step, and in which folder."""
    start = foresee(config)
    if start.folder is None:
        return f"a new run in outputs/{config.run.name}/<time>"
    if start.checkpoint is not None:
        return f"goes on at step {start.checkpoint.step} of {config.trainer.steps} in {start.folder}"
    anew = "; what an earlier try left there is moved to earlier-N" if start.leftovers else ""
    return f"a new run in {start.folder}{anew}"


def _teachers(preflight: Preflight) -> Table:
    table = Table("teacher", Column("model", overflow="fold"), "weights", "of a slot", "prompts")
    for name, teacher in preflight.models.teachers.items():
        share = teacher.slot_bytes / preflight.models.slot_bytes
        count = str(preflight.prompts.rows_per_teacher[name])
        table.add_row(name, escape(_model(teacher)), size(teacher.slot_bytes), f"{share:.0%}", count)
    return table


def _model(teacher: TeacherFolder) -> str:
    return f"{teacher.model.path} ({teacher.model.architecture})"


def _pairs(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
