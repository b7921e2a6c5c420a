"""The prompts of a run: read, routed to teachers, tokenised, held against the context and the number of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.config import DataConfig, RunConfig
from distill.config.routing import ANSWER, GROUP_MARK, PROMPT, group_name
from distill.errors import ConfigError
from distill.registry import did_you_mean
from distill.rollout.prompts import PromptRow, PromptStream, encode, read_rows
from distill.rollout.routing import Router
from distill.types import Ids, Prompt


@dataclass(frozen=True)
class Prompts:
    """What the student trains on and what it is judged by."""

    stream: PromptStream
    held_out: Mapping[str, tuple[Prompt, ...]]
    """Domain -> held-out prompts, at most evaluation.limit of them."""
    longest: int
    """Tokens of the longest prompt."""
    rows_per_teacher: Mapping[str, int]
    rows: Sequence[tuple[PromptRow, Ids]]
    """Every row that is trained on, beside the student's ids of its prompt."""
    held_out_rows: Sequence[tuple[PromptRow, Ids]]
    notes: tuple[str, ...] = ()


def load_prompts(config: RunConfig, tokenizer: Any, context_length: int, tightest: str) -> Prompts:
    """`tightest` names the setting that limits the context to `context_length`. Raises ConfigError."""
    router, columns = Router(config.routing, config.teachers), context_columns(config)
    rows = [row for source in config.data for row in read_rows(source, config.teachers, router=router, columns=columns)]
    router.check_columns()
    _check_contexts(config, router.columns)
    if config.objective.outcome is not None:
        _check_outcomes(rows, config.objective.outcome.grader)
    encoded = [encode(row, tokenizer) for row in rows]
    check_length(rows, encoded, config.rollout.max_new_tokens, "rollout.max_new_tokens", context_length, tightest)
    counts = {name: sum(name in row.teachers for row in rows) for name in config.teachers}
    idle = [name for name, count in counts.items() if not count]
    if idle:
        raise ConfigError(
            f"teachers.{idle[0]}: no prompt of data is routed to it",
            why="a teacher that is never asked would be ignored",
            fix="name it in a data entry's `teachers`, in a column `teacher`, in routing.rules or as a domain; or "
            "remove it",
        )
    _check_mixture(config, rows)
    _check_domain_weights(config, rows)
    mix = _mix(config, rows)
    stream = PromptStream(rows, encoded, config.run.seed, config.rollout.epochs, mix)
    _check_steps(config, stream)
    held_out, further = _held_out(config, rows, tokenizer, context_length, tightest)
    pairs = list(zip(rows, encoded, strict=True))
    longest = max(len(ids) for _, ids in pairs + further)
    return Prompts(stream, held_out, longest, counts, pairs, further, tuple(router.notes()))


def context_columns(config: RunConfig) -> frozenset[str]:
    """Columns of the data that some teacher reads beside the prompt."""
    contexts = [teacher.context for teacher in config.teachers.values() if teacher.context is not None]
    return frozenset(name for context in contexts for name in context.columns)


def _check_contexts(config: RunConfig, columns: Collection[str]) -> None:
    """Raises ConfigError for a template that names a column that none of the rows has."""
    for name, teacher in config.teachers.items():
        for column in sorted(teacher.context.columns if teacher.context is not None else ()):
            if column not in columns:
                raise ConfigError(
                    f"teachers.{name}.context.template names {column!r}, and no row of data has such a column",
                    fix=did_you_mean(column, {PROMPT, ANSWER, *columns}),
                )


def _mix(config: RunConfig, rows: Sequence[PromptRow]) -> dict[str, float] | None:
    """`group_name` of teachers -> share. Raises ConfigError unless it has one for each group of prompts and no more."""
    if config.routing.mix is None:
        return None
    mix = {group_name(name.split(GROUP_MARK)): share for name, share in config.routing.mix.items()}
    counts = Counter(group_name(list(row.teachers)) for row in rows)
    there = ", ".join(f"{name} ({count})" for name, count in counts.items())
    for name in mix:
        if name not in counts:
            raise ConfigError(
                f"routing.mix.{name}: no prompt is taught by {name.replace(GROUP_MARK, ' and ')}"
                + (" together" if GROUP_MARK in name else " alone"),
                why=f"teachers of the {len(rows)} prompts: {there}",
                fix="name these groups, each with its share",
            )
    without = [name for name in counts if name not in mix]
    if without:
        raise ConfigError(
            f"routing.mix: there is no share for the {counts[without[0]]} prompts of {without[0]}",
            why=f"teachers of the {len(rows)} prompts: {there}",
            fix="give them one, or take them out of the data",
        )
    return mix


def _check_outcomes(rows: Sequence[PromptRow], grader: str) -> None:
    without = [row for row in rows if row.answer is None]
    if without:
        raise ConfigError(
            f"{without[0].place}: no answer, as in {len(without)} of {len(rows)} prompts, and objective.outcome is set",
            why=f"the grader {grader} gives each sample its reward by the answer of its prompt",
            fix="name the column in the data entry's `answer_field`, fill it, or remove objective.outcome",
        )


