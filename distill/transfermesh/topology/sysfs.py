"""What Linux shows in /sys and /proc: PCI paths, NUMA nodes, RDMA devices, network interfaces.

Every function takes the root, so that a copied or made-up tree is read in the same way.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from distill.transfermesh.topology.model import Interface, Nic, Port, common_depth

_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_MAPPED_IPV4 = "0000:0000:0000:0000:0000:ffff:"
_DEFAULT_PREFIX = "fe80:0000:0000:0000"
"""Of every InfiniBand subnet that nobody gave a prefix: it tells nothing."""


def pci_address(address: str) -> str:
    """As /sys spells it: NVML writes the domain with eight digits, nvidia-smi in capitals."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}:{rest}"


def pci_path(sys: Path, address: str) -> tuple[str, ...]:
    """The bridges above a device, the host bridge first, itself last; () for one that is not there."""
    device = sys / "bus/pci/devices" / address
    return _pci_parts(device.resolve()) if address and device.exists() else ()


def _pci_parts(device: Path) -> tuple[str, ...]:
    parts = device.parts
    root = next((at for at, part in enumerate(parts) if _BRIDGE.fullmatch(part)), None)
    return () if root is None else (parts[root], *(part for part in parts[root:] if _ADDRESS.fullmatch(part)))


def link_class(a: tuple[str, ...], b: tuple[str, ...], numa_a: int | None, numa_b: int | None, nodes: int) -> str:
    """The class of the way between two devices from their PCI paths, "" where that does not tell.

    PIX: one switch (a bridge above each, at most). PXB: several. PHB: only the host bridge is shared. Without that,
    NODE or SYS by NUMA node; on a machine with one node everything is in it.
    """
    if not a or not b:
        return ""
    common = common_depth(a, b)
    if common > 1:
        return "PIX" if len(a) - common <= 2 and len(b) - common <= 2 else "PXB"
    if common == 1:
        return "PHB"
    if nodes == 1 or (numa_a is not None and numa_a == numa_b):
        return "NODE"
    return "SYS" if numa_a is not None and numa_b is not None else ""


def numa_nodes(sys: Path) -> int:
    """How many NUMA nodes the machine has; 1 where the kernel was built without them."""
    return max(1, len(list((sys / "devices/system/node").glob("node[0-9]*"))))


def numa_of(device: Path) -> int | None:
    """The NUMA node of a device's folder; None for -1, which firmware that does not say so gives."""
    text = _read(device / "numa_node")
    return int(text) if text.isdigit() else None


def rdma_devices(sys: Path, proc: Path) -> tuple[Nic, ...]:
    """Every device in /sys/class/infiniband, in the order of their numbers."""
    subnets = _subnets(proc)
    folder = sys / "class/infiniband"
    devices = sorted(folder.iterdir(), key=lambda path: _natural(path.name)) if folder.is_dir() else []
    return tuple(_nic(device, subnets) for device in devices)


def _nic(folder: Path, subnets: dict[str, str]) -> Nic:
    parts = _pci_parts((folder / "device").resolve())
    ports = sorted((folder / "ports").glob("[0-9]*"), key=lambda path: _natural(path.name))
    return Nic(
        folder.name,
        pci=parts[-1] if parts else "",
        numa=numa_of(folder / "device"),
        ports=tuple(_port(port, subnets) for port in ports),
    )


def _port(folder: Path, subnets: dict[str, str]) -> Port:
    rate = re.match(r"\d+(?:\.\d+)?", _read(folder / "rate"))
    state = _read(folder / "state")
    layer = _read(folder / "link_layer")
    gids = {int(path.name): _read(path) for path in (folder / "gids").glob("[0-9]*")}
    netdev = next((name for at in sorted(gids) if (name := _read(folder / "gid_attrs/ndevs" / str(at)))), "")
    return Port(
        int(folder.name),
        state=("ACTIVE" if "ACTIVE" in state else "DOWN") if state else "",
        rate_gbit=float(rate[0]) if rate else None,
        link_layer=layer if layer in ("InfiniBand", "Ethernet") else "",
        roce_v2_index=_roce_v2(folder, gids),
        subnet=_infiniband_subnet(gids) if layer == "InfiniBand" else subnets.get(netdev, ""),
        netdev=netdev,
    )


def _roce_v2(folder: Path, gids: dict[int, str]) -> int | None:
    """The lowest index of a GID of version 2 with an IPv4 address."""
    for index, gid in sorted(gids.items()):
        if gid.startswith(_MAPPED_IPV4) and _read(folder / "gid_attrs/types" / str(index)) == "RoCE v2":
            return index
    return None


def _infiniband_subnet(gids: dict[int, str]) -> str:
    prefix = gids.get(0, "")[: len(_DEFAULT_PREFIX)]
    return "" if prefix == _DEFAULT_PREFIX else prefix


def _subnets(proc: Path) -> dict[str, str]:
    """Interface -> its IPv4 network, from the routes without a gateway. /proc writes addresses backwards."""
    found: dict[str, str] = {}
    for line in _read(proc / "net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and fields[2] == "00000000" and fields[1] != "00000000":
            address, mask = (ipaddress.IPv4Address(bytes.fromhex(fields[at])[::-1]) for at in (1, 7))
            found.setdefault(fields[0], str(ipaddress.ip_network(f"{address}/{mask}", strict=False)))
    return found


def interfaces(sys: Path, nics: tuple[Nic, ...]) -> tuple[Interface, ...]:
    """Every network interface but the loopback."""
    folder = sys / "class/net"
    shared = {
        path.name: nic.name for nic in nics for path in (sys / "class/infiniband" / nic.name / "device/net").glob("*")
    }
    names = sorted((path.name for path in folder.iterdir()), key=_natural) if folder.is_dir() else []
    return tuple(_interface(folder / name, shared.get(name, "")) for name in names if name != "lo")


def _interface(folder: Path, nic: str) -> Interface:
    speed = _read(folder / "speed")
    parts = _pci_parts((folder / "device").resolve()) if (folder / "device").exists() else ()
    return Interface(
        folder.name,
        speed_mbit=int(speed) if speed.isdigit() and int(speed) > 0 else None,
        state=_read(folder / "operstate"),
        pci=parts[-1] if parts else "",
        numa=numa_of(folder / "device"),
        nic=nic,
    )


def _read(file: Path) -> str:
    """A small file's text; "" for one that is not there or refuses, as `speed` does for an interface that is down."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts mlx5_10 after mlx5_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
