"""What a cluster is made of: hosts with GPUs, NICs and network interfaces, and how near they are to each other.

Everything here is a value: read from a paste, seen on this machine or simulated from a file, it looks the same.
`None` and "" mean that nobody saw it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from distill.errors import ConfigError
from distill.transfermesh.topology.classes import Rate, distance, joins_island

_NO_LINKS: Mapping[tuple[str, str], str] = {}
_NO_PATHS: Mapping[str, tuple[str, ...]] = {}
_NO_RATES: Mapping[str, Rate] = {}


@dataclass(frozen=True, slots=True)
class Gpu:
    """`numa`: node of the CPUs next to it. `memory_numa`: node that its own memory is, on machines with such memory."""

    name: str
    uuid: str = ""
    pci: str = ""
    model: str = ""
    capability: float | None = None
    numa: int | None = None
    memory_numa: int | None = None
    cpu_affinity: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a NIC. `state` is ACTIVE or DOWN, `rate_gbit` in Gbit/s, `subnet` a network that the port is in."""

    number: int
    state: str = ""
    rate_gbit: float | None = None
    link_layer: str = ""
    roce_v2_index: int | None = None
    subnet: str = ""
    netdev: str = ""


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device."""

    name: str
    pci: str = ""
    numa: int | None = None
    ports: tuple[Port, ...] = ()

    @property
    def usable(self) -> bool:
        """False only where a port was seen and none is up."""
        return not self.ports or any(port.state != "DOWN" for port in self.ports)

    @property
    def port(self) -> Port | None:
        """The port that would be used: the fastest that is not down."""
        up = [port for port in self.ports if port.state != "DOWN"]
        return max(up, key=lambda port: port.rate_gbit or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of the operating system; `nic` is the RDMA device that it shares a wire with."""

    name: str
    speed_mbit: int | None = None
    state: str = ""
    pci: str = ""
    numa: int | None = None
    nic: str = ""


