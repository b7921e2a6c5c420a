"""Every check that spans more than one key of a configuration. Pure: no file is opened, no model is looked at.

A check yields findings: (key, what is wrong, what to do). `check` collects those of all checks into one error. What
needs the files that a configuration names is in `distill.preflight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from distill import registry
from distill.config.checks_data import DATA_CHECKS
from distill.config.checks_routing import ROUTING_CHECKS, TARGET
from distill.config.elsewhere import teachers_are_somewhere
from distill.config.explain import Finding, Where, gather, nowhere
from distill.config.models import RunConfig
from distill.config.schema import KeyPath, dotted

LEAST_TEMPERATURE = 1e-6
"""SGLang 0.5.23 and the embedded server."""


def check(config: RunConfig, where: Where = nowhere, others: Sequence[Finding] = ()) -> None:
    """Raises one ConfigError with every finding, `others` included. `where`: the file and line of a key."""
    findings = [*others, *(finding for each in CHECKS for finding in each(config))]
    if findings:
        raise gather(findings, where)


def _names_are_registered(config: RunConfig) -> Iterator[Finding]:
    named: list[tuple[str, str, KeyPath]] = [
        ("objective", config.objective.name, ("objective", "name")),
        ("student", config.student.backend, ("student", "backend")),
        ("server", config.server.program, ("server", "program")),
        ("store", config.store.name, ("store", "name")),
        ("scheduler", config.teacher_manager.scheduler, ("teacher_manager", "scheduler")),
        ("grader", config.evaluation.grader, ("evaluation", "grader")),
    ]
    if config.objective.outcome is not None:
        named.append(("grader", config.objective.outcome.grader, ("objective", "outcome", "grader")))
    named += [("sink", name, ("observe", "sinks", index)) for index, name in enumerate(config.observe.sinks)]
    for kind, name, key in named:
        if ":" in name and not TARGET.fullmatch(name):
            yield key, f"{dotted(key)}: {name!r} does not say where a {kind} is", "write my_package.my_module:Name"
        elif ":" not in name and name not in registry.names(kind):
            yield key, f"{dotted(key)}: there is no {kind} {name!r}", registry.did_you_mean(name, registry.names(kind))


def _slots_have_teachers(config: RunConfig) -> Iterator[Finding]:
    """A slot more than teachers can take a share of a long queue, where servers hold teachers in any number."""
    slots = config.teacher_manager.slots
    teachers = sum(teacher.url is None for teacher in config.teachers.values())
    if config.server.program != "embedded" and slots > max(teachers, 1):
        yield (
            ("teacher_manager", "slots"),
            f"teacher_manager.slots is {slots}, and the number of teachers only {teachers}",
            f"a server of {config.server.program} holds one teacher at a time: set it to {max(teachers, 1)} or less",
        )


def _attached_servers_are_named(config: RunConfig) -> Iterator[Finding]:
    server = config.server
    wanted = {
        "rollout_urls": (server.rollout_urls, config.rollout.servers, "rollout.servers"),
        "teacher_urls": (server.teacher_urls, config.teacher_manager.slots, "teacher_manager.slots"),
    }
    for name, (urls, count, setting) in wanted.items():
        key: KeyPath = ("server", name)
        if server.program != "attach":
            if urls:
                yield (
                    key,
                    f"server.{name} is given, but server.program is {server.program!r}",
                    "set server=attach to use running servers",
                )
            continue
        if len(urls) != count:
            yield key, f"server.{name} names {len(urls)} servers, and {setting} is {count}", "give one URL a server"
        for index, url in enumerate(urls):
            if not re.fullmatch(r"https?://[^\s/]+/?", url):
                yield (
                    (*key, index),
                    f"server.{name}.{index}: {url!r} is not the address of a server",
                    "write http://host:port",
                )
    if server.program == "attach":
        both = set(server.rollout_urls) & set(server.teacher_urls)
        if both:
            yield (
                ("server", "teacher_urls"),
                f"{sorted(both)[0]} is both a rollout and a teacher server",
                "a server holds one model: name different servers",
            )
        for name in ("args", "python"):
            if getattr(server, name):
                yield (
                    ("server", name),
                    f"server.{name} is given, but server.program is 'attach', which starts nothing",
                    "remove it",
                )


def _ports_exist(config: RunConfig) -> Iterator[Finding]:
    servers = config.rollout.servers + config.teacher_manager.slots
    if config.server.port and config.server.port + servers - 1 > 65535:
        yield (
            ("server", "port"),
            f"server.port is {config.server.port}, and {servers} servers take the ports from there on, beyond 65535",
            f"take at most {65536 - servers}, or 0 for free ones",
        )


def _batches_are_whole_prompts(config: RunConfig) -> Iterator[Finding]:
    batch, samples = config.trainer.batch_size, config.rollout.samples_per_prompt
    if batch % samples:
        yield (
            ("trainer", "batch_size"),
            f"trainer.batch_size is {batch}, which is no multiple of rollout.samples_per_prompt ({samples})",
            f"take {max(batch // samples, 1) * samples} or {(batch // samples + 1) * samples}",
        )
    if config.store.capacity is not None and config.store.capacity < batch:
        yield (
            ("store", "capacity"),
            f"store.capacity is {config.store.capacity}, less than one batch ({batch})",
            f"take at least {batch}, or leave it out",
        )


def _folders_are_the_runs_own(config: RunConfig) -> Iterator[Finding]:
    folder, resume = config.run.dir, config.resume
    if folder is not None and folder == folder.parent:
        yield (
            ("run", "dir"),
            f"run.dir is {folder}, the root of the file system",
            "give the run a folder of its own; it writes many files beside one another",
        )
    if folder is not None and resume not in (None, "auto") and folder != Path(resume):
        yield (
            ("resume",),
            f"resume names {resume}, and run.dir is {folder}: one of the two would be ignored",
            "leave run.dir out: a run goes on in its own folder",
        )


def _nothing_is_ignored(config: RunConfig) -> Iterator[Finding]:
    student, observe = config.student, config.observe
    if student.lr_schedule == "constant" and student.lr_final_ratio:
        yield (
            ("student", "lr_final_ratio"),
            f"student.lr_final_ratio is {student.lr_final_ratio:g}, but a constant schedule has no final learning rate",
            "set student.lr_schedule to linear or cosine, or remove it",
        )
    if observe.wandb_project and "wandb" not in observe.sinks:
        yield (
            ("observe", "wandb_project"),
            "observe.wandb_project is given, but wandb is not in observe.sinks",
            "add it there",
        )
    if config.rollout.temperature < LEAST_TEMPERATURE:
        yield (
            ("rollout", "temperature"),
            f"rollout.temperature is {config.rollout.temperature:g}, and what is below {LEAST_TEMPERATURE:g} is taken "
            "for 0 by servers: they write greedily, and report the probabilities of temperature 1",
            "take a larger one; 1 samples from the student itself",
        )
    if config.rollout.top_k == 0:
        yield ("rollout", "top_k"), "rollout.top_k is 0, which leaves no token to draw", "-1 draws from all of them"
    for index, beta in enumerate(student.betas):
        if not 0 <= beta < 1:
            yield (
                ("student", "betas", index),
                f"student.betas.{index} must be in [0, 1), and is {beta:g}",
                "AdamW's own are 0.9 and 0.999",
            )


def _scores_on_disk_have_been_in_memory(config: RunConfig) -> Iterator[Finding]:
    manager = config.teacher_manager
    if manager.cache_folder is not None and not manager.cache_disk_gb:
        yield (
            ("teacher_manager", "cache_folder"),
            "teacher_manager.cache_folder is given, but teacher_manager.cache_disk_gb is 0: nothing is written there",
            "say how much the folder may hold, or remove it",
        )
    if manager.cache_disk_gb and not manager.cache_mb:
        yield (
            ("teacher_manager", "cache_disk_gb"),
            f"teacher_manager.cache_disk_gb is {manager.cache_disk_gb:g}, but teacher_manager.cache_mb is 0: scores "
            "come to the disk when memory has no room for them",
            "give it some memory; 256 is the default",
        )


def _ranks_fit_the_student(config: RunConfig) -> Iterator[Finding]:
    student, batch = config.student, config.trainer.batch_size
    if student.ranks == 1:
        if student.parallel is not None:
            yield (
                ("student", "parallel"),
                f"student.parallel is {student.parallel}, but student.ranks is 1",
                "set student.ranks to the number of training processes, or remove it",
            )
        return
    if student.ranks > batch:
        yield (
            ("student", "ranks"),
            f"student.ranks is {student.ranks}, and a batch has only {batch} samples (trainer.batch_size)",
            f"take at most {batch}: a rank trains whole samples",
        )
    if ":" in student.device:
        yield (
            ("student", "device"),
            f"student.device names one device, {student.device}, for {student.ranks} ranks",
            "set it to cuda: each rank takes a device of its own",
        )
    if student.optimizer == "adamw_8bit" and student.parallel != "ddp":
        yield (
            ("student", "optimizer"),
            "student.optimizer is adamw_8bit, which cannot keep its moments in pieces (student.parallel=fsdp)",
            "set student.parallel=ddp, or student.optimizer=adamw: fsdp divides its moments by the number of ranks",
        )


def _segments_exist(config: RunConfig) -> Iterator[Finding]:
    """No part of Distill cuts an answer into several samples; a store of the user's own may hold some that were."""
    plain = {"segment_mean": "seq_mean", "segment_token": "token_mean"}
    reduction = config.objective.reduction
    if reduction in plain and ":" not in config.store.name:
        yield (
            ("objective", "reduction"),
            f"objective.reduction is {reduction}, but every answer is a single sample: it would be the same as "
            f"{plain[reduction]}",
            f"set it to {plain[reduction]}; segments can only come from a store of your own, which sets "
            "Sample.trajectory",
        )


