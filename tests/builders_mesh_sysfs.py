"""Makes /sys and /proc trees, and an NVML that knows the GPUs that a test wants."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace


@dataclass
class Machine:
    """A machine below a folder. PCI paths are given as they stand in /sys/devices: "pci0000:00/0000:00:01.0/..."."""

    root: Path

    def __post_init__(self) -> None:
        for folder in ("sys/bus/pci/devices", "sys/class/infiniband", "sys/class/net", "proc/net"):
            (self.root / folder).mkdir(parents=True)
        self.nodes(1)

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    def nodes(self, count: int) -> None:
        for node in range(count):
            (self.sys / f"devices/system/node/node{node}").mkdir(parents=True, exist_ok=True)

    def device(self, path: str, numa: int = -1) -> Path:
        """A PCI device, as bus/pci/devices has it too."""
        folder = self.sys / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        link = self.sys / "bus/pci/devices" / folder.name
        if not link.is_symlink():
            link.symlink_to(folder)
        return folder

    def nic(self, name: str, path: str, numa: int = -1, netdev: str = "", **port: str) -> None:
        """An RDMA device with one port: state, rate, link_layer, gids (index=gid/type/netdev by `gid`)."""
        device = self.device(path, numa)
        folder = device / "infiniband" / name
        values = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"} | port
        (folder / "ports/1/gids").mkdir(parents=True)
        for key, value in values.items():
            (folder / "ports/1" / key).write_text(f"{value}\n")
        (folder / "device").symlink_to(device)
        (self.sys / "class/infiniband" / name).symlink_to(folder)
        if netdev:
            self.interface(netdev, path, speed="100000")

    def gid(self, nic: str, index: int, gid: str, kind: str = "IB/RoCE v1", netdev: str = "") -> None:
        port = self.sys / "class/infiniband" / nic / "ports/1"
        for folder, value in (("gids", gid), ("gid_attrs/types", kind), ("gid_attrs/ndevs", netdev)):
            (port / folder).mkdir(parents=True, exist_ok=True)
            (port / folder / str(index)).write_text(f"{value}\n")

    def interface(self, name: str, path: str = "", speed: str = "", state: str = "up") -> None:
        parent = self.sys / "devices" / path if path else self.sys / "devices/virtual"
        folder = parent / "net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text(f"{state}\n")
        if speed:
            (folder / "speed").write_text(f"{speed}\n")
        if path:
            (folder / "device").symlink_to(parent)
        (self.sys / "class/net" / name).symlink_to(folder)

    def routes(self, *lines: str) -> None:
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
        (self.proc / "net/route").write_text("\n".join([head, *lines]) + "\n")


class NVMLError(Exception):
    pass


@dataclass
class FakeGpu:
    """`nvlinks`: what each link leads to, a PCI bus id as NVML spells it or "switch"."""

    bus: str
    uuid: str = "GPU-0"
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    nvlinks: list[str] = field(default_factory=list)
    ancestor: int = 50


def fake_nvml(*gpus: FakeGpu, broken: str = "") -> SimpleNamespace:
    """The functions of pynvml that are asked. `broken`: what nvmlInit says."""

    def init() -> None:
        if broken:
            raise NVMLError(broken)

    def state(gpu: FakeGpu, link: int) -> int:
        if link >= len(gpu.nvlinks):
            raise NVMLError("Not Supported")
        return 1

    def not_for_switches(gpu: FakeGpu, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=gpu.nvlinks[link])

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=36,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        NVML_TOPOLOGY_INTERNAL=0,
        NVML_TOPOLOGY_SINGLE=10,
        NVML_TOPOLOGY_MULTIPLE=20,
        NVML_TOPOLOGY_HOSTBRIDGE=30,
        NVML_TOPOLOGY_NODE=40,
        NVML_TOPOLOGY_SYSTEM=50,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid.encode(),
        nvmlDeviceGetName=lambda gpu: gpu.name,
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=gpu.bus.encode()),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: gpu.capability,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda gpu, link: 2 if gpu.nvlinks[link] == "switch" else 0,
        nvmlDeviceGetNvLinkRemotePciInfo=not_for_switches,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: min(a.ancestor, b.ancestor),
    )
