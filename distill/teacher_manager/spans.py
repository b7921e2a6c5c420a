"""Where the teacher manager tells what it does."""

from __future__ import annotations

from typing import Protocol


class SpanSink(Protocol):
    """Takes what took time. `kind` is swap, score or eval; times are of time.monotonic; `amount` is bytes or tokens."""

    def __call__(self, kind: str, start: float, end: float, label: str, amount: int, /) -> None: ...


class EventSink(Protocol):
    """Takes a line for the person who runs it: (level, message)."""

    def __call__(self, level: str, message: str, /) -> None: ...
