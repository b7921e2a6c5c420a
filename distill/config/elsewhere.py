"""The check of where each teacher is: a folder, or a server elsewhere; and that each has the settings of its kind."""

from __future__ import annotations

import re
from collections.abc import Iterator

from distill.config.explain import Finding
from distill.config.models import RunConfig, TeacherConfig
from distill.config.schema import KeyPath, dotted

ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")
"""Of a server elsewhere: without a key in it, which would be shown wherever the address is."""


def teachers_are_somewhere(config: RunConfig) -> Iterator[Finding]:
    """A teacher is a folder, which takes a slot, or a server elsewhere."""
    for name, teacher in config.teachers.items():
        key: KeyPath = ("teachers", name)
        if teacher.url is None and teacher.model is None:
            yield (
                key,
                f"teachers.{name} has neither a model nor a url",
                "give the Hugging Face folder in `model`, or the address of a server that serves it in `url`",
            )
        if teacher.url is not None:
            yield from _served_elsewhere(key, teacher)
        ignored = {"url": ("api", "remote_model", "api_key_env", "concurrency")} if teacher.url is None else {}
        if teacher.url is not None and teacher.api != "openai":
            ignored = {"api=openai": ("remote_model",)}
        for setting, fields in ignored.items():
            for field in fields:
                if getattr(teacher, field) != type(teacher).model_fields[field].default:
                    yield (*key, field), f"teachers.{name}.{field} has no effect without {setting}", "remove it"


def _served_elsewhere(key: KeyPath, teacher: TeacherConfig) -> Iterator[Finding]:
    name = dotted(key)
    if not ADDRESS.fullmatch(teacher.url or ""):
        yield (
            (*key, "url"),
            f"{name}.url is not the address of a server",
            "write https://host:port, or with a path; a key goes into the environment, see api_key_env",
        )
    for field in ("model", "base"):
        if getattr(teacher, field) is not None:
            yield (
                (*key, field),
                f"{name} has a {field} and a url: the folder would not be looked at",
                f"remove {name}.url to load the folder into a slot, or {name}.{field} to ask the server",
            )
    if teacher.tokenizer is None:
        yield (
            key,
            f"{name} has a url and no tokenizer",
            f"give {name}.tokenizer, a folder with the tokenizer of the model that is served: it is compared with the "
            "student's before anything is scored",
        )
