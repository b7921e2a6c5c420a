"""What comes of one golden case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """`detail` says what differs; for a case that is right it may say how good it was."""

    case: str
    ok: bool
    detail: str = ""
