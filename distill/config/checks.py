"""Every check that spans more than one key of a configuration. Pure: no file is opened, no model is looked at.

A check yields findings: (key, what is wrong, what to do). `check` collects those of all checks into one error. What
needs the files that a configuration names is in `distill.preflight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from distill import registry
from distill.config.elsewhere import teachers_are_somewhere
from distill.config.explain import Finding, Where, gather, nowhere
from distill.config.models import DataConfig, RunConfig
from distill.config.schema import KeyPath, dotted

NAME = re.compile(r"\w[\w.-]*")
"""Of a teacher and of a domain: they become parts of metrics' names, whose parts are separated by `/`."""
LEAST_TEMPERATURE = 1e-6
"""SGLang 0.5.23 and the embedded server."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Of a teacher, a domain, an outcome. A step is summed up in float32, which holds seven digits: what weighs less than a
millionth is lost beside the rest, and what weighs more leaves no room for it."""
TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


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


def _teachers_in_data_exist(config: RunConfig) -> Iterator[Finding]:
    for name in config.teachers:
        if not NAME.fullmatch(name):
            key = ("teachers", name)
            yield (
                key,
                f"the teacher's name {name!r} holds other characters than letters, digits, '_', '.' and '-'",
                "rename it",
            )
    for at, source in _sources(config):
        if source.teachers is None:
            continue
        if not source.teachers:
            yield (*at, "teachers"), f"{dotted(at)}.teachers is empty", "name a teacher, or leave the key out"
        weights = source.teachers if isinstance(source.teachers, dict) else {}
        for position, name in enumerate(source.teachers):
            place: KeyPath = (*at, "teachers", name if weights else position)
            if name in list(source.teachers)[:position]:
                yield (
                    place,
                    f"{dotted(at)}.teachers names {name!r} twice",
                    f"name it once; a mapping gives it another weight: {{{name}: 2.0}}",
                )
            elif name not in config.teachers:
                yield (
                    place,
                    f"{dotted(at)}.teachers names {name!r}, which is not one of the teachers",
                    registry.did_you_mean(name, config.teachers),
                )
            elif weights and not weights[name] > 0:
                yield (
                    place,
                    f"{dotted(place)} must be more than 0, and is {weights[name]:g}",
                    "leave out a teacher without weight",
                )


def _sources(config: RunConfig) -> Iterator[tuple[KeyPath, DataConfig]]:
    yield from ((("data", index), source) for index, source in enumerate(config.data))
    yield from ((("evaluation", "data", index), source) for index, source in enumerate(config.evaluation.data))


def _every_teacher_has_work(config: RunConfig) -> Iterator[Finding]:
    """Only where the configuration tells: rows may name teachers and domains themselves."""
    used: set[str] = set()
    for source in config.data:
        if source.teachers is not None:
            used |= set(source.teachers)
        else:
            return
    for name in config.teachers:
        if name not in used:
            yield (
                ("teachers", name),
                f"teachers.{name} is named by no entry of data",
                "name it in the `teachers` of an entry of data, or remove it",
            )


def _weights_are_used(config: RunConfig) -> Iterator[Finding]:
    """Only where the configuration tells: rows may name teachers with weights, or without."""
    if not all(isinstance(source.teachers, dict) for source in config.data):
        return
    for name, teacher in config.teachers.items():
        if teacher.weight != type(teacher).model_fields["weight"].default:
            yield (
                ("teachers", name, "weight"),
                f"teachers.{name}.weight has no effect: every entry of data gives its teachers weights of its own",
                "remove it, or name the teacher without a weight",
            )


