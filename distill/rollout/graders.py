"""Graders: (written text, expected answer, finished by itself) -> 1.0 right, 0.0 wrong."""

from __future__ import annotations


def exact_match(text: str, answer: str, finished: bool) -> float:
    """The whole text is the answer, and the model ended it itself."""
    return float(finished and text.strip() == answer.strip())
