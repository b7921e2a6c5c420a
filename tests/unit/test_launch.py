"""Server processes: published addresses, restarts, giving up, and trees that end. The programs are small scripts."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from distill.config.models import ServerConfig
from distill.errors import ConfigError, DistillError, EnvironmentFault, MissingDependency, ServerError
from distill.serving import process
from distill.serving.launch import KEY_VARIABLE, AttachLauncher, EmbeddedLauncher, SGLangLauncher, SlotSettings
from distill.serving.process import Published, ServerProcess

LISTEN = """
    import json, os, socket, subprocess, sys, time
    listener = socket.create_server(("127.0.0.1", 0))
    def publish():
        with open(sys.argv[1] + ".draft", "w") as file:
            json.dump({"pid": os.getpid(), "url": f"http://127.0.0.1:{listener.getsockname()[1]}"}, file)
        os.replace(sys.argv[1] + ".draft", sys.argv[1])
"""
SERVE = "publish()\nprint('serving', flush=True)\ntime.sleep(600)\n"


class Script:
    """A program that is a Python script, published through a file as the embedded server does."""

    def __init__(self, folder: Path, body: str) -> None:
        self.folder = folder
        self.path = folder / "program.py"
        self.path.write_text(textwrap.dedent(LISTEN) + textwrap.dedent(body))

    def command(self, incarnation: int) -> list[str]:
        return [sys.executable, str(self.path), str(self.folder / f"address.{incarnation}"), str(incarnation)]

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def published(self, incarnation: int, pid: int) -> Published | None:
        try:
            found = json.loads((self.folder / f"address.{incarnation}").read_text())
        except (OSError, ValueError):
            return None
        return Published(found["url"]) if found["pid"] == pid else None

    def hopeless(self, exit_code: int, log: str) -> DistillError | None:
        return ConfigError(log) if exit_code == 2 else None


Make = Callable[..., ServerProcess]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(process, "FIRST_BACKOFF_S", 0.05)
    made: list[ServerProcess] = []

    def build(body: str, *, max_restarts: int = 3, start_timeout_s: float = 60.0) -> ServerProcess:
        host = ServerProcess(
            Script(tmp_path, body),
            name="server-0",
            log=tmp_path / "logs" / "server-0.log",
            start_timeout_s=start_timeout_s,
            max_restarts=max_restarts,
        )
        made.append(host)
        return host

    yield build
    for host in made:
        host.stop()


def pid_of(tmp_path: Path, incarnation: int) -> int:
    return json.loads((tmp_path / f"address.{incarnation}").read_text())["pid"]


def kill(pid: int) -> None:
    """SIGKILL, and wait until the kernel has ended the process; whoever started it still has to collect it."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):  # collected
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_a_server_is_where_it_says_it_is(make: Make) -> None:
    address = make(SERVE).start()
    assert (address.name, address.incarnation) == ("server-0", 0)
    assert address.url.startswith("http://127.0.0.1:")


def test_what_it_prints_is_in_the_log_and_in_its_tail(make: Make, tmp_path: Path) -> None:
    host = make("print('to stdout'); print('to stderr', file=sys.stderr, flush=True)\n" + SERVE)
    host.start()
    assert "to stdout" in host.log_tail() and "to stderr" in host.log_tail()
    assert "program.py" in (tmp_path / "logs" / "server-0.log").read_text()


@pytest.mark.faults
def test_a_killed_server_comes_back_as_the_next_incarnation_somewhere_else(make: Make, tmp_path: Path) -> None:
    host = make(SERVE)
    first = host.start()
    for incarnation in (1, 2):
        kill(pid_of(tmp_path, incarnation - 1))
        after = host.address(60)
        assert after.incarnation == incarnation
        assert after.url != first.url


@pytest.mark.faults
def test_a_server_that_hangs_is_replaced_if_it_is_the_incarnation_that_was_meant(make: Make, tmp_path: Path) -> None:
    host = make(SERVE)
    first = host.start()
    host.restart(first.incarnation + 1)
    assert host.address(5) == first, "that one does not run"
    os.kill(pid_of(tmp_path, 0), signal.SIGSTOP)
    host.restart(first.incarnation)
    while (second := host.address(60)) == first:  # the watcher notices within a moment
        time.sleep(0.05)
    assert second.incarnation == first.incarnation + 1
    host.restart(first.incarnation)
    assert host.address(5) == second


