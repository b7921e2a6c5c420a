"""Reads `ibstat`, `ibv_devinfo` and `show_gids`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distill.errors import ConfigError
from distill.transfermesh.topology.model import Nic, Port

_PREFIX = r"^.*?(?<![\w.\-])"
"""A prompt, a log's prefix or a comment sign."""
_DEVICE = {
    "ibstat": re.compile(_PREFIX + r"CA:?\s+['\"‘’`]([\w.\-]+)['\"’`]"),
    "ibv_devinfo": re.compile(_PREFIX + r"hca_id:\s*([\w.\-]+)"),
}
_PORT = {
    "ibstat": re.compile(_PREFIX + r"Port\s+(\d+)\s*:"),
    "ibv_devinfo": re.compile(_PREFIX + r"port:\s*(\d+)"),
}
_STATE = re.compile(r"(?<!\w)(?:State|(?<![A-Za-z] )state):\s*(?:PORT_)?([A-Za-z]+)")
"""Neither "Physical state:" nor "phys_state:"."""
_RATE = re.compile(r"(?<!\w)Rate:\s*(\d+(?:\.\d+)?)")
_LAYER = re.compile(r"(?<!\w)(?:Link layer|link_layer):\s*(\w+)")
_LAYERS = {"infiniband": "InfiniBand", "ib": "InfiniBand", "ethernet": "Ethernet", "eth": "Ethernet"}
_TROUBLE = re.compile(
    r"panic|warn|debug|error|fail|can'?t|cannot|could ?n[o']t|unable|not found|no such|timed? ?out|no IB devices",
    re.IGNORECASE,
)
_MENTION = re.compile(
    r"(?<![\w.\-])(?:mlx\d+_|hfi1_|bnxt_re|irdma|rxe|siw|efa_?\d|rocep|ibp\d|ibs\d|rdmap|qedr|hns_)\w*:\s*[A-Za-z]"
)
"""A driver's message about a device, which is no row of a matrix."""
_REFUSED = re.compile(r"panic|can'?t|cannot|could ?n[o']t|unable|fail", re.IGNORECASE)
"""A line that names a device because the tool got nothing from it."""
_GID_HEADER = re.compile(r"DEV\s+PORT\s+INDEX\s+GID", re.IGNORECASE)
_GID = re.compile(
    r"(?<![\w.\-])([A-Za-z][\w.\-]*)\s+(\d+)\s+(\d+)\s+((?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|[0-9a-fA-F:]*::[0-9a-fA-F:]*)"
    r"(?:\s*(\d{1,3}(?:\.\d{1,3}){3}))?(?:\s+(v\d+(?:\.\d+)?))?(?:\s+([A-Za-z][\w.\-@]*))?\s*$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Gid:
    """A row of `show_gids`: an address that a RoCE port answers to. `ipv4` is None where the column is blank."""

    dev: str
    port: int
    index: int
    ipv4: str | None
    ver: str
    netdev: str | None


@dataclass(frozen=True, slots=True)
class NicReport:
    """What one tool told: devices in the order of the text, or GIDs; warnings for what it could not tell."""

    tool: str
    devices: tuple[Nic, ...] = ()
    gids: tuple[Gid, ...] = ()
    warnings: tuple[str, ...] = ()

    def roce_v2_ipv4_index(self) -> dict[str, int]:
        """`dev:port` -> the lowest index of a GID of version 2 with an IPv4 address: what NCCL_IB_GID_INDEX needs."""
        found: dict[str, int] = {}
        for gid in self.gids:
            if gid.ver == "v2" and gid.ipv4 is not None:
                place = f"{gid.dev}:{gid.port}"
                found[place] = min(gid.index, found.get(place, gid.index))
        return found


def read_reports(lines: Sequence[str]) -> list[NicReport]:
    """What the NIC tools say in this text, one report a tool; none when no line looks like theirs."""
    reports = [_read_devices(tool, lines) for tool in _DEVICE if _speaks(tool, lines)]
    if any(_GID_HEADER.search(line) or "n_gids_found" in line for line in lines):
        gids = tuple(gid for line in lines if (gid := _gid(line)))
        reports.append(NicReport("show_gids", gids=gids))
    return reports


def read_nics(lines: Sequence[str]) -> NicReport:
    """The only or first report. Raises ConfigError when no line looks like one of the tools."""
    for report in read_reports(lines):
        return report
    raise ConfigError(
        "this text is not the output of ibstat, ibv_devinfo or show_gids",
        fix="paste the whole output of one of them",
    )


def _speaks(tool: str, lines: Sequence[str]) -> bool:
    if any(_DEVICE[tool].search(line) for line in lines):
        return True
    return tool == "ibv_devinfo" and any("No IB devices found" in line for line in lines)


def _read_devices(tool: str, lines: Sequence[str]) -> NicReport:
    devices: dict[str, dict[int, Port]] = {}
    warnings: list[str] = []
    name, number = "", 0
    for line in lines:
        found = _DEVICE[tool].search(line)
        if found and not _REFUSED.search(line):
            name, number = found[1], 0
            devices.setdefault(name, {})
        elif name and (found := _PORT[tool].search(line)):
            number = int(found[1])
            devices[name][number] = Port(number)
        elif number and (port := _detail(line, devices[name][number])):
            devices[name][number] = port
        elif _TROUBLE.search(line) or _MENTION.search(line):
            warnings.append(line.strip())
    nics = tuple(Nic(name, ports=tuple(ports.values())) for name, ports in devices.items())
    return NicReport(tool, devices=nics, warnings=(*warnings, *_doubts(nics)))


def _detail(line: str, port: Port) -> Port | None:
    """The port with what this line says of it, or None."""
    if found := _STATE.search(line):
        return replace(port, state="ACTIVE" if found[1].upper() == "ACTIVE" else "DOWN")
    if found := _RATE.search(line):
        return replace(port, rate_gbit=float(found[1]))
    if found := _LAYER.search(line):
        return replace(port, link_layer=_LAYERS.get(found[1].lower(), ""))
    return None


def _doubts(nics: Sequence[Nic]) -> list[str]:
    """About devices that will not carry anything."""
    doubts = [f"{nic.name}: no port is shown" for nic in nics if not nic.ports]
    doubts += [f"{nic.name} port {port.number} is down" for nic in nics for port in nic.ports if port.state == "DOWN"]
    return doubts


def _gid(line: str) -> Gid | None:
    found = _GID.search(line)
    if found is None:
        return None
    dev, port, index, _, ipv4, version, netdev = found.groups()
    return Gid(dev, int(port), int(index), ipv4, (version or "").lower(), netdev)


def with_reports(nics: Sequence[Nic], reports: Sequence[NicReport]) -> tuple[Nic, ...]:
    """The NICs with the ports that the tools tell of; what only a tool knows comes last."""
    known = {nic.name: nic for nic in nics}
    for report in reports:
        for device in report.devices:
            known[device.name] = replace(known.get(device.name, device), ports=device.ports)
    gids = [gid for report in reports for gid in report.gids]
    for dev in dict.fromkeys(gid.dev for gid in gids):
        numbers = dict.fromkeys(gid.port for gid in gids if gid.dev == dev)
        known.setdefault(dev, Nic(dev, ports=tuple(Port(number) for number in numbers)))
    return tuple(_with_gids(nic, NicReport("show_gids", gids=tuple(gids))) for nic in known.values())


def _with_gids(nic: Nic, report: NicReport) -> Nic:
    index = report.roce_v2_ipv4_index()
    netdev = {f"{gid.dev}:{gid.port}": gid.netdev for gid in report.gids if gid.netdev}
    ports = [
        replace(port, roce_v2_index=index.get(place, port.roce_v2_index), netdev=netdev.get(place, port.netdev))
        for port in nic.ports
        for place in [f"{nic.name}:{port.number}"]
    ]
    return replace(nic, ports=tuple(ports))
