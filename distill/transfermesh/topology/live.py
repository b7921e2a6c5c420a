"""Looks at this machine. What could not be seen is in the notes; nothing is made up in its place."""

from __future__ import annotations

import csv
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from distill.errors import ConfigError
from distill.transfermesh.endpoint import host_id
from distill.transfermesh.topology import nvidia, nvml, rocm, sysfs
from distill.transfermesh.topology.model import Gpu, Host, Interface, Nic, Topology
from distill.transfermesh.topology.nvml import SeenGpus
from distill.transfermesh.topology.reading import about_ties, read_paste

RunTool = Callable[[Sequence[str]], str | None]
"""Runs a program of the PATH; its output, or None where there is none or it failed."""
_TOOL_PATIENCE_S = 60.0
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,name,compute_cap", "--format=csv,noheader")


def run_tool(command: Sequence[str]) -> str | None:
    """See `RunTool`. Asking a driver that hangs takes a minute at most."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TOOL_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def detect(
    *,
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    load_nvml: Callable[[], Any | None] = nvml.load,
    run: RunTool = run_tool,
    name: str = "",
    identity: str = "",
) -> Topology:
    """This host, with its GPUs, NICs and interfaces. Everything that is asked is an argument, for tests."""
    nics = sysfs.rdma_devices(sys, proc)
    seen = _gpus(load_nvml(), run)
    gpus = tuple(replace(gpu, numa=_numa(sys, gpu)) for gpu in seen.gpus)
    addresses = {device.name: device.pci for device in (*gpus, *nics)}
    paths = {device: path for device, pci in addresses.items() if (path := sysfs.pci_path(sys, pci))}
    host = Host(
        name or socket.gethostname(),
        identity=identity or host_id(),
        gpus=gpus,
        nics=nics,
        interfaces=sysfs.interfaces(sys, nics),
        links=_links(gpus, nics, paths, seen.links, sysfs.numa_nodes(sys)),
        paths=paths,
    )
    return Topology((host,), notes=(*seen.notes, *_unseen(host)))


def _gpus(library: Any | None, run: RunTool) -> SeenGpus:
    """From NVML where it answers, else from what nvidia-smi or rocm-smi print."""
    notes: tuple[str, ...] = ()
    if library is not None:
        seen = nvml.see_gpus(library)
        if seen.gpus:
            return SeenGpus(seen.gpus, seen.links, seen.notes)
        notes = seen.notes
    for command, complete in ((nvidia.TOOL, _with_uuids), (rocm.TOOL, None)):
        text = run(command.split())
        if text is None:
            continue
        try:
            host = read_paste(text).host
        except ConfigError as error:
            notes = (*notes, f"`{command}` was not understood: {error.what}")
            continue
        gpus = complete(host.gpus, run) if complete else host.gpus
        return SeenGpus(gpus, dict(host.links), notes)
    if library is None:
        notes = (*notes, "nvidia-ml-py is not installed, and neither nvidia-smi nor rocm-smi showed a GPU")
    return SeenGpus(notes=(*notes, "no GPU was seen"))


def _with_uuids(gpus: tuple[Gpu, ...], run: RunTool) -> tuple[Gpu, ...]:
    """The matrix has neither UUIDs nor PCI addresses; another call of the tool has both."""
    rows = {
        row[0].strip(): [field.strip() for field in row] for row in csv.reader((run(_QUERY) or "").splitlines()) if row
    }
    complete: list[Gpu] = []
    for gpu in gpus:
        row = rows.get(gpu.name.removeprefix("GPU"), [])
        if len(row) == 5:
            _, uuid, pci, model, capability = row
            number = float(capability) if capability.replace(".", "", 1).isdigit() else None
            gpu = replace(gpu, uuid=uuid, pci=sysfs.pci_address(pci), model=model, capability=number)
        complete.append(gpu)
    return tuple(complete)


def _numa(sys: Path, gpu: Gpu) -> int | None:
    return gpu.numa if gpu.numa is not None or not gpu.pci else sysfs.numa_of(sys / "bus/pci/devices" / gpu.pci)


def _links(
    gpus: Sequence[Gpu],
    nics: Sequence[Nic],
    paths: dict[str, tuple[str, ...]],
    told: dict[tuple[str, str], str],
    nodes: int,
) -> dict[tuple[str, str], str]:
    """What a tool told, and for the other pairs what their PCI paths tell."""
    links: dict[tuple[str, str], str] = {}
    for a, b in combinations([*gpus, *nics], 2):
        pair = (a.name, b.name)
        found = told.get(pair) or sysfs.link_class(paths.get(a.name, ()), paths.get(b.name, ()), a.numa, b.numa, nodes)
        if found:
            links[pair] = found
    return links


def _unseen(host: Host) -> list[str]:
    notes: list[str] = []
    if not host.nics:
        notes.append("no RDMA device was seen: /sys/class/infiniband is empty or not there")
    for nic in host.nics:
        notes += _about_nic(nic)
    for interface in host.interfaces:
        notes += _about_interface(interface)
    for gpu in host.gpus:
        if not gpu.uuid:
            notes.append(f"{gpu.name}: its UUID was not told")
        if gpu.name not in host.paths:
            notes.append(f"{gpu.name}: its place on the PCI bus was not seen")
    return notes + about_ties(host)


def _about_nic(nic: Nic) -> list[str]:
    notes = [f"{nic.name} port {port.number} is down" for port in nic.ports if port.state == "DOWN"]
    notes += [f"{nic.name} port {port.number}: no rate is shown" for port in nic.ports if port.rate_gbit is None]
    return notes if nic.pci else [*notes, f"{nic.name}: no PCI device, so not known to which GPU it is near"]


def _about_interface(interface: Interface) -> list[str]:
    known = interface.speed_mbit is not None or interface.state not in ("up", "unknown")
    return [] if known else [f"{interface.name}: the kernel does not tell its speed"]
