"""Text of files and pastes: escape codes, odd blanks and line ends."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from distill.errors import ConfigError

_COLOUR = re.compile(r"(?:\x1b|\^\[|\\e|\\033|\\x1b)?\[[0-9;]*m")
"""Also where the escape character itself was lost on the way, or written out."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_UNSEEN = {ord(char): None for char in "\u200b\u200c\u200d\u2060\ufeff\x00\x07\x08"}
_BLANKS = {ord(char): " " for char in "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u202f\u3000"}


def clean_lines(text: str) -> list[str]:
    """The lines without escape codes and unseen characters, with plain blanks and tabs only."""
    text = _ESCAPE.sub("", _COLOUR.sub("", text)).translate(_UNSEEN | _BLANKS)
    return text.splitlines()


def decoded(content: bytes) -> str:
    """UTF-8 or what Windows calls Unicode; bytes that are neither become a mark and no error."""
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    return content.decode("utf-16" if wide else "utf-8-sig", errors="replace")


def content_of(path: Path) -> bytes:
    """Raises ConfigError for a file that cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def naming(path: Path) -> Generator[None]:
    """A ConfigError about what is in a file says which file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.what}", why=error.why, fix=error.fix) from error
