"""`distill-mesh topo`: the table, the picture, JSON there and back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distill.cli import mesh_topo
from distill.cli.program import Parser, run_program
from distill.transfermesh.topology import read_cluster_file, read_paste_file, read_topology_files
from distill.transfermesh.topology.serial import from_json, to_json

ROOT = Path(__file__).parents[2]
TOPO = ROOT / "tests/golden/data/mesh/topo"
RAILS, SITES = ROOT / "recipes/mesh/rails.yaml", ROOT / "recipes/mesh/two_sites.yaml"
SVG = "{http://www.w3.org/2000/svg}"


def call(*words: str | Path) -> int:
    parser = Parser(prog="distill-mesh")
    mesh_topo.add(parser.add_subparsers(required=True))

    def body() -> int:
        arguments: argparse.Namespace = parser.parse_args(["topo", *map(str, words)])
        return arguments.run(arguments)

    return run_program("distill-mesh", body)


def test_a_paste_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--from", TOPO / "16_t4_single_spaces.txt") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["GPU0", "0-19", "mlx5_2,", "mlx5_3", "(PIX)", "mlx5_2"] in lines
    assert ["GPU1", "0-19", "mlx5_2,", "mlx5_3", "(PIX)", "mlx5_3"] in lines


def test_many_hosts_alike_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--from", RAILS) == 0
    out = capsys.readouterr().out
    assert "engine1 to engine4: 4 hosts alike (engine)" in out and out.count("GPU7") == 2
    assert "rail 7: train:nic7, engine1:nic7, engine2:nic7, engine3:nic7, engine4:nic7" in out
    assert "network rdma: all hosts, along rails" in out


def test_warnings_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--from", TOPO / "05_rtx5090_two_gpu_tabs.txt") == 0
    assert "warning: 05_rtx5090_two_gpu_tabs: no NIC is shown" in capsys.readouterr().out


def test_this_machine_is_looked_at_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    [host] = json.loads(capsys.readouterr().out)["hosts"]
    assert host["identity"] and host["name"]


@pytest.mark.parametrize("name", ["21_broken_truncated_header.txt", "24_broken_empty.txt", "nothing.txt"])
def test_a_file_that_cannot_be_used_ends_with_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--from", TOPO / name) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("path", [RAILS, SITES, *sorted(TOPO.glob("[01]*.txt"))], ids=lambda path: path.stem)
def test_json_gives_the_topology_back(path: Path, tmp_path: Path) -> None:
    topology = read_topology_files([path])
    text = json.dumps(to_json(topology))
    assert from_json(json.loads(text)) == topology
    (tmp_path / "saved.json").write_text(text)
    assert read_topology_files([tmp_path / "saved.json"]) == topology


def test_several_files_are_one_topology(capsys: pytest.CaptureFixture[str]) -> None:
    files = [TOPO / "12_h100_tabs_reversed_nics.txt", TOPO / "13_b200_four_numa_nodes.txt"]
    assert call("--from", files[0], "--from", files[1], "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [host["name"] for host in printed["hosts"]] == [file.stem for file in files]
    assert printed["rails"][0] == {files[0].stem: ["mlx5_8"], files[1].stem: ["mlx5_0"]}


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"hosts": [{}]}', '{"hosts": [{"name": "a", "gpus": [{"name": 3}]}]}', '{"hosts": 1}']
)
def test_json_that_is_no_topology_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(content)
    assert call("--from", tmp_path / "x.json") == 2
    assert "x.json" in capsys.readouterr().err


def test_the_picture_has_every_device_and_a_line_to_the_nic_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = TOPO / "10_a40_eight_gpu_four_bridges.txt"
    assert call("--from", source, "--svg", tmp_path / "t.svg") == 0
    picture = ElementTree.parse(tmp_path / "t.svg").getroot()
    words = [text.text for text in picture.iter(f"{SVG}text")]
    host = read_paste_file(source).host
    assert {gpu.name for gpu in host.gpus} | {nic.name for nic in host.nics} <= set(words)
    assert words.count("NVLink NV4") == 4
    thick = [
        line
        for line in picture.iter(f"{SVG}line")
        if line.get("stroke-width") == "2.5" and line.get("y1") != line.get("y2")
    ]
    assert len(thick) == len(host.gpus)


def test_nothing_in_the_picture_lies_outside_it(tmp_path: Path) -> None:
    for source in (SITES, TOPO / "01_h100_dgx_tabs_glued_column.txt"):
        assert call("--from", source, "--svg", tmp_path / "t.svg") == 0
        picture = ElementTree.parse(tmp_path / "t.svg").getroot()
        width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
        for group in picture.iter(f"{SVG}g"):
            x, y = (float(part) for part in (group.get("transform") or "")[len("translate(") : -1].split(","))
            for box in group.iter(f"{SVG}rect"):
                right, bottom = (
                    float(box.get(a, 0)) + float(box.get(b, 0)) for a, b in (("x", "width"), ("y", "height"))
                )
                assert x + right <= width and y + bottom <= height
            assert all(y + float(text.get("y", 0)) <= height for text in group.iter(f"{SVG}text"))


def test_names_from_files_cannot_become_markup(tmp_path: Path) -> None:
    (tmp_path / "a<b>&.txt").write_text("  GPU0\nGPU0 X\n")
    assert call("--from", tmp_path / "a<b>&.txt", "--svg", tmp_path / "t.svg") == 0
    assert "a<b>&" in [text.text for text in ElementTree.parse(tmp_path / "t.svg").getroot().iter(f"{SVG}text")]


def test_a_picture_that_cannot_be_written_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--from", RAILS, "--svg", tmp_path / "no" / "t.svg") == 3
    assert "t.svg" in capsys.readouterr().err


def test_a_thousand_hosts_are_one_frame() -> None:
    from distill.transfermesh.topology.drawing import svg

    picture = svg(read_cluster_file(RAILS).with_engine_hosts(1000).topology)
    assert "1000 hosts alike" in picture and len(picture) < 50_000
