"""distill-run: start a run, or look at what it would be. Thin: everything is imported when it is needed."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distill.cli.program import Parser, complain, run_program, say
from distill.errors import ConfigError

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
  distill-run teachers.yaml resume=auto        go on with the newest unfinished run of this name; a new
                                               run, and a line that says so, where all are finished

  distill-run doctor [teachers.yaml]           what this machine has, and whether the run would start
  distill-run schema                           every key with its default and meaning, as JSON schema for editors
  distill-run teachers plan teachers.yaml      what it will cost that teachers share slots, and what would halve it
  distill-run teachers score teachers.yaml --input answers.jsonl --output scores.parquet
                                               what the teachers say of a file of finished answers
  distill-run teachers sim trace.json          teachers that share devices, on a virtual clock; see teachers --help"""
_EPILOG = (
    "exit codes: 0 done, 2 configuration, 3 this machine, 4 a teacher or a server, 1 a bug of ours, "
    "128 + n stopped by signal n"
)
_ENDINGS = (".yaml", ".yml")
_COMMANDS = ("doctor", "schema")
_TEACHERS = "teachers"
"""Has subcommands of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `distill-run argv`; messages go to stderr, what was asked for to stdout."""
    return run_program("error", lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == [_TEACHERS]:
        from distill.cli.teachers import teachers

        return teachers(argv[1:])
    parser = Parser(
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
        return _version(argv)
    command, path, overrides = _sort(options.arguments)
    _refuse_ignored(command, path, overrides, options)
    if command == "schema":
        return _schema()
    if command == "doctor":
        from distill.cli.examine import examine

        return examine(path, overrides)
    return _run(path or quick_start(), overrides, dry_run=options.dry_run, show_config=options.cfg is not None)


def _version(argv: Sequence[str]) -> int:
    from distill import __version__

    others = [word for word in argv if word != "--version"]
    if others:
        raise ConfigError(f"the command line: --version stands alone, and {others[0]!r} would be ignored")
    say(f"distill-engine {__version__}\n")
    return 0


def _refuse_ignored(
    command: str | None, path: Path | None, overrides: Sequence[str], options: argparse.Namespace
) -> None:
    """What would have no effect is an error here too."""
    flags = [name for name, given in (("--dry-run", options.dry_run), ("--cfg", options.cfg)) if given]
    if len(flags) == 2:
        raise ConfigError("the command line: --dry-run and --cfg print different things", fix="give one of them")
    ignored = [*flags] if command else []
    if command == "schema":
        ignored += [str(path)] if path else []
        ignored += overrides
    if command == "doctor" and path is None:
        ignored += overrides
    if ignored:
        raise ConfigError(
            f"the command line: {command} makes no use of {ignored[0]}",
            fix="distill-run doctor teachers.yaml key=value ... looks at a run"
            if command == "doctor"
            else "leave it out",
        )


def _sort(arguments: Sequence[str]) -> tuple[str | None, Path | None, list[str]]:
    """Subcommand, file and overrides, in whatever order they came."""
    if "" in arguments:
        raise ConfigError("the command line: an argument is empty", fix="a variable of the shell may be unset")
    overrides = [word for word in arguments if _is_setting(word)]
    words = [word for word in arguments if word not in overrides]
    command = words.pop(0) if words and words[0] in _COMMANDS else None
    if len(words) > 1:
        raise ConfigError(
            f"the command line: {words[1]!r} is neither a second file nor key=value",
            why="a run is described by one file",
            fix=f"write {words[1]}=VALUE, or put the values in quotes",
        )
    if words and not words[0].endswith(_ENDINGS) and not Path(words[0]).expanduser().exists():
        from distill.registry import did_you_mean

        raise ConfigError(
            f"the command line: {words[0]!r} is neither a file, nor a folder, nor key=value",
            fix=f"subcommands: {did_you_mean(words[0], (*_COMMANDS, _TEACHERS))}; "
            f"settings are written {words[0]}=VALUE",
        )
    return command, Path(words[0]) if words else None, overrides


def _is_setting(word: str) -> bool:
    """`key=value`, `~key` or `+key`: anything with a "=" that is not evidently the name of a run's file."""
    if "=" not in word:
        return re.match(r"[~+]+[^/]", word) is not None
    if not word.endswith(_ENDINGS):
        return True
    from distill.config.models import RunConfig

    return re.split(r"[.@=\[]", word.lstrip("+~"))[0] in RunConfig.model_fields


def quick_start() -> Path:
    """The recipe that runs when no file is named: beside the installed package, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "quickstart" / "teachers.yaml").is_file():
            return folder / "quickstart" / "teachers.yaml"
    raise ConfigError("the quick start recipe was not installed", fix="name a file: distill-run teachers.yaml")


def _schema() -> int:
    import json

    from distill.config.json_schema import json_schema

    say(json.dumps(json_schema(), indent=2) + "\n")
    return 0


def _run(path: Path, overrides: list[str], *, dry_run: bool, show_config: bool) -> int:
    from distill.config.compose import load_config

    loaded = load_config(path, overrides)
    if show_config:
        return _show_config(loaded)
    return _dry_run(loaded) if dry_run else _start(loaded)


def _show_config(loaded: LoadedConfig) -> int:
    import yaml

    from distill.config.options import resolved
    from distill.preflight.parts import check_part

    name = loaded.config.objective.name
    if ":" in name:  # a class of the user's own, whose fields are settings
        check_part("objective.name", "objective", name)
    say(yaml.safe_dump(resolved(loaded.config), sort_keys=False, allow_unicode=True))
    return 0


def _dry_run(loaded: LoadedConfig) -> int:
    from distill.cli.plan import print_plan, print_unprepared
    from distill.config.explain import located
    from distill.preflight import inspect, inspect_early, is_prepared

    with located(loaded.written):
        if loaded.config.prepare is not None and not is_prepared(loaded.config.prepare):
            print_unprepared(loaded, inspect_early(loaded.config))
        else:
            print_plan(loaded, inspect(loaded.config))
    return 0


def _start(loaded: LoadedConfig) -> int:
    from distill.config.explain import located
    from distill.preflight import inspect, inspect_early, prepare

    with located(loaded.written):
        if loaded.config.prepare is not None:
            inspect_early(loaded.config)  # preparing may take long
            prepare(loaded.config.prepare)
        preflight = inspect(loaded.config)
    for note in preflight.notes:
        complain(f"note: {note}")
    from distill.build import run

    run(loaded.config, preflight=preflight)
    return 0


if __name__ == "__main__":
    sys.exit(main())
