"""Peak memory of the run's processes on this machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

import psutil


class MemoryWatch:
    """Samples the memory of this process, its descendants and further processes in a thread.

    Memory shared between processes counts once: proportional set sizes where the system tells them, resident sizes
    elsewhere. Sampling takes at most about 2 % of one core, however many processes there are.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._extra: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self.peak_bytes = 0

    def start(self) -> None:
        self._thread.start()

    def watch(self, pids: Iterable[int]) -> None:
        """Count these processes and their descendants too."""
        self._extra = self._extra | set(pids)

    def sample(self) -> int:
        """Bytes now; raises the peak."""
        now = tree_bytes({os.getpid(), *self._extra})
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def _watch(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            began = time.monotonic()
            self.sample()
            pause = max(self._interval_s, 50 * (time.monotonic() - began))


def tree_bytes(roots: Iterable[int]) -> int:
    """Memory of these processes and all below them. Those that end meanwhile count nothing."""
    found: dict[int, psutil.Process] = {}
    for pid in roots:
        try:
            root = psutil.Process(pid)
            found[pid] = root
            found.update((child.pid, child) for child in root.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    return sum(_bytes(process) for process in found.values())


def _bytes(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.rss))
    except psutil.NoSuchProcess:
        return 0
    except psutil.AccessDenied:
        pass
    try:
        return int(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
