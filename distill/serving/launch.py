"""Three ways to a model server: our embedded one, SGLang, or one that somebody else runs. Each is a `ServerHost`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, Unpack

import distill
from distill.config.models import ServerConfig
from distill.errors import ConfigError, DistillError, EnvironmentFault, MissingDependency, ServerError
from distill.protocols import ServerAddress
from distill.serving import sglang_cpu
from distill.serving.process import Published, ServerProcess, free_port

CPU_KV_TOKENS = 32768
"""KV cache of SGLang on a CPU host. Its own default is a share of the machine's memory, which it fills at once."""
PROBE_S = 5.0
KEY_VARIABLE = "DISTILL_RUN_KEY"
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_WILDCARDS = ("0.0.0.0", "::")


class SlotSettings(TypedDict):
    """The memory of a slot. GB = 1e9 bytes."""

    slot_gb: float
    """Weight bytes on the device."""
    host_gb: NotRequired[float]
    """Host memory for weights, of all slots of the machine together; 0: none."""
    host_folder: NotRequired[Path | None]
    """Where that is; None: a folder of the user's in /dev/shm."""
    host_differences: NotRequired[bool]


class LaunchSettings(TypedDict):
    """What a launcher is told beside the configuration that all servers share."""

    name: str
    model: Path
    """Hugging Face folder."""
    vocab_size: int
    """The common vocabulary: padded rows of the model's head beyond it are cut off by the embedded server."""
    folder: Path
    """Gets the log and the address file."""
    index: int
    """Counts the servers; moves a fixed port."""
    weight_version: str
    """What the weights in `model` are called."""
    run_key: str | None
    """Hex; authenticates the mesh. Travels in the environment, because command lines can be read by everybody."""
    memory_limit_gb: NotRequired[float | None]
    """Weight bytes that the embedded server may hold, GB = 1e9."""
    attach_url: NotRequired[str | None]
    slot: NotRequired[SlotSettings | None]
    """Start the embedded server as a slot that teachers share; it holds nothing at first, and `model` is not read.
    Other programs are started with `model`."""


class EmbeddedLauncher(ServerProcess):
    """Our own server (transformers and torch), in a process of its own."""

    def __init__(self, config: ServerConfig, **settings: Unpack[LaunchSettings]) -> None:
        super().__init__(
            _Embedded(config, settings),
            name=settings["name"],
            log=settings["folder"] / f"{settings['name']}.log",
            start_timeout_s=config.start_timeout_s,
            max_restarts=config.max_restarts,
        )


class SGLangLauncher(ServerProcess):
    """The real SGLang. On a host without a GPU it is started through `sglang_cpu`."""

    def __init__(self, config: ServerConfig, **settings: Unpack[LaunchSettings]) -> None:
        super().__init__(
            _SGLang(config, settings),
            name=settings["name"],
            log=settings["folder"] / f"{settings['name']}.log",
            start_timeout_s=config.start_timeout_s,
            max_restarts=config.max_restarts,
        )


class AttachLauncher:
    """A server at a URL that somebody else started, watches and stops."""

    def __init__(self, config: ServerConfig, **settings: Unpack[LaunchSettings]) -> None:
        self._name = settings["name"]
        self._start_timeout_s = config.start_timeout_s
        url = settings.get("attach_url")
        if not url:
            raise ConfigError(
                f"server {self._name} has no URL to attach to",
                fix="give server.rollout_urls and server.teacher_urls one URL a server",
            )
        self._url = url.rstrip("/")

    def start(self) -> ServerAddress:
        return self.address(self._start_timeout_s)

    def address(self, deadline_s: float) -> ServerAddress:
        """The server's address once it answers. Its incarnation never changes: a restart cannot be seen from here."""
        end = time.monotonic() + deadline_s
        while (answer := _get_json(f"{self._url}/server_info")) is None:
            if time.monotonic() >= end:
                raise ServerError(
                    f"waited {deadline_s:g} s for {self._url}/server_info of server {self._name}",
                    why="the server is attached: it has to be running already",
                    fix="start it, or correct its URL in server.rollout_urls or server.teacher_urls",
                )
            time.sleep(0.2)
        return ServerAddress(self._name, self._url, 0, answer.get("mesh"))

    def restart(self, incarnation: int) -> None:
        """Whoever started it may."""

    def log_tail(self) -> str:
        return ""

    def stop(self) -> None:
        """Leave it running: it is not ours."""


