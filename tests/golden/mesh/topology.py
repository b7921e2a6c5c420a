"""Compares what the product reads from pastes with the answers: folders topo/ and nictools/ of FORMAT.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distill.errors import DistillError
from distill.transfermesh.topology.nictools import read_nics
from distill.transfermesh.topology.reading import read_paste
from distill.transfermesh.topology.text import clean_lines, decoded
from tests.golden.mesh.results import Result

NOT_COMPARED = {"note", "warnings_must_name"}


def check(folder: Path) -> list[Result]:
    """A result for every case below `folder`; none when it has neither topo/ nor nictools/."""
    results = [_compare(path, topology_answer) for path in sorted((folder / "topo").glob("*.txt"))]
    return results + [_compare(path, nic_answer) for path in sorted((folder / "nictools").glob("*.txt"))]


def _compare(text_file: Path, answer: Callable[[str], tuple[dict[str, Any], str]]) -> Result:
    case = f"{text_file.parent.name}/{text_file.stem}"
    expected = json.loads(text_file.with_suffix(".expected.json").read_text())
    try:
        got, warnings = answer(decoded(text_file.read_bytes()))
    except DistillError as error:
        return _refused(case, expected, str(error))
    if "error" in expected:
        return Result(case, False, f"was read, but must be refused: {expected['error']}")
    wrong = [key for key in expected if key not in NOT_COMPARED and got.get(key) != expected[key]]
    details = [f"{key} is {got.get(key)!r}, expected {expected[key]!r}" for key in wrong]
    details += [f"no warning names {name}" for name in expected.get("warnings_must_name", []) if name not in warnings]
    return Result(case, not details, "; ".join(details))


def _refused(case: str, expected: dict[str, Any], message: str) -> Result:
    if "error" not in expected:
        return Result(case, False, f"was refused: {message}")
    unsaid = [words for words in expected["message_must_contain"] if words.lower() not in message.lower()]
    return Result(case, not unsaid, f"the message lacks {unsaid}: {message}" if unsaid else "refused as it must be")


def topology_answer(text: str) -> tuple[dict[str, Any], str]:
    paste = read_paste(text)
    host = paste.host
    gpus = host.gpus if host.nics else ()
    return {
        "format": paste.tool,
        "gpus": len(host.gpus),
        "nics": [nic.name for nic in host.nics],
        "links": {f"{a}-{b}": link for (a, b), link in host.links.items()},
        "numa": {gpu.name: gpu.numa for gpu in host.gpus if gpu.numa is not None},
        "cpu_affinity": {gpu.name: gpu.cpu_affinity for gpu in host.gpus if gpu.cpu_affinity},
        "gpu_numa_id": {gpu.name: gpu.memory_numa for gpu in host.gpus if gpu.memory_numa is not None},
        "nearest_nics": {gpu.name: list(host.nearest_nics(gpu.name)) for gpu in gpus},
        "nics_by_distance": {gpu.name: [list(group) for group in host.nics_by_distance(gpu.name)] for gpu in gpus},
        "nvlink_islands": [list(island) for island in host.islands()],
    }, " ".join(paste.notes)


def nic_answer(text: str) -> tuple[dict[str, Any], str]:
    report = read_nics(clean_lines(text))
    answer: dict[str, Any] = {"format": report.tool}
    if report.tool == "show_gids":
        keys = ("dev", "port", "index", "ipv4", "ver", "netdev")
        answer["gids"] = [{key: getattr(gid, key) for key in keys} for gid in report.gids]
        answer["roce_v2_ipv4_index"] = report.roce_v2_ipv4_index()
    else:
        answer["devices"] = [
            {
                "name": nic.name,
                "ports": [
                    {
                        "port": port.number,
                        "state": port.state,
                        "rate_gbit": port.rate_gbit,
                        "link_layer": port.link_layer,
                    }
                    for port in nic.ports
                ],
            }
            for nic in report.devices
        ]
    return answer, " ".join(report.warnings)
