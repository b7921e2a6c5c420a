"""The order in which a configuration is held against the world. `inspect` stops at the first thing that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill.config import RunConfig, TeacherConfig
from distill.errors import ConfigError, StudentError, TeacherError
from distill.modeling.adapter_settings import adapter_settings
from distill.objectives.build import build_objective
from distill.preflight import machine
from distill.preflight.data import Prompts, load_prompts, prompts_needed
from distill.preflight.folder import ModelFolder, existing_folder, inspect_folder, read_json
from distill.preflight.foreign import check_alignment
from distill.preflight.full_rows import FullRows, choose_full_rows
from distill.preflight.lora import check_targets
from distill.preflight.memory import Holding, check_host, holdings, round_up, slot_budget
from distill.preflight.parts import check_parts
from distill.preflight.programs import check_loss_kernel, check_programs
from distill.preflight.readers import make_readers
from distill.preflight.remote import TeacherElsewhere, look_at_servers, notes_on, teacher_elsewhere
from distill.preflight.vocabulary import (
    Vocabularies,
    Vocabulary,
    check_ends,
    check_rows,
    check_same,
    end_ids,
    foreign_notes,
    load_foreign,
    load_vocabulary,
)
from distill.protocols import Objective
from distill.run_folder import foresee
from distill.teacher_manager import Reader
from distill.weights.costs import ADAPTER_CONFIG, costs_of, is_adapter
from distill.weights.files import SPELLING

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TeacherFolder:
    """A teacher on disk."""

    name: str
    folder: Path
    base: Path | None
    """What its adapter stands on; None for a whole model."""
    model: ModelFolder
    """Of an adapter: that of its base."""
    tokenizer: Path
    slot_bytes: int
    """Of a slot while it is resident, its base included, in the servers' dtype."""
    stream_bytes: int | None
    """Of a slot while it is streamed; None: it cannot be."""
    foreign: bool
    """Its tokenizer is said to be another than the student's."""


@dataclass(frozen=True)
class Models:
    student: ModelFolder
    student_tokenizer: Path
    teachers: Mapping[str, TeacherFolder]
    context_length: int
    """Tokens that the student and every teacher can read."""
    tightest: str
    """Which setting that limit comes from."""
    slot_bytes: int
    """Byte budget of a slot; 0 where no teacher needs one."""
    elsewhere: Mapping[str, TeacherElsewhere] = field(default_factory=dict[str, TeacherElsewhere])
    """The teachers that are no folders."""


@dataclass(frozen=True)
class Preflight:
    """What is known of a run that may start."""

    models: Models
    vocabulary: Vocabulary
    vocab_size: int
    """V: every log-probability is over ids below it, but for teachers with another tokenizer."""
    teacher_vocab_sizes: Mapping[str, int]
    translations: Mapping[str, Reader]
    """For each teacher that does not read the student's ids: it has another tokenizer, or a context of its own."""
    end_ids: tuple[int, ...]
    prompts: Prompts
    objective: Objective
    full_rows: FullRows
    disk_bytes: int
    notes: tuple[str, ...]
    """What a careful user wants to know though nothing is wrong."""
    plan: Plan


@dataclass(frozen=True)
class Plan:
    """What the run will do, as far as arithmetic tells."""

    steps: int
    samples: int
    prompts: int
    epochs: float
    max_tokens: int
    """Upper bound of the response tokens."""
    swaps_per_step: int
    """Teachers beyond the slots: a scheduler that goes through them in turn and back loads so many a step."""
    update_bytes: int
    """Weights sent after each step, to all rollout servers together, when nothing is compressed."""


