"""The prompts of a run in the tokens of a teacher that does not read the student's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distill.config import RunConfig
from distill.errors import ConfigError
from distill.preflight.context import with_context
from distill.preflight.data import Prompts, answer_length, check_length
from distill.preflight.folder import ModelFolder
from distill.rollout.prompts import PromptRow, encode
from distill.teacher_manager.own_prompts import OwnPrompts, RowPrompts, prompt_key
from distill.types import Ids


def room(config: RunConfig, model: ModelFolder) -> int:
    """Tokens that the model can read in its server."""
    return min(model.context_length, config.server.context_length or model.context_length)


def spell_prompts(
    config: RunConfig, name: str, tokenizer: Any, prompts: Prompts, context_length: int, tightest: str
) -> OwnPrompts:
    """The prompts that the teacher scores, and the held-out ones that it answers, as it reads them.

    Raises ConfigError for a prompt that it cannot spell, for one that leaves no room for an answer in `context_length`,
    which `tightest` explains, and for held-out prompts that only its context tells apart.
    """
    role, context = f"teachers.{name}", config.teachers[name].context

    def spell(rows: Sequence[PromptRow], new_tokens: int, setting: str) -> list[Ids]:
        read = [with_context(row, context, role) for row in rows]
        encoded = [encode(row, tokenizer, f"{role}'s") for row in read]
        if rows:
            check_length(read, encoded, new_tokens, setting, context_length, tightest)
        return encoded

    trained = [index for index, (row, _) in enumerate(prompts.rows) if name in row.teachers]
    spelled = spell([prompts.rows[index][0] for index in trained], config.rollout.max_new_tokens, _NEW_TOKENS)
    held_out = [pair for pair in prompts.held_out_rows if config.evaluation.teachers or name in pair[0].teachers]
    by_ids: dict[bytes, Ids] = {}
    for (row, ids), own in zip(held_out, spell([row for row, _ in held_out], *answer_length(config)), strict=True):
        known = by_ids.setdefault(prompt_key(ids), own)
        if context is not None and not np.array_equal(known, own):
            raise ConfigError(
                f"{row.place}: another held-out prompt reads the same to the student, and not to {role}",
                why=f"answers of an evaluation are told apart by the student's prompt, and {role}.context.template "
                "makes two prompts of it",
                fix="keep one of the two rows, or make their prompts different",
            )
    if context is None:
        for index, own in zip(trained, spelled, strict=True):
            by_ids.setdefault(prompt_key(prompts.rows[index][1]), own)
    samples, stream = config.rollout.samples_per_prompt, prompts.stream
    rows = RowPrompts(
        row_of=lambda ordinal: stream.row_at(ordinal // samples),
        student_ids=[ids for _, ids in prompts.rows],
        teacher_ids=dict(zip(trained, spelled, strict=True)),
    )
    return OwnPrompts(name, by_ids, rows)


_NEW_TOKENS = "rollout.max_new_tokens"
