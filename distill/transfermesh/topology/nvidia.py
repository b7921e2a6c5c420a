"""Reads `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from distill.errors import ConfigError
from distill.transfermesh.topology.classes import OLD_NAMES
from distill.transfermesh.topology.matrix import Matrix, Vocabulary, find_tables, whole_matrices
from distill.transfermesh.topology.model import Gpu, Host, Nic

TOOL = "nvidia-smi topo -m"
_CLASSES = Vocabulary(
    TOOL, r"NV\d+|PIX|PXB|PHB|NODE|SYS|SOC", "X", other=frozenset({"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"})
)
_LEGEND = re.compile(r"(?<!\w)(NIC\d+)\s*:\s*([A-Za-z][\w.\-]*)")
_CPU, _NUMA, _MEMORY = "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"


def read_matrix(lines: Sequence[str]) -> tuple[Host, list[str]]:
    """The host that a paste shows, and what to tell about the paste. Raises ConfigError for what is no whole matrix."""
    matrices = whole_matrices(find_tables(lines, _CLASSES), _CLASSES)
    notes = [f"the text has {len(matrices)} topology matrices; the first is taken"] if len(matrices) > 1 else []
    return host_of(matrices[0], _nic_names(lines, matrices[0])), notes


def _nic_names(lines: Sequence[str], matrix: Matrix) -> dict[str, str]:
    """Column name -> the name in the NIC Legend, if it has one."""
    names: dict[str, str] = {}
    for line in lines:
        for column, name in _LEGEND.findall(line):
            if column in matrix.devices:
                names.setdefault(column, name)
    taken = [names.get(device, device) for device in matrix.devices]
    for name in taken:
        if taken.count(name) > 1:
            raise ConfigError(f"{TOOL}: two NICs are called {name}", fix="correct the NIC Legend below the matrix")
    return names


def host_of(matrix: Matrix, nic_names: Mapping[str, str]) -> Host:
    """A host without a name, with the devices and links of the matrix; NICs by their names in the legend."""
    order = sorted(range(len(matrix.devices)), key=lambda at: not matrix.devices[at].startswith("GPU"))
    names = [nic_names.get(device, device) for device in matrix.devices]
    gpus = [_gpu(names[at], matrix.tails[at], matrix.titles) for at in order if names[at].startswith("GPU")]
    links = {
        (names[a], names[b]): OLD_NAMES.get(matrix.cells[a][b], matrix.cells[a][b])
        for place, a in enumerate(order)
        for b in order[place + 1 :]
    }
    nics = tuple(Nic(names[at]) for at in order[len(gpus) :])
    return Host("", gpus=tuple(gpus), nics=nics, links=links)


def _gpu(name: str, tail: str, titles: Sequence[str]) -> Gpu:
    fields = _fields(tail, titles)
    numa = re.match(r"\d+", fields.get(_NUMA, ""))
    memory = re.match(r"\d+", fields.get(_MEMORY, ""))
    return Gpu(
        name,
        numa=int(numa[0]) if numa else None,
        memory_numa=int(memory[0]) if memory else None,
        cpu_affinity=fields.get(_CPU, ""),
    )


def _fields(tail: str, titles: Sequence[str]) -> dict[str, str]:
    """Title -> the text in its column, for those that have one.

    Columns do not line up with their titles: the tool prints a tab after each value, two after the NUMA affinity.
    Only where a value is blank does it matter which.
    """
    words = tail.split()
    if len(words) >= len(titles):
        return dict(zip(titles, words, strict=False))
    if "\t" in tail:
        parts = [part.strip() for part in tail.lstrip(" ").removeprefix("\t").split("\t")]
        by_title = dict(zip((_CPU, _NUMA), parts, strict=False)) | {_MEMORY: parts[-1] if len(parts) > 2 else ""}
        return {title: text for title, text in by_title.items() if text and title in titles}
    return _by_place(tail, words, titles)


def _by_place(tail: str, words: Sequence[str], titles: Sequence[str]) -> dict[str, str]:
    """The same where tabs became blanks: a CPU affinity is a range or stands within a tab of the last cell."""
    fields: dict[str, str] = {}
    left = list(words)
    indent = len(tail) - len(tail.lstrip())
    if left and (indent <= 8 or re.fullmatch(r"\d+-\d+(?:,.*)?", left[0])):
        fields[_CPU] = left.pop(0)
    if left and _MEMORY in titles and (len(left) > 1 or left[-1] == "N/A"):
        fields[_MEMORY] = left.pop()
    if left:
        fields[_NUMA] = left[0]
    return {title: text for title, text in fields.items() if title in titles}