def inspect(config: RunConfig) -> Preflight:
    """Raises the DistillError of the first thing that is wrong: ConfigError, EnvironmentFault, TeacherError, ..."""
    notes = inspect_early(config)
    models = inspect_models(config)
    vocabularies = inspect_vocabularies(models)
    vocabulary = vocabularies.student
    notes += vocabularies.notes
    notes += [note for model, size in heads(models, vocabularies) if (note := check_rows(model, size))]
    objective = inspect_objective(config, vocabularies)
    models = inspect_servers(config, models, vocabularies, objective)
    notes += notes_on(config, models.elsewhere)
    prompts = inspect_prompts(config, models, vocabulary)
    notes += prompts.notes
    note = check_loss_kernel(config, objective)
    notes += [note] if note else []
    translations = make_readers(config, models, vocabularies, prompts)
    check_writers(config, models)
    check_memory(config, models)
    needed = machine.check_disk(config, models.student.parameters)
    machine.check_ports(config)
    return Preflight(
        models=models,
        vocabulary=vocabulary,
        vocab_size=vocabulary.size,
        teacher_vocab_sizes={name: vocabularies.of(name).size for name in config.teachers},
        translations=translations,
        end_ids=vocabularies.end_ids,
        prompts=prompts,
        objective=objective,
        full_rows=choose_full_rows(config, objective.spec, vocabulary.size),
        disk_bytes=needed,
        notes=tuple(notes),
        plan=make_plan(config, models, prompts),
    )


def inspect_early(config: RunConfig) -> list[str]:
    """What can be told before a recipe has made its models and prompts. Returns notes; raises as `inspect` does."""
    check_parts(config)
    build_objective(config.objective)
    notes = [foresee(config).note, warmup_note(config), check_programs(config)]
    return [note for note in notes if note]


def warmup_note(config: RunConfig) -> str:
    """Empty where the learning rate has its peak before the last step."""
    student, steps = config.student, config.trainer.steps
    if student.warmup_steps < steps:
        return ""
    reached = (
        "reaches its peak in the last step only"
        if student.warmup_steps == steps
        else f"never reaches its peak: {student.lr * steps / student.warmup_steps:.3g} at most"
    )
    return f"student.warmup_steps is {student.warmup_steps}, and trainer.steps {steps}: the learning rate {reached}"


def inspect_models(config: RunConfig) -> Models:
    """Student and teachers: folders whole, layers for LoRA there, context and slot budget sufficient."""
    student = inspect_folder(config.student.model, "student.model", StudentError)
    if config.student.lora is not None and config.student.backend == "hf":
        check_targets(config.student.lora, student)
    teachers = {
        name: _teacher(name, teacher.model, teacher, config)
        for name, teacher in config.teachers.items()
        if teacher.model is not None
    }
    limits = {model.role: model.context_length for model in (student, *(each.model for each in teachers.values()))}
    tightest = min(limits, key=lambda role: limits[role])
    context = limits[tightest]
    if config.server.context_length is not None:
        if config.server.context_length > context:
            raise ConfigError(
                f"server.context_length is {config.server.context_length}, and {tightest} can read {context} tokens",
                fix=f"set it to {context} or less, or leave it out",
            )
        tightest, context = "server.context_length", config.server.context_length
    return Models(
        student=student,
        student_tokenizer=config.student.tokenizer or config.student.model,
        teachers=teachers,
        context_length=context,
        tightest=tightest,
        slot_bytes=slot_budget(
            config,
            teachers,
            {name: each.stream_bytes for name, each in teachers.items() if each.stream_bytes is not None},
        ),
        elsewhere={
            name: teacher_elsewhere(name, teacher)
            for name, teacher in config.teachers.items()
            if teacher.url is not None
        },
    )


def inspect_servers(config: RunConfig, models: Models, vocabularies: Vocabularies, objective: Objective) -> Models:
    """`models` with what the servers of teachers elsewhere say of themselves, once each has been asked."""
    rooms = look_at_servers(config, models.elsewhere, vocabularies, objective.spec)
    places = {name: replace(place, context_length=rooms[name]) for name, place in models.elsewhere.items()}
    # a server that scores has to write a token behind
    limits = [(room - 1, name) for name, room in rooms.items() if room is not None and not places[name].foreign]
    context, tightest = models.context_length, models.tightest
    if limits and min(limits)[0] < context:
        context, tightest = min(limits)[0], f"teachers.{min(limits)[1]}.url"
    return replace(models, elsewhere=places, context_length=context, tightest=tightest)


