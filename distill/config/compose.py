"""teachers.yaml and the command line become one RunConfig.

Hydra composes, pydantic validates, and `checks` has the last word.
The user's file is Hydra's primary configuration. Hydra finds its groups beside the file and in `distill.conf`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

import distill.conf
from distill.config.checks import check
from distill.config.document import Document, find, read
from distill.config.explain import Where, explain, gather
from distill.config.included import check_included
from distill.config.models import ObjectiveConfig, RunConfig
from distill.config.options import section_findings
from distill.config.overrides import COMMAND_LINE, GROUPS, Overrides, read_overrides
from distill.config.schema import KeyPath, path_values
from distill.errors import ConfigError
from distill.registry import did_you_mean

PRIMARY = "distill_primary"
"""The name under which Hydra finds the user's file after `_primary` has prepared it."""


@dataclass(frozen=True)
class LoadedConfig:
    """A run as it was asked for, and where each part of it was written."""

    config: RunConfig
    source: Path
    written: Where
    """The place of a key, or of what it stands in; empty where the file and the command line hold neither."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Compose and validate the run that `path` (a YAML file, or a folder with a teachers.yaml) describes.

    Relative paths in the file are relative to its folder, on the command line to the working directory. Raises
    ConfigError, which names every key that is wrong and where it was written.
    """
    document = read(find(path))
    _refuse_shadow(document.path.parent / "distill.yaml")
    teachers, data = document.values.get("teachers"), document.values.get("data")
    asked = read_overrides(
        overrides,
        teachers=[str(name) for name in teachers] if isinstance(teachers, dict) else [],
        data=len(data) if isinstance(data, list) else 0,
        has_section=document.has_section,
    )
    values = _absolute(_composed(document, asked), document, asked)

    def where(key: KeyPath) -> str:
        return COMMAND_LINE if asked.sets(key) else document.place(key)

    def written(key: KeyPath) -> str:
        if asked.sets(key):
            return COMMAND_LINE
        held = next((key[:length] for length in range(len(key), 0, -1) if key[:length] in document.lines), None)
        return document.place(held) if held else ""

    wrong = section_findings(values.get("objective"))
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise gather([*explain(error), *wrong], where) from None
    check(config, where, wrong)
    return LoadedConfig(config, document.path, written)


def _refuse_shadow(file: Path) -> None:
    """Hydra looks beside the user's file first: a file of this name would silently replace Distill's own defaults."""
    if file.exists():
        raise ConfigError(
            f"{file} would stand in for the defaults of Distill",
            why="`distill` in a defaults list is the name of those defaults, and files beside the run's come first",
            fix="give it another name, such as teachers.yaml",
        )


def distill_cache(name: str) -> str:
    """`${distill_cache:NAME}` in a YAML file: a folder that survives runs, under $DISTILL_CACHE or ~/.cache/distill."""
    root = os.environ.get("DISTILL_CACHE") or "~/.cache/distill"
    return str((Path(root).expanduser() / name).absolute())


def _composed(document: Document, asked: Overrides) -> dict[str, Any]:
    primary, choices = _primary(document, asked)
    OmegaConf.register_new_resolver("distill_cache", distill_cache, replace=True)
    ConfigStore.instance().store(name=PRIMARY, node=OmegaConf.create(primary))
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(document.path.parent), version_base="1.3"):
            composed = compose(PRIMARY, overrides=[*choices, *asked.settings])
        return _plain(composed)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(
            f"{document.path}: {key}{_first_line(error)}", fix="check the ${...} in this value"
        ) from error
    except HydraException as error:
        raise _hydra_error(document, error) from error
    except RecursionError as error:
        raise ConfigError(
            f"{document.path}: its defaults list leads back to a file that is already being read",
            why="files that include one another have no end",
            fix="take the file's own name out of the defaults lists, here and in what they name",
        ) from error
    finally:
        GlobalHydra.instance().clear()


