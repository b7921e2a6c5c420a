"""What both programs have in common: how words reach the terminal, and how every end becomes an exit code."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TextIO, cast

from distill.errors import ConfigError, DistillError, EnvironmentFault, RunStopped

if TYPE_CHECKING:
    from rich.console import RenderableType

_WITHOUT_END = 1_000_000
"""Columns of an output that nobody watches."""
_BROKEN_PIPE = 141
"""128 + SIGPIPE, as a shell reports a program whose reader has left."""


class Parser(argparse.ArgumentParser):
    """A wrong command line is a ConfigError like any other; help goes the way of all output."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the command line: {message}", fix=" ".join(self.format_usage().split()))

    def _print_message(self, message: str, file: object = None) -> None:
        if message:
            say(message)


def run_program(name: str, body: Callable[[], int]) -> int:
    """The exit code of `body`. Errors go to stderr, without a traceback unless the fault is ours."""
    try:
        return body()
    except DistillError as error:
        # A stop is what the user asked for; its message begins with the word itself.
        complain(str(error) if isinstance(error, RunStopped) else f"{name}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except BrokenPipeError:
        _leave_stdout()
        return _BROKEN_PIPE
    except Exception:  # noqa: BLE001 - the one place that turns a bug of ours into an exit code
        complain(
            f"{traceback.format_exc()}\nThis is a fault of Distill, not of yours. Please report it with the lines"
            " above, the command and the output of `distill-run doctor`."
        )
        return 1


def say(text: str) -> None:
    """Write to standard output now, so that a reader who left or a full disk is noticed here and nowhere later.

    Raises BrokenPipeError, EnvironmentFault.
    """
    output = cast(TextIO | None, sys.stdout)
    if output is None:  # the caller closed it: `>&-`
        return
    if isinstance(output, io.TextIOWrapper):
        output.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII only gets the rest spelt out
    try:
        output.write(text)
        output.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _leave_stdout()
        raise EnvironmentFault(f"cannot write to standard output: {error.strerror}") from error


class _Page(io.StringIO):
    """Text that rich draws for a terminal with this encoding."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - of StringIO it is always None
        return self._encoding


def show(*things: RenderableType) -> None:
    """`say` for what rich draws: one thing a line, long lines left to the terminal.

    Where there is no terminal nothing is wrapped, so that what is to be copied stays whole, and no line ends in blanks.
    """
    from rich.console import Console

    output = cast(TextIO | None, sys.stdout)
    page = _Page(getattr(output, "encoding", None) or "utf-8")
    watched = output is not None and output.isatty()
    width = None if watched else _WITHOUT_END
    console = Console(file=page, force_terminal=watched, width=width, highlight=False)
    for thing in things:
        plain = isinstance(thing, str)
        console.print(thing, soft_wrap=plain, markup=not plain)
    text = page.getvalue()
    say(text if watched else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def complain(text: str) -> None:
    """Write to standard error, if there is one."""
    error = cast(TextIO | None, sys.stderr)
    if error is not None:
        with contextlib.suppress(OSError):  # there is nobody left to tell
            print(text, file=error, flush=True)


def _leave_stdout() -> None:
    """Python would fail once more when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
