"""A topology as a picture: SVG, made by hand so that it needs nothing.

A frame for each kind of host. GPUs below, islands of NVLink behind them, NICs above in the colour of their rail, then
other interfaces. A line from each GPU to its nearest NICs, thick to the one that it uses, in the colour of its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import combinations

from distill.transfermesh.topology.alike import HostGroup, alike_hosts
from distill.transfermesh.topology.classes import NEAREST_FIRST, joins_island
from distill.transfermesh.topology.model import Host, Interface, Nic, Topology

_CELL, _BOX, _GAP = 104, 88, 24
_TOP = 44
"""Of what is in a frame, below its title."""
_CLASS_COLOUR: dict[str, str] = dict(
    zip(NEAREST_FIRST, ("#1a7f37", "#1f6feb", "#b08800", "#c4622d", "#b3261e"), strict=True)
)
_RAIL_COLOUR = ("#dbe9f6", "#fde4cf", "#dff0d8", "#e8dff5", "#fff3bf", "#d3f0ee", "#f8d7e3", "#e2e3e5")
_NO_RAIL, _DOWN, _ISLAND, _FRAME = "#f4f4f4", "#f2c1bd", "#e9f2e4", "#8a8f98"


def svg(topology: Topology) -> str:
    """The whole file. Hosts that are alike are drawn once, with their number."""
    groups = alike_hosts(topology.hosts)
    width = max(560, max([_columns(group.host) for group in groups], default=1) * _CELL + 3 * _GAP)
    rails = {(host, nic): at for at, rail in enumerate(topology.rails()) for host, nics in rail.items() for nic in nics}
    parts: list[str] = []
    y = _GAP
    for group in groups:
        parts.append(f'<g transform="translate({_GAP},{y})">{_host(group, rails, width - 2 * _GAP)}</g>')
        y += _height(group.host) + _GAP
    parts.append(f'<g transform="translate({_GAP},{y})">{_below(topology)}</g>')
    y += 20 * (len(_network_lines(topology)) + 2)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="12">', paper, *parts, "</svg>"]) + "\n"


def _columns(host: Host) -> int:
    return max(len(host.gpus), len(host.nics) + len(_own_wires(host)), 1)


def _own_wires(host: Host) -> list[Interface]:
    """Interfaces that are drawn: those whose wire no NIC in the picture has."""
    return [interface for interface in host.interfaces if not interface.nic]


def _gpu_y(host: Host) -> int:
    """Below the row of NICs and interfaces, if there is one."""
    return _TOP + (126 if host.nics or _own_wires(host) else 0)


def _height(host: Host) -> int:
    return _gpu_y(host) + 84 if host.gpus else _TOP + 66


def _host(group: HostGroup, rails: dict[tuple[str, str], int], width: int) -> str:
    host = group.host
    gpu_y = _gpu_y(host)
    x_gpu = {name: at * _CELL + _GAP / 2 for at, name in enumerate(_drawn_order(host))}
    x_nic = {device.name: at * _CELL + _GAP / 2 for at, device in enumerate([*host.nics, *_own_wires(host)])}
    parts = [_rect(0, 0, width, _height(host), "#ffffff", stroke=_FRAME), _text(10, 20, group.title(), bold=True)]
    for island in host.islands():
        left, right = min(x_gpu[name] for name in island), max(x_gpu[name] for name in island)
        parts.append(_rect(left - 6, gpu_y - 8, right - left + _BOX + 12, 82, _ISLAND))
        parts.append(_text(left, gpu_y + 68, _island_name(host, island)))
    parts += _lines(host, x_gpu, x_nic)
    parts += [_nic(nic, x_nic[nic.name], rails.get((host.name, nic.name))) for nic in host.nics]
    for interface in _own_wires(host):
        speed = f"{interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit else interface.state
        parts.append(_device(x_nic[interface.name], _TOP, interface.name, speed, "#ffffff"))
    for gpu in host.gpus:
        numa = "" if gpu.numa is None else f"NUMA {gpu.numa}"
        parts.append(_device(x_gpu[gpu.name], gpu_y, gpu.name, numa, "#ffffff"))
    return "".join(parts)


def _drawn_order(host: Host) -> list[str]:
    """Members of an island side by side."""
    inside = [name for island in host.islands() for name in island]
    return [*inside, *(gpu.name for gpu in host.gpus if gpu.name not in inside)]


def _island_name(host: Host, island: Sequence[str]) -> str:
    classes = sorted({link for a, b in combinations(island, 2) if joins_island(link := host.link(a, b))})
    return "XGMI" if classes == ["XGMI"] else f"NVLink {', '.join(classes)}"


def _lines(host: Host, x_gpu: dict[str, float], x_nic: dict[str, float]) -> list[str]:
    serving = host.serving_nics()
    lines: list[str] = []
    for gpu in host.gpus:
        for nic in dict.fromkeys([*host.nearest_nics(gpu.name), *filter(None, [serving.get(gpu.name)])]):
            colour = _CLASS_COLOUR.get(host.link(gpu.name, nic), _FRAME)
            ends = (x_gpu[gpu.name] + _BOX / 2, _gpu_y(host), x_nic[nic] + _BOX / 2, _TOP + 50)
            lines.append(_line(*ends, colour, 2.5 if serving.get(gpu.name) == nic else 0.8))
    return lines


def _nic(nic: Nic, x: float, rail: int | None) -> str:
    fill = _NO_RAIL if rail is None else _RAIL_COLOUR[rail % len(_RAIL_COLOUR)]
    port = nic.port
    words = f"{port.rate_gbit:g} Gbit/s" if port and port.rate_gbit else "" if nic.usable else "down"
    return _device(x, _TOP, nic.name, words, fill if nic.usable else _DOWN)


def _device(x: float, y: float, name: str, words: str, fill: str) -> str:
    return _rect(x, y, _BOX, 50, fill, stroke="#3c4043") + _text(x + 8, y + 20, name) + _text(x + 8, y + 38, words)


def _below(topology: Topology) -> str:
    """What the colours of lines mean, and the networks."""
    parts = [_text(0, 12, "nearest NIC by:")]
    for at, (link, colour) in enumerate(_CLASS_COLOUR.items()):
        x = 100 + at * 76
        parts += [_line(x, 8, x + 24, 8, colour, 2.5), _text(x + 30, 12, link)]
    parts += [_text(0, 36 + 20 * at, line) for at, line in enumerate(_network_lines(topology))]
    return "".join(parts)


def _network_lines(topology: Topology) -> list[str]:
    lines: list[str] = []
    for network in topology.networks:
        core = f", core {network.oversubscription:g} times oversubscribed" if network.oversubscription > 1 else ""
        where = f"{len(network.hosts)} hosts" if network.hosts else "all hosts"
        lines.append(f"{network.kind}: {where}, {'along rails' if network.scope == 'rails' else 'everybody'}{core}")
    return lines + [f"{wire.kind}: {wire.src} to {wire.dst}, {wire.rate.gbps:g} GB/s" for wire in topology.wires]


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="6" fill="{fill}" stroke="{stroke}"/>'


def _text(x: float, y: float, words: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="#202124"{weight}>{escape(words)}</text>' if words else ""


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'