def _check_mixture(config: RunConfig, rows: Sequence[PromptRow]) -> None:
    mixture = config.objective.mixture
    if mixture != "weighted" and all(len(row.teachers) == 1 for row in rows):
        raise ConfigError(
            f"objective.mixture: {mixture} has no effect: each of the {len(rows)} prompts has a single teacher",
            why="a setting that is ignored is a mistake",
            fix="name several `teachers` in an entry of data or several in a row's `teacher`, or remove it",
        )


def _check_domain_weights(config: RunConfig, rows: Sequence[PromptRow]) -> None:
    """The rows may name domains of which the configuration knows nothing."""
    weights = config.objective.domain_weights
    if weights is None:
        return
    domains = {row.domain: row for row in reversed(rows)}
    unknown = [name for name in weights if name not in domains]
    if unknown:
        raise ConfigError(
            f"objective.domain_weights.{unknown[0]}: no prompt has this domain", fix=did_you_mean(unknown[0], domains)
        )
    without = [name for name in domains if name not in weights]
    if without:
        raise ConfigError(
            f"objective.domain_weights: there is none for the domain {without[0]!r} of {domains[without[0]].place}",
            fix="give it one; 0 leaves it out",
        )


def prompts_needed(config: RunConfig) -> int:
    return config.trainer.steps * config.trainer.batch_size // config.rollout.samples_per_prompt


def _check_steps(config: RunConfig, stream: PromptStream) -> None:
    needed = prompts_needed(config)
    if stream.total is not None and stream.total < needed:
        steps = stream.total * config.rollout.samples_per_prompt // config.trainer.batch_size
        raise ConfigError(
            f"rollout.epochs: the data end after {steps} of {config.trainer.steps} steps: "
            f"{stream.prompts_per_epoch} prompts x {config.rollout.epochs} epochs, and {needed} are needed",
            fix=(f"set trainer.steps={steps}, " if steps else "")
            + f"set rollout.epochs={-(-needed // stream.prompts_per_epoch)}, or leave rollout.epochs out",
        )


def check_length(
    rows: Sequence[PromptRow], encoded: Sequence[Ids], new_tokens: int, setting: str, context_length: int, tightest: str
) -> None:
    """Raises ConfigError when the longest prompt and an answer to it do not fit in the context."""
    row, ids = max(zip(rows, encoded, strict=True), key=lambda pair: len(pair[1]))
    if len(ids) + new_tokens > context_length:
        room = context_length - len(ids)
        raise ConfigError(
            f"{row.place}: the prompt has {len(ids)} tokens, and {setting} is {new_tokens}: "
            f"together {len(ids) + new_tokens}, more than the context of {context_length} ({tightest})",
            why="nothing is cut silently",
            fix=f"set {setting}={room} or less, or remove the prompt" if room > 0 else "shorten or remove the prompt",
        )


def _held_out(
    config: RunConfig, rows: Sequence[PromptRow], tokenizer: Any, context_length: int, tightest: str
) -> tuple[dict[str, tuple[Prompt, ...]], list[tuple[PromptRow, Ids]]]:
    """The prompts by domain, and all rows with their ids."""
    routes = {row.domain: row.teachers for row in reversed(rows)}
    router, columns = Router(config.routing, config.teachers), context_columns(config)
    limit = config.evaluation.limit
    new_tokens, setting = answer_length(config)
    domains: dict[str, list[Prompt]] = {}
    pairs: list[tuple[PromptRow, Ids]] = []
    for index, source in enumerate(config.evaluation.data):
        found = read_rows(source, config.teachers, routes, router=router, columns=columns)
        _check_answers(config, index, source, found)
        encoded = [encode(row, tokenizer) for row in found]
        check_length(found, encoded, new_tokens, setting, context_length, tightest)
        pairs += zip(found, encoded, strict=True)
        for row, ids in zip(found, encoded, strict=True):
            domain = domains.setdefault(row.domain, [])
            if limit is None or len(domain) < limit:
                domain.append(Prompt(len(domain), row.domain, ids, row.teachers, row.answer))
    return {name: tuple(prompts) for name, prompts in domains.items()}, pairs


def answer_length(config: RunConfig) -> tuple[int, str]:
    """The most tokens of a held-out answer, and the setting that says so."""
    if config.evaluation.max_new_tokens is not None:
        return config.evaluation.max_new_tokens, "evaluation.max_new_tokens"
    return config.rollout.max_new_tokens, "rollout.max_new_tokens"


def _check_answers(config: RunConfig, index: int, source: DataConfig, rows: Sequence[PromptRow]) -> None:
    without = [row for row in rows if row.answer is None]
    if not without or (config.evaluation.kl and len(without) == len(rows)):
        return
    raise ConfigError(
        f"{without[0].place}: no column {source.answer_field!r}: accuracy cannot be measured with {len(without)} of "
        f"{len(rows)} answers of evaluation.data.{index} missing",
        why=f"the grader {config.evaluation.grader} compares what is written with the answer",
        fix="name the column in `answer_field`, fill it, or set evaluation.kl=true for prompts without any answer",
    )
