"""Reads files: what tools printed, as a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distill.errors import ConfigError
from distill.transfermesh.topology import nvidia, rocm
from distill.transfermesh.topology.matrix import NoMatrix
from distill.transfermesh.topology.model import Host
from distill.transfermesh.topology.nictools import read_reports, with_reports
from distill.transfermesh.topology.text import clean_lines, content_of, decoded, naming


@dataclass(frozen=True)
class Paste:
    """What a text shows. `tool` printed the matrix of links, or "" when the text only tells of NICs."""

    tool: str
    host: Host
    notes: tuple[str, ...] = ()


def read_paste(text: str, name: str = "host") -> Paste:
    """The outputs of `nvidia-smi topo -m` or `rocm-smi --showtopo`, and of ibstat, ibv_devinfo and show_gids, together.

    Raises ConfigError for a text with neither a whole matrix nor NICs; it says which device or which line is at fault.
    """
    lines = clean_lines(text)
    if not any(line.strip() for line in lines):
        raise ConfigError("the text is empty", fix=f"paste the output of `{nvidia.TOOL}` or `{rocm.TOOL}`")
    reports = read_reports(lines)
    try:
        tool, host, notes = _matrix(lines)
    except NoMatrix:
        if not reports:
            raise
        tool, host, notes = "", Host(""), ["no matrix of GPU links: only NICs are known"]
    notes += [warning for report in reports for warning in report.warnings]
    if not host.nics and not reports and host.gpus:
        notes.append("no NIC is shown: which NIC is nearest to a GPU is not known")
    notes += about_ties(host)
    return Paste(tool, replace(host, name=name, nics=with_reports(host.nics, reports)), tuple(notes))


def about_ties(host: Host) -> list[str]:
    """A warning when it cannot be seen which of several NICs a GPU should use."""
    torn = [gpu.name for gpu in host.gpus if len(host.nearest_nics(gpu.name)) == len(host.nics) > 1]
    if not torn:
        return []
    return [
        f"all {len(host.nics)} NICs are equally near to {', '.join(torn)}: a virtual machine, or a machine that does"
        " not tell; they are dealt out in turn"
    ]


def _matrix(lines: Sequence[str]) -> tuple[str, Host, list[str]]:
    if rocm.is_rocm(lines):
        return (rocm.TOOL, *rocm.read_blocks(lines))
    return (nvidia.TOOL, *nvidia.read_matrix(lines))


def read_paste_file(path: Path) -> Paste:
    """The same of a file; the host is called as the file is. Raises ConfigError, also when it cannot be read."""
    text = decoded(content_of(path))
    with naming(path):
        return read_paste(text, name=path.stem)