def _plain(composed: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _primary(document: Document, asked: Overrides) -> tuple[dict[str, Any], list[str]]:
    """The file as Hydra shall see it, and the group choices: of the command line, else of the file."""
    values = dict(document.values)
    defaults, choices = _defaults(document)
    check_included(document, {**choices, **asked.choices})
    overrides: list[str] = []
    for group, key in GROUPS.items():
        block = values.get(group)
        named = _named(block, group, key, document)
        if named is not None and group in choices and named != choices[group]:
            raise ConfigError(
                f"{document.place((group, key))}: {group} is {named!r} here, {choices[group]!r} in the defaults list",
                fix="say it in one place",
            )
        if group in asked.choices and isinstance(block, Mapping):
            # The settings of an objective's class belong to it alone; all others are common to all choices.
            kept = ObjectiveConfig.model_fields if group == "objective" else block
            values[group] = {name: entry for name, entry in block.items() if name != key and name in kept}
        choice = asked.choices.get(group) or named or choices.get(group)
        if choice is not None:
            where = COMMAND_LINE if group in asked.choices else document.place((group, key))
            overrides += _choose(group, key, str(choice), where, document.path.parent)
    hydra = {"searchpath": [*_searchpath(document), "pkg://distill.conf"]}
    return {**values, "defaults": defaults, "hydra": hydra}, overrides


def _named(block: Any, group: str, key: str, document: Document) -> str | None:
    """The implementation that the file's block names, if it names one."""
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError(
            f"{document.place((group,))}: {group} must be a mapping of settings, and is {block!r}",
            fix=f"write {group}: {{{key}: {block}}}" if isinstance(block, str) else "",
        )
    if not block or key not in block:
        return None
    named = block[key]
    if not isinstance(named, str) or not named:
        raise ConfigError(
            f"{document.place((group, key))}: {group}.{key} must be the name of an implementation, and is {named!r}",
            fix=f"write a name, or leave {group}.{key} out",
        )
    return named


def _defaults(document: Document) -> tuple[list[Any], dict[str, str]]:
    """The defaults list with `distill` in it and without the choices of our groups, which are returned beside it."""
    written = document.values.get("defaults", ["distill", "_self_"])
    if not isinstance(written, list):
        raise ConfigError(
            f"{document.place(('defaults',))}: defaults must be a list", fix="defaults: [distill, _self_]"
        )
    kept: list[Any] = []
    choices: dict[str, str] = {}
    for index, entry in enumerate(written):
        if not (isinstance(entry, str) or (isinstance(entry, Mapping) and len(entry) == 1)):
            raise ConfigError(
                f"{document.place(('defaults', index))}: {entry!r} cannot stand in a defaults list",
                fix="an entry is the name of a file beside this one, or GROUP: NAME",
            )
        group, name = next(iter(entry.items())) if isinstance(entry, Mapping) else ("", entry)
        group = str(group).removeprefix("override ").strip()
        if group in GROUPS:
            choices[group] = str(name)
        else:
            kept.append(entry)
    if "distill" not in kept:
        kept.insert(0, "distill")
    if "_self_" not in kept:
        kept.append("_self_")
    return kept, choices


def _searchpath(document: Document) -> list[str]:
    hydra = document.values.get("hydra", {})
    if not isinstance(hydra, Mapping) or set(hydra) - {"searchpath"}:
        raise ConfigError(
            f"{document.place(('hydra',))}: of Hydra's own settings only hydra.searchpath has a meaning here",
            why="a run is started by distill-run, which needs none of the others",
        )
    return [str(entry) for entry in hydra.get("searchpath", [])]


def _choose(group: str, key: str, choice: str, where: str, folder: Path) -> list[str]:
    packaged = Path(distill.conf.__path__[0])
    files = {path.stem for root in (folder, packaged) for path in (root / group).glob("*.yaml")}
    if choice in files:
        return [f"{group}={choice}"]
    if ":" in choice:  # a class of the user's own, which has no file of settings
        return [f"~{group}", f"++{group}.{key}='{choice}'"]
    raise ConfigError(f"{where}: there is no {group} {choice!r}", fix=did_you_mean(choice, files))


def _absolute(values: dict[str, Any], document: Document, asked: Overrides) -> dict[str, Any]:
    """Every path made absolute, from the folder of whoever wrote it."""
    found = list(path_values(values))
    resume = values.get("resume")
    if isinstance(resume, str) and resume not in ("auto", ""):
        found.append((("resume",), resume))
    for key, text in found:
        if not text:  # no path: the models say so
            continue
        base = Path.cwd() if asked.sets(key) else document.path.parent
        holder: Any = values
        for part in key[:-1]:
            holder = holder[part]
        holder[key[-1]] = os.path.normpath(base / Path(text).expanduser())
    return values


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].replace(f"'{PRIMARY}'", "the file").replace(PRIMARY, "the file")


def _hydra_error(document: Document, error: HydraException) -> ConfigError:
    said = _first_line(error)
    removed = re.match(r"Could not delete from config\. '(.+)' does not exist", said)
    if removed:
        name = removed[1]
        return ConfigError(
            f"{COMMAND_LINE}: ~{name}: the file does not set it",
            why="~ takes back what the file says; what it leaves out has its default already",
        )
    missing = getattr(error, "missing_cfg_file", None)
    fix = f"the defaults list names {missing!r}, which is neither beside the file nor a part of distill"
    return ConfigError(f"{document.path}: {said}", fix=fix if missing else "")
