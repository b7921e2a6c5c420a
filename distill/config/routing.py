"""Sections that say who teaches a prompt, how often each teacher is met, and what a teacher alone reads.

Rules are read from the first to the last, and the first that fits a row decides. What they mean together is checked in
`checks_routing`; `distill.rollout.routing` applies them.
"""

from __future__ import annotations

import string
from typing import Annotated

from pydantic import Field

from distill.config.fields import Section, Text

PROMPT, ANSWER = "prompt", "answer"
"""Names in a template that stand for the row's prompt and answer, whatever their columns are called."""
GROUP_MARK = "+"
"""Joins the names of the teachers of one prompt. It is in no teacher's name."""


def group_name(teachers: list[str]) -> str:
    """What a group of prompts with these teachers is called in `routing.mix`, in whatever order they are named."""
    return GROUP_MARK.join(sorted(teachers))


class MatchConfig(Section):
    """All that is given here must hold of a row."""

    domain: Text | None = Field(default=None, description="the row's domain")
    tag: Text | None = Field(default=None, description="one of the texts in the row's column `tags`")
    column: Text | None = Field(default=None, description="what `regex` is looked for in; default: the prompt's text")
    regex: Text | None = Field(default=None, description="a regular expression that is found anywhere in the text")


class RuleConfig(Section):
    """Either `match` with `teachers`, or `call`."""

    match: MatchConfig | None = Field(default=None, description="what a row must be like")
    teachers: list[str] | dict[str, float] | None = Field(
        default=None, description="teachers of the rows that match, with weights if a mapping"
    )
    call: Text | None = Field(
        default=None,
        description="package.module:function that is given the row as a mapping of its columns and returns a teacher, "
        "several, a mapping of teachers to weights, or None where the next rule is to decide",
    )


class RoutingConfig(Section):
    """Who teaches a row that says nothing about it itself."""

    rules: list[RuleConfig] = Field(default_factory=list[RuleConfig], description="the first that fits a row decides")
    default: Text | None = Field(
        default=None, description="teacher of rows that nothing else gives one; default: such a row is an error"
    )
    mix: dict[Text, Annotated[float, Field(gt=0)]] | None = Field(
        default=None,
        description="share of each teacher among the prompts of every step, divided by their sum; a+b: prompts that a "
        "and b teach together; default: as in the data",
    )


class ContextConfig(Section):
    """Privileged context: the teacher reads it, the student does not."""

    system: Text | None = Field(default=None, description="instructions before the prompt: a chat's system message")
    template: Text | None = Field(
        default=None,
        description="what the teacher reads in place of the prompt's text: {prompt}, {answer} and {column} stand for "
        "parts of the row",
    )

    def names(self) -> list[str]:
        """The names in `template`, in their order. Raises ValueError where it is not one of plain names."""
        found: list[str] = []
        for _, name, spec, conversion in string.Formatter().parse(self.template or ""):
            if name is None:
                continue
            if not name or spec or conversion or not name.replace("-", "_").isidentifier():
                raise ValueError(f"{{{name}}} is not the plain name of a column; write {{{{ and }}}} for braces")
            found.append(name)
        return found

    @property
    def columns(self) -> frozenset[str]:
        """Columns of a row that the template needs beside its prompt and answer."""
        return frozenset(self.names()) - {PROMPT, ANSWER}
