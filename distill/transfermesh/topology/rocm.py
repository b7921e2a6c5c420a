"""Reads `rocm-smi --showtopo`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distill.errors import ConfigError
from distill.transfermesh.topology.matrix import Vocabulary, find_tables, whole_matrices
from distill.transfermesh.topology.model import Gpu, Host

TOOL = "rocm-smi --showtopo"
_CLASSES = Vocabulary(TOOL, "XGMI|PCIE", "0")
_WANTED = re.compile(r"link\s*type\s*between\s*two\s*gpus", re.IGNORECASE)
_NEXT_BLOCK = re.compile(r"={4,}|between\s*two\s*gpus|numa\s*nodes", re.IGNORECASE)
_NUMA = re.compile(r"GPU\[(\d+)\].*?Numa\s*Node\s*:\s*(-?\d+)", re.IGNORECASE)


def is_rocm(lines: Sequence[str]) -> bool:
    """Whether this tool printed the text: its blocks have titles that no other tool's have."""
    return any(_WANTED.search(line) or "ROCm System Management" in line or "--showtopo" in line for line in lines)


def read_blocks(lines: Sequence[str]) -> tuple[Host, list[str]]:
    """The host that a paste shows. The link types count; weights and hops say nothing that they do not.

    Raises ConfigError for a paste without a whole block of link types.
    """
    start = next((at for at, line in enumerate(lines) if _WANTED.search(line)), None)
    if start is None:
        raise ConfigError(
            f"{TOOL}: there is no block 'Link Type between two GPUs'", fix=f"paste the whole output of `{TOOL}`"
        )
    block = lines[start + 1 :]
    end = next((at for at, line in enumerate(block) if _NEXT_BLOCK.search(line)), len(block))
    matrix = whole_matrices(find_tables(block[:end], _CLASSES), _CLASSES)[0]
    numa = {f"GPU{found[1]}": int(found[2]) for line in lines if (found := _NUMA.search(line))}
    links = {
        (a, b): matrix.cells[i][j]
        for i, a in enumerate(matrix.devices)
        for j, b in enumerate(matrix.devices[i + 1 :], start=i + 1)
    }
    return Host("", gpus=tuple(Gpu(name, numa=numa.get(name)) for name in matrix.devices), links=links), []