def inspect_vocabularies(models: Models) -> Vocabularies:
    """The student's vocabulary, once every teacher is known to share it or to be compared by its text."""
    vocabulary = load_vocabulary(models.student_tokenizer, "student")
    ends = end_ids(models.student.path, vocabulary)
    if not ends:
        raise ConfigError(
            "student: its tokenizer has no end token",
            why="every answer would run to rollout.max_new_tokens, and the student could not learn to stop",
            fix="set eos_token in tokenizer_config.json",
        )
    notes: list[str] = []
    foreign: dict[str, Vocabulary] = {}
    for name, teacher in {**models.teachers, **models.elsewhere}.items():
        role = f"teachers.{name}"
        folder = teacher.model.path if isinstance(teacher, TeacherFolder) else teacher.tokenizer
        if teacher.foreign:
            foreign[name] = load_foreign(vocabulary, teacher.tokenizer, role)
            notes += foreign_notes(foreign[name], end_ids(folder, foreign[name]), role)
            continue
        own = check_same(vocabulary, models.student_tokenizer, teacher.tokenizer, role)
        note = check_ends(vocabulary, ends, end_ids(folder, own), role, models.student.path)
        notes += [note] if note else []
    return Vocabularies(vocabulary, ends, foreign, tuple(notes))


def inspect_prompts(config: RunConfig, models: Models, vocabulary: Vocabulary) -> Prompts:
    return load_prompts(config, vocabulary.tokenizer, models.context_length, models.tightest)


def inspect_objective(config: RunConfig, vocabularies: Vocabularies) -> Objective:
    """The objective with its settings; it asks for no more ids than there are, and of no teacher what it cannot use."""
    objective = build_objective(config.objective)
    check_alignment(config, list(vocabularies.foreign), objective)
    size = vocabularies.student.size
    if objective.spec.k > size:
        topk = [f"objective.{name}" for name in ("support", "k", "form") if name in config.objective.options]
        raise ConfigError(
            f"objective.k is {objective.spec.k}, and the vocabulary has {size} ids",
            fix=f"set objective.k={size} or less"
            + (f"; or compare the whole vocabulary: remove {' and '.join(topk)}" if topk else ""),
        )
    return objective


def check_writers(config: RunConfig, models: Models) -> None:
    """Raises ConfigError for a teacher that is to write for an evaluation, and can only be streamed."""
    if not config.evaluation.data or not (config.evaluation.teachers or config.evaluation.kl):
        return
    for name, teacher in models.teachers.items():
        if teacher.slot_bytes > models.slot_bytes:
            raise ConfigError(
                f"teachers.{name} has {teacher.slot_bytes} bytes of weights, and a slot holds {models.slot_bytes}: it "
                "is streamed layer by layer, and cannot write answers for an evaluation",
                why="writing goes token by token, and would read all weights for each of them",
                fix=f"set teacher_manager.slot_gb={round_up(teacher.slot_bytes / 1e9):g} or more, or "
                "evaluation.teachers=false and evaluation.kl=false",
            )


def check_memory(config: RunConfig, models: Models) -> int:
    """Bytes of this machine's memory that weights will take. Raises EnvironmentFault when it has less."""
    held = holdings(config, models.student, models.slot_bytes, ITEMSIZE[config.server.dtype])
    if config.teacher_manager.host_gb:
        held.append(Holding("host memory for teachers", round(config.teacher_manager.host_gb * 1e9)))
    if config.teacher_manager.cache_mb and config.trainer.max_staleness:
        held.append(Holding("score cache", round(config.teacher_manager.cache_mb * 1e6)))
    return check_host(config, held)


