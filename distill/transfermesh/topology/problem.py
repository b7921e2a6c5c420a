"""A topology as a problem for the planner: nodes, links and limits in the JSON shape of its acceptance data.

Rates in GB/s (1e9 bytes), latencies in microseconds. A node is a GPU ("host.g0"), or a host without GPUs ("host").
A rate that nobody measured or gave is that of `classes.PRIORS`; the problem's `notes` list which ones were used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from distill.errors import ConfigError
from distill.registry import did_you_mean
from distill.transfermesh.topology.classes import Rate
from distill.transfermesh.topology.inside import links_inside
from distill.transfermesh.topology.model import Host, Topology
from distill.transfermesh.topology.network import links_of, networks_of
from distill.transfermesh.topology.parts import Node, Parts

ROLES = ("trainer", "engine", "relay")


def to_problem(
    topology: Topology,
    payload_bytes: int,
    *,
    sharded: bool = False,
    roles: Mapping[str, str] | None = None,
    sources: Sequence[str] = (),
    receivers: Sequence[str] = (),
    measured: Mapping[tuple[str, str, str], Rate] | None = None,
) -> dict[str, Any]:
    """The problem of bringing `payload_bytes` from the trainers to all engines.

    roles: host -> trainer, engine or relay, where the topology does not say. sources, receivers: node ids; all nodes of
    trainers, all of engines, when empty. sharded: every source holds an equal part. measured: (source node, destination
    node, kind) -> the rate to take instead of the link's. Raises ConfigError: a host without a role, a node that is not
    there, nobody to send or to receive.
    """
    if payload_bytes < 1:
        raise ConfigError(f"a payload of {payload_bytes} bytes cannot be planned", fix="give at least one byte")
    by_host = {host.name: nodes_of(host, (roles or {}).get(host.name, host.role)) for host in topology.hosts}
    nodes = {node.id: node for its in by_host.values() for node in its}
    parts = Parts()
    for host in topology.hosts:
        links_inside(host, by_host[host.name], parts)
    for network in networks_of(topology):
        links_of(network, topology, by_host, parts)
    for wire in topology.wires:
        _check_nodes((wire.src, wire.dst), nodes, f"the link from {wire.src} to {wire.dst}")
        parts.link(wire.src, wire.dst, wire.rate, wire.kind)
    _take_measured(parts, measured or {})
    return {
        "payload_bytes": payload_bytes,
        "sharded": sharded,
        "nodes": [node.as_json() for node in nodes.values()],
        "links": parts.links,
        "link_groups": parts.groups,
        "shared": [*parts.limits(nodes.values()), *(dict(limit) for limit in topology.limits)],
        "sources": _ends(sources, nodes, "sources", "trainer"),
        "receivers": _ends(receivers, nodes, "receivers", "engine"),
        "notes": parts.assumptions,
    }


def nodes_of(host: Host, role: str) -> list[Node]:
    """A node for each GPU, with the NIC that serves it, or one for the host with its first NIC that is up."""
    if role not in ROLES:
        raise ConfigError(
            f"host {host.name}: {role!r} is no role" if role else f"host {host.name}: what it does is not known",
            why="weights go from trainers to engines; relays only pass them on",
            fix=f"give it a role: {', '.join(ROLES)}",
        )
    if not host.gpus:
        nic = next((nic.name for nic in host.nics if nic.usable), "")
        return [Node(host.name, host.name, role, nic)]
    serving = host.serving_nics()
    return [
        Node(f"{host.name}.g{index}", host.name, role, serving.get(gpu.name, ""), gpu.name)
        for index, gpu in enumerate(host.gpus)
    ]


def _ends(chosen: Sequence[str], nodes: Mapping[str, Node], what: str, role: str) -> list[str]:
    _check_nodes(chosen, nodes, what)
    ends = list(chosen) or [node.id for node in nodes.values() if node.kind == role]
    if not ends:
        raise ConfigError(f"there are no {what}", fix=f"give a host the role {role}")
    return ends


def _check_nodes(names: Sequence[str], nodes: Mapping[str, Node], where: str) -> None:
    for name in names:
        if name not in nodes:
            raise ConfigError(
                f"{where}: there is no node {name!r}",
                fix=did_you_mean(name, nodes) or "a node is HOST.gN for GPU N of a host, or HOST where it has no GPU",
            )


def _take_measured(parts: Parts, measured: Mapping[tuple[str, str, str], Rate]) -> None:
    """Replaces rates. A group with a measured pair becomes single links: its pairs are not alike any more."""
    groups = parts.groups
    parts.groups = []
    for group in groups:
        pairs = [(src, dst, group["kind"]) for src, dst in permutations(group["among"], 2)] if measured else []
        if not any(pair in measured for pair in pairs):
            parts.groups.append(group)
            continue
        for src, dst, kind in pairs:
            parts.link(src, dst, Rate(group["gbps"], group["alpha_us"]), kind)
    for link in parts.links:
        if rate := measured.get((link["src"], link["dst"], link["kind"])):
            link.update(gbps=rate.gbps, alpha_us=rate.alpha_us)
