"""Every YAML that ships composes, validates and passes the checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import distill
from distill.config.compose import load_config
from distill.config.overrides import GROUPS
from distill.objectives.build import build_objective
from distill.registry import KINDS
from tests.builders_config import settings, write_yaml

ROOT = Path(distill.__file__).parents[1]
GROUP_FILES = sorted(path for group in GROUPS for path in (ROOT / "distill/conf" / group).glob("*.yaml"))
CLUSTERS = sorted((ROOT / "recipes/mesh").glob("*.yaml"))
"""Described for `distill-mesh`: no runs."""
RECIPES = sorted(set((ROOT / "recipes").rglob("*.yaml")) - set(CLUSTERS))
IMPLEMENTATIONS = {"student": "student", "server": "server", "store": "store", "objective": "objective"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_is_a_valid_run(path: Path) -> None:
    loaded = load_config(path)
    build_objective(loaded.config.objective)
    assert loaded.config.run.name == path.parent.name


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_group_file_names_its_implementation(path: Path, tmp_path: Path) -> None:
    group = path.parent.name
    values = settings()
    if path.stem == "attach":
        values["server"] = {"rollout_urls": ["http://a:1"], "teacher_urls": ["http://b:1"]}
    loaded = load_config(write_yaml(tmp_path, values), [f"{group}={path.stem}"])
    chosen = loaded.config.model_dump()[group][GROUPS[group]]
    assert chosen == path.stem == yaml.safe_load(path.read_text())[GROUPS[group]]
    build_objective(loaded.config.objective)


@pytest.mark.parametrize(("group", "kind"), IMPLEMENTATIONS.items())
def test_every_registered_implementation_has_a_group_file(group: str, kind: str) -> None:
    assert {path.stem for path in GROUP_FILES if path.parent.name == group} == set(KINDS[kind])


def test_no_yaml_of_the_package_is_left_out_of_these_tests() -> None:
    shipped = set((ROOT / "distill").rglob("*.yaml")) | set((ROOT / "recipes").rglob("*.yaml"))
    assert shipped == {*GROUP_FILES, *RECIPES, *CLUSTERS, ROOT / "distill/conf/distill.yaml"}