def make_plan(config: RunConfig, models: Models, prompts: Prompts) -> Plan:
    trainer, needed = config.trainer, prompts_needed(config)
    samples = trainer.steps * trainer.batch_size
    return Plan(
        steps=trainer.steps,
        samples=samples,
        prompts=needed,
        epochs=needed / prompts.stream.prompts_per_epoch,
        max_tokens=samples * config.rollout.max_new_tokens,
        swaps_per_step=max(0, len(models.teachers) - config.teacher_manager.slots),
        update_bytes=models.student.loaded_bytes(ITEMSIZE[config.server.dtype]) * config.rollout.servers,
    )


def heads(models: Models, vocabularies: Vocabularies) -> list[tuple[ModelFolder, int]]:
    """Every model with the number of ids of its tokenizer."""
    teachers = [(teacher.model, vocabularies.of(name).size) for name, teacher in models.teachers.items()]
    return [(models.student, vocabularies.student.size), *teachers]


def _teacher(name: str, model_folder: Path, teacher: TeacherConfig, config: RunConfig) -> TeacherFolder:
    role = f"teachers.{name}"
    folder = existing_folder(model_folder, f"{role}.model")
    base = _base_of(folder, teacher, config, role)
    model = inspect_folder(base or folder, f"{role}.{'base' if base else 'model'}", TeacherError)
    own_tokenizer = base is None or (folder / "tokenizer_config.json").is_file()
    slot_bytes, stream_bytes = _room_in_slot(folder, base, model, config)
    return TeacherFolder(
        name=name,
        folder=folder,
        base=base,
        model=model,
        tokenizer=teacher.tokenizer or (folder if own_tokenizer else model.path),
        slot_bytes=slot_bytes,
        stream_bytes=stream_bytes,
        foreign=teacher.alignment is not None,
    )


def _room_in_slot(folder: Path, base: Path | None, model: ModelFolder, config: RunConfig) -> tuple[int, int | None]:
    """Bytes of a slot that it takes resident, with its base, and streamed; None: it cannot be."""
    if config.server.program != "embedded":
        return model.loaded_bytes(ITEMSIZE[config.server.dtype]), None
    dtype = SPELLING[config.server.dtype]
    costs = costs_of(folder, dtype, base)
    under = costs_of(base, dtype).bytes if base else 0
    return costs.bytes + under, costs.stream_bytes


def _base_of(folder: Path, teacher: TeacherConfig, config: RunConfig, role: str) -> Path | None:
    """The folder under a LoRA adapter; None for a whole model. Raises ConfigError for a base that would be ignored, and
    for an adapter without one or on servers that hold whole models."""
    if not is_adapter(folder):
        if teacher.base is not None:
            raise ConfigError(
                f"{role}.base: {teacher.base} would be ignored: {folder} is a whole model, without {ADAPTER_CONFIG}",
                fix=f"remove {role}.base",
            )
        return None
    named = read_json(folder / ADAPTER_CONFIG, role).get("base_model_name_or_path")
    if config.server.program != "embedded":
        raise ConfigError(
            f"{role}: {folder} is a LoRA adapter{f' over {named}' if named else ''}, which a server of "
            f"{config.server.program} is not given",
            why="there a teacher is a whole model whose weights are checked against its files after each load",
            fix="set server.program=embedded, or merge it into its base (peft: merge_and_unload, save_pretrained)",
        )
    base = teacher.base or (Path(named) if named and Path(named).is_dir() else None)
    if base is None:
        raise ConfigError(
            f"{role}: {folder} is a LoRA adapter{f' over {named}, which is no folder here' if named else ''}",
            why="an adapter scores together with its base only",
            fix=f"name the folder of its base in {role}.base",
        )
    adapter_settings(folder)
    return existing_folder(base, f"{role}.base")