@dataclass(frozen=True)
class Host:
    """One machine, or one container of it.

    identity: boot id and namespaces as `endpoint.host_id` has them, "" where only a paste is known.
    links: (a, b) -> class, for GPUs and NICs in that order, one direction.
    paths: device -> the PCI bridges above it, outermost first, itself last.
    rates: link class -> what was measured or given for it; otherwise `classes.PRIORS`.
    role: trainer, engine or relay; "" where nobody said.
    """

    name: str
    identity: str = ""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    links: Mapping[tuple[str, str], str] = field(default_factory=lambda: _NO_LINKS)
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NO_PATHS)
    rates: Mapping[str, Rate] = field(default_factory=lambda: _NO_RATES)
    role: str = ""

    def link(self, a: str, b: str) -> str:
        """The class of the link between two devices, "" when nobody saw it."""
        return self.links.get((a, b)) or self.links.get((b, a), "")

    def nic(self, name: str) -> Nic:
        return next(nic for nic in self.nics if nic.name == name)

    def nics_by_distance(self, gpu: str) -> tuple[tuple[str, ...], ...]:
        """All NICs with a known link to `gpu`, in groups that are equally near, the nearest group first.

        Nearer is the better class; in the same class, where PCI paths are known, the deeper common ancestor.
        """
        groups: dict[tuple[int, int], list[str]] = {}
        for nic in self.nics:
            if link := self.link(gpu, nic.name):
                groups.setdefault((distance(link), -self._common_depth(gpu, nic.name)), []).append(nic.name)
        return tuple(tuple(groups[key]) for key in sorted(groups))

    def _common_depth(self, a: str, b: str) -> int:
        if distance(self.link(a, b)) >= distance("NODE"):
            return 0  # nothing is shared but the machine
        return common_depth(self.paths.get(a, ()), self.paths.get(b, ()))

    def nearest_nics(self, gpu: str) -> tuple[str, ...]:
        return next(iter(self.nics_by_distance(gpu)), ())

    def serving_nics(self) -> dict[str, str]:
        """GPU -> the NIC that it is to use: among the nearest that are up, those which tie are dealt out in turn."""
        serving: dict[str, str] = {}
        dealt: dict[tuple[str, ...], int] = {}
        for gpu in self.gpus:
            for group in self.nics_by_distance(gpu.name):
                usable = tuple(name for name in group if self.nic(name).usable)
                if usable:
                    turn = dealt.get(usable, 0)
                    serving[gpu.name] = usable[turn % len(usable)]
                    dealt[usable] = turn + 1
                    break
        return serving

    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Groups of two GPUs or more that NVLink or XGMI joins, directly or over others; ordered by lowest GPU."""
        order = [gpu.name for gpu in self.gpus]
        seen: set[str] = set()
        found: list[tuple[str, ...]] = []
        for start in order:
            if start in seen:
                continue
            reached, frontier = {start}, [start]
            while frontier:
                here = frontier.pop()
                new = [other for other in order if other not in reached and joins_island(self.link(here, other))]
                reached.update(new)
                frontier += new
            seen |= reached
            if len(reached) > 1:
                found.append(tuple(name for name in order if name in reached))
        return tuple(found)


def common_depth(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """How many bridges two PCI paths share, counted from the root."""
    depth = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine != theirs:
            break
        depth += 1
    return depth


@dataclass(frozen=True, slots=True)
class Network:
    """What joins hosts. `kind` names its links, so no two networks have the same.

    over: "nics", where each NIC has its own rate, or "hosts", where all of a host share its fastest interface.
    scope: "rails", where a NIC reaches only the NICs of its rail, or "all".
    hosts: who is in it; () for all. gbps: what one NIC or host may use, where its own rate is not to count.
    oversubscription: by how much all edges together exceed the core; 1 for a fabric that never blocks.
    """

    kind: str
    over: str = "nics"
    scope: str = "all"
    hosts: tuple[str, ...] = ()
    gbps: float | None = None
    alpha_us: float | None = None
    oversubscription: float = 1.0


@dataclass(frozen=True, slots=True)
class Wire:
    """A link of its own from one node to another, as in FORMAT 3.1: `src` and `dst` are node ids ("host.g0")."""

    src: str
    dst: str
    kind: str
    rate: Rate


@dataclass(frozen=True)
class Topology:
    """Hosts, and what joins them. `limits` have the shape of the planner's `shared`; `notes` say what was not seen."""

    hosts: tuple[Host, ...]
    networks: tuple[Network, ...] = ()
    wires: tuple[Wire, ...] = ()
    limits: tuple[Mapping[str, object], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, count in Counter(host.name for host in self.hosts).items():
            if count > 1:
                raise ConfigError(f"{count} hosts are called {name!r}", fix="give every host a name of its own")

    def host(self, name: str) -> Host:
        """Raises ConfigError for a host that is not there."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise ConfigError(f"there is no host {name!r}", fix=f"one of: {', '.join(host.name for host in self.hosts)}")

    def rails(self) -> tuple[dict[str, tuple[str, ...]], ...]:
        """Rail -> host -> its NICs of that rail.

        Where every NIC in use has a subnet and they differ, a rail is a subnet. Otherwise it is a position: the first
        NIC that serves a GPU of each host, the second, and so on.
        """
        serving = {host.name: _in_use(host) for host in self.hosts}
        subnets = {host.name: [_subnet(host.nic(nic)) for nic in serving[host.name]] for host in self.hosts}
        distinct = dict.fromkeys(subnet for found in subnets.values() for subnet in found)
        if len(distinct) > 1 and "" not in distinct:
            return tuple(_members(serving, subnets, subnet) for subnet in distinct)
        longest = max((len(nics) for nics in serving.values()), default=0)
        return tuple(
            {host: (nics[rail],) for host, nics in serving.items() if rail < len(nics)} for rail in range(longest)
        )


def _members(
    serving: Mapping[str, tuple[str, ...]], subnets: Mapping[str, list[str]], subnet: str
) -> dict[str, tuple[str, ...]]:
    """Host -> its NICs in this subnet, for the hosts that have any."""
    chosen = {
        host: tuple(nic for nic, its in zip(nics, subnets[host], strict=True) if its == subnet)
        for host, nics in serving.items()
    }
    return {host: nics for host, nics in chosen.items() if nics}


def _in_use(host: Host) -> tuple[str, ...]:
    """NICs that serve a GPU, in the order of the GPUs; on a host without GPUs all that are up."""
    if host.gpus:
        return tuple(dict.fromkeys(host.serving_nics().values()))
    return tuple(nic.name for nic in host.nics if nic.usable)


def _subnet(nic: Nic) -> str:
    return nic.port.subnet if nic.port else ""


def together(topologies: Iterable[Topology]) -> Topology:
    """One of several. A host that several of them saw, by its identity, is there once; one without is nobody else.

    Raises ConfigError when different hosts have the same name.
    """
    parts = list(topologies)
    hosts: dict[str, Host] = {}
    for number, host in enumerate(host for part in parts for host in part.hosts):
        hosts.setdefault(host.identity or f"unknown {number}", host)
    return Topology(
        tuple(hosts.values()),
        networks=tuple(network for part in parts for network in part.networks),
        wires=tuple(wire for part in parts for wire in part.wires),
        limits=tuple(limit for part in parts for limit in part.limits),
        notes=tuple(note for part in parts for note in part.notes),
    )
