"""`distill-mesh topo`: GPUs, NICs and hosts, seen on this machine or read from files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.cli.program import say
from distill.errors import EnvironmentFault
from distill.transfermesh.topology import Host, Interface, Nic, Topology, detect, read_topology_files
from distill.transfermesh.topology.alike import alike_hosts
from distill.transfermesh.topology.drawing import svg
from distill.transfermesh.topology.serial import to_json

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]  # pyright: ignore[reportPrivateUsage] - argparse has no public name


def add(commands: Commands) -> None:
    """The subcommand and its options."""
    topo = commands.add_parser(
        "topo",
        help="show GPUs, the NICs nearest to them, NVLink islands and rails",
        description="Looks at this machine, or at files: a paste of `nvidia-smi topo -m` or `rocm-smi --showtopo` (with"
        " ibstat, ibv_devinfo, show_gids), what --json printed on another host, or a cluster in YAML.",
    )
    topo.add_argument(
        "--from",
        dest="files",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="read this and do not look at the machine; several may be given",
    )
    topo.add_argument("--svg", type=Path, metavar="FILE", help="also draw it into FILE")
    topo.add_argument("--json", action="store_true", help="print JSON, which --from reads again")
    topo.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the topology; 0, or an error of the program's exit codes."""
    topology = read_topology_files(arguments.files) if arguments.files else detect()
    if arguments.svg is not None:
        _write(arguments.svg, svg(topology))
    say(json.dumps(to_json(topology), indent=2) + "\n" if arguments.json else "\n".join(_report(topology)) + "\n")
    return 0


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {file}: {error.strerror}", fix="give --svg another FILE") from error


def _report(topology: Topology) -> Iterable[str]:
    for group in alike_hosts(topology.hosts):
        yield group.title()
        yield from _host(group.host)
        yield ""
    yield from _rails(topology)
    for network in topology.networks:
        reach = "along rails" if network.scope == "rails" else "everybody"
        core = f", core {network.oversubscription:g} times oversubscribed" if network.oversubscription > 1 else ""
        yield f"network {network.kind}: {_names(network.hosts) if network.hosts else 'all hosts'}, {reach}{core}"
    for wire in topology.wires:
        yield f"link {wire.kind}: {wire.src} -> {wire.dst}, {wire.rate.gbps:g} GB/s, {wire.rate.alpha_us:g} us"
    for note in topology.notes:
        yield f"warning: {note}"


def _host(host: Host) -> Iterable[str]:
    gpus = [("GPU", "NUMA", "CPUs", "island", "nearest NICs", "uses", "model"), *_gpu_rows(host)]
    ports = ("NIC", "PCI", "NUMA", "port", "state", "Gbit/s", "layer", "interface", "RoCE v2 GID")
    nics = [ports, *(row for nic in host.nics for row in _nic_rows(nic))]
    interfaces = [("interface", "PCI", "NUMA", "state", "Gbit/s", "wire of NIC"), *map(_interface_row, host.interfaces)]
    shown = [_table(rows) for rows in (gpus, nics, interfaces) if len(rows) > 1]
    yield from shown[0] if shown else ["  nothing was seen"]
    for table in shown[1:]:
        yield ""
        yield from table


def _gpu_rows(host: Host) -> Iterable[tuple[str, ...]]:
    serving = host.serving_nics()
    island_of = {name: str(number) for number, island in enumerate(host.islands(), start=1) for name in island}
    for gpu in host.gpus:
        nearest = host.nearest_nics(gpu.name)
        link = f" ({host.link(gpu.name, nearest[0])})" if nearest else ""
        yield (
            gpu.name,
            _text(gpu.numa),
            _text(gpu.cpu_affinity),
            island_of.get(gpu.name, "-"),
            f"{_names(nearest)}{link}",
            serving.get(gpu.name, "-"),
            _text(gpu.model),
        )


def _nic_rows(nic: Nic) -> Iterable[tuple[str, ...]]:
    device = (nic.name, _text(nic.pci), _text(nic.numa))
    if not nic.ports:
        yield (*device, "-", "-", "-", "-", "-", "-")
    for port in nic.ports:
        rate = "-" if port.rate_gbit is None else f"{port.rate_gbit:g}"
        details = (port.state, rate, port.link_layer, port.netdev, port.roce_v2_index)
        yield (*device, str(port.number), *map(_text, details))
        device = ("", "", "")


def _interface_row(interface: Interface) -> tuple[str, ...]:
    gbit = None if interface.speed_mbit is None else f"{interface.speed_mbit / 1000:g}"
    return (interface.name, *map(_text, (interface.pci, interface.numa, interface.state, gbit, interface.nic)))


def _rails(topology: Topology) -> Iterable[str]:
    """Only of several hosts: a single one has a rail for each NIC, which tells nothing."""
    if len(topology.hosts) < 2:
        return
    for number, rail in enumerate(topology.rails()):
        members = [f"{host}:{nic}" for host, nics in rail.items() for nic in nics]
        yield f"rail {number}: {_names(members)}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """With the columns of which something is known."""
    first, *others = range(len(rows[0]))
    columns = [first, *(column for column in others if any(row[column] not in ("-", "") for row in rows[1:]))]
    widths = [max(len(row[column]) for row in rows) for column in columns]
    cells = [[row[column].ljust(width) for column, width in zip(columns, widths, strict=True)] for row in rows]
    return [f"  {'  '.join(line)}".rstrip() for line in cells]


def _names(names: Sequence[str]) -> str:
    """All of a few, the ends of many."""
    return (", ".join(names) or "-") if len(names) <= 8 else f"{', '.join(names[:3])} ... {names[-1]} ({len(names)})"


def _text(value: object) -> str:
    """ "-" for what nobody saw."""
    return "-" if value is None or value == "" else str(value)
