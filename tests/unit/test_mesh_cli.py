"""`distill-mesh` from the outside."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from distill.cli.mesh import main
from distill.errors import ConfigError
from distill.transfermesh.bench import BenchPlan, parse_size


def test_doctor_tries_what_is_here_and_says_what_was_not_tried(capsys):
    assert main(["doctor"]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " ok " in lines["shm"] and " ok " in lines["tcp 127.0.0.1"]
    for name in ("ucx", "nccl", "rdma"):
        assert "not part of this version, so it was not tried" in lines[name]


def test_bench_measures_each_size_and_transport_and_finds_nothing_wrong(capsys, tmp_path):
    output = tmp_path / "bench.json"
    words = "bench -b 64K -e 256K -f 4 --transports shm,tcp --receivers 2 --iterations 2 --bucket 100K --json"
    assert main([*words.split(), str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["size", "transport", "receivers", "p50", "ms", "max", "ms", "GB/s/rcv", "#wrong"]
    rows = json.loads(output.read_text())["rows"]
    assert [(row["bytes"], row["transport"], row["receivers"], row["wrong"]) for row in rows] == [
        (65536, "shm", 2, 0),
        (262144, "shm", 2, 0),
        (65536, "tcp", 2, 0),
        (262144, "tcp", 2, 0),
    ]
    assert all(0 < row["seconds_p50"] <= row["seconds_max"] for row in rows) and len(lines) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench --transports smh", "did you mean 'shm'?"),
        ("bench -b 12X", "'12X' is not a size"),
        ("bench -b 2M -e 1M", "0 < begin <= end"),
        ("bench -f 1", "factor > 1"),
        ("bench --bucket 3", "buckets of 3 bytes"),
        ("bench --receivers x", "invalid int value: 'x'"),
        ("bnech", "invalid choice: 'bnech'"),
    ],
)
def test_wrong_arguments_end_with_2_and_a_sentence(words, message, capsys):
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_noticed_before_the_measurement(capsys, tmp_path):
    for file, reason in ((tmp_path / "none" / "x.json", "there is no"), (tmp_path, "it is a folder")):
        assert main(["bench", "-b", "1K", "-e", "1K", "--iterations", "1", "--json", str(file)]) == 3
        done = capsys.readouterr()
        assert f"cannot write {file}: {reason}" in done.err and done.out == ""


def test_a_full_output_and_a_reader_who_left_end_as_those_of_distill_run():
    command = [sys.executable, "-m", "distill.cli.mesh", "--help"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 3 and "cannot write to standard output" in done.stderr


def test_sizes_are_powers_of_1024():
    assert [parse_size(text) for text in ("4096", "1K", "64M", "2g")] == [4096, 1024, 64 << 20, 2 << 30]
    for wrong in ("", "M", "1.5M", "-1"):
        with pytest.raises(ConfigError):
            parse_size(wrong)
    assert BenchPlan(begin=1, end=20, factor=4).sizes == [1, 4, 16]


def test_the_mesh_loads_neither_torch_nor_ray_nor_pydantic():
    code = (
        "import sys, distill.cli.mesh, distill.transfermesh\n"
        "from distill import registry\n"
        "[registry.load('transport', n) for n in registry.names('transport')]\n"
        "print(*sorted({'torch', 'ray', 'pydantic', 'transformers', 'pickle'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) <= {"pickle"}, "numpy loads pickle; nothing of ours calls it"


def test_help_explains_itself():
    done = subprocess.run(
        [sys.executable, "-m", "distill.cli.mesh", "bench", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--transports" in done.stdout and "powers of 1024" in done.stdout
