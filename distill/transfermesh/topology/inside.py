"""Links between the GPUs of one host: NVLink or XGMI where it is, PCIe for the other pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from distill.transfermesh.topology.classes import Rate, joins_island, nvlinks, prior
from distill.transfermesh.topology.model import Gpu, Host
from distill.transfermesh.topology.parts import Node, Parts

_MOST_NVLINKS = ((9.0, 18), (8.0, 12), (0.0, 6))
"""By compute capability, of one GPU: H100 and B200, A100, V100 (NVIDIA's data sheets)."""


def links_inside(host: Host, nodes: Sequence[Node], parts: Parts) -> None:
    """Adds them, and for what all links of a GPU share a limit on each node.

    NVLink through a switch: each GPU has one total for all its peers. GPUs that are wired to each other have a rate for
    each pair and no total. PCIe: all links of a GPU go through its one slot.
    """
    ids = {node.device: node.id for node in nodes}
    gpus = {gpu.name: gpu for gpu in host.gpus}
    for island in host.islands():
        _island(host, [gpus[name] for name in island], ids, parts)
    slow = [(a, b) for a, b in combinations(host.gpus, 2) if not joins_island(host.link(a.name, b.name))]
    rates = {(a.name, b.name): _rate(host, a, b, parts) for a, b in slow}
    alike = len(set(rates.values())) == 1 and len(slow) == len(gpus) * (len(gpus) - 1) // 2
    if alike:
        parts.group(ids.values(), next(iter(rates.values())), "pcie")
    for (a, b), rate in rates.items():
        if not alike:
            _both_ways(ids[a], ids[b], rate, "pcie", parts)
        for end in (ids[a], ids[b]):
            slot = parts.node_gbps.setdefault("pcie", {})
            slot[end] = max(rate.gbps, slot.get(end, 0.0))


def _island(host: Host, gpus: Sequence[Gpu], ids: dict[str, str], parts: Parts) -> None:
    pairs = list(combinations(gpus, 2))
    classes = {host.link(a.name, b.name) for a, b in pairs}
    kind = "xgmi" if "XGMI" in classes else "nvlink"
    if len(classes) == 1 and nvlinks(next(iter(classes))) * (len(gpus) - 1) > _most_nvlinks(gpus):
        rate = _rate(host, gpus[0], gpus[1], parts)
        members = [ids[gpu.name] for gpu in gpus]
        parts.group(members, rate, kind)
        parts.node_gbps.setdefault(kind, {}).update(dict.fromkeys(members, rate.gbps))
        return
    for a, b in pairs:
        if joins_island(host.link(a.name, b.name)):
            _both_ways(ids[a.name], ids[b.name], _rate(host, a, b, parts), kind, parts)


def _most_nvlinks(gpus: Sequence[Gpu]) -> int:
    """More links than a GPU has, counted over its peers, can only be seen through a switch."""
    capability = min((gpu.capability for gpu in gpus if gpu.capability is not None), default=9.0)
    return next(count for newest, count in _MOST_NVLINKS if capability >= newest)


def _rate(host: Host, a: Gpu, b: Gpu, parts: Parts) -> Rate:
    link = host.link(a.name, b.name)
    if link in host.rates:
        return host.rates[link]
    known = [gpu.capability for gpu in (a, b) if gpu.capability is not None]
    return parts.assume(link or "a link of unknown class", prior(link, min(known, default=None)))


def _both_ways(a: str, b: str, rate: Rate, kind: str, parts: Parts) -> None:
    parts.link(a, b, rate, kind)
    parts.link(b, a, rate, kind)
