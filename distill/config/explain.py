"""pydantic's findings as sentences: which key, where it was written, what it must be, what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from distill.config.models import PATTERNS
from distill.config.overrides import suggestion
from distill.config.schema import KeyPath, UnknownKey, annotation_at, describe, dotted, known_names
from distill.errors import ConfigError

Where = Callable[[KeyPath], str]
"""The place in which a key was written, for people: `teachers.yaml:7`, or "the command line"."""


def explain(error: ValidationError, where: Where) -> ConfigError:
    """One ConfigError that lists every finding."""
    findings: dict[KeyPath, tuple[str, str]] = {}
    for detail in error.errors():
        key = _key(detail)
        findings.setdefault(key, _finding(detail, key, where))
    return gather(list(findings.values()))


def gather(findings: list[tuple[str, str]]) -> ConfigError:
    """One error from (what, fix) pairs; there must be at least one."""
    if len(findings) == 1:
        what, fix = findings[0]
        return ConfigError(what, fix=fix)
    lines = [f"- {what}" + (f"\n    {fix}" if fix else "") for what, fix in findings]
    return ConfigError(f"{len(findings)} things in the configuration are wrong:\n" + "\n".join(lines))


def _key(detail: ErrorDetails) -> KeyPath:
    """The key that a finding is about. pydantic adds the branch of a union to it: that is cut off."""
    location: KeyPath = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return location
    if detail["type"] == "missing" and isinstance(location[-1], int):  # a list that is too short
        return location[:-1]
    for length in range(len(location), 0, -1):
        part = str(location[length - 1])
        try:
            annotation_at(location[:length])
        except UnknownKey:
            continue
        if not any(mark in str(each) for each in location[:length] for mark in "[(") and part not in (
            "int",
            "str",
            "float",
        ):
            return location[:length]
    return location


def _finding(detail: ErrorDetails, key: KeyPath, where: Where) -> tuple[str, str]:
    place = where(key)
    if detail["type"] == "extra_forbidden":
        return f"{place}: unknown key {dotted(key)}", suggestion(key[:-1], str(key[-1]), known_names(key))
    if detail["type"] == "missing" and detail["loc"] == key:
        section = dotted(key[:-1]) or "the run"
        return f"{where(key[:-1])}: {dotted(key)} is missing", f"{section} must have a value for {key[-1]!r}"
    if len(detail["loc"]) > len(key) or detail["type"].endswith(("_parsing", "_type")):
        must = describe(annotation_at(key))
    else:
        must = _requirement(detail)
    return f"{place}: {dotted(key)} must be {must}, and is {_shown(detail['input'])}", _advice(detail)


def _advice(detail: ErrorDetails) -> str:
    """For a text that reads like what is wanted."""
    if detail["type"] not in ("int_type", "float_type", "bool_type") or not isinstance(detail["input"], str):
        return ""
    return "write it without quotes; a value of the environment is read as ${oc.decode:${oc.env:NAME}}"


def _requirement(detail: ErrorDetails) -> str:
    context: Mapping[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "greater_than":
            return f"more than {_number(context['gt'])}"
        case "greater_than_equal":
            return f"at least {_number(context['ge'])}"
        case "less_than":
            return f"less than {_number(context['lt'])}"
        case "less_than_equal":
            return f"at most {_number(context['le'])}"
        case "literal_error":
            return f"one of {context['expected']}"
        case "too_short" | "string_too_short":
            return "not empty"
        case "too_long" | "string_too_long":
            return f"no longer than {context['max_length']}"
        case "unusable_path":
            return detail["msg"]
        case "int_from_float":
            return "a whole number"
        case "finite_number":
            return "a finite number"
        case "string_pattern_mismatch":
            return PATTERNS.get(context["pattern"], f"a text that matches {context['pattern']}")
        case _:
            return f"something else ({detail['msg']})"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _shown(value: Any) -> str:
    """As YAML has it, for what Python calls otherwise."""
    text = (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else repr(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."
