"""Classes of links between devices, how near they are, and the rate assumed of each where nothing was measured."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""What lies between two devices on the PCIe tree of a host, as nvidia-smi abbreviates it."""
OLD_NAMES = {"SOC": "SYS"}
_NVLINK = re.compile(r"NV(\d+)")
_FARTHEST = len(NEAREST_FIRST) + 1


@functools.cache
def distance(link: str) -> int:
    """0 for what is nearest: NVLink and XGMI, then the PCIe classes in their order; what is unknown comes last."""
    if joins_island(link):
        return 0
    return NEAREST_FIRST.index(link) + 1 if link in NEAREST_FIRST else _FARTHEST


@functools.cache
def joins_island(link: str) -> bool:
    """Whether GPUs with this link between them reach each other's memory without PCIe."""
    return link == "XGMI" or nvlinks(link) > 0


def nvlinks(link: str) -> int:
    """How many NVLinks `NV18` bonds; 0 for any other class."""
    found = _NVLINK.fullmatch(link)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class Rate:
    """What a link carries in one direction: GB/s (1e9 bytes), and the time before the first byte in microseconds."""

    gbps: float
    alpha_us: float


@dataclass(frozen=True, slots=True)
class Prior:
    """A rate from somebody's table: a seed for measurement, not the truth."""

    rate: Rate
    source: str


_TOPO_H = "NVIDIA/nccl src/graph/topo.h"
_TUNING = "NVIDIA/nccl tuning constants, hwLatencies, ring, protocol Simple"
_GEN3 = Prior(Rate(12.0, 5.7), f"{_TOPO_H}: PCI_BW, Gen3 x16; {_TUNING}: PCI")
PRIORS = {
    "PIX": _GEN3,
    "PXB": _GEN3,
    "PHB": _GEN3,
    "NODE": _GEN3,
    "SYS": Prior(Rate(6.0, 5.7), f"{_TOPO_H}: QPI_BW, the slowest of 6 to 40 by CPU; {_TUNING}: PCI"),
    "PCIE": _GEN3,
    "XGMI": Prior(Rate(36.0, 3.4), "ROCm/rccl src/graph/topo.h: MI200_XGMI_WIDTH; the MI300 has 48; latency as NVLink"),
    "rdma": Prior(Rate(12.0, 14.0), f"{_TOPO_H}: NET_BW, 100 Gbit/s; {_TUNING}: NET"),
    "tcp": Prior(Rate(1.25, 40.0), "10 Gbit/s, the least that servers have; latency: our estimate, measure it"),
}
"""By link class, and by kind of network. The rate of NV# is that of one link (`nvlink_prior`) times their number."""

_PER_NVLINK = {6.0: 18.0, 7.0: 20.0, 8.0: 20.0, 8.6: 12.0, 9.0: 20.6, 10.0: 40.1}
"""GB/s of one NVLink by compute capability, as NCCL's search counts it (SM60_NVLINK_BW and so on)."""
_UNKNOWN_GPU_NVLINK = 20.0
"""Volta, Ampere; later ones have more."""


def prior(link: str, capability: float | None = None) -> Prior:
    """What is assumed of a link class or a kind of network. `capability` is the GPU's (9.0 for an H100), if known.

    A class that nobody knows gets the slowest PCIe class.
    """
    if count := nvlinks(link):
        return nvlink_prior(count, capability)
    return PRIORS.get(link, PRIORS["SYS"])


def nvlink_prior(count: int, capability: float | None) -> Prior:
    """`count` bonded NVLinks of a GPU of this compute capability, or of the newest known one that is not newer."""
    older = [known for known in _PER_NVLINK if capability is not None and known <= capability]
    each = _PER_NVLINK[max(older)] if older else _UNKNOWN_GPU_NVLINK
    whose = f"compute capability {max(older)}" if older else "a GPU that is not known"
    return Prior(Rate(each * count, 3.4), f"{_TOPO_H}: NVLink of {whose}; {_TUNING}: NVLink")
