"""A cluster as a file describes it: hosts by count, networks, limits. For planning what nobody has built yet.

```yaml
payload_gb: 64
hosts:
  train: {role: trainer, gpus: 8, gpu_link: {class: NV18}, nics: 8, nic_gbit: 400}
  engine: {role: engine, count: 4, gpus: 8, gpu_link: {class: NV18}, nics: 8, nic_gbit: 400}
networks:
  rdma: {scope: rails, alpha_us: 12}
```

docs/mesh-topology.md has every key. All errors are ConfigError and name the key.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from distill.errors import ConfigError, MissingDependency
from distill.transfermesh.topology.classes import NEAREST_FIRST, Rate, nvlinks, prior
from distill.transfermesh.topology.model import Gpu, Host, Interface, Network, Nic, Port, Topology, Wire
from distill.transfermesh.topology.network import OVER, SCOPES
from distill.transfermesh.topology.parts import DIRECTIONS
from distill.transfermesh.topology.problem import ROLES, to_problem
from distill.transfermesh.topology.section import Section
from distill.transfermesh.topology.text import content_of, naming

MOST_HOSTS = 100_000
MOST_DEVICES = 1_000
"""Of one host."""


@dataclass(frozen=True)
class Cluster:
    """A topology, and what is to be sent over it. `document` is what the file said."""

    topology: Topology
    payload_bytes: int
    sharded: bool
    sources: tuple[str, ...]
    receivers: tuple[str, ...]
    document: Mapping[str, Any]

    def problem(self) -> dict[str, Any]:
        """As `to_problem`."""
        return to_problem(
            self.topology,
            self.payload_bytes,
            sharded=self.sharded,
            sources=self.sources,
            receivers=self.receivers,
        )

    def with_engine_hosts(self, count: int) -> Cluster:
        """The same with `count` hosts in its one group of engines. Raises ConfigError when it has several."""
        groups = [name for name, group in self.document["hosts"].items() if group["role"] == "engine"]
        if len(groups) != 1:
            raise ConfigError(
                f"hosts: {len(groups)} groups are engines ({', '.join(groups)}), so it is not known which one grows",
                fix="leave one group with the role engine in the file",
            )
        document = copy.deepcopy(dict(self.document))
        document["hosts"][groups[0]]["count"] = count
        return read_cluster(document)


def read_cluster_file(path: Path) -> Cluster:
    """Raises ConfigError, also for a file that is not YAML; MissingDependency without PyYAML."""
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency(f"{path}: reading YAML needs PyYAML", fix="pip install pyyaml") from error
    try:
        document = yaml.safe_load(content_of(path))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    with naming(path):
        return read_cluster(document)


def read_cluster(document: object) -> Cluster:
    """The same from the file's values."""
    file = Section(document, "")
    groups = {name: _hosts(name, section) for name, section in file.sections("hosts")}
    if not groups:
        raise ConfigError("hosts: there is none", fix="write a group of hosts below `hosts`")
    topology = Topology(
        tuple(host for hosts in groups.values() for host in hosts),
        networks=tuple(_network(kind, section, groups) for kind, section in file.sections("networks")),
        wires=tuple(wire for section in file.items("links") for wire in _wires(section)),
        limits=tuple(_limit(section, groups) for section in file.items("limits")),
    )
    payload = file.number("payload_gb")
    sharded, sources, receivers = file.flag("sharded"), file.texts("sources"), file.texts("receivers")
    file.text("name", "")
    file.close()
    assert isinstance(document, Mapping)
    return Cluster(topology, max(1, round(payload * 1e9)), sharded, sources, receivers, document)


