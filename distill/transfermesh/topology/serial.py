"""A topology as JSON and back, so that what each host saw can be put together on one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.errors import ConfigError
from distill.transfermesh.topology.classes import Rate
from distill.transfermesh.topology.model import Gpu, Host, Interface, Network, Nic, Port, Topology, Wire
from distill.transfermesh.topology.section import Section
from distill.transfermesh.topology.text import content_of, naming

_MOST = 1 << 53


def to_json(topology: Topology) -> dict[str, Any]:
    """Plain values. What follows from the rest, such as the nearest NICs, is there too, for whoever reads it."""
    return {
        "hosts": [_host_json(host) for host in topology.hosts],
        "networks": [asdict(network) for network in topology.networks],
        "wires": [asdict(wire) for wire in topology.wires],
        "limits": [dict(limit) for limit in topology.limits],
        "notes": list(topology.notes),
        "rails": [{host: list(nics) for host, nics in rail.items()} for rail in topology.rails()],
    }


def _host_json(host: Host) -> dict[str, Any]:
    return {
        "name": host.name,
        "identity": host.identity,
        "role": host.role,
        "gpus": [asdict(gpu) for gpu in host.gpus],
        "nics": [asdict(nic) for nic in host.nics],
        "interfaces": [asdict(interface) for interface in host.interfaces],
        "links": [{"a": a, "b": b, "class": link} for (a, b), link in host.links.items()],
        "paths": {device: list(path) for device, path in host.paths.items()},
        "rates": {link: asdict(rate) for link, rate in host.rates.items()},
        "islands": [list(island) for island in host.islands()],
        "nics_by_distance": {gpu.name: [list(group) for group in host.nics_by_distance(gpu.name)] for gpu in host.gpus},
        "serving_nics": host.serving_nics(),
    }


def read_json_file(path: Path) -> Topology:
    """Raises ConfigError for what `to_json` did not write; it names the key."""
    try:
        document = json.loads(content_of(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    with naming(path):
        return from_json(document)


def from_json(document: object) -> Topology:
    """The inverse of `to_json`."""
    file = Section(document, "")
    return Topology(
        tuple(_host(section) for section in file.items("hosts")),
        networks=tuple(_network(section) for section in file.items("networks")),
        wires=tuple(_wire(section) for section in file.items("wires")),
        limits=tuple(section.plain() for section in file.items("limits")),
        notes=file.texts("notes"),
    )


def _host(section: Section) -> Host:
    return Host(
        section.text("name"),
        identity=section.text("identity", ""),
        gpus=tuple(_gpu(inner) for inner in section.items("gpus")),
        nics=tuple(_nic(inner) for inner in section.items("nics")),
        interfaces=tuple(_interface(inner) for inner in section.items("interfaces")),
        links={(inner.text("a"), inner.text("b")): inner.text("class") for inner in section.items("links")},
        paths={device: section.inner("paths").texts(device) for device in section.inner("paths").plain()},
        rates={link: _rate(inner) for link, inner in section.sections("rates")},
        role=section.text("role", ""),
    )


def _gpu(section: Section) -> Gpu:
    return Gpu(
        section.text("name"),
        uuid=section.text("uuid", ""),
        pci=section.text("pci", ""),
        model=section.text("model", ""),
        capability=section.number("capability") if "capability" in section else None,
        numa=_whole(section, "numa"),
        memory_numa=_whole(section, "memory_numa"),
        cpu_affinity=section.text("cpu_affinity", ""),
    )


def _nic(section: Section) -> Nic:
    ports = tuple(_port(inner) for inner in section.items("ports"))
    return Nic(section.text("name"), pci=section.text("pci", ""), numa=_whole(section, "numa"), ports=ports)


def _port(section: Section) -> Port:
    return Port(
        section.whole("number", 1, 0, _MOST),
        state=section.text("state", ""),
        rate_gbit=section.number("rate_gbit") if "rate_gbit" in section else None,
        link_layer=section.text("link_layer", ""),
        roce_v2_index=_whole(section, "roce_v2_index"),
        subnet=section.text("subnet", ""),
        netdev=section.text("netdev", ""),
    )


def _interface(section: Section) -> Interface:
    return Interface(
        section.text("name"),
        speed_mbit=_whole(section, "speed_mbit"),
        state=section.text("state", ""),
        pci=section.text("pci", ""),
        numa=_whole(section, "numa"),
        nic=section.text("nic", ""),
    )


def _network(section: Section) -> Network:
    return Network(
        section.text("kind"),
        section.text("over"),
        scope=section.text("scope"),
        hosts=section.texts("hosts"),
        gbps=section.number("gbps") if "gbps" in section else None,
        alpha_us=section.number("alpha_us") if "alpha_us" in section else None,
        oversubscription=section.number("oversubscription", 1.0),
    )


def _wire(section: Section) -> Wire:
    return Wire(section.text("src"), section.text("dst"), section.text("kind"), _rate(section.inner("rate")))


def _rate(section: Section) -> Rate:
    return Rate(section.number("gbps"), section.number("alpha_us"))


def _whole(section: Section, key: str) -> int | None:
    return section.whole(key, 0, -_MOST, _MOST) if key in section else None
