"""Which reader a file needs: a cluster (YAML), a saved topology (JSON), or a paste (anything else)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distill.transfermesh.topology.cluster import read_cluster_file
from distill.transfermesh.topology.model import Topology, together
from distill.transfermesh.topology.reading import read_paste_file
from distill.transfermesh.topology.serial import read_json_file


def read_topology_files(paths: Sequence[Path]) -> Topology:
    """All of them as one. Raises ConfigError, MissingDependency for YAML without PyYAML."""
    return together(_read(path) for path in paths)


def _read(path: Path) -> Topology:
    if path.suffix in (".yaml", ".yml"):
        return read_cluster_file(path).topology
    if path.suffix == ".json":
        return read_json_file(path)
    paste = read_paste_file(path)
    return Topology((paste.host,), notes=tuple(f"{paste.host.name}: {note}" for note in paste.notes))
