"""`distill-run teachers score`: what the teachers of a run say of a file of finished answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from distill.cli.program import Parser, complain, say
from distill.config.compose import load_config
from distill.config.explain import located
from distill.errors import ConfigError, DistillError
from distill.preflight import is_prepared
from distill.score_files import Progress, ScoreJob, Summary, score_file
from distill.score_files.job import WINDOW
from distill.score_files.scoring import Sinks
from distill.types import Signal

_HELP = """\
Score finished answers by the teachers of a run, without training: one row of output for each answer and teacher.

  distill-run teachers score teachers.yaml --input answers.jsonl --output scores.parquet
  distill-run teachers score teachers.yaml --input answers.parquet --output math.parquet --teacher math --keep source
  distill-run teachers score teachers.yaml --input answers.jsonl --output scores.parquet --signal topk --k 64 --resume

A row of the input has a prompt, as in the run's data, and `response` (a text) or `response_ids`. It goes to the
teachers that the run's routing gives such a row, unless --teacher names them. docs/teachers.md has the columns."""


def score(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = _parser().parse_intermixed_args(list(argv))
    try:
        summary = _score(arguments)
    except DistillError as error:
        if not arguments.json_errors:
            raise
        complain(as_json(error))
        return error.exit_code
    say(_closing(summary, arguments.output) + "\n")
    return 0


def _score(arguments: argparse.Namespace) -> Summary:
    loaded = load_config(arguments.run, arguments.overrides)
    with located(loaded.written):
        config = loaded.config
        if config.prepare is not None and not is_prepared(config.prepare):
            raise ConfigError(
                f"prepare.output: {config.prepare.output} is not made yet, so there are no teachers",
                fix=f"start the run once, which first starts {config.prepare.script}",
            )
        return score_file(config, _job(arguments), Sinks(_event, lambda progress: complain(line(progress))))


def _job(arguments: argparse.Namespace) -> ScoreJob:
    return ScoreJob(
        source=arguments.input,
        output=arguments.output,
        teachers=tuple(arguments.teacher),
        signal=None if arguments.signal is None else Signal(arguments.signal),
        k=arguments.k,
        keep=tuple(arguments.keep),
        limit=arguments.limit,
        prompt_field=arguments.prompt_field,
        domain=arguments.domain,
        append_end=arguments.append_end,
        resume=arguments.resume,
        window=arguments.window,
    )


def _parser() -> Parser:
    parser = Parser(
        prog="distill-run teachers score", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="teachers.yaml", help="the run's file, or a folder with one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="other settings, as for distill-run")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="answers: JSONL or Parquet")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="scores: a new Parquet file")
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--teacher", action="append", default=[], metavar="NAME", help="score every row by this one; may be repeated"
    )
    rows.add_argument("--domain", metavar="NAME", help="of every row; default: the row's column `domain`")
    rows.add_argument("--prompt-field", metavar="COLUMN", help="default: as in the run's first data entry")
    rows.add_argument("--limit", type=_whole, metavar="N", help="score the first N rows only")
    rows.add_argument(
        "--append-end", action="store_true", help="put the student's end token behind each `response` that is a text"
    )
    scores = parser.add_argument_group("scores")
    asked = [str(signal) for signal in (Signal.SAMPLED, Signal.TOPK, Signal.FULL)]
    scores.add_argument("--signal", choices=asked, help="default: what the run's objective asks for")
    scores.add_argument("--k", type=_whole, metavar="K", help="tokens of each topk row; default: the objective's")
    scores.add_argument(
        "--keep", action="append", default=[], metavar="COLUMN", help="carry this column through; may be repeated"
    )
    parser.add_argument("--resume", action="store_true", help="go on behind the rows that a broken job has scored")
    parser.add_argument(
        "--window", type=_whole, default=WINDOW, metavar="N", help=f"rows under way at a time; default {WINDOW}"
    )
    parser.add_argument("--json-errors", action="store_true", help="print an error as one JSON object")
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _event(level: str, message: str) -> None:
    if level != "debug":
        complain(f"{level}: {message}" if level != "info" else message)


def line(progress: Progress) -> str:
    """For whoever waits."""
    seconds = max(progress.seconds, 1e-9)
    return (
        f"{progress.rows} of {progress.total} rows, {progress.scored_rows / seconds:.1f} rows/s, "
        f"{progress.tokens / seconds:.0f} tokens/s, {progress.swaps} swaps, stall {100 * progress.stall_share:.1f} %"
    )


def _closing(summary: Summary, output: Path) -> str:
    missing = f", {summary.dropped} scores missing" if summary.dropped else ""
    return f"{output}: {line(summary.progress)}, {summary.progress.seconds:.1f} s{missing}"


def as_json(error: DistillError) -> str:
    """One line; `exit_code` is also the program's."""
    return json.dumps(
        {
            "error": type(error).__name__,
            "what": error.what,
            "why": error.why,
            "fix": error.fix,
            "exit_code": error.exit_code,
        }
    )
