"""Looking at a machine, on made-up /sys and /proc trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from distill.transfermesh import host_id
from distill.transfermesh.topology import Topology, detect
from distill.transfermesh.topology.sysfs import link_class, pci_address
from tests.builders_mesh_sysfs import FakeGpu, Machine, fake_nvml

ROOT0, ROOT1 = "pci0000:00/0000:00:01.0", "pci0000:80/0000:80:01.0"
SWITCH_A = f"{ROOT0}/0000:01:00.0"
"""Upstream port of a switch; below it are ports, and below these devices."""
SWITCH_B = f"{ROOT1}/0000:81:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def look(machine: Machine, nvml=None, printed: dict[str, str] | None = None) -> Topology:
    def run(command: Sequence[str]) -> str | None:
        return (printed or {}).get(" ".join(command[:2]))

    return detect(sys=machine.sys, proc=machine.proc, load_nvml=lambda: nvml, run=run, name="here")


def two_sockets(machine: Machine) -> None:
    """A switch on each socket with a GPU and a NIC; on socket 0 another NIC on the host bridge itself."""
    machine.nodes(2)
    machine.device(f"{SWITCH_A}/0000:02:00.0/0000:03:00.0", numa=0)
    machine.device(f"{SWITCH_B}/0000:82:00.0/0000:83:00.0", numa=1)
    # The numbers of the NICs are crossed on purpose: mlx5_0 is near GPU1.
    machine.nic("mlx5_0", f"{SWITCH_B}/0000:82:01.0/0000:84:00.0", numa=1)
    machine.nic("mlx5_1", f"{SWITCH_A}/0000:02:01.0/0000:04:00.0", numa=0)
    machine.nic("mlx5_2", "pci0000:00/0000:00:02.0/0000:05:00.0", numa=0)


PAIR = (FakeGpu("00000000:03:00.0", "GPU-a"), FakeGpu("00000000:83:00.0", "GPU-b"))


def test_the_nearest_nic_is_the_one_with_the_deepest_common_ancestor(machine: Machine) -> None:
    two_sockets(machine)
    [host] = look(machine, fake_nvml(*PAIR)).hosts
    assert host.nics_by_distance("GPU0") == (("mlx5_1",), ("mlx5_2",), ("mlx5_0",))
    assert [host.link("GPU0", nic) for nic in ("mlx5_1", "mlx5_2", "mlx5_0")] == ["PIX", "PHB", "SYS"]
    assert host.serving_nics() == {"GPU0": "mlx5_1", "GPU1": "mlx5_0"}


def test_in_one_class_the_deeper_ancestor_wins(machine: Machine) -> None:
    deep = f"{SWITCH_A}/0000:02:00.0/0000:03:00.0/0000:04:00.0"
    machine.device(f"{deep}/0000:05:00.0/0000:06:00.0")
    machine.nic("mlx5_0", f"{SWITCH_A}/0000:02:01.0/0000:20:00.0/0000:21:00.0/0000:22:00.0")
    machine.nic("mlx5_1", f"{SWITCH_A}/0000:02:00.0/0000:03:00.0/0000:04:01.0/0000:07:00.0/0000:08:00.0")
    [host] = look(machine, fake_nvml(FakeGpu("00000000:06:00.0"))).hosts
    assert {host.link("GPU0", "mlx5_0"), host.link("GPU0", "mlx5_1")} == {"PXB"}
    assert host.nics_by_distance("GPU0") == (("mlx5_1",), ("mlx5_0",))


@pytest.mark.parametrize(
    ("a", "b", "numa", "nodes", "expected"),
    [
        (("pci0000:00", "p", "u", "d1", "gpu"), ("pci0000:00", "p", "u", "d2", "nic"), (0, 0), 2, "PIX"),
        (("pci0000:00", "p", "nic.0"), ("pci0000:00", "p", "nic.1"), (0, 0), 2, "PIX"),
        (("pci0000:00", "p", "u", "d1", "u2", "d3", "gpu"), ("pci0000:00", "p", "u", "d2", "nic"), (0, 0), 2, "PXB"),
        (("pci0000:00", "p", "gpu"), ("pci0000:00", "q", "nic"), (0, 0), 2, "PHB"),
        (("pci0000:00", "gpu"), ("pci0000:40", "nic"), (0, 0), 2, "NODE"),
        (("pci0000:00", "gpu"), ("pci0000:40", "nic"), (None, None), 1, "NODE"),
        (("pci0000:00", "gpu"), ("pci0000:40", "nic"), (0, 1), 2, "SYS"),
        (("pci0000:00", "gpu"), ("pci0000:40", "nic"), (0, None), 2, ""),
        ((), ("pci0000:40", "nic"), (0, 0), 1, ""),
    ],
)
def test_the_class_of_a_way_follows_from_the_paths(a, b, numa, nodes: int, expected: str) -> None:
    assert link_class(a, b, *numa, nodes) == expected == link_class(b, a, *numa[::-1], nodes)


def test_pci_addresses_of_all_tools_are_the_same() -> None:
    assert pci_address("00000000:0A:00.0") == pci_address("0000:0a:00.0") == "0000:0a:00.0"
    assert pci_address("00010000:0A:00.0") == "00010000:0a:00.0"


def test_gpus_behind_a_switch_are_joined_by_the_fewer_of_both_links(machine: Machine) -> None:
    gpus = [FakeGpu(f"00000000:0{i}:00.0", nvlinks=["switch"] * links) for i, links in ((1, 18), (2, 18), (3, 17))]
    [host] = look(machine, fake_nvml(*gpus)).hosts
    assert dict(host.links) == {("GPU0", "GPU1"): "NV18", ("GPU0", "GPU2"): "NV17", ("GPU1", "GPU2"): "NV17"}
    assert host.islands() == (("GPU0", "GPU1", "GPU2"),)


def test_gpus_that_are_wired_to_each_other_have_their_own_number(machine: Machine) -> None:
    one, two, three = (f"00000000:0{i}:00.0" for i in (1, 2, 3))
    gpus = [FakeGpu(one, nvlinks=[two, two, three]), FakeGpu(two, nvlinks=[one, one]), FakeGpu(three, nvlinks=[one])]
    [host] = look(machine, fake_nvml(*gpus)).hosts
    assert dict(host.links) == {("GPU0", "GPU1"): "NV2", ("GPU0", "GPU2"): "NV1", ("GPU1", "GPU2"): "SYS"}


def test_a_gpu_is_known_by_its_uuid_and_its_compute_capability(machine: Machine) -> None:
    two_sockets(machine)
    gpu = look(machine, fake_nvml(*PAIR)).hosts[0].gpus[1]
    assert (gpu.uuid, gpu.pci, gpu.capability, gpu.numa) == ("GPU-b", "0000:83:00.0", 9.0, 1)
    assert gpu.model == "NVIDIA H100 80GB HBM3"


def test_a_host_is_known_by_boot_and_namespaces(machine: Machine) -> None:
    assert look(machine).hosts[0].identity == host_id()


def test_a_port_shows_rate_state_layer_and_the_index_of_its_gid(machine: Machine) -> None:
    machine.nic(
        "mlx5_0",
        "pci0000:00/0000:00:02.0/0000:05:00.0",
        netdev="ens1",
        link_layer="Ethernet",
        rate="100 Gb/sec (4X EDR)",
    )
    machine.gid("mlx5_0", 0, "fe80:0000:0000:0000:0200:00ff:fe00:0001", netdev="ens1")
    machine.gid("mlx5_0", 1, "0000:0000:0000:0000:0000:ffff:c000:020a", netdev="ens1")
    machine.gid("mlx5_0", 3, "0000:0000:0000:0000:0000:ffff:c000:020a", "RoCE v2", netdev="ens1")
    machine.routes(
        "ens1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0",
        "ens1\t00000000\t010200C0\t3\t0\t0\t0\t00000000\t0\t0\t0",
    )
    [host] = look(machine).hosts
    [port] = host.nics[0].ports
    assert (port.number, port.state, port.rate_gbit, port.link_layer) == (1, "ACTIVE", 100.0, "Ethernet")
    assert (port.roce_v2_index, port.netdev, port.subnet) == (3, "ens1", "192.0.2.0/24")
    [interface] = host.interfaces
    assert (interface.name, interface.speed_mbit, interface.nic, interface.pci) == (
        "ens1",
        100_000,
        "mlx5_0",
        "0000:05:00.0",
    )


def test_an_infiniband_subnet_that_nobody_named_tells_nothing(machine: Machine) -> None:
    for number, prefix in enumerate(("fe80:0000:0000:0000", "fec0:0000:0000:0007")):
        machine.nic(f"mlx5_{number}", f"pci0000:00/0000:00:0{number}.0")
        machine.gid(f"mlx5_{number}", 0, f"{prefix}:0200:00ff:fe00:0001")
    assert [nic.ports[0].subnet for nic in look(machine).hosts[0].nics] == ["", "fec0:0000:0000:0007"]


def test_nics_stand_in_the_order_of_their_numbers(machine: Machine) -> None:
    for number in (10, 9, 0):
        machine.nic(f"mlx5_{number}", f"pci0000:00/0000:00:{number:02x}.0")
    assert [nic.name for nic in look(machine).hosts[0].nics] == ["mlx5_0", "mlx5_9", "mlx5_10"]


MATRIX = (
    "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPXB\t0-7\t1\nNIC0\tPXB\t X \n\nNIC Legend:\n  NIC0: mlx5_0\n"
)


def test_without_nvml_nvidia_smi_is_asked(machine: Machine) -> None:
    machine.nic("mlx5_0", f"{ROOT0}/0000:05:00.0")
    machine.device("pci0000:40/0000:40:01.0")
    query = "0, GPU-c, 00000000:40:01.0, NVIDIA A100-SXM4-80GB, 8.0\n"
    [host] = look(
        machine,
        printed={"nvidia-smi topo": MATRIX, "nvidia-smi --query-gpu=index,uuid,pci.bus_id,name,compute_cap": query},
    ).hosts
    [gpu] = host.gpus
    assert (gpu.uuid, gpu.pci, gpu.model, gpu.capability) == ("GPU-c", "0000:40:01.0", "NVIDIA A100-SXM4-80GB", 8.0)
    assert (gpu.numa, gpu.cpu_affinity, host.link("GPU0", "mlx5_0")) == (1, "0-7", "PXB")


def test_on_amd_rocm_smi_is_asked(machine: Machine) -> None:
    text = "== Link Type between two GPUs ==\n  GPU0 GPU1\nGPU0 0 XGMI\nGPU1 XGMI 0\nGPU[1] : (Topology) Numa Node: 1\n"
    [host] = look(machine, printed={"rocm-smi --showtopo": text}).hosts
    assert host.islands() == (("GPU0", "GPU1"),) and host.gpus[1].numa == 1


def test_a_machine_with_nothing_says_so(machine: Machine) -> None:
    topology = look(machine)
    notes = " ".join(topology.notes)
    assert "nvidia-ml-py is not installed" in notes and "no GPU was seen" in notes and "no RDMA device" in notes
    assert topology.hosts[0].gpus == () and topology.hosts[0].links == {}


def test_what_could_not_be_seen_is_said(machine: Machine) -> None:
    machine.nic("mlx5_0", "pci0000:00/0000:00:02.0", state="1: DOWN", rate="")
    machine.interface("eth0", "pci0000:00/0000:00:03.0", speed="-1")
    machine.interface("lo")
    topology = look(machine, fake_nvml(FakeGpu("00000000:99:00.0", uuid="")))
    notes = " ".join(topology.notes)
    for words in ("mlx5_0 port 1 is down", "mlx5_0 port 1: no rate", "eth0: the kernel does not tell its speed"):
        assert words in notes
    assert "GPU0: its UUID was not told" in notes and "GPU0: its place on the PCI bus was not seen" in notes
    assert "lo" not in [interface.name for interface in topology.hosts[0].interfaces]


def test_nics_that_tie_are_a_warning(machine: Machine) -> None:
    machine.device("pci0000:00/0000:00:05.0")
    for number in range(2):
        machine.nic(f"mlx5_{number}", f"pci0000:00/0000:00:1{number}.0")
    assert any("equally near to GPU0" in note for note in look(machine, fake_nvml(FakeGpu("0000:00:05.0"))).notes)


def test_a_driver_that_does_not_answer_is_a_warning_and_the_tools_are_asked(machine: Machine) -> None:
    topology = look(machine, fake_nvml(broken="Driver Not Loaded"), {"nvidia-smi topo": MATRIX})
    assert "Driver Not Loaded" in topology.notes[0] and [gpu.name for gpu in topology.hosts[0].gpus] == ["GPU0"]


def test_output_that_is_not_understood_is_a_warning(machine: Machine) -> None:
    topology = look(machine, printed={"nvidia-smi topo": "  GPU0 GPU1\nGPU0 X PIX\n"})
    assert any("`nvidia-smi topo -m` was not understood" in note and "GPU1" in note for note in topology.notes)
    assert topology.hosts[0].gpus == ()
