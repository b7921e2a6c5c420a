"""Links between hosts: over RDMA NICs, each with its own rate, or over the interface that a host's processes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distill.errors import ConfigError
from distill.transfermesh.topology.classes import PRIORS, Prior, Rate, prior
from distill.transfermesh.topology.model import Host, Interface, Network, Topology
from distill.transfermesh.topology.parts import Node, Parts

OVER = ("nics", "hosts")
SCOPES = ("rails", "all")


def networks_of(topology: Topology) -> tuple[Network, ...]:
    """Those that the topology names; without any, RDMA between all NICs that are up and TCP between all interfaces.

    An interface on the wire of an RDMA NIC is not counted a second time.
    """
    if topology.networks:
        return topology.networks
    with_nics = tuple(host.name for host in topology.hosts if any(nic.usable for nic in host.nics))
    with_wires = tuple(host.name for host in topology.hosts if _interface(host) is not None)
    found = (Network("rdma", "nics", hosts=with_nics), Network("tcp", "hosts", hosts=with_wires))
    return tuple(network for network in found if len(network.hosts) > 1)


def links_of(network: Network, topology: Topology, by_host: Mapping[str, Sequence[Node]], parts: Parts) -> None:
    """Adds its links and limits. Raises ConfigError for a host that is not there, or has nothing to be joined by."""
    hosts = [topology.host(name) for name in network.hosts] or list(topology.hosts)
    if network.over == "nics":
        edges = _nic_links(network, topology, hosts, by_host, parts)
    else:
        edges = _host_links(network, hosts, by_host, parts)
    if network.oversubscription > 1:
        parts.core_gbps[network.kind] = edges / network.oversubscription


def _nic_links(
    network: Network, topology: Topology, hosts: Sequence[Host], by_host: Mapping[str, Sequence[Node]], parts: Parts
) -> float:
    """Adds them; returns the total rate of the NICs."""
    rates: dict[tuple[str, str], float] = {}
    members: dict[int, list[Node]] = {}
    rails = _rail_of(topology) if network.scope == "rails" else {}
    for host in hosts:
        for node in by_host[host.name]:
            if not node.nic:
                raise ConfigError(
                    f"network {network.kind}: {node.id} has no NIC that is up",
                    fix=f"name the hosts that are in the network, in `hosts`, without {host.name}",
                )
            rates[host.name, node.nic] = _nic_gbps(network, host, node.nic, parts)
            members.setdefault(rails.get((host.name, node.nic), 0), []).append(node)
    joined: dict[tuple[str, str], float] = {}
    for nodes in members.values():
        if len({node.host for node in nodes}) > 1:
            joined |= {(node.host, node.nic): rates[node.host, node.nic] for node in nodes}
            fastest = max(rates[node.host, node.nic] for node in nodes)
            parts.group((node.id for node in nodes), Rate(fastest, _alpha(network, parts)), network.kind)
    parts.nic_gbps[network.kind] = joined
    return sum(rates.values())


def _rail_of(topology: Topology) -> dict[tuple[str, str], int]:
    return {
        (host, nic): number
        for number, rail in enumerate(topology.rails())
        for host, nics in rail.items()
        for nic in nics
    }


def _host_links(network: Network, hosts: Sequence[Host], by_host: Mapping[str, Sequence[Node]], parts: Parts) -> float:
    """Adds them; returns the total rate of the hosts."""
    rates = {host.name: _host_gbps(network, host, parts) for host in hosts}
    nodes = [node for host in hosts for node in by_host[host.name]]
    if len(rates) > 1:
        fastest = max(rates.values())
        parts.group((node.id for node in nodes), Rate(fastest, _alpha(network, parts)), network.kind)
        parts.host_gbps[network.kind] = rates
    return sum(rates.values())


def _nic_gbps(network: Network, host: Host, name: str, parts: Parts) -> float:
    """What was given, else the line rate of the port: an upper bound as every rate of the planner's is."""
    port = host.nic(name).port
    if network.gbps is not None:
        return network.gbps
    if port and port.rate_gbit:
        return port.rate_gbit / 8
    return parts.assume("a NIC whose rate is not known", PRIORS["rdma"]).gbps


def _host_gbps(network: Network, host: Host, parts: Parts) -> float:
    interface = _interface(host)
    if network.gbps is not None:
        return network.gbps
    if interface and interface.speed_mbit:
        return interface.speed_mbit / 8000
    return parts.assume("an interface whose speed is not known", PRIORS["tcp"]).gbps


def _interface(host: Host) -> Interface | None:
    """The fastest that is up and has a wire of its own, "" being a state that nobody saw."""
    own = [each for each in host.interfaces if not each.nic and each.state in ("up", "unknown", "") and each.speed_mbit]
    return max(own, key=lambda each: each.speed_mbit or 0, default=None)


def _alpha(network: Network, parts: Parts) -> float:
    if network.alpha_us is not None:
        return network.alpha_us
    known = prior("rdma" if network.over == "nics" else "tcp")
    rate = replace(known.rate, gbps=0.0)
    return parts.assume(f"latency of network {network.kind}", Prior(rate, known.source)).alpha_us
