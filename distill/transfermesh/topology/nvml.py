"""GPUs and their NVLinks, as the driver's management library tells of them (package nvidia-ml-py, optional)."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from distill.transfermesh.topology.model import Gpu
from distill.transfermesh.topology.sysfs import pci_address


@dataclass(frozen=True)
class SeenGpus:
    """GPUs in NVML's order, and the classes of the links between them."""

    gpus: tuple[Gpu, ...] = ()
    links: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    notes: tuple[str, ...] = ()


def load() -> Any | None:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def see_gpus(nvml: Any) -> SeenGpus:
    """What `nvml`, the module `pynvml`, says. A driver that does not answer gives no GPU, and a note."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return SeenGpus(notes=(f"NVML is installed but the NVIDIA driver does not answer: {error}",))
    try:
        return _Session(nvml).see()
    except nvml.NVMLError as error:
        return SeenGpus(notes=(f"NVML failed while it listed the GPUs: {error}",))
    finally:
        nvml.nvmlShutdown()


class _Session:
    """Questions to an initialised library. What one GPU or driver cannot answer is left out."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._classes = {
            nvml.NVML_TOPOLOGY_INTERNAL: "PIX",
            nvml.NVML_TOPOLOGY_SINGLE: "PIX",
            nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
            nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
            nvml.NVML_TOPOLOGY_NODE: "NODE",
            nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
        }

    def see(self) -> SeenGpus:
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        gpus = tuple(self._gpu(f"GPU{index}", handle) for index, handle in enumerate(handles))
        ends = [self._nvlink_ends(handle) for handle in handles]
        links: dict[tuple[str, str], str] = {}
        for i, a in enumerate(gpus):
            for j, b in enumerate(gpus[i + 1 :], start=i + 1):
                # Links to a switch reach every GPU on it; the fewer of both are what the pair can use.
                bonded = ends[i][b.pci] or min(ends[i]["switch"], ends[j]["switch"])
                found = f"NV{bonded}" if bonded else self._pcie_class(handles[i], handles[j])
                if found:
                    links[a.name, b.name] = found
        return SeenGpus(gpus, links)

    def _gpu(self, name: str, handle: Any) -> Gpu:
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        pci = self._ask("nvmlDeviceGetPciInfo", handle)
        return Gpu(
            name,
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)),
            pci=pci_address(_text(pci.busId)) if pci else "",
            model=_text(self._ask("nvmlDeviceGetName", handle)),
            capability=float(f"{capability[0]}.{capability[1]}") if capability else None,
        )

    def _nvlink_ends(self, handle: Any) -> Counter[str]:
        """PCI address of the GPU at the other end, or "switch" -> active NVLinks."""
        ends: Counter[str] = Counter()
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            if not self._ask("nvmlDeviceGetNvLinkState", handle, link):
                continue
            kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            if kind == self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                ends["switch"] += 1
            elif remote := self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link):
                ends[pci_address(_text(remote.busId))] += 1
        return ends

    def _pcie_class(self, a: Any, b: Any) -> str:
        level = self._ask("nvmlDeviceGetTopologyCommonAncestor", a, b)
        return self._classes.get(level, "")

    def _ask(self, question: str, *arguments: Any) -> Any | None:
        """None also where this version of the package does not have the function."""
        function = getattr(self._nvml, question, None)
        try:
            return function(*arguments) if function else None
        except self._nvml.NVMLError:
            return None


def _text(value: Any) -> str:
    """Older versions of the package answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
