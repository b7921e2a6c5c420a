"""Pastes of nvidia-smi and rocm-smi: what was printed is what is read, whatever happened to the text on the way."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.transfermesh.topology import read_paste, read_paste_file
from distill.transfermesh.topology.text import decoded
from tests.builders_mesh_pastes import Printed, pastes

TWO = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"


@settings(deadline=None, max_examples=200)
@given(pastes())
def test_what_was_printed_is_read(case: tuple[Printed, str]) -> None:
    printed, text = case
    host = read_paste(text).host
    assert [gpu.name for gpu in host.gpus] == list(printed.names[: printed.gpus])
    assert [nic.name for nic in host.nics] == list(printed.names[printed.gpus :])
    assert host.links == printed.links
    for gpu in host.gpus:
        cpus, numa, memory = (*printed.affinity[gpu.name], "", "", "")[:3]
        assert gpu.cpu_affinity == cpus
        assert gpu.numa == (int(numa.split(",")[0]) if numa[:1].isdigit() else None)
        assert gpu.memory_numa == (int(memory) if memory.isdigit() else None)


@settings(deadline=None, max_examples=100)
@given(pastes(), st.data())
def test_a_matrix_that_is_not_symmetric_is_refused_with_both_devices(
    case: tuple[Printed, str], data: st.DataObject
) -> None:
    printed, _ = case
    if len(printed.names) < 2:
        return
    a, b = data.draw(st.sampled_from(list(combinations(range(len(printed.names)), 2))))
    cells = [[printed.cell(x, y) for y in printed.names] for x in printed.names]
    cells[a][b] = "PIX" if cells[a][b] != "PIX" else "SYS"
    rows = [f"{column} {' '.join(row)}" for column, row in zip(printed.columns, cells, strict=True)]
    with pytest.raises(ConfigError) as refused:
        read_paste("\n".join([" ".join(printed.columns), *rows]))
    assert printed.columns[a] in str(refused.value) and printed.columns[b] in str(refused.value)


@settings(deadline=None, max_examples=100)
@given(pastes(), st.data())
def test_a_matrix_without_one_of_its_rows_is_refused_with_its_name(
    case: tuple[Printed, str], data: st.DataObject
) -> None:
    printed, _ = case
    if len(printed.names) < 2:
        return
    gone = data.draw(st.integers(0, len(printed.names) - 1))
    rows = [
        f"{c} {' '.join(printed.cell(n, o) for o in printed.names)}"
        for c, n in zip(printed.columns, printed.names, strict=True)
    ]
    del rows[gone]
    with pytest.raises(ConfigError) as refused:
        read_paste("\n".join([" ".join(printed.columns), *rows]))
    assert printed.columns[gone] in str(refused.value)


SCRAPS = (
    *("GPU0", "GPU1", "GPU10", "NIC0", "NIC0:", "mlx5_0", "X", "NV4", "PIX", "SYS", "QPI", "OK", "GP", "CPU Affinity"),
    *("N/A", "0-3", "=", "=====", "Link Type between two GPUs", "XGMI", "0", "GPU[0] : (Topology) Numa Node: 1"),
    *("CA 'mlx5_0'", "Port 1:", "State: Active", "Rate: 100", "hca_id: mlx5_1", "port: 1", "ibpanic: mlx5_3"),
    *("DEV PORT INDEX GID", "mlx5_0 1 0 fe80::1 v2 e0", "\x1b[4m", "```"),
)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.tuples(st.sampled_from(SCRAPS), st.sampled_from(["", " ", "\t", "\n", "\n"])), max_size=60))
def test_scraps_of_the_tools_are_read_or_refused(scraps: list[tuple[str, str]]) -> None:
    answer_or_refusal("".join(f"{word}{gap}" for word, gap in scraps))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    answer_or_refusal(decoded(content))


def answer_or_refusal(text: str) -> None:
    try:
        paste = read_paste(text)
    except ConfigError:
        return
    assert paste.host.gpus or paste.host.nics or paste.notes


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("\t0-63\t0\t\tN/A", ("0-63", 0, None)),
        ("\t\t1\t\tN/A", ("", 1, None)),
        ("\t0-63\t\t\tN/A", ("0-63", None, None)),
        ("\t0-63\t\t\t9", ("0-63", None, 9)),
        ("\t0-63\t0,3-9\t\t2", ("0-63", 0, 2)),
        ("     0-63                    N/A", ("0-63", None, None)),
        ("             1               N/A", ("", 1, None)),
        ("                             N/A", ("", None, None)),
        ("", ("", None, None)),
    ],
)
def test_columns_that_are_blank_stay_unknown(tail: str, expected: tuple[str, int | None, int | None]) -> None:
    host = read_paste(f"{TWO}GPU0\t X \tPHB{tail}\nGPU1\tPHB\t X {tail}\n").host
    gpu = host.gpus[1]
    assert (gpu.cpu_affinity, gpu.numa, gpu.memory_numa) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        (" \n\t\n", ["empty"]),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ["no topology matrix"]),
        ("  GPU0 GPU1\n GPU0 X OK\n GPU1 OK X\n", ["no topology matrix"]),
        ("GPU0 X PIX\nGPU1 PIX X\n", ["header", "GPU0"]),
        ("  GPU0 GPU1 GPU\nGPU0 X PIX PIX\nGPU1 PIX X PIX\nGPU2 PIX PIX X\n", ["header", "GPU2"]),
        ("  GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X\nGPU2 PIX PIX\n", ["header", "GPU2"]),
        ("  GPU1 GPU0\nGPU0 X PIX\nGPU1 PIX X\n", ["header", "order"]),
        ("  GPU0 GPU1 CPU Affinity\nGPU0 X PIX 0-3\nGPU1 PIX 0-3\n", ["GPU1", "not square"]),
        ("  GPU0 GPU1\nGPU0 X PIX PIX\nGPU1 PIX X\n", ["GPU0", "more cells"]),
        ("  GPU0 GPU1\nGPU0 X PIX\nGPU0 X PIX\nGPU1 PIX X\n", ["two rows", "GPU0"]),
        ("  GPU0 GPU1\nGPU0 PIX PIX\nGPU1 PIX X\n", ["GPU0", "itself"]),
        ("  GPU0 GPU1\nGPU0 X X\nGPU1 X X\n", ["GPU1", "GPU0", "itself"]),
        ("  GPU0 GPU1\nGPU0 X NODEQPI\nGPU1 NODE X\n", ["QPI", "GPU0"]),
        ("  GPU0 mlx5_0\nGPU0 X foo\nmlx5_0 PIX X\n", ["foo", "GPU0", "mlx5_0"]),
        ("  GPU0 mlx5_0\nGPU0 X NS\nmlx5_0 PIX X\n", ["NS", "GPU0"]),
        (" GPU0 NIC0 NIC1\nGPU0 X PIX PIX\nNIC0 PIX X PIX\nNIC1 PIX PIX X\nNIC0: a\nNIC1: a\n", ["two NICs", "a"]),
        ("== ROCm System Management Interface ==\nGPU0 GPU1\nGPU0 0 15\nGPU1 15 0\n", ["Link Type between two GPUs"]),
        ("=== Link Type between two GPUs ===\n GPU0 GPU1\nGPU0 0 XGMI\nGPU1 FOO 0\n", ["FOO", "GPU1"]),
    ],
)
def test_a_broken_paste_is_refused_with_the_place(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_paste(text)
    for word in words:
        assert word.lower() in str(refused.value).lower()


def test_the_first_of_two_matrices_is_taken_and_that_is_said() -> None:
    one = "  GPU0 GPU1\nGPU0 X {0}\nGPU1 {0} X\n"
    paste = read_paste(one.format("NV4") + one.format("SYS"))
    assert paste.host.link("GPU0", "GPU1") == "NV4" and "2 topology matrices" in " ".join(paste.notes)


def test_a_broken_matrix_is_not_overlooked_because_of_what_else_is_pasted() -> None:
    with pytest.raises(ConfigError, match="GPU1"):
        read_paste("  GPU0 GPU1\nGPU0 X PIX\n\nCA 'mlx5_0'\n  Port 1:\n    State: Active\n    Rate: 100\n")


def test_the_tools_of_one_paste_are_put_together() -> None:
    matrix = "  GPU0 NIC0\nGPU0 X PIX\nNIC0 PIX X\nNIC Legend:\n  NIC0: mlx5_0\n"
    ibstat = (
        "CA 'mlx5_0'\n  Port 1:\n   State: Active\n   Physical state: LinkUp\n   Rate: 200\n   Link layer: Ethernet\n"
    )
    gids = "DEV PORT INDEX GID IPv4 VER DEV\nmlx5_0 1 3 0000:0000:0000:0000:0000:ffff:c000:020a 192.0.2.10 v2 ens1\n"
    paste = read_paste(matrix + ibstat + gids)
    [nic] = paste.host.nics
    assert paste.notes == ()
    [port] = nic.ports
    assert (port.state, port.rate_gbit, port.link_layer, port.roce_v2_index, port.netdev) == (
        "ACTIVE",
        200.0,
        "Ethernet",
        3,
        "ens1",
    )


def test_a_file_names_its_host_and_its_faults(tmp_path) -> None:
    good, bad = tmp_path / "node-a.txt", tmp_path / "bad.txt"
    good.write_bytes("\ufeff  GPU0\r\nGPU0 X\r\n".encode("utf-16"))
    bad.write_text("  GPU0 GPU1\nGPU0 X PIX\n")
    assert read_paste_file(good).host.name == "node-a"
    with pytest.raises(ConfigError, match=r"bad\.txt.*GPU1"):
        read_paste_file(bad)
    with pytest.raises(ConfigError, match=r"none\.txt"):
        read_paste_file(tmp_path / "none.txt")