class _Embedded:
    def __init__(self, config: ServerConfig, settings: LaunchSettings) -> None:
        self._config = config
        self._settings = settings
        self._port = config.port + settings["index"] if config.port else 0

    def command(self, incarnation: int) -> list[str]:
        config, settings = self._config, self._settings
        file = self._address_file(incarnation)
        file.unlink(missing_ok=True)
        slot = settings.get("slot")
        return [
            *(_interpreter(config), "-m", "distill.serving.embedded"),
            *(self._one_model() if slot is None else _slot_arguments(slot)),
            *("--name", settings["name"]),
            *("--host", config.host),
            *("--port", str(self._port)),
            *("--address-file", str(file)),
            *("--device", config.device),
            *("--dtype", config.dtype),
            *(("--context-length", str(config.context_length)) if config.context_length else ()),
            *("--max-batch-size", str(config.max_batch_size)),
            *("--threads", str(config.threads)),
            *config.args,
        ]

    def _one_model(self) -> list[str]:
        settings, limit = self._settings, self._settings.get("memory_limit_gb")
        return [
            *("--model-path", str(settings["model"])),
            *("--vocab-size", str(settings["vocab_size"])),
            *("--weight-version", settings["weight_version"]),
            *("--mesh-host", self._config.host),
            *(("--memory-limit-gb", str(limit)) if limit else ()),
        ]

    def environment(self) -> dict[str, str]:
        env = _environment(self._config)
        if self._settings["run_key"]:
            env[KEY_VARIABLE] = self._settings["run_key"]
        if self._config.python is None:
            # the same interpreter must find the same code, also when it is not installed
            source = str(Path(distill.__file__).parents[1])
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (source, env.get("PYTHONPATH"))))
        return env

    def published(self, incarnation: int, pid: int) -> Published | None:
        try:
            found = json.loads(self._address_file(incarnation).read_text())
        except (OSError, ValueError):
            return None
        return Published(found["url"], found.get("mesh")) if found["pid"] == pid else None

    def hopeless(self, exit_code: int, log: str) -> DistillError | None:
        """Its exit codes are those of `distill.errors`, and the error is the last thing that it writes."""
        if exit_code == EnvironmentFault.exit_code and f"{self._config.host}:{self._port}" in log:
            return port_taken(self._config.host, self._port)
        kind = {kind.exit_code: kind for kind in (ConfigError, EnvironmentFault)}.get(exit_code)
        if kind is None:
            return None
        lines = log.splitlines()
        first = max((i for i, line in enumerate(lines) if not line.startswith(" ")), default=0)
        return kind(f"server {self._settings['name']}: " + "\n".join(lines[first:]))

    def _address_file(self, incarnation: int) -> Path:
        return self._settings["folder"].absolute() / f"{self._settings['name']}.{incarnation}.address.json"


def _slot_arguments(slot: SlotSettings) -> list[str]:
    host_gb, folder = slot.get("host_gb", 0.0), slot.get("host_folder")
    return [
        *("--teachers", "--slot-gb", str(slot["slot_gb"])),
        *(("--host-gb", str(host_gb)) if host_gb else ()),
        *(("--host-folder", str(folder)) if folder else ()),
        *(("--host-differences",) if slot.get("host_differences") else ()),
    ]


class _SGLang:
    def __init__(self, config: ServerConfig, settings: LaunchSettings) -> None:
        self._config = config
        self._settings = settings
        self._on_cpu = config.device == "cpu" or (config.device == "auto" and not has_gpu())
        self._port = 0

    def command(self, incarnation: int) -> list[str]:
        config, settings = self._config, self._settings
        self._port = self._choose_port()
        entry = [str(Path(sglang_cpu.__file__))] if self._on_cpu else ["-m", "sglang.launch_server"]
        return [
            *(_interpreter(config), *entry),
            *("--model-path", str(settings["model"])),
            *("--host", config.host),
            *("--port", str(self._port)),
            *("--dtype", config.dtype),
            *("--max-running-requests", str(config.max_batch_size)),
            *("--weight-version", settings["weight_version"]),
            *(("--context-length", str(config.context_length)) if config.context_length else ()),
            *(self._cpu_arguments() if self._on_cpu else ()),
            *config.args,
        ]

    def _cpu_arguments(self) -> list[str]:
        tokens = max(CPU_KV_TOKENS, self._config.context_length or 0)
        return ["--device", "cpu", "--sleep-on-idle", "--max-total-tokens", str(tokens)]

    def _choose_port(self) -> int:
        host = self._config.host
        if not self._config.port:
            return free_port(host)
        port = self._config.port + self._settings["index"]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise port_taken(host, port) from error
        return port

    def environment(self) -> dict[str, str]:
        return _environment(self._config)

    def published(self, incarnation: int, pid: int) -> Published | None:
        host = self._config.host
        url = f"http://{socket.gethostbyname(socket.gethostname()) if host in _WILDCARDS else host}:{self._port}"
        return Published(url) if _get(f"{url}/ready") is not None else None

    def hopeless(self, exit_code: int, log: str) -> DistillError | None:
        if "No module named 'sglang'" in log or "No module named sglang" in log:
            return MissingDependency(
                f"server {self._settings['name']}: {_interpreter(self._config)} has no sglang",
                fix="pip install 'distill-engine[sglang]', or give server.python an interpreter that has it",
            )
        return None


def has_gpu() -> bool:
    """Whether this machine has a CUDA or ROCm device. Asks the device files: a launcher loads no torch."""
    return any(device.exists() for device in _GPU_DEVICES)


def port_taken(host: str, port: int) -> EnvironmentFault:
    return EnvironmentFault(
        f"{host}:{port} is taken",
        why="another program listens there, perhaps a server of an earlier run",
        fix="end that program, or choose another server.port (0 takes free ones)",
    )


def _interpreter(config: ServerConfig) -> str:
    if config.python is None:
        return sys.executable
    found = shutil.which(str(config.python))
    if found is None:
        raise ConfigError(
            f"server.python: {config.python} is not a program", fix="give the path of a Python interpreter"
        )
    return found


def _environment(config: ServerConfig) -> dict[str, str]:
    """Ours, without the run's key, offline, with the threads that the configuration grants."""
    env = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    return env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1"}


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Servers are reached directly, whatever proxy the environment names for the world outside."""


def _get(url: str) -> bytes | None:
    """The body of a 200, or None."""
    try:
        with _direct.open(url, timeout=PROBE_S) as response:
            return response.read() if response.status == 200 else None
    except (OSError, ValueError):  # URLError is an OSError; a half-written reply is a ValueError
        return None


def _get_json(url: str) -> Mapping[str, Any] | None:
    body = _get(url)
    try:
        answer: Any = None if body is None else json.loads(body)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
