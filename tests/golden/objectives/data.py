"""Golden cases as they stand in a folder: manifests in JSON, arrays beside them in npz."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

FORMAT = 1
PRECISIONS = {"f64": torch.float64, "f32": torch.float32}
_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class NotGolden(Exception):
    """The folder, or a file in it, is not of the format. The message says which and why."""


@dataclass(frozen=True)
class Case:
    """One case. Arrays are numpy arrays as stored; a scalar that JSON cannot hold is a float already."""

    id: str
    kind: str
    status: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Any]
    expect: Mapping[str, Any]
    tol: Mapping[str, tuple[float, float]]
    tags: frozenset[str]
    siblings: Mapping[str, Case] = field(repr=False, compare=False)
    """All cases of the set by id, this one among them."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those it has tolerances for; a refusal must come in every precision."""
        return tuple(name for name in PRECISIONS if name in self.tol or not self.tol)

    def tolerance(self, name: str, precision: str) -> tuple[float, float]:
        """(rtol, atol) of an expected value: one of its own, also where it is that of an item (`0_name`), or that of
        the precision."""
        own = self.tol.get(name, self.tol.get(name.lstrip("0123456789_")))
        return self.tol[precision] if own is None else own

    def tensor(self, name: str, precision: str) -> Tensor:
        """The floating-point input `name`, computed with in `precision`."""
        return torch.from_numpy(np.array(self.inputs[name])).to(PRECISIONS[precision])

    def ints(self, name: str) -> Tensor:
        return torch.from_numpy(np.array(self.inputs[name]).astype(np.int64))


def sets(folder: Path) -> Iterator[tuple[str, tuple[Case, ...]]]:
    """(name of the set, its cases) for every manifest in the folder, by name. Raises NotGolden."""
    if not folder.is_dir():
        raise NotGolden(f"{folder} is not a folder")
    manifests = sorted(folder.glob("*.json"))
    if not manifests:
        raise NotGolden(f"{folder} holds no manifest (*.json)")
    for path in manifests:
        yield _load(path)


def load(folder: Path, name: str) -> tuple[Case, ...]:
    return _load(folder / f"{name}.json")[1]


def _load(path: Path) -> tuple[str, tuple[Case, ...]]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotGolden(f"{path}: no JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise NotGolden(f"{path}: a manifest of format {FORMAT} is expected, this has format {got!r}")
    try:
        entries = manifest["cases"]
        with np.load(path.parent / manifest["arrays"], allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
        siblings: dict[str, Case] = {}
        for entry in entries:
            siblings[entry["id"]] = _case(entry, arrays, siblings)
    except (KeyError, TypeError, AttributeError, OSError, ValueError, BadZipFile) as error:
        raise NotGolden(f"{path}: {type(error).__name__}: {error}") from error
    if not entries or len(siblings) != len(entries) or manifest.get("n_cases", len(entries)) != len(entries):
        raise NotGolden(f"{path}: {len(entries)} cases with {len(siblings)} ids, n_cases is {manifest.get('n_cases')}")
    return manifest["set"], tuple(siblings.values())


def _case(entry: Mapping[str, Any], arrays: Mapping[str, Any], siblings: Mapping[str, Case]) -> Case:
    def value(stored: Any) -> Any:
        if isinstance(stored, str):
            return arrays[stored[1:]] if stored.startswith("@") else _WORDS.get(stored, stored)
        return stored

    return Case(
        id=entry["id"],
        kind=entry["kind"],
        status=entry["status"],
        params=entry["params"],
        inputs={key: value(stored) for key, stored in entry["inputs"].items()},
        expect={key: value(stored) for key, stored in entry["expect"].items()},
        tol={key: (float(rtol), float(atol)) for key, (rtol, atol) in entry.get("tol", {}).items()},
        tags=frozenset(entry.get("tags", [])),
        siblings=siblings,
    )
