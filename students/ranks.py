"""The ranks of a student as one group: how they meet, and what they do when they lose each other.

Rank 0 listens on a port of its own (`listen`), its address goes to all, and each of them joins (`join`). What they say
to one another afterwards goes through torch.distributed: gloo for host memory, NCCL for CUDA.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from distill.errors import EnvironmentFault, PeerFault
from distill.protocols import RankPlace

COLLECTIVE_TIMEOUT_S = 1800.0
"""Longest wait of a rank for the others in one collective. Shares of a batch differ by seconds, but rank 0 alone writes
the model's files and sends weights. A rank that dies is noticed at once, by whoever started it."""
MEET_TIMEOUT_S = 120.0
"""Longest wait until all ranks have joined."""
TCPStore: Any = getattr(dist, "TCPStore")  # noqa: B009 (torch's stubs do not export it)
_LISTENING: dict[str, Any] = {}
"""Address -> the store that this process serves there; kept as long as the process lives."""


def listen(host: str, ranks: int) -> str:
    """Serve the meeting point of `ranks` ranks on a free port of `host`; returns its address, host:port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise EnvironmentFault(
                f"student rank 0 cannot listen on {host}: {error.strerror}",
                why="the other ranks of the student meet there",
                fix="check that this is an address of the machine, as Ray names it",
            ) from error
        port = int(listener.getsockname()[1])
        # Bound here to this one address: of its own the store would listen on all of them.
        store = TCPStore(
            host,
            port,
            ranks,
            is_master=True,
            timeout=timedelta(seconds=MEET_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    address = f"{host}:{port}"
    _LISTENING[address] = store
    return address


def join(place: RankPlace, *, cuda: bool) -> None:
    """Make this process rank `place.rank` of `place.ranks`; returns when all have come.

    Raises EnvironmentFault when they do not within `MEET_TIMEOUT_S`, or `place.host` is no address of this machine.
    """
    # Gloo and NCCL would else listen on whatever address the host name stands for.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _interface(place.host)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    host, _, port = place.meet.rpartition(":")
    try:
        store = _LISTENING.get(place.meet) or TCPStore(
            host, int(port), place.ranks, is_master=False, timeout=timedelta(seconds=MEET_TIMEOUT_S)
        )
        if cuda:
            torch.cuda.set_device(place.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "cpu:gloo",
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timeout,
        )
        dist.barrier(device_ids=[place.device] if cuda else None)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"student rank {place.rank} did not meet the other {place.ranks - 1} at {place.meet}: {_first_line(error)}",
            why=f"all ranks must come within {MEET_TIMEOUT_S:.0f} s",
            fix="look for a firewall between the machines; on one machine, check its memory",
        ) from error


def leave() -> None:
    """End this process's membership, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def lost_contact_is_a_fault(doing: str) -> Generator[None]:
    """A collective that fails because another rank is gone, or silent for too long, raises PeerFault."""
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors have no class of their own; each names the source file that it comes from.
        if not (dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in str(error))):
            raise
        raise PeerFault(
            f"student rank {dist.get_rank()} lost contact with the other ranks during {doing!r}",
            why=_first_line(error),
            fix="look at the machine of the rank that is gone; resume=auto goes on from the newest checkpoint",
        ) from error


def _interface(host: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    raise EnvironmentFault(
        f"student: {host} is no address of this machine",
        why="its ranks listen for one another there",
        fix="check the node's address with `ray status`",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