def test_a_server_that_keeps_dying_is_given_up_after_its_restarts(make: Make, tmp_path: Path) -> None:
    host = make(
        "if sys.argv[2] == '0':\n    publish()\n    time.sleep(600)\nprint('no luck')\nsys.exit(7)\n", max_restarts=2
    )
    host.start()
    kill(pid_of(tmp_path, 0))
    with pytest.raises(ServerError, match="server-0 ended with exit code 7, after 2 restarts") as caught:
        host.address(60)
    assert "no luck" in caught.value.why
    assert (tmp_path / "logs" / "server-0.log").read_text().count("--- server-0, start") == 3


def test_a_first_start_that_fails_is_final_and_shows_the_log(make: Make, tmp_path: Path) -> None:
    host = make("print('there are no weights')\nsys.exit(1)\n")
    with pytest.raises(ServerError, match="exit code 1 when it was started") as caught:
        host.start()
    assert "there are no weights" in caught.value.why
    assert (tmp_path / "logs" / "server-0.log").read_text().count("--- server-0, start") == 1


def test_an_exit_that_the_program_knows_to_be_hopeless_is_its_own_error(make: Make) -> None:
    with pytest.raises(ConfigError, match="bad option"):
        make("print('bad option')\nsys.exit(2)\n").start()


def test_a_server_that_never_publishes_is_ended_and_named(make: Make) -> None:
    with pytest.raises(ServerError, match=r"server-0 did not come up in 0.5 s"):
        make("time.sleep(600)\n", start_timeout_s=0.5).start()


def test_a_deadline_that_passes_names_who_was_awaited_and_for_how_long(make: Make) -> None:
    host = make("time.sleep(600)\n")
    with pytest.raises(ServerError, match=r"waited 0.2 s for server server-0"):
        host.address(0.2)


def test_a_program_that_does_not_exist_is_an_error_at_once(tmp_path: Path, make: Make) -> None:
    host = make(SERVE)
    host.program.command = lambda incarnation: [str(tmp_path / "no-such-program")]
    with pytest.raises(ServerError, match="no-such-program"):
        host.start()


