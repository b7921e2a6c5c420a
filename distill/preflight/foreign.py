"""Teachers whose tokenizer is not the student's: whether the run can use them, and how they read its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config import RunConfig
from distill.config.models import INT32
from distill.errors import ConfigError
from distill.preflight.data import Prompts
from distill.preflight.own_prompts import room, spell_prompts
from distill.preflight.vocabulary import Vocabularies, end_ids
from distill.protocols import Objective
from distill.teacher_manager import Spelling, Translation

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
        folder, length = folder_and_room(config, models, name)
        found[name] = Translation(
            teacher=name,
            student=student,
            spelling=Spelling.read(vocabulary.tokenizer, end_ids(folder, vocabulary), f"teachers.{name}"),
            prompts=spell_prompts(
                config,
                name,
                vocabulary.tokenizer,
                prompts,
                length,
                f"{reader_of(config, name)}, as its own tokenizer counts",
            ),
            context_length=length,
            student_context_length=room(config, models.student),
        )
    return found


def reader_of(config: RunConfig, teacher: str) -> str:
    """The setting that says where the teacher is."""
    return f"teachers.{teacher}.{'model' if config.teachers[teacher].url is None else 'url'}"


def folder_and_room(config: RunConfig, models: Models, teacher: str) -> tuple[Path, int]:
    """The folder that names its end tokens, and how many tokens it can score."""
    if teacher not in models.elsewhere:
        model = models.teachers[teacher].model
        return model.path, room(config, model)
    place = models.elsewhere[teacher]
    # a server that scores has to write a token behind; one that does not tell its limit refuses what is too long
    return place.tokenizer, INT32 if place.context_length is None else place.context_length - 1
