"""The server as a process: where it says it is, how it ends, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from distill.serving.embedded.__main__ import parse_arguments
from distill.serving.embedded.lifetime import bind
from distill.transfermesh import Endpoint, Publisher, model_digest, tensor_digest
from tests.builders_embedded import prompt, save_model

START_S = 120


def command(folder: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "distill.serving.embedded", "--model-path", str(folder), *extra]


def environment(**extra: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key != "DISTILL_RUN_KEY"}
    return {**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


def until(condition: Any, what: str, seconds: float = START_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return value


@contextmanager
def started(
    folder: Path, file: Path, *extra: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        command(folder, "--address-file", str(file), *extra),
        env=environment(**variables), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: file.exists() or process.poll() is not None, "the address file")
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        yield process, json.loads(file.read_text())
    finally:
        process.kill()
        process.wait(30)
        if process.stderr:
            process.stderr.close()


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_says_where_it_is_serves_and_ends_in_order_when_told(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    with started(folder, tmp_path / "address", "--weight-version", "v7", "--max-batch-size", "3") as (process, address):
        assert address["pid"] == process.pid and address["mesh"] is None
        with urllib.request.urlopen(address["url"] + "/server_info", timeout=60) as reply:
            info = json.loads(reply.read())
        assert (info["weight_version"], info["max_batch_size"], info["model_path"]) == ("v7", 3, str(folder))
        reply = post(address["url"], "/generate", {"input_ids": prompt(4), "sampling_params": {"max_new_tokens": 3}})
        assert reply["meta_info"]["completion_tokens"] <= 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_running_request_does_not_hold_up_the_end_and_gets_what_it_has_written(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", max_position_embeddings=100_000)
    with started(folder, tmp_path / "address") as (process, address):
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 90_000, "ignore_eos": True}, "stream": True}
        request = urllib.request.Request(address["url"] + "/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as stream:
            stream.readline()
            process.send_signal(signal.SIGTERM)
            events = [line for line in stream.read().decode().split("\n\n") if line]
        assert process.wait(30) == 0
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "abort" and last["output_ids"]


def test_a_taken_port_is_told_in_one_line_with_exit_code_3(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(folder, "--port", str(port)), env=environment(), capture_output=True, text=True, timeout=START_S
        )
    assert done.returncode == 3
    (line,) = done.stderr.strip().splitlines()
    assert f"127.0.0.1:{port}" in line


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--vocab-size", "1000"], 2, "61 rows"),
        (["--memory-limit-gb", "0.000001"], 3, "do not fit in the limit"),
        (["--threads", "0"], 2, "--threads must be at least 1"),
    ],
)
def test_what_cannot_be_served_is_told_without_a_traceback(
    tmp_path: Path, extra: list[str], code: int, message: str
) -> None:
    folder = save_model(tmp_path / "model")
    done = subprocess.run(command(folder, *extra), env=environment(), capture_output=True, text=True, timeout=START_S)
    assert done.returncode == code
    assert message in done.stderr and "Traceback" not in done.stderr


def test_it_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    folder, file = save_model(tmp_path / "model"), tmp_path / "address"
    arguments = command(folder, "--address-file", str(file))
    script = f"import subprocess, time; subprocess.Popen({arguments!r}); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment(), stderr=subprocess.DEVNULL)
    try:
        until(file.exists, "the address file")
        pid = json.loads(file.read_text())["pid"]
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait(30)
    until(lambda: not alive(pid), "the end of the orphan", 30)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_weights_published_over_the_mesh_are_live_and_agree(tmp_path: Path, transport: str) -> None:
    folder, other = save_model(tmp_path / "a"), save_model(tmp_path / "b", seed=1)
    key = bytes(range(32))
    weights = load_file(other / "model.safetensors")
    with started(folder, tmp_path / "address", "--name", "r0", DISTILL_RUN_KEY=key.hex()) as (_, address):
        endpoint = Endpoint.from_dict(address["mesh"])
        assert endpoint.name == "r0"
        publisher = Publisher(key, transport=transport)
        items = [
            (n, str(w.dtype), w.shape, np.ascontiguousarray(w).reshape(-1).view(np.uint8)) for n, w in weights.items()
        ]
        report = publisher.publish(items, 12, [endpoint])
        assert not report.failed
        reply = post(address["url"], "/weights_checker", {"action": "checksum"})
        sums = reply["ranks"][0]["checksums"]
        assert sums == {name: tensor_digest(data) for name, _, _, data in items}
        assert report.digest == model_digest(sums)
        wrote = post(address["url"], "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
        assert wrote["meta_info"]["weight_version"] == "12"


async def test_replies_are_sent_at_once_and_do_not_wait_for_acknowledgements() -> None:
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        told.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(accept, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(told, 30) != 0
        writer.close()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--model-path for one model, or --teachers"),
        (["--model-path", "m", "--teachers", "--slot-gb", "1"], "--model-path for one model, or --teachers"),
        (["--teachers"], "--teachers needs --slot-gb"),
    ],
)
def test_a_server_is_of_one_model_or_a_slot(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments)
    assert caught.value.code == 2 and complaint in capsys.readouterr().err


def test_a_slot_that_is_told_to_stop_frees_the_host_memory(tmp_path: Path) -> None:
    model, file, host = save_model(tmp_path / "m", seed=1), tmp_path / "address.json", tmp_path / "host"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "distill.serving.embedded", "--teachers", "--slot-gb", "0.01"),
            *("--host-gb", "0.01", "--host-folder", str(host), "--address-file", str(file)),
        ],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: file.exists() or process.poll() is not None, "the address file")
        url = json.loads(file.read_text())["url"]
        for path, body in (
            ("register", {"name": "a", "folder": str(model), "version": "a@1"}),
            ("load", {"name": "a"}),
        ):
            request = urllib.request.Request(f"{url}/teachers/{path}", json.dumps(body).encode(), method="POST")
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert reply.status == 200
        assert any(each.suffix == ".bin" for each in host.iterdir())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert {each.name for each in host.iterdir()} == {"lock", "users"}
    finally:
        process.kill()
        process.wait()
