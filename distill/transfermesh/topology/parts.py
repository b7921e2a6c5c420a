"""What a planner's problem is put together from: nodes, links, and limits on their sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distill.transfermesh.topology.classes import Prior, Rate

DIRECTIONS = ("egress", "ingress")


@dataclass(frozen=True, slots=True)
class Node:
    """An end of links: a GPU of a host, or a host without any. `device` is the GPU's name on its host."""

    id: str
    host: str
    kind: str
    nic: str = ""
    device: str = ""

    def as_json(self) -> dict[str, str]:
        plain = {"id": self.id, "host": self.host, "kind": self.kind}
        return plain | ({"nic": self.nic} if self.nic else {})


class Parts:
    """Collects links and limits. A limit is given by what it belongs to; written as short as it can be said."""

    def __init__(self) -> None:
        self.links: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.node_gbps: dict[str, dict[str, float]] = {}
        self.host_gbps: dict[str, dict[str, float]] = {}
        self.nic_gbps: dict[str, dict[tuple[str, str], float]] = {}
        self.core_gbps: dict[str, float] = {}
        self._assumed: dict[str, None] = {}

    def link(self, src: str, dst: str, rate: Rate, kind: str) -> None:
        self.links.append({"src": src, "dst": dst, "gbps": rate.gbps, "alpha_us": rate.alpha_us, "kind": kind})

    def group(self, among: Iterable[str], rate: Rate, kind: str) -> None:
        """A link from each of these nodes to each other one."""
        members = list(among)
        if len(members) > 1:
            self.groups.append({"among": members, "gbps": rate.gbps, "alpha_us": rate.alpha_us, "kind": kind})

    def assume(self, what: str, prior: Prior) -> Rate:
        """The rate of `prior`, of which the problem's notes will tell."""
        self._assumed[f"{what}: {prior.rate.gbps:g} GB/s and {prior.rate.alpha_us:g} us, from {prior.source}"] = None
        return prior.rate

    @property
    def assumptions(self) -> str:
        return "".join(f"not measured, {line}\n" for line in self._assumed)

    def limits(self, nodes: Iterable[Node]) -> list[dict[str, Any]]:
        """All limits in the shape of the planner's `shared`, in both directions."""
        places = {node.id: (node.host, node.nic) for node in nodes}
        shared: list[dict[str, Any]] = []
        for kind, by_node in self.node_gbps.items():
            shared += _said(kind, {node: {"node": node} for node in by_node}, by_node, self._each_node(kind, by_node))
        for kind, by_nic in self.nic_gbps.items():
            where = {nic: {"host": nic[0], "nic": nic[1]} for nic in by_nic}
            shared += _said(kind, where, by_nic, self._each_nic(kind, by_nic, places))
        for kind, by_host in self.host_gbps.items():
            alone = {places[node][0] for node in self._users(kind)} <= set(by_host)
            shared += _said(kind, {host: {"host": host} for host in by_host}, by_host, "host" if alone else "")
        shared += [{"dir": "egress", "gbps": gbps, "kinds": [kind]} for kind, gbps in self.core_gbps.items()]
        return shared

    def _users(self, kind: str) -> set[str]:
        ends = {link[end] for link in self.links if link["kind"] == kind for end in ("src", "dst")}
        return ends.union(*(group["among"] for group in self.groups if group["kind"] == kind))

    def _each_node(self, kind: str, limited: Mapping[str, float]) -> str:
        return "node" if self._users(kind) <= set(limited) else ""

    def _each_nic(self, kind: str, limited: Mapping[Any, float], places: Mapping[str, tuple[str, str]]) -> str:
        """ "node" when no two nodes share a NIC, "host" when all nodes of a host share one, "" otherwise."""
        used = [places[node] for node in self._users(kind)]
        if not set(used) <= set(limited):
            return ""
        if len(set(used)) == len(used):
            return "node"
        return "host" if len({host for host, _ in used}) == len(set(used)) else ""


def _said(kind: str, where: Mapping[Any, dict[str, str]], gbps: Mapping[Any, float], each: str) -> list[dict[str, Any]]:
    """One entry for all that have the same rate when `each` may stand for them, otherwise one for each."""
    if each and len(set(gbps.values())) == 1:
        rate = next(iter(gbps.values()))
        return [{"dir": way, "gbps": rate, "kinds": [kind], "each": each} for way in DIRECTIONS]
    return [
        {**where[key], "dir": way, "gbps": rate, "kinds": [kind]} for key, rate in gbps.items() for way in DIRECTIONS
    ]
