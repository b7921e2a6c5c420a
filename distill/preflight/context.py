"""What a teacher with a context of its own reads in place of a row's prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distill.config import ContextConfig
from distill.config.routing import ANSWER, PROMPT
from distill.errors import ConfigError
from distill.registry import did_you_mean
from distill.rollout.prompts import PromptRow
from distill.rollout.routing import Messages

_BETWEEN = "\n\n"
"""Between instructions and what follows them, where no chat template keeps them apart."""


def with_context(row: PromptRow, context: ContextConfig | None, role: str) -> PromptRow:
    """The row as the teacher reads it; `role` is its setting, teachers.NAME, for errors.

    The template takes the place of a text, or of what the last message of the user says. Instructions become the
    system message of a chat, before what such a message says already, or the beginning of a text. Raises ConfigError
    for a column that the row lacks.
    """
    if context is None:
        return row
    prompt = row.prompt
    if context.template is not None:
        prompt = _filled(row, context.template, context.names(), role)
    if context.system is not None:
        prompt = _instructed(prompt, context.system)
    return replace(row, prompt=prompt)


def _filled(row: PromptRow, template: str, names: list[str], role: str) -> str | Messages:
    values = {name: _value(row, name, role) for name in names if name != PROMPT}
    if isinstance(row.prompt, str):
        return _fill(template, values, row.prompt)
    messages = [dict(message) for message in row.prompt]
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last is None or not isinstance(last.get("content"), str):
        raise ConfigError(
            f"{row.place}: {role}.context.template has no text to stand for {{prompt}}: "
            + ("no message is the user's" if last is None else "the user's last message is not a text"),
            why="in a chat, the template takes the place of the user's last message",
            fix=f"give {role}.context a `system` text in place of the template, or the row such a message",
        )
    last["content"] = _fill(template, values, last["content"])
    return messages


def _fill(template: str, values: Mapping[str, str], prompt: str) -> str:
    return template.format_map({**values, PROMPT: prompt})


def _value(row: PromptRow, name: str, role: str) -> str:
    found: Any = row.answer if name == ANSWER else row.columns.get(name)
    if found is None:
        raise ConfigError(
            f"{row.place}: the row has no {'answer' if name == ANSWER else f'column {name!r}'}, and "
            f"{role}.context.template names it",
            why="the teacher would read a prompt with a hole in it",
            fix=f"fill it, or name another: {did_you_mean(name, [PROMPT, ANSWER, *row.columns])}",
        )
    if isinstance(found, bool | list | Mapping):
        raise ConfigError(
            f"{row.place}: the column {name!r} is not a text, and {role}.context.template names it",
            fix="write what the teacher is to read as a text",
        )
    return str(found)


def _instructed(prompt: str | Messages, system: str) -> str | Messages:
    if isinstance(prompt, str):
        return system + _BETWEEN + prompt
    first, *others = prompt
    if first["role"] == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": system + _BETWEEN + first["content"]}, *others]
    return [{"role": "system", "content": system}, *prompt]
