"""Teachers whose tokenizer is not the student's: whether the run can use them, and how they read its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config import RunConfig
from distill.config.models import INT32
from distill.errors import ConfigError
from distill.preflight.data import Prompts, answer_length, check_length
from distill.preflight.folder import ModelFolder
from distill.preflight.vocabulary import Vocabularies, Vocabulary, end_ids
from distill.protocols import Objective
from distill.rollout.prompts import encode
from distill.teacher_manager import Spelling, Translation
from distill.teacher_manager.translation import prompt_key
from distill.types import Ids

if TYPE_CHECKING:
    from distill.preflight.inspection import Models


def check_alignment(config: RunConfig, foreign: Sequence[str], objective: Objective) -> None:
    """Raises ConfigError when the objective cannot learn from teachers with another tokenizer; `foreign` are their
    names."""
    if not foreign:
        return
    key = f"teachers.{foreign[0]}.alignment"
    if not objective.contract.reads_spans:
        raise ConfigError(
            f"{key}: the objective {config.objective.name} cannot use a teacher with another tokenizer",
            why="it compares probabilities of single tokens, and this teacher's tokens are not the student's",
            fix="set objective=span_kl, which compares the text that both spell; or use a teacher of the student's "
            "tokenizer",
        )
    if config.objective.mixture != "weighted":
        raise ConfigError(
            f"{key}: objective.mixture is {config.objective.mixture}, and teachers.{foreign[0]} has another tokenizer",
            why="a mixture is taken token by token, so all teachers must answer for the same tokens",
            fix="remove objective.mixture: the losses of several teachers are then added up",
        )


def make_translations(
    config: RunConfig, models: Models, vocabularies: Vocabularies, prompts: Prompts
) -> dict[str, Translation]:
    """Teacher -> its translation, for those with another tokenizer.

    Raises ConfigError for a tokenizer that does not tell its bytes, for a prompt that it cannot spell, and for one that
    leaves no room for an answer in its context.
    """
    if not vocabularies.foreign:
        return {}
    student = Spelling.read(vocabularies.student.tokenizer, vocabularies.end_ids, "student")
    found: dict[str, Translation] = {}
    for name, vocabulary in vocabularies.foreign.items():
        folder, room = _folder_and_room(config, models, name)
        found[name] = Translation(
            teacher=name,
            student=student,
            spelling=Spelling.read(vocabulary.tokenizer, end_ids(folder, vocabulary), f"teachers.{name}"),
            prompts=_prompts(config, name, vocabulary, prompts, room),
            context_length=room,
            student_context_length=_room(config, models.student),
        )
    return found


def _folder_and_room(config: RunConfig, models: Models, teacher: str) -> tuple[Path, int]:
    """The folder that names its end tokens, and how many tokens it can score."""
    if teacher not in models.elsewhere:
        model = models.teachers[teacher].model
        return model.path, _room(config, model)
    place = models.elsewhere[teacher]
    # a server that scores has to write a token behind; one that does not tell its limit refuses what is too long
    return place.tokenizer, INT32 if place.context_length is None else place.context_length - 1


def _room(config: RunConfig, model: ModelFolder) -> int:
    return min(model.context_length, config.server.context_length or model.context_length)


def _prompts(
    config: RunConfig, name: str, vocabulary: Vocabulary, prompts: Prompts, context_length: int
) -> Mapping[bytes, Ids]:
    """The prompts that the teacher scores, and the held-out ones that it answers, as it reads them.

    Rows that the student cannot tell apart are read as the first of them.
    """
    trained = [pair for pair in prompts.rows if name in pair[0].teachers]
    held_out = [pair for pair in prompts.held_out_rows if config.evaluation.teachers or name in pair[0].teachers]
    limits = ((trained, config.rollout.max_new_tokens, "rollout.max_new_tokens"), (held_out, *answer_length(config)))
    found: dict[bytes, Ids] = {}
    for pairs, new_tokens, setting in limits:
        if not pairs:
            continue
        rows = [row for row, _ in pairs]
        encoded = [encode(row, vocabulary.tokenizer, f"teachers.{name}'s") for row in rows]
        source = f"teachers.{name}.{'model' if config.teachers[name].url is None else 'url'}"
        tightest = f"{source}, as its own tokenizer counts"
        check_length(rows, encoded, new_tokens, setting, context_length, tightest)
        for (_, ids), own in zip(pairs, encoded, strict=True):
            found.setdefault(prompt_key(ids), own)
    return found
