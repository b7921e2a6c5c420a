"""JSON schema of teachers.yaml, for editors. It says no more than the models and the classes of the objectives do."""

from __future__ import annotations

from typing import Any

from distill import registry
from distill.config.models import ObjectiveConfig, RunConfig
from distill.config.options import section_model, settings_class

_DEFS = "#/$defs/{model}"


def json_schema() -> dict[str, Any]:
    """The schema of a whole file. What Hydra reads before the models do is added to theirs."""
    schema = RunConfig.model_json_schema(ref_template=_DEFS)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"] |= {
        "defaults": {"type": "array", "description": "Hydra's defaults list; without it: [distill, _self_]"},
        "hydra": {
            "type": "object",
            "description": "Hydra's own settings, of which one has a meaning here",
            "properties": {"searchpath": {"type": "array", "description": "more folders with groups of settings"}},
            "additionalProperties": False,
        },
    }
    shared = schema["$defs"]["ObjectiveConfig"]
    sections = {name: _section(name, schema["$defs"]) for name in registry.names("objective")}
    schema["$defs"]["ObjectiveConfig"] = {
        "title": "ObjectiveConfig",
        "description": "What is minimised. `name` decides which settings there are beside those of all objectives.",
        "type": "object",
        "oneOf": [*sections.values(), _own_class(shared), _named_elsewhere(shared, list(sections.values()))],
    }
    return schema


def _section(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The section of one objective; the models within it go into `definitions`."""
    section = section_model(settings_class(name)).model_json_schema(ref_template=_DEFS)
    for kind, definition in section.pop("$defs", {}).items():
        if "const" in definition["properties"].get("name", {}):  # it tells the kind, so it must be there
            definition["required"] = ["name", *definition.get("required", [])]
        definitions[kind] = definition
    section["title"] = name
    section["properties"]["name"] = {"const": name}
    section["required"] = ["name", *section.get("required", [])]
    return section


def _own_class(shared: dict[str, Any]) -> dict[str, Any]:
    """A class of the user's own: its settings are not known."""
    name = {"type": "string", "pattern": ":", "description": "package.module:Class"}
    return {
        "title": "a class of your own",
        "type": "object",
        "properties": shared["properties"] | {"name": name},
        "required": ["name"],
    }


def _named_elsewhere(shared: dict[str, Any], sections: list[dict[str, Any]]) -> dict[str, Any]:
    """Without a name: the defaults list may give it, so every setting of every objective may stand there."""
    merged: dict[str, list[Any]] = {}
    for section in sections:
        for key, value in section["properties"].items():
            if key not in ObjectiveConfig.model_fields and value not in merged.setdefault(key, []):
                merged[key].append(value)
    own = {key: values[0] if len(values) == 1 else {"anyOf": values} for key, values in merged.items()}
    common = {key: value for key, value in shared["properties"].items() if key != "name"}
    return {
        "title": "an objective that the defaults list names",
        "type": "object",
        "properties": common | own,
        "additionalProperties": False,
    }
