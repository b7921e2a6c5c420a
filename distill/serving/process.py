"""A model server's process: started, watched from a thread, started again when it dies, ended with all its children."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

import psutil

from distill.errors import DistillError, ServerError
from distill.protocols import ServerAddress

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL. SGLang needs 4 to 6 s on a busy CPU host."""
POLL_S = 0.05
TAIL_BYTES = 4000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Published:
    """Where a started program says it can be reached."""

    url: str
    mesh: Mapping[str, Any] | None = None


class Program(Protocol):
    """What is special about one kind of server program."""

    def command(self, incarnation: int) -> Sequence[str]: ...
    def environment(self) -> Mapping[str, str]: ...
    def published(self, incarnation: int, pid: int) -> Published | None:
        """Where it is, or None while it is still starting."""
        ...

    def hopeless(self, exit_code: int, log: str) -> DistillError | None:
        """The error to give up with, if starting it again cannot help."""
        ...


class ServerProcess:
    """Implements `ServerHost` for a program that runs here.

    A first start that fails is final: nothing that was wrong with it gets better by itself. Later deaths are answered
    by a restart, after a pause that doubles each time, `max_restarts` times at most.
    """

    def __init__(self, program: Program, *, name: str, log: Path, start_timeout_s: float, max_restarts: int) -> None:
        self.program = program
        self._name = name
        self._log_path = log
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._log_from = 0
        self._process: tuple[int, subprocess.Popen[bytes]] | None = None
        """The present incarnation, and its program."""
        self._address: ServerAddress | None = None
        """Set while the program runs and can be reached."""
        self._failure: DistillError | None = None
        """Set once it was given up."""
        self._watcher: threading.Thread | None = None

    def start(self) -> ServerAddress:
        """Start the program and wait until it can be reached. Raises DistillError when it does not come up."""
        if self._watcher is None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._watcher = threading.Thread(target=self._watch, name=f"watch {self._name}", daemon=True)
            self._watcher.start()
        return self.address(self._start_timeout_s + 2 * GRACE_S)

    def address(self, deadline_s: float) -> ServerAddress:
        """Where the server is, waiting for a start or restart under way."""
        end = time.monotonic() + deadline_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._address or self._failure, max(0.0, end - time.monotonic()))
                address, failure = self._address, self._failure
            if failure is not None:
                raise failure
            # The watcher may not have noticed yet that the program died.
            if address is not None and _accepts(address.url):
                return address
            if time.monotonic() >= end:
                raise ServerError(
                    f"waited {deadline_s:g} s for server {self._name} to come up",
                    why=f"the end of {self._log_path}:\n{self.log_tail()}",
                    fix="raise server.start_timeout_s if it is only slow",
                )
            time.sleep(POLL_S)

    def restart(self, incarnation: int) -> None:
        """End the program of this incarnation, which does not answer; the watcher starts the next one."""
        with self._changed:
            if self._process is not None and self._process[0] == incarnation:
                _signal_group(self._process[1].pid, signal.SIGKILL)  # a stopped process takes no other signal

    def log_tail(self) -> str:
        """The end of what the present program wrote to stdout and stderr."""
        try:
            with self._log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_from, size - TAIL_BYTES))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def stop(self) -> None:
        """End the program and all its children, and do not start it again."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join(GRACE_S * 3)

    def _watch(self) -> None:
        """Run incarnations until stopped or given up. This thread outlives every program that it starts: PDEATHSIG
        fires when the starting *thread* ends, so starting them anywhere else would kill them too early."""
        failure: DistillError | None = None
        restarts = 0
        try:
            while failure is None and not self._stopping.is_set():
                failure = self._run(restarts)
                if failure is None:
                    self._stopping.wait(min(FIRST_BACKOFF_S * 2**restarts, LONGEST_BACKOFF_S))
                restarts += 1
        except DistillError as error:
            failure = error
        finally:  # also after a fault of ours: nobody shall wait for a server that is not watched
            how = "was stopped" if self._stopping.is_set() else "is no longer watched: an error of the launcher"
            self._set(None, failure or ServerError(f"server {self._name} {how}"))

    def _run(self, incarnation: int) -> DistillError | None:
        """One life of the program. Returns the error to give up with, or None to start it again."""
        process = self._spawn(incarnation)
        with self._changed:
            self._process = incarnation, process
        try:
            came_up = self._await_published(process, incarnation)
            if came_up:
                self._until(lambda: process.poll() is not None)
            code = process.poll()
        finally:
            with self._changed:
                self._process = None
            self._set(None)
            end_tree(process)
        return None if self._stopping.is_set() else self._judge(code, came_up, incarnation)

    def _spawn(self, incarnation: int) -> subprocess.Popen[bytes]:
        command = list(self.program.command(incarnation))
        with self._log_path.open("ab") as log:
            log.write(f"--- {self._name}, start {incarnation}: {' '.join(command)}\n".encode())
            log.flush()
            self._log_from = log.tell()
            return start_process(command, self.program.environment(), log)

    def _await_published(self, process: subprocess.Popen[bytes], incarnation: int) -> bool:
        def look() -> bool:
            found = self.program.published(incarnation, process.pid)
            if found is not None:
                self._set(ServerAddress(self._name, found.url, incarnation, found.mesh))
            return found is not None or process.poll() is not None

        self._until(look, self._start_timeout_s)
        return self._address is not None

    def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition() and (end is None or time.monotonic() < end):
            if self._stopping.wait(POLL_S):
                return

    def _judge(self, code: int | None, came_up: bool, restarts: int) -> DistillError | None:
        """The error to give up with, or None to start it again."""
        log = self.log_tail()
        if not came_up and code is not None:
            hopeless = self.program.hopeless(code, log)
            if hopeless is not None:
                return hopeless
        how = f"ended with {_exit_words(code)}" if code is not None else "did not come up"
        if not came_up and restarts == 0:
            waited = "" if code is not None else f" in {self._start_timeout_s:g} s"
            what = f"server {self._name} {how}{waited} when it was started"
        elif restarts >= self._max_restarts:
            what = f"server {self._name} {how}, after {restarts} restarts"
        else:
            return None
        return ServerError(
            what,
            why=f"the end of {self._log_path}:\n{log}",
            fix="start it by hand with the command at the top of the log",
        )

    def _set(self, address: ServerAddress | None, failure: DistillError | None = None) -> None:
        with self._changed:
            self._address = address
            self._failure = failure
            self._changed.notify_all()


def start_process(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, to die with the calling thread. Raises ServerError."""
    try:
        return subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    except OSError as error:
        raise ServerError(f"cannot start {command[0]}: {error}", fix="check server.python") from error


def _die_with_parent() -> None:
    """Runs between fork and exec: one system call, nothing that could wait for a lock."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything that it started: SIGTERM, then SIGKILL after a grace period."""
    children = _descendants(process.pid)
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            children += _descendants(process.pid)
    _signal_group(process.pid, signal.SIGKILL)  # what is left of the group, also when its leader is gone
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait(GRACE_S)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=1.0):
            return True
    except OSError:
        return False


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