def _hosts(name: str, section: Section) -> list[Host]:
    """One host of that name, or with a `count` as many, numbered from 1."""
    gpus = section.whole("gpus", 0, 0, MOST_DEVICES)
    nics = section.whole("nics", 0, 0, MOST_DEVICES)
    gbit = section.number("nic_gbit") if nics else None
    link, rate = _gpu_link(section) if "gpu_link" in section else ("SYS", None)
    capability = section.number("capability") if "capability" in section else None
    ethernet = section.number("ethernet_gbit") if "ethernet_gbit" in section else None
    host = Host(
        name,
        gpus=tuple(Gpu(f"GPU{index}", capability=capability) for index in range(gpus)),
        nics=tuple(Nic(f"nic{index}", ports=(Port(1, "ACTIVE", gbit, "InfiniBand"),)) for index in range(nics)),
        interfaces=(Interface("eth0", round(ethernet * 1000), "up"),) if ethernet else (),
        links=_links(gpus, nics, link),
        rates={link: rate} if rate else {},
        role=section.text("role", among=ROLES),
    )
    counted = "count" in section
    count = section.whole("count", 1, 1, MOST_HOSTS)
    section.close()
    return [replace(host, name=f"{name}{number}") for number in range(1, count + 1)] if counted else [host]


def _gpu_link(section: Section) -> tuple[str, Rate | None]:
    """The class of the links between a host's GPUs, and their rate where the file gives one."""
    inner = section.inner("gpu_link")
    link = inner.text("class")
    if link not in NEAREST_FIRST and link != "XGMI" and not nvlinks(link):
        raise ConfigError(
            f"{inner.where('class')}: {link!r} is no link class",
            fix=f"NV18 and the like, XGMI, {', '.join(NEAREST_FIRST)}",
        )
    assumed = prior(link).rate
    given = "gbps" in inner
    rate = Rate(inner.number("gbps", assumed.gbps), inner.number("alpha_us", assumed.alpha_us))
    inner.close()
    return link, rate if given else None


def _links(gpus: int, nics: int, link: str) -> dict[tuple[str, str], str]:
    """Every pair of GPUs alike. NICs go to the GPUs in order, each behind a switch with those that it serves."""
    links = {(f"GPU{a}", f"GPU{b}"): link for a, b in combinations(range(gpus), 2)}
    for gpu in range(gpus):
        for nic in range(nics):
            near = gpu * nics // gpus == nic if nics <= gpus else nic * gpus // nics == gpu
            links[f"GPU{gpu}", f"nic{nic}"] = "PIX" if near else "SYS"
    return links


def _network(kind: str, section: Section, groups: Mapping[str, list[Host]]) -> Network:
    over = section.text("over", "hosts" if kind == "tcp" else "nics", among=OVER)
    network = Network(
        kind,
        over,
        scope=section.text("scope", "all", among=SCOPES),
        hosts=_named_hosts(section, groups),
        gbps=section.number("gbps") if "gbps" in section else None,
        alpha_us=section.number("alpha_us") if "alpha_us" in section else None,
        oversubscription=section.number("oversubscription", 1.0),
    )
    if network.scope == "rails" and over == "hosts":
        raise ConfigError(f"{section.where('scope')}: rails are of NICs", fix="write `over: nics`, or `scope: all`")
    section.close()
    return network


def _named_hosts(section: Section, groups: Mapping[str, list[Host]]) -> tuple[str, ...]:
    """A name may be that of a group or of one host."""
    named: list[str] = []
    for name in section.texts("hosts"):
        named += [host.name for host in groups[name]] if name in groups else [name]
    return tuple(named)


def _wires(section: Section) -> list[Wire]:
    src, dst = section.text("from"), section.text("to")
    rate = Rate(section.number("gbps"), section.number("alpha_us"))
    wire = Wire(src, dst, section.text("kind"), rate)
    both = section.flag("both_ways")
    section.close()
    return [wire, replace(wire, src=dst, dst=src)] if both else [wire]


def _limit(section: Section, groups: Mapping[str, list[Host]]) -> dict[str, object]:
    """As in the planner's `shared`."""
    limit: dict[str, object] = {"dir": section.text("dir", among=DIRECTIONS), "gbps": section.number("gbps")}
    limit["kinds"] = list(section.texts("kinds"))
    if not limit["kinds"]:
        raise ConfigError(f"{section.where('kinds')}: a limit covers kinds of links", fix="for instance [rdma]")
    for key in ("host", "node", "nic"):
        if key in section:
            limit[key] = section.text(key)
    if "each" in section:
        limit["each"] = section.text("each", among=("node", "host"))
    known = {host.name for hosts in groups.values() for host in hosts}
    if limit.get("host") not in {None, *known}:
        raise ConfigError(f"{section.where('host')}: there is no host {limit['host']!r}")
    section.close()
    return limit
