"""ibstat, ibv_devinfo and show_gids, with what stands around their output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.transfermesh.topology.nictools import NicReport, read_nics
from distill.transfermesh.topology.text import clean_lines

GID_HEADER = (
    "DEV     PORT    INDEX   GID     IPv4    VER     DEV\n---     ----    -----   ---     ----    ---     ---\n"
)


def read(text: str) -> NicReport:
    return read_nics(clean_lines(text))


def ibstat(name: str, *ports: tuple[int, str, str, str]) -> str:
    lines = [f"CA '{name}'", "\tCA type: MT4129", f"\tNumber of ports: {len(ports)}", "\tFirmware version: 28.39.1002"]
    for number, state, rate, layer in ports:
        lines += [f"\tPort {number}:", f"\t\tState: {state}", "\t\tPhysical state: LinkUp", f"\t\tRate: {rate}"]
        lines += ["\t\tBase lid: 0", "\t\tCapability mask: 0x00010000", f"\t\tLink layer: {layer}"]
    return "\n".join(lines) + "\n"


names = st.from_regex(r"[a-z]{2,5}\d?_?[0-9]{1,2}", fullmatch=True)
ports = st.tuples(
    st.sampled_from(["Active", "Down", "Initializing", "Armed", "Polling"]),
    st.sampled_from(["2.5", "10", "40", "56", "100", "200", "400", "800"]),
    st.sampled_from(["InfiniBand", "Ethernet"]),
)


@given(
    st.dictionaries(names, st.lists(ports, min_size=1, max_size=3), min_size=1),
    st.sampled_from(["", "    ", "# ", "[1,0]<stdout>:", "node-a: "]),
)
def test_what_ibstat_printed_is_read(devices: dict[str, list[tuple[str, str, str]]], prefix: str) -> None:
    text = "".join(ibstat(name, *((at, *port) for at, port in enumerate(its, 1))) for name, its in devices.items())
    report = read("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert report.tool == "ibstat"
    assert {
        nic.name: [(port.number, port.state, port.rate_gbit, port.link_layer) for port in nic.ports]
        for nic in report.devices
    } == {
        name: [
            (at, "ACTIVE" if state == "Active" else "DOWN", float(rate), layer)
            for at, (state, rate, layer) in enumerate(its, 1)
        ]
        for name, its in devices.items()
    }


def test_a_port_that_is_down_is_in_a_warning() -> None:
    report = read(ibstat("mlx5_0", (1, "Active", "100", "Ethernet"), (2, "Down", "40", "Ethernet")))
    assert report.warnings == ("mlx5_0 port 2 is down",)


def test_a_panic_is_a_warning_and_no_device() -> None:
    panic = "ibpanic: [21514] main: stat of IB device 'mlx5_3' failed: No such file or directory\n"
    report = read("ibwarn: [7] something\n" + ibstat("mlx5_0", (1, "Active", "100", "InfiniBand")) + panic)
    assert [nic.name for nic in report.devices] == ["mlx5_0"]
    assert any("mlx5_3" in warning for warning in report.warnings)


def test_a_device_that_could_not_be_opened_is_no_device() -> None:
    report = read(ibstat("mlx5_0", (1, "Active", "100", "InfiniBand")) + "ibpanic: [1] main: can't open CA 'mlx5_1'\n")
    assert [nic.name for nic in report.devices] == ["mlx5_0"]
    assert any("mlx5_1" in warning for warning in report.warnings)


def test_what_else_a_text_says_of_a_device_is_a_warning() -> None:
    report = read("$ ibstat mlx5_0\nmlx5_7: hard reset\n" + ibstat("mlx5_0", (1, "Active", "100", "InfiniBand")))
    assert report.warnings == ("mlx5_7: hard reset",)


def test_ibv_devinfo_tells_state_and_layer_but_no_rate() -> None:
    text = (
        "libibverbs: Warning: couldn't load driver 'libhns-rdmav34.so'\n"
        "hca_id:\tmlx5_0\n\ttransport:\t\t\tInfiniBand (0)\n\tphys_port_cnt:\t\t\t2\n"
        "\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tphys_state:\t\tLINK_UP (5)\n"
        "\t\t\tlink_layer:\t\tInfiniBand\n"
        "\t\tport:\t2\n\t\t\tstate:\t\t\tPORT_DOWN (1)\n\t\t\tlink_layer:\t\tEthernet\n"
        "hca_id:\tmlx5_1\nFailed to query device props\n"
    )
    report = read(text)
    first, second = report.devices
    assert [(port.state, port.rate_gbit, port.link_layer) for port in first.ports] == [
        ("ACTIVE", None, "InfiniBand"),
        ("DOWN", None, "Ethernet"),
    ]
    assert second.ports == () and "mlx5_1: no port is shown" in report.warnings
    assert "libhns" in report.warnings[0]


def test_no_device_at_all_is_an_answer() -> None:
    report = read("No IB devices found\n")
    assert (report.tool, report.devices) == ("ibv_devinfo", ()) and "No IB devices found" in report.warnings


def test_an_empty_table_of_gids_is_an_answer() -> None:
    report = read(f"[root@a ~]# show_gids\n{GID_HEADER}n_gids_found=0\n")
    assert (report.tool, report.gids, report.roce_v2_ipv4_index()) == ("show_gids", (), {})


def test_gids_with_tabs_and_blanks_in_them() -> None:
    long = "0000:0000:0000:0000:0000:ffff:c000:020a"
    report = read(
        f"{GID_HEADER}mlx5_0\t1\t0\tfe80:0000:0000:0000:0200:00ff:fe00:0001\t\t\tv1\tens1f0\n"
        f"mlx5_0\t1\t3\t{long}\t192.0.2.10  \tv2\tens1f0\n"
        f"mlx5_0\t1\t7\t{long}\t192.0.2.10  \tv2\tens1f0.100\n"
        f"mlx5_1\t2\t0\tfe80:0000:0000:0000:0200:00ff:fe00:0002\t\t\tv1\n"
    )
    assert [(gid.dev, gid.port, gid.index, gid.ipv4, gid.ver, gid.netdev) for gid in report.gids] == [
        ("mlx5_0", 1, 0, None, "v1", "ens1f0"),
        ("mlx5_0", 1, 3, "192.0.2.10", "v2", "ens1f0"),
        ("mlx5_0", 1, 7, "192.0.2.10", "v2", "ens1f0.100"),
        ("mlx5_1", 2, 0, None, "v1", None),
    ]
    assert report.roce_v2_ipv4_index() == {"mlx5_0:1": 3}


def test_another_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="ibstat, ibv_devinfo or show_gids"):
        read("eth0: flags=4163<UP,BROADCAST>\n")