def _slots_fit_teachers(config: RunConfig) -> Iterator[Finding]:
    slots = config.teacher_manager.slots
    teachers = sum(teacher.url is None for teacher in config.teachers.values())
    if slots > max(teachers, 1):  # one that stays empty where all teachers are elsewhere is the default
        yield (
            ("teacher_manager", "slots"),
            f"teacher_manager.slots is {slots}, and the number of teachers only {teachers}",
            f"a slot holds one teacher at a time: set it to {max(teachers, 1)} or less",
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


def _evaluation_is_complete(config: RunConfig) -> Iterator[Finding]:
    evaluation = config.evaluation
    if not evaluation.data:
        for name in ("every", "limit", "kl", "max_new_tokens"):
            if getattr(evaluation, name):
                yield (
                    ("evaluation", name),
                    f"evaluation.{name} is given, but evaluation.data is empty",
                    "name held-out prompts there",
                )
    domains = {source.domain for source in config.data}
    if None in domains:
        return
    known = {str(domain) for domain in domains} | set(config.teachers)
    for index, source in enumerate(evaluation.data):
        if source.domain is not None and source.domain not in known and source.teachers is None:
            yield (
                ("evaluation", "data", index, "domain"),
                f"evaluation.data.{index}.domain is {source.domain!r}, which is neither a domain of data nor a teacher",
                registry.did_you_mean(source.domain, known) + "; or give the entry its `teachers`",
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


def _domains_are_names(config: RunConfig) -> Iterator[Finding]:
    for at, source in _sources(config):
        if source.domain is not None and not NAME.fullmatch(source.domain):
            yield (
                (*at, "domain"),
                f"{dotted(at)}.domain is {source.domain!r}, which is more than letters, digits, '_', '.' and '-'",
                "rename it: it becomes a part of the metrics' names",
            )


def _weights_can_be_felt(config: RunConfig) -> Iterator[Finding]:
    """A weight of 0 is left to others: it means something, or is refused already."""
    for key, weight in _weights(config):
        if 0 < weight < LEAST_WEIGHT or weight > MOST_WEIGHT:
            yield (
                key,
                f"{dotted(key)} must be between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, and is {weight:g}",
                "bring the weights nearer to 1: a step is summed up in float32, where one part would drown another",
            )


def _weights(config: RunConfig) -> Iterator[tuple[KeyPath, float]]:
    """Every weight of the configuration."""
    yield from ((("teachers", name, "weight"), teacher.weight) for name, teacher in config.teachers.items())
    for at, source in _sources(config):
        if isinstance(source.teachers, dict):
            yield from (((*at, "teachers", name), weight) for name, weight in source.teachers.items())
    objective, key = config.objective, ("objective",)
    yield from (((*key, "domain_weights", name), weight) for name, weight in (objective.domain_weights or {}).items())
    if objective.outcome is not None:
        yield from (
            ((*key, "outcome", name), getattr(objective.outcome, name)) for name in ("weight", "teacher_weight")
        )


def _domain_weights_are_of_domains(config: RunConfig) -> Iterator[Finding]:
    weights, key = config.objective.domain_weights, ("objective", "domain_weights")
    if weights is None:
        return
    if config.objective.reduction != "domain_balanced":
        yield (
            key,
            f"objective.domain_weights has no effect with objective.reduction={config.objective.reduction}",
            "set objective.reduction=domain_balanced, or remove it",
        )
    if not any(weights.values()):
        yield key, "objective.domain_weights leaves every domain out", "give a domain a weight above 0"
    domains = {source.domain for source in config.data}
    if None in domains:
        # rows may name domains themselves
        return
    known = {str(domain) for domain in domains}
    for name in weights:
        if name not in known:
            what = f"objective.domain_weights names {name!r}, which is not a domain of data"
            yield (*key, name), what, registry.did_you_mean(name, known)
    for name in sorted(known - set(weights)):
        yield key, f"objective.domain_weights has none for the domain {name!r}", "give it one; 0 leaves it out"


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


def _a_mixture_has_several_teachers(config: RunConfig) -> Iterator[Finding]:
    """Only where the configuration tells: rows may name teachers themselves."""
    alone = all(source.teachers is not None and len(source.teachers) < 2 for source in config.data)
    if config.objective.mixture != "weighted" and (alone or len(config.teachers) == 1):
        yield (
            ("objective", "mixture"),
            f"objective.mixture is {config.objective.mixture}, but every sample has a single teacher",
            "name several `teachers` in an entry of data, or remove it",
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
    _teachers_in_data_exist,
    _every_teacher_has_work,
    _weights_are_used,
    teachers_are_somewhere,
    _slots_fit_teachers,
    _attached_servers_are_named,
    _ports_exist,
    _batches_are_whole_prompts,
    _evaluation_is_complete,
    _folders_are_the_runs_own,
    _nothing_is_ignored,
    _ranks_fit_the_student,
    _domains_are_names,
    _weights_can_be_felt,
    _domain_weights_are_of_domains,
    _segments_exist,
    _a_mixture_has_several_teachers,
    _outcomes_can_teach,
    _temperatures_are_exact,
)