@pytest.mark.faults
def test_stop_ends_grandchildren_also_those_that_left_the_group_and_ignore_sigterm(make: Make, tmp_path: Path) -> None:
    grandchild = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    spawn = f"""
        for new_session in (False, True):
            child = subprocess.Popen([sys.executable, "-c", {grandchild!r}], start_new_session=new_session,
                                     stdout=subprocess.PIPE)
            child.stdout.readline()
    """
    host = make(textwrap.dedent(spawn) + SERVE)
    host.start()
    tree = [psutil.Process(pid_of(tmp_path, 0))]
    tree += tree[0].children(recursive=True)
    assert len(tree) == 3
    host.stop()
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert not alive
    with pytest.raises(ServerError, match="was stopped"):
        host.address(1)


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_server_does_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = Script(tmp_path, SERVE)
    launcher = f"""
        import sys, time
        sys.path.insert(0, {str(Path.cwd())!r})
        from pathlib import Path
        from tests.unit.test_launch import Script, SERVE, ServerProcess
        folder = Path({str(tmp_path)!r})
        host = ServerProcess(Script(folder, SERVE), name="s", log=folder / "s.log", start_timeout_s=60, max_restarts=0)
        host.start()
        print("up", flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    server = psutil.Process(json.loads((script.folder / "address.0").read_text())["pid"])
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([server], timeout=10)
    assert not alive


def settings(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "teacher-0",
        "model": tmp_path / "model",
        "vocab_size": 50,
        "folder": tmp_path,
        "index": 0,
        "weight_version": "v3",
        "run_key": "c0ffee",
    } | changes


def test_the_run_key_travels_in_the_environment_and_never_on_the_command_line(tmp_path: Path) -> None:
    program = EmbeddedLauncher(ServerConfig(), **settings(tmp_path)).program
    assert program.environment()[KEY_VARIABLE] == "c0ffee"
    assert not any("c0ffee" in argument for argument in program.command(0))


def test_a_program_that_is_not_ours_does_not_see_the_run_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "c0ffee")
    assert KEY_VARIABLE not in SGLangLauncher(ServerConfig(), **settings(tmp_path)).program.environment()


def test_the_configuration_reaches_the_embedded_servers_command(tmp_path: Path) -> None:
    config = ServerConfig(port=7000, dtype="bfloat16", context_length=99, threads=3, args=["--extra"])
    command = EmbeddedLauncher(config, **settings(tmp_path, index=2, memory_limit_gb=1.5)).program.command(0)
    pairs = dict(itertools.pairwise(command))
    assert pairs["--port"] == "7002"
    assert pairs["--dtype"] == "bfloat16"
    assert pairs["--context-length"] == "99"
    assert pairs["--threads"] == "3"
    assert pairs["--vocab-size"] == "50"
    assert pairs["--weight-version"] == "v3"
    assert pairs["--memory-limit-gb"] == "1.5"
    assert command[-1] == "--extra"


def test_a_slot_is_started_without_a_model_and_with_its_memory(tmp_path: Path) -> None:
    slot: SlotSettings = {"slot_gb": 1.5, "host_gb": 8.0, "host_folder": tmp_path / "host", "host_differences": True}
    command = EmbeddedLauncher(ServerConfig(), **settings(tmp_path, slot=slot)).program.command(0)
    pairs = dict(itertools.pairwise(command))
    assert (pairs["--slot-gb"], pairs["--host-gb"], pairs["--host-folder"]) == ("1.5", "8.0", str(tmp_path / "host"))
    assert {"--teachers", "--host-differences"} <= set(command)
    assert not {"--model-path", "--vocab-size", "--weight-version", "--mesh-host"} & set(command)
    bare = EmbeddedLauncher(ServerConfig(), **settings(tmp_path, slot={"slot_gb": 2.0})).program.command(0)
    assert not {"--host-gb", "--host-folder", "--host-differences"} & set(bare)


def test_sglang_on_a_cpu_starts_through_our_launcher_with_the_users_arguments_last(tmp_path: Path) -> None:
    config = ServerConfig(device="cpu", threads=2, args=["--max-total-tokens", "500"])
    program = SGLangLauncher(config, **settings(tmp_path)).program
    command = list(program.command(0))
    assert command[1].endswith("sglang_cpu.py")
    assert "--sleep-on-idle" in command and command[-2:] == ["--max-total-tokens", "500"]
    assert program.environment()["OMP_NUM_THREADS"] == "2"
    assert program.environment()["HF_HUB_OFFLINE"] == "1"


def test_sglang_on_a_gpu_is_started_as_it_is(tmp_path: Path) -> None:
    command = list(SGLangLauncher(ServerConfig(device="cuda"), **settings(tmp_path)).program.command(0))
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert "cpu" not in command


@pytest.mark.parametrize("launcher", [EmbeddedLauncher, SGLangLauncher])
def test_a_taken_port_is_a_fault_of_the_environment_that_names_the_port(launcher: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = launcher(ServerConfig(port=port - 1, device="cpu", max_restarts=5), **settings(tmp_path, index=1))
        try:
            with pytest.raises(EnvironmentFault, match=f"127.0.0.1:{port} is taken"):
                host.start()
        finally:
            host.stop()
    log = (tmp_path / "teacher-0.log").read_text() if (tmp_path / "teacher-0.log").exists() else ""
    assert log.count("--- teacher-0, start") <= 1


def test_a_model_folder_that_is_not_there_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    host = EmbeddedLauncher(ServerConfig(device="cpu"), **settings(tmp_path))
    try:
        with pytest.raises(ConfigError, match=r"teacher-0: .*model.*config.json"):
            host.start()
    finally:
        host.stop()


def test_an_interpreter_without_sglang_is_a_missing_dependency_that_names_the_extra(tmp_path: Path) -> None:
    program = SGLangLauncher(ServerConfig(device="cpu"), **settings(tmp_path)).program
    error = program.hopeless(1, "ModuleNotFoundError: No module named 'sglang'")
    assert isinstance(error, MissingDependency)
    assert "distill-engine[sglang]" in error.fix
    assert program.hopeless(1, "something else") is None


def test_an_attached_server_that_does_not_answer_is_an_error_that_names_its_url(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    host = AttachLauncher(ServerConfig(start_timeout_s=0.1), **settings(tmp_path, attach_url=url))
    with pytest.raises(ServerError, match=url):
        host.start()


def test_attaching_without_a_url_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher-0 has no URL"):
        AttachLauncher(ServerConfig(), **settings(tmp_path))


def test_a_missing_interpreter_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    host = EmbeddedLauncher(ServerConfig(python=tmp_path / "no-python"), **settings(tmp_path))
    start = time.monotonic()
    with pytest.raises(ConfigError, match="no-python"):
        host.start()
    assert time.monotonic() - start < 60