def _outcomes_can_teach(config: RunConfig) -> Iterator[Finding]:
    outcome, key = config.objective.outcome, ("objective", "outcome")
    if outcome is None:
        return
    if outcome.baseline == "group" and config.rollout.samples_per_prompt == 1:
        yield (
            ("rollout", "samples_per_prompt"),
            "rollout.samples_per_prompt is 1, and objective.outcome compares a reward with those of the same prompt: "
            "every advantage would be 0",
            "take 4 or more, or set objective.outcome.baseline to batch or none",
        )
    if outcome.baseline == "batch" and config.trainer.batch_size == 1:
        yield (
            ("trainer", "batch_size"),
            "trainer.batch_size is 1, and objective.outcome compares a reward with those of the batch: every advantage "
            "would be 0",
            "take a larger batch, or set objective.outcome.baseline to none",
        )
    ignored = {
        f"mix={outcome.mix}": ("teacher_share", "importance")
        if outcome.mix == "advantage"
        else ("weight", "teacher_weight"),
        "baseline=none": ("use_std", "ddof", "eps") if outcome.baseline == "none" else (),
        "use_std=false": () if outcome.use_std or outcome.baseline == "none" else ("ddof", "eps"),
    }
    for setting, names in ignored.items():
        for name in names:
            if getattr(outcome, name) != type(outcome).model_fields[name].default:
                yield (*key, name), f"objective.outcome.{name} has no effect with {setting}", "remove it"


def _temperatures_are_exact(config: RunConfig) -> Iterator[Finding]:
    if config.server.program != "sglang":
        return
    for name, teacher in config.teachers.items():
        if teacher.temperature != 1.0:
            yield (
                ("teachers", name, "temperature"),
                f"teachers.{name}.temperature is {teacher.temperature:g}, and SGLang scores at 1 whatever it is asked",
                "set server.program=embedded, or remove it",
            )


CHECKS: tuple[Callable[[RunConfig], Iterable[Finding]], ...] = (
    _names_are_registered,
    teachers_are_somewhere,
    _slots_have_teachers,
    _attached_servers_are_named,
    _ports_exist,
    _batches_are_whole_prompts,
    _folders_are_the_runs_own,
    _nothing_is_ignored,
    _scores_on_disk_have_been_in_memory,
    _ranks_fit_the_student,
    _segments_exist,
    _outcomes_can_teach,
    _temperatures_are_exact,
    *DATA_CHECKS,
    *ROUTING_CHECKS,
)
