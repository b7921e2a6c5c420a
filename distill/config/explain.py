"""pydantic's findings as sentences: which key, where it was written, what it must be, what it is."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from distill.config.fields import PATTERNS
from distill.config.models import RunConfig
from distill.config.schema import (
    KeyPath,
    UnknownKey,
    annotation_at,
    describe,
    dotted,
    known_names,
    split,
    suggestion,
    tagged,
    tags_with,
    without_tags,
)
from distill.errors import ConfigError
from distill.registry import did_you_mean

Where = Callable[[KeyPath], str]
"""The place in which a key was written, for people: `teachers.yaml:7`, or "the command line"; empty if nobody knows."""
Finding = tuple[KeyPath, str, str]
"""The key whose place is named, what is wrong, what to do."""
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a key that a model, or a dataclass, does not have."""


def explain(error: ValidationError, root: Any = RunConfig, at: KeyPath = ()) -> list[Finding]:
    """Every finding about a value that must be a `root`, and stands at the key `at` of a run; one for each key."""
    findings: dict[KeyPath, Finding] = {}
    for detail in error.errors():
        key = _key(detail, root)
        findings.setdefault(key, _finding(detail, key, root, at))
    return list(findings.values())


def gather(findings: Sequence[Finding], where: Where) -> ConfigError:
    """One error from all findings, in the order of the file's lines; there must be at least one."""
    placed = sorted(((where(key), what, fix) for key, what, fix in findings), key=lambda finding: _line(finding[0]))
    said = [(f"{place}: {what}" if place else what, fix) for place, what, fix in placed]
    if len(said) == 1:
        return ConfigError(said[0][0], fix=said[0][1])
    lines = [f"- {what}" + (f"\n    {fix}" if fix else "") for what, fix in said]
    return ConfigError(f"{len(said)} things in the configuration are wrong:\n" + "\n".join(lines))


def _line(place: str) -> int:
    """What has no line comes last."""
    number = re.search(r":(\d+)$", place)
    return int(number[1]) if number else sys.maxsize


def nowhere(key: KeyPath) -> str:
    """The `Where` of a configuration that was read from no file."""
    return ""


@contextlib.contextmanager
def located(where: Where) -> Generator[None]:
    """Add the place to a ConfigError whose text begins with a key of the run, such as `objective.k: ...`."""
    try:
        yield
    except ConfigError as error:
        place = where(_leading_key(error.what))
        if place:
            error.what = f"{place}: {error.what}"
        raise


def _leading_key(what: str) -> KeyPath:
    """Empty where the text does not begin with one."""
    word = re.match(r"[\w.-]*\w", what)
    key = split(word[0]) if word else ()
    return key if key and key[0] in RunConfig.model_fields else ()


def _key(detail: ErrorDetails, root: Any) -> KeyPath:
    """The key that a finding is about, kinds included. pydantic adds the branch of any union to it: that is cut off."""
    location: KeyPath = detail["loc"]
    if detail["type"] in _UNKNOWN:
        return location
    if detail["type"] == "missing" and isinstance(location[-1], int):  # a list that is too short
        return location[:-1]
    for length in range(len(location), 0, -1):
        part = str(location[length - 1])
        try:
            annotation_at(location[:length], root)
        except UnknownKey:
            continue
        if not any(mark in str(each) for each in location[:length] for mark in "[(") and part not in (
            "int",
            "str",
            "float",
        ):
            return location[:length]
    return location


def _finding(detail: ErrorDetails, key: KeyPath, root: Any, at: KeyPath) -> Finding:
    full = (*at, *without_tags(key, root))
    name = dotted(full)
    if detail["type"] in _UNKNOWN:
        return full, f"unknown key {name}", suggestion(full[:-1], str(key[-1]), known_names(key, root))
    if detail["type"] == "missing" and detail["loc"] == key:
        section = dotted(full[:-1]) or "the run"
        return full[:-1], f"{name} is missing", f"{section} must have a value for {key[-1]!r}"
    if detail["type"] == "union_tag_invalid":
        tag = str(detail.get("ctx", {})["tag"])
        return full, f"{name}: there is no {tag!r}", did_you_mean(tag, tagged(annotation_at(key, root)))
    if len(detail["loc"]) > len(key) or detail["type"].endswith(("_parsing", "_type")):
        must = describe(annotation_at(key, root))
    else:
        must = _requirement(detail)
    advice = _names_for(detail, annotation_at(key, root), name) if detail["type"] == "no_name" else _advice(detail)
    return full, f"{name} must be {must}, and is {shown(detail['input'])}", advice


def _names_for(detail: ErrorDetails, kinds: Any, name: str) -> str:
    """For settings that do not say whose they are: the names of those that have them."""
    given = detail["input"] if isinstance(detail["input"], Mapping) else {}
    first, *others = tags_with(kinds, given) or tagged(kinds)
    return f"set {name}.name={first}" + (f"; or to {', '.join(others)}" if others else "")


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
        case "unusable_path" | "no_name":
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


def shown(value: Any) -> str:
    """As YAML has it, for what Python calls otherwise."""
    text = (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else repr(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."
