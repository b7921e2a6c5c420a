"""Teachers that do not read the student's ids: those with another tokenizer, and those with a context of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distill.config import RunConfig
from distill.preflight.data import Prompts
from distill.preflight.foreign import folder_and_room, make_translations, reader_of
from distill.preflight.own_prompts import spell_prompts
from distill.preflight.vocabulary import Vocabularies
from distill.teacher_manager import Context, Reader

if TYPE_CHECKING:
    from distill.preflight.inspection import Models


def make_readers(config: RunConfig, models: Models, vocabularies: Vocabularies, prompts: Prompts) -> dict[str, Reader]:
    """Teacher -> how it reads samples, for those that do not read the student's ids. Raises ConfigError."""
    readers: dict[str, Reader] = dict(make_translations(config, models, vocabularies, prompts))
    for name, teacher in config.teachers.items():
        if teacher.context is None or name in readers:
            continue
        length = folder_and_room(config, models, name)[1]
        own = spell_prompts(
            config,
            name,
            vocabularies.student.tokenizer,
            prompts,
            length,
            f"{reader_of(config, name)}, which reads teachers.{name}.context too",
        )
        readers[name] = Context(name, own, length)
    return readers
