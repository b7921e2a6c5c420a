"""By when a sample must have its scores, from how fast the run steps."""

from __future__ import annotations

_NEWEST_SHARE = 0.3
"""Weight of the newest step in the moving average of their lengths."""


class Pace:
    """The step that learns from sample `ordinal` is number ordinal // batch_size; it waits for the scores of all of its
    samples. Before a step was seen, every sample has `longest_s`."""

    def __init__(self, batch_size: int, longest_s: float) -> None:
        self._batch_size = batch_size
        self._longest_s = longest_s
        self._version = 0
        self._step_s: float | None = None
        self._since: float | None = None

    def advance(self, version: int, now: float) -> None:
        """The student has version `version` since `now` (seconds)."""
        if self._since is not None and version > self._version:
            newest = (now - self._since) / (version - self._version)
            old = newest if self._step_s is None else self._step_s
            self._step_s = _NEWEST_SHARE * newest + (1 - _NEWEST_SHARE) * old
        self._version, self._since = version, now

    def due_s(self, ordinal: int, now: float) -> float:
        """Seconds from `now` until the step of the sample would begin if no score were late; never more than the
        longest, and 0 for a step that waits already."""
        if self._step_s is None or self._since is None or ordinal < 0:
            return self._longest_s
        begins = self._since + (ordinal // self._batch_size - self._version + 1) * self._step_s
        return min(max(begins - now, 0.0), self._longest_s)
