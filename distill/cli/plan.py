"""What `--dry-run` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from distill.cli.program import show
from distill.config import ObjectiveConfig, RunConfig
from distill.config.compose import LoadedConfig
from distill.config.explain import shown
from distill.config.options import own_settings
from distill.preflight import Preflight, TeacherFolder
from distill.run_folder import allowed_changes, foresee


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
        **_start(config),
        "student": f"{models.student.path} ({models.student.architecture}, {models.student.parameters:,} parameters)",
        **_learning(config),
        "objective": f"{config.objective.name}: {preflight.objective.contract.optimises}",
        **_objective(config.objective),
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
        **_start(config),
        "student": str(config.student.model),
        **_learning(config),
        "teachers": ", ".join(config.teachers),
        "teacher slots": str(config.teacher_manager.slots),
        "objective": config.objective.name,
        **_objective(config.objective),
        "steps": f"{config.trainer.steps:,} of {config.trainer.batch_size} samples",
        "samples": f"{config.trainer.steps * config.trainer.batch_size:,}",
    }
    end = (
        f"Not made yet: {config.prepare.output}. "
        f"The run first starts {config.prepare.script}, and then checks models and prompts."
    )
    show(_pairs(rows), *(f"note: {note}" for note in notes), end)


def _start(config: RunConfig) -> dict[str, str]:
    """From which step, in which folder, and what a run that goes on does otherwise than before."""
    start = foresee(config)
    if start.folder is None:
        return {"start": f"a new run in outputs/{config.run.name}/<time>"}
    if start.checkpoint is None:
        anew = "; what an earlier try left there is moved to earlier-N" if start.leftovers else ""
        return {"start": f"a new run in {start.folder}{anew}"}
    goes_on = f"goes on at step {start.checkpoint.step} of {config.trainer.steps} in {start.folder}"
    differs = "\n".join(map(str, allowed_changes(start.checkpoint, config)))
    return {"start": goes_on} | ({"other than before": differs} if differs else {})


def _learning(config: RunConfig) -> dict[str, str]:
    """How the student trains."""
    student, lora = config.student, config.student.lora
    several = f", {student.parallel or 'fsdp'}" if student.ranks > 1 else ""
    return {
        "student ranks": f"{student.ranks}{several}; {student.dtype} on {student.device}",
        "weights that learn": f"LoRA: {_settings(lora.model_dump())}" if lora else "all",
        "optimizer": f"{student.optimizer}, lr {_schedule(config)}",
        "loss kernel": student.loss_kernel,
    }


def _schedule(config: RunConfig) -> str:
    student = config.student
    warmup = f" after {student.warmup_steps} steps of warm-up" if student.warmup_steps else ""
    falls = f" towards {student.lr * student.lr_final_ratio:g} at step {config.trainer.steps}"
    return f"{student.lr:g}{warmup}, {student.lr_schedule}" + ("" if student.lr_schedule == "constant" else falls)


def _objective(objective: ObjectiveConfig) -> dict[str, str]:
    """Its settings: those of its class, and those that all objectives have."""
    weights, outcome = objective.domain_weights, objective.outcome
    return {
        "its settings": _settings(own_settings(objective)) or "none",
        "reduction": objective.reduction + (f": {_settings(weights)}" if weights else ""),
        "mixture": objective.mixture,
        "outcome": _settings(outcome.model_dump()) if outcome else "none",
    }


def _settings(values: Mapping[str, Any]) -> str:
    """As on the command line."""
    return ", ".join(f"{name}={_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_value(below)}" for name, below in value.items()) + "}"
    return value if isinstance(value, str) else shown(value)


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
