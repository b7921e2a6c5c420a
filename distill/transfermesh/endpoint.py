"""Where a receiver listens, and whether two processes share a host."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill.errors import MeshError

SHM_DIR = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver: its name, where it listens, and which host it is on. An IPv6 `host` has no brackets."""

    name: str
    host: str
    port: int
    host_id: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name} at {host}:{self.port}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or msgpack."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Endpoint:
        """The inverse of `to_dict`. Raises MeshError for missing, unknown or wrong values."""
        kinds = {"name": str, "host": str, "port": int, "host_id": str}
        if set(values) != set(kinds) or not all(type(values[key]) is kind for key, kind in kinds.items()):
            raise MeshError(f"not an endpoint of a weight receiver: {dict(values)!r}", fix=f"give {', '.join(kinds)}")
        if not 0 < values["port"] < 65536:
            raise MeshError(f"endpoint {values['name']!r}: {values['port']} is not a port")
        return cls(**values)


@functools.cache
def host_id() -> str:
    """Equal in two processes exactly when one can map a segment that the other makes in /dev/shm.

    Boot id, inode of the network namespace and device of /dev/shm: an IP address names neither a machine nor a
    container. Where the kernel tells none of these, a random value, so that the process shares a host with nobody.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
        shm = SHM_DIR.stat().st_dev
    except OSError:
        return f"alone-{uuid.uuid4().hex}"
    return f"{boot}-{network:x}-{shm:x}"
