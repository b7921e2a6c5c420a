"""What a run that goes on from a checkpoint must share with the run that made it, and what it may change.

A setting that decides what is trained, on what, or what the results compare is fixed; how, where, how fast and how long
the work is done is free, and a change is noted in the log. `FIXED` and `FREE` name every key of a run; `*` stands for a
name of `teachers`, a number in a list, or any key of `objective`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distill.config.explain import shown
from distill.config.models import ObjectiveConfig, RunConfig
from distill.config.options import resolved
from distill.config.schema import KeyPath, dotted

Table = Mapping[str, tuple[str, ...]]
"""Section -> keys in it; "" is the run itself."""

_ROWS = ("path", "domain", "teachers", "prompt_field", "answer_field")
FIXED: Table = {
    "run": ("seed",),
    "student": ("backend", "model", "tokenizer", "dtype", "ema_decay", "optimizer"),
    "student.lora": ("r", "alpha", "dropout", "targets"),
    "teachers.*": ("model", "weight", "base", "tokenizer", "alignment", "remote_model", "temperature"),
    "teachers.*.context": ("system", "template"),
    "data.*": _ROWS,
    "routing": ("default", "mix"),
    "routing.rules.*": ("teachers", "call"),
    "routing.rules.*.match": ("domain", "tag", "column", "regex"),
    "objective": ("*",),
    "rollout": ("samples_per_prompt", "max_new_tokens", "temperature", "top_p", "top_k"),
    "server": ("dtype",),
    "trainer": ("batch_size",),
    # the student at the end is held against the base at the start
    "evaluation": ("grader", "limit", "kl", "max_new_tokens"),
    "evaluation.data.*": _ROWS,
}
FREE: Table = {
    "": ("ray_address", "resume"),
    "run": ("name", "dir"),
    "prepare": ("script", "output"),
    "student": (
        # how fast it learns, which is what a run that went astray is resumed with
        *("lr", "lr_schedule", "lr_final_ratio", "warmup_steps", "betas", "eps", "weight_decay", "max_grad_norm"),
        *("micro_batch_tokens", "packing", "head_chunk_tokens", "loss_kernel", "lean_layers", "gradient_checkpointing"),
        *("device", "threads", "ranks", "parallel"),
    ),
    "student.lora": ("export",),
    # where a teacher is served; that it is the same one is seen from its canary
    "teachers.*": ("url", "api", "api_key_env", "concurrency"),
    "rollout": ("servers", "epochs", "requests_per_call", "timeout_s", "max_tries"),
    "teacher_manager": (
        *("slots", "slot_gb", "scheduler", "call_tokens", "deadline_s", "on_teacher_failure", "canary_atol"),
        *("host_gb", "host_differences", "remote_canary_atol", "topk_dtype", "full_rows", "timeout_s", "max_tries"),
        *("cache_mb", "cache_disk_gb", "cache_folder"),
    ),
    "server": (
        *("program", "device", "host", "port", "context_length", "max_batch_size", "threads", "args", "python"),
        *("rollout_urls", "teacher_urls", "start_timeout_s", "max_restarts"),
    ),
    "mesh": ("transport", "bucket_mb", "timeout_s", "host"),
    "store": ("name", "capacity"),
    "trainer": ("steps", "max_staleness", "checkpoint_every", "keep_checkpoints", "max_quarantined"),
    "evaluation": ("every", "teachers"),
    "observe": ("sinks", "progress", "wandb_project"),
}
_OF_THIS_START = {("resume",), ("run", "dir")}
"""They say where the run is, not how it goes on: a change of them is not worth a line."""


@dataclass(frozen=True)
class Change:
    """`now` and `then` are None where the key is not there."""

    key: KeyPath
    now: Any
    then: Any

    @property
    def allowed(self) -> bool:
        """It lies outside of all that is fixed: no fixed key is a part of it, or it of one."""
        pattern = _pattern(self.key)
        return not any(pattern[: len(fixed)] == fixed[: len(pattern)] for fixed in patterns(FIXED))

    def __str__(self) -> str:
        return f"{dotted(self.key)} is {shown(self.now)}, and was {shown(self.then)}"


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Every setting as plain values: the same for configurations that mean the same, whatever defaults they write."""
    values = resolved(config)
    for section in (values["student"], *values["teachers"].values()):
        section["tokenizer"] = section["tokenizer"] or section["model"]
    for section in values["teachers"].values():
        if section["temperature"] == 1.0:
            section["temperature"] = None  # as in a run from before there was such a setting
    weights = {name: teacher.weight for name, teacher in config.teachers.items()}
    for entry in (*values["data"], *values["evaluation"]["data"], *values["routing"]["rules"]):
        if isinstance(entry["teachers"], list):
            entry["teachers"] = {name: weights.get(name) for name in entry["teachers"]}
    if config.evaluation.max_new_tokens == config.rollout.max_new_tokens:
        values["evaluation"]["max_new_tokens"] = None
    return values


def changes(now: Any, then: Any, at: KeyPath = ()) -> Iterator[Change]:
    """Where two results of `settings_of` differ, each as deep as both have something there."""
    if at in _OF_THIS_START or now == then:
        return
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        for name in _comparable(now, then, at):
            yield from changes(now.get(name), then.get(name), (*at, name))
    elif _holds_sections(now) and _holds_sections(then):
        for index in range(max(len(now), len(then))):
            one, other = (side[index] if index < len(side) else None for side in (now, then))
            yield from changes(one, other, (*at, index))
    else:
        yield Change(at, now, then)


def _comparable(now: Mapping[str, Any], then: Mapping[str, Any], at: KeyPath) -> list[str]:
    """The keys to look at: where the objective is another one, what only one of them has says nothing more."""
    names = list({**then, **now})
    if at == ("objective",) and now["name"] != then["name"]:
        return [name for name in names if name in ObjectiveConfig.model_fields]
    return names


def _holds_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _pattern(key: KeyPath) -> KeyPath:
    named = key[0] in ("teachers", "objective")
    return tuple("*" if isinstance(part, int) or (named and depth == 1) else part for depth, part in enumerate(key))


def patterns(table: Table) -> Iterator[KeyPath]:
    """The key of every entry."""
    for section, keys in table.items():
        yield from ((*(section.split(".") if section else ()), key) for key in keys)
