"""The settings that belong to an objective's class alone: its fields, read as strictly as the models are.

The class is loaded by its name. It is the only thing that a configuration loads torch for.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from typing import Any, get_type_hints

import pydantic
from pydantic import ConfigDict, ValidationError
from pydantic_core import to_json

from distill import registry
from distill.config.explain import Finding, explain
from distill.config.models import ObjectiveConfig, RunConfig
from distill.config.schema import tagged
from distill.errors import ConfigError


class _Section(ObjectiveConfig):
    """The `objective` section of one objective, whose own settings are fields too."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)


def settings_class(name: str) -> type[Any]:
    """The dataclass that `objective.name` means. Raises ConfigError, MissingDependency without its package."""
    kind: Any = registry.load("objective", name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ConfigError(
            f"objective.name: {name!r} is not a dataclass",
            why="the fields of an objective's class are its settings",
            fix="give the class as 'package.module:Class' and decorate it with @dataclass(frozen=True)",
        )
    return kind


@lru_cache(maxsize=64)
def section_model(kind: type[Any]) -> type[ObjectiveConfig]:
    """The `objective` section where `name` means `kind`: what all objectives share, and the fields of the dataclass.

    Raises ConfigError where the types of its fields cannot be looked up.
    """
    try:
        hints, said = get_type_hints(kind, include_extras=True), _descriptions(kind)
    except NameError as error:
        raise ConfigError(
            f"objective.name: the settings of {kind.__name__} cannot be read: {error}",
            why="the types of a class's fields say what may stand in a configuration",
            fix="import that name when the module runs, not only for type checkers",
        ) from error
    own: dict[str, Any] = {
        field.name: (hints[field.name], _described(field, said.get(field.name)))
        for field in fields(kind)
        if field.init and field.name not in ObjectiveConfig.model_fields
    }
    return pydantic.create_model(kind.__name__, __base__=_Section, __doc__=kind.__doc__, **own)


def _described(field: Field[Any], text: str | None) -> Any:
    """`field` for pydantic. A default is what the class says it is: it need not be what could be written in a file."""
    if field.default_factory is not MISSING:
        return pydantic.Field(default_factory=field.default_factory, description=text, validate_default=False)
    default = ... if field.default is MISSING else field.default
    return pydantic.Field(default, description=text, validate_default=False)


def _descriptions(kind: type[Any]) -> dict[str, str]:
    """Field -> the text below it in the source of `kind` and its bases; nothing of a class without a source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef)), [])
        for line, below in itertools.pairwise(body):
            match line, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
                case _:
                    pass
    return found


def read_options(kind: type[Any], options: Mapping[str, Any]) -> ObjectiveConfig:
    """`options` as the fields of `kind`, defaults beside them.

    By way of JSON, whose strict rules are those of YAML: a list may stand for a tuple, a mapping for a dataclass.
    Raises ValidationError; ConfigError where a setting is itself a dataclass, and refuses its values.
    """
    return section_model(kind).model_validate_json(to_json(dict(options), inf_nan_mode="constants"))


def own_settings(config: ObjectiveConfig) -> dict[str, Any]:
    """Every setting of the objective's class as plain values, defaults written out. Raises as `read_options`."""
    read = read_options(settings_class(config.name), config.options)
    return read.model_dump(mode="json", exclude=set(ObjectiveConfig.model_fields))


def resolved(config: RunConfig) -> dict[str, Any]:
    """All of a run as plain values: every default written out, those of the objective's class too.

    Composing that again gives the same run. Raises as `own_settings`.
    """
    values = config.model_dump(mode="json")
    values["objective"] |= own_settings(config.objective)
    return values


def option_findings(kind: type[Any], options: Mapping[str, Any]) -> list[Finding]:
    """Unknown keys and values of a wrong type. The class itself says what right values mean together."""
    model = section_model(kind)
    try:
        read_options(kind, options)
    except ValidationError as error:
        return explain(error, model, ("objective",))
    except ConfigError:
        # Settings of a setting refuse their values. The others are still to be read; none is missing because of that.
        nested = {name for name, field in model.model_fields.items() if tagged(field.annotation)}
        others = option_findings(kind, {key: value for key, value in options.items() if key not in nested})
        return [finding for finding in others if len(finding[0]) > 1]
    return []


def section_findings(section: Any) -> list[Finding]:
    """`option_findings` of an `objective` section as it is written.

    None where it does not tell its class, or the class cannot be loaded: there are other checks for that.
    """
    if not isinstance(section, Mapping):
        return []
    try:
        kind = settings_class(section.get("name", ObjectiveConfig().name))
    except Exception:  # noqa: BLE001 - anything may come out of a module of the user's own
        return []
    shared = ObjectiveConfig.model_fields
    return option_findings(kind, {key: value for key, value in section.items() if key not in shared})
