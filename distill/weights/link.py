"""A limit on how fast weights are copied: an emulated link, for benchmarks and for tests of what a stall does."""

from __future__ import annotations

import threading
import time


class Link:
    """Bytes pass one copy after the other at `bytes_per_s`; None: as fast as they come. Used by any threads."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, nbytes: int, *, began: float | None = None) -> float:
        """Wait until `nbytes` have passed. `began`: when their copy began on the monotonic clock, so that what it took
        counts. Returns the seconds that were waited."""
        if self._rate is None:
            return 0.0
        now = time.monotonic()
        with self._lock:
            start = max(self._free_at, now if began is None else began)
            self._free_at = start + nbytes / self._rate
            pause = self._free_at - now
        if pause <= 0:
            return 0.0
        time.sleep(pause)
        return pause
