"""Hosts that differ in nothing but their names, so that a thousand of them are shown once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from distill.transfermesh.topology.model import Host


@dataclass(frozen=True)
class HostGroup:
    """`host` is the first of them."""

    host: Host
    names: tuple[str, ...]

    def title(self) -> str:
        role = f" ({self.host.role})" if self.host.role else ""
        if len(self.names) == 1:
            return f"{self.names[0]}{role}"
        return f"{self.names[0]} to {self.names[-1]}: {len(self.names)} hosts alike{role}"


def alike_hosts(hosts: Iterable[Host]) -> list[HostGroup]:
    """Neighbours that are alike, together, in order."""
    groups: list[HostGroup] = []
    for host in hosts:
        if groups and _nameless(groups[-1].host) == _nameless(host):
            groups[-1] = replace(groups[-1], names=(*groups[-1].names, host.name))
        else:
            groups.append(HostGroup(host, (host.name,)))
    return groups


def _nameless(host: Host) -> Host:
    """Without what is different for every machine: names, UUIDs."""
    return replace(host, name="", identity="", gpus=tuple(replace(gpu, uuid="") for gpu in host.gpus))
