"""distill-run: start a run, or look at what it would be. Thin: everything is imported when it is needed."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO, cast

from distill.errors import ConfigError, DistillError, RunStopped

if TYPE_CHECKING:
    from distill.config.compose import LoadedConfig

_USAGE = "distill-run [teachers.yaml] [key=value ...] [--dry-run] [--cfg job]"
_HELP = """\
Teach one student what several teachers know, on the answers that the student writes itself.

  distill-run                                  the quick start: three tiny experts, one student, a laptop's CPU
  distill-run teachers.yaml student.lr=1e-5    your own run; any key of it can be set behind the file
  distill-run recipes/reasoning                a folder stands for the teachers.yaml in it
  distill-run teachers.yaml objective=jsd      another objective, with the settings that it has by itself
  distill-run teachers.yaml +teachers.chemistry.model=./experts/chemistry     one teacher more; ~teachers.math one less
  distill-run teachers.yaml resume=auto        go on with the newest unfinished run of this name

  distill-run doctor [teachers.yaml]           what this machine has, and whether the run would start
  distill-run schema                           every key with its default and meaning, as JSON schema for editors"""
_EPILOG = (
    "exit codes: 0 done, 2 configuration, 3 this machine, 4 a teacher or a server, 1 a bug of ours, "
    "128 + n stopped by signal n"
)
_COMMANDS = ("doctor", "schema")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the command line: {message}", fix=f"usage: {_USAGE}")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `distill-run argv`; messages go to stderr, what was asked for to stdout."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        output = cast(TextIO | None, sys.stdout)
        if output is not None:  # it is None where the caller closed it: `>&-`
            output.flush()
        return code
    except DistillError as error:
        # A stop is what the user asked for; its message begins with the word itself.
        print(error if isinstance(error, RunStopped) else f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:  # noqa: BLE001 - the one place that turns a bug of ours into an exit code
        traceback.print_exc()
        print(
            "\nThis is a fault of Distill, not of yours. Please report it with the lines above, the command and"
            " the output of `distill-run doctor`.",
            file=sys.stderr,
        )
        return 1


def _dispatch(argv: list[str]) -> int:
    parser = _Parser(
        prog="distill-run",
        usage=_USAGE,
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="check everything, load no model, print the plan")
    parser.add_argument("--cfg", choices=["job"], help="print the whole resolved configuration as YAML")
    parser.add_argument("--version", action="store_true", help="print the version")
    options = parser.parse_intermixed_args(argv)
    if options.version:
        from distill import __version__

        print(f"distill-engine {__version__}")
        return 0
    command, path, overrides = _sort(options.arguments)
    if command == "schema":
        return _schema()
    if command == "doctor":
        from distill.doctor import doctor

        return doctor(path, overrides)
    return _run(path or quick_start(), overrides, dry_run=options.dry_run, show=options.cfg is not None)


def _sort(arguments: Sequence[str]) -> tuple[str | None, Path | None, list[str]]:
    """Subcommand, file and overrides, in whatever order they came."""
    overrides = [word for word in arguments if "=" in word or re.match(r"[~+]+[^/]", word)]
    words = [word for word in arguments if word not in overrides]
    command = words.pop(0) if words and words[0] in _COMMANDS else None
    if len(words) > 1:
        raise ConfigError(
            f"the command line: {words[1]!r} is neither a second file nor key=value",
            why="a run is described by one file",
            fix=f"write {words[1]}=VALUE, or put the values in quotes",
        )
    if words and not Path(words[0]).expanduser().exists() and Path(words[0]).suffix == "":
        from distill.registry import did_you_mean

        raise ConfigError(
            f"the command line: {words[0]!r} is neither a file, nor a folder, nor key=value",
            fix=f"subcommands: {did_you_mean(words[0], _COMMANDS)}; settings are written {words[0]}=VALUE",
        )
    return command, Path(words[0]) if words else None, overrides


def quick_start() -> Path:
    """The recipe that runs when no file is named: beside the installed package, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "quickstart" / "teachers.yaml").is_file():
            return folder / "quickstart" / "teachers.yaml"
    raise ConfigError("the quick start recipe was not installed", fix="name a file: distill-run teachers.yaml")


def _schema() -> int:
    import json

    from distill.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _run(path: Path, overrides: list[str], *, dry_run: bool, show: bool) -> int:
    from distill.config.compose import load_config

    loaded = load_config(path, overrides)
    if show:
        import yaml

        print(yaml.safe_dump(loaded.resolved, sort_keys=False, allow_unicode=True), end="")
        return 0
    return _dry_run(loaded) if dry_run else _start(loaded)


def _dry_run(loaded: LoadedConfig) -> int:
    from distill.cli.plan import print_plan, print_unprepared
    from distill.preflight import inspect, is_prepared

    if loaded.config.prepare is not None and not is_prepared(loaded.config.prepare):
        print_unprepared(loaded)
    else:
        print_plan(loaded, inspect(loaded.config))
    return 0


def _start(loaded: LoadedConfig) -> int:
    from distill.preflight import inspect, prepare

    if loaded.config.prepare is not None:
        prepare(loaded.config.prepare)
    preflight = inspect(loaded.config)
    for note in preflight.notes:
        print(f"note: {note}", file=sys.stderr)
    from distill.build import run

    run(loaded.config, preflight=preflight, resolved=loaded.resolved)
    return 0


if __name__ == "__main__":
    sys.exit(main())
