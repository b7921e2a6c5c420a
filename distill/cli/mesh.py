"""`distill-mesh`: what weight updates can use on this machine, and how fast they are."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distill import registry
from distill.cli import mesh_topo
from distill.cli.program import Parser, run_program, say
from distill.errors import EnvironmentFault, MeshError
from distill.transfermesh.bench import BenchPlan, BenchRow, as_json, bench, parse_size, table
from distill.transfermesh.doctor import examine, healthy


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code: 0 done, 2 what was asked, 3 the machine, 4 weights arrived wrong."""
    return run_program("distill-mesh", lambda: _dispatch(argv))


def _dispatch(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="distill-mesh",
        description="Weights from a trainer to inference engines: see what this machine can use, and measure it.",
        epilog="exit codes: 0 done, 2 wrong arguments, 3 the machine cannot, 4 weights did not arrive right",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    mesh_topo.add(commands)
    doctor = commands.add_parser("doctor", help="try each transport on this machine and say what is missing")
    doctor.set_defaults(run=_doctor)
    plan = BenchPlan()
    measure = commands.add_parser(
        "bench",
        help="publish to real receiver processes and time it",
        description="Times whole updates: offer, transfer, load, digest in every receiver, commit. GB = 1e9 bytes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    measure.add_argument(
        "-b", "--begin", default="1M", metavar="SIZE", help="smallest model; K, M and G are powers of 1024"
    )
    measure.add_argument("-e", "--end", default="64M", metavar="SIZE", help="largest model")
    measure.add_argument("-f", "--factor", type=int, default=plan.factor, help="each size is this many times the last")
    measure.add_argument("--transports", default=",".join(plan.transports), help="separated by commas")
    measure.add_argument("--receivers", type=int, default=plan.receivers, help="receiver processes")
    measure.add_argument(
        "--iterations", type=int, default=plan.iterations, help="timed updates a line, after a warm-up"
    )
    measure.add_argument("--bucket", default="64M", metavar="SIZE", help="bytes sent and checked at a time")
    measure.add_argument(
        "--timeout", type=float, default=plan.timeout_s, help="seconds a receiver may take for one step"
    )
    measure.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    measure.set_defaults(run=_bench)
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    findings = examine()
    words = {True: "ok", False: "FAILED", None: "-"}
    for finding in findings:
        say(f"{finding.what:<14} {words[finding.ok]:<7} {finding.detail}\n")
    return 0 if healthy(findings) else EnvironmentFault.exit_code


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        _check_writable(arguments.json)
    transports = tuple(name.strip() for name in arguments.transports.split(","))
    for name in transports:
        registry.load("transport", name)  # before any process is started
    plan = BenchPlan(
        begin=parse_size(arguments.begin),
        end=parse_size(arguments.end),
        factor=arguments.factor,
        transports=transports,
        receivers=arguments.receivers,
        iterations=arguments.iterations,
        bucket_bytes=parse_size(arguments.bucket),
        timeout_s=arguments.timeout,
    )
    rows: list[BenchRow] = []
    for row in bench(plan):
        rows.append(row)
        lines = table([row]).splitlines()
        say("\n".join(lines if len(rows) == 1 else lines[1:]) + "\n")
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(as_json(plan, rows), indent=2) + "\n")
        except OSError as error:
            raise EnvironmentFault(f"cannot write {arguments.json}: {error}") from error
    return MeshError.exit_code if any(row.wrong for row in rows) else 0


def _check_writable(file: Path) -> None:
    """Before the measurement, which takes minutes. An old result stays until the new one is there."""
    target = file if file.exists() else file.parent
    if file.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        reason = "it is a folder" if file.is_dir() else "not permitted" if target.exists() else f"there is no {target}"
        raise EnvironmentFault(f"cannot write {file}: {reason}", fix="give --json another FILE")


if __name__ == "__main__":
    sys.exit(main())
