"""What a run needs of the machine: room on the disk, free ports, servers that answer."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from distill.config import RunConfig
from distill.errors import EnvironmentFault, ServerError

_MASTER, _MOMENTS = 4, 8
"""Bytes a parameter of float32 weights and of AdamW's two moments."""
_CONNECT_TIMEOUT_S = 5.0


def output_root(config: RunConfig) -> Path:
    """The folder below which this run writes."""
    return config.run.dir if config.run.dir is not None else Path.cwd() / "outputs" / config.run.name


def disk_bytes(config: RunConfig, parameters: int) -> int:
    """Bytes that checkpoints and the export of a student of this size take: one more checkpoint than is kept, since the
    oldest goes only after the newest is whole."""
    checkpoint = parameters * (_MASTER + _MOMENTS)
    return (config.trainer.keep_checkpoints + 1) * checkpoint + parameters * _MASTER


def check_disk(config: RunConfig, parameters: int) -> int:
    """Bytes needed. Raises EnvironmentFault for a folder that cannot be written, or a disk with too little room."""
    root = output_root(config)
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise EnvironmentFault(
            f"run.dir: {existing} is not a folder that can be written", fix="give another run.dir=FOLDER"
        )
    needed, free = disk_bytes(config, parameters), shutil.disk_usage(existing).free
    if free < needed:
        raise EnvironmentFault(
            f"no disk space: {existing} has {free / 1e9:.3g} GB free, and the run may need {needed / 1e9:.3g} GB",
            why=f"{config.trainer.keep_checkpoints + 1} checkpoints with the state of the optimiser, and the export",
            fix="free some space, give run.dir=FOLDER on another disk, or keep fewer: trainer.keep_checkpoints=1",
        )
    return needed


def check_ports(config: RunConfig) -> None:
    """Raises EnvironmentFault when a fixed port is taken, ServerError when a server to attach to does not answer."""
    server = config.server
    if server.program == "attach":
        for url in (*server.rollout_urls, *server.teacher_urls):
            _check_reachable(url)
    elif server.port:
        for port in range(server.port, server.port + config.rollout.servers + config.teacher_manager.slots):
            _check_free(server.host, port)


def _check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As the servers do: a port whose last owner has just ended is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EnvironmentFault(
                f"server.port: port {port} on {host} cannot be taken: {error.strerror}",
                why="a server of this run would listen there",
                fix="stop what uses it, give another server.port, or 0 for free ports",
            ) from error


def _check_reachable(url: str) -> None:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_TIMEOUT_S):
            pass
    except (OSError, ValueError) as error:
        raise ServerError(
            f"no server answers at {url}: {error} (waited {_CONNECT_TIMEOUT_S:g} s at most)",
            fix="start it, or correct server.rollout_urls and server.teacher_urls",
        ) from error
