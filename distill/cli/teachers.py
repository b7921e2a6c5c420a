"""`distill-run teachers`: what can be said of the teachers of a run without running it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.cli.program import Parser, say
from distill.errors import ConfigError
from distill.teacher_manager.planning.policy import IndexPolicy
from distill.teacher_manager.timeline.bounds import Bounds, bounds
from distill.teacher_manager.timeline.case import Case
from distill.teacher_manager.timeline.metrics import Metrics, measure
from distill.teacher_manager.timeline.reading import read_case
from distill.teacher_manager.timeline.schedule import Schedule, write_schedule
from distill.teacher_manager.timeline.simple import SIMPLE, prefetched
from distill.teacher_manager.timeline.simulator import simulate

_SIMULATE = """\
Serve the jobs of a trace (tm-sched/1: `timed`, `timed_exact` or `generated`; docs/teachers.md) on a virtual clock with
Distill's scheduler and with simple policies, and print how far each is from what no schedule can beat."""


def teachers(argv: Sequence[str]) -> int:
    """Run a subcommand; returns its exit code."""
    if argv and argv[0] in _COMMANDS:
        return _COMMANDS[argv[0]].run(argv[1:])
    parser = Parser(prog="distill-run teachers", description="Teachers that share devices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    parser.parse_args(list(argv))  # which ends with help or an error: no command stands first
    return 0


@dataclass(frozen=True, slots=True)
class _Command:
    help: str
    run: Callable[[Sequence[str]], int]
    """From the words behind the command's name to the exit code."""


def _plan(argv: Sequence[str]) -> int:
    from distill.cli.teachers_plan import plan  # knows the configuration, and takes longer to import

    return plan(argv)


def _score(argv: Sequence[str]) -> int:
    from distill.cli.teachers_score import score  # as for plan

    return score(argv)


def _sim(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="distill-run teachers sim",
        description=_SIMULATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="trace.json")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="write the scheduler's copies, evictions and visits here"
    )
    parser.add_argument("--no-simple", action="store_true", help="leave out the simple policies, which take longer")
    arguments = parser.parse_args(list(argv))
    return _simulate(arguments.trace, arguments.log, alone=arguments.no_simple)


_COMMANDS: Mapping[str, _Command] = {
    "plan": _Command("what sharing slots will cost a run", _plan),
    "score": _Command("score a file of finished answers", _score),
    "sim": _Command("schedule a trace on a virtual clock", _sim),
}


def _simulate(trace: Path, log: Path | None, *, alone: bool) -> int:
    case = read_case(trace)
    ours = simulate(case, IndexPolicy(case.system))
    if log is not None:
        try:
            write_schedule(ours, log)
        except OSError as error:
            raise ConfigError(f"--log: {log} cannot be written: {error.strerror}") from error
    found = bounds(case)
    say("\n".join(_summary(case, found)) + "\n\n")
    rows = [("policy", *_FIGURES), ("distill", *_cells(case, measure(case, ours), found))]
    for name, schedule in () if alone else _simple_schedules(case):
        rows.append((name, *_cells(case, measure(case, schedule), found)))
    say("\n".join(_aligned(rows)) + "\n")
    say("\nx: times the bound that no schedule can beat; bytes: the bound of schedules that miss no deadline\n")
    return 0


def _simple_schedules(case: Case) -> Iterator[tuple[str, Schedule]]:
    for name, make in SIMPLE.items():
        on_demand = simulate(case, make(case))
        yield name, on_demand
        if name != "oldest_drain_stream":
            yield f"{name}, prefetched", prefetched(case, name, on_demand)


def _summary(case: Case, found: Bounds) -> Iterator[str]:
    system = case.system
    room = sum(device.budget_bytes for device in system.devices)
    weights = sum(teacher.bytes for teacher in system.teachers)
    yield f"{case.name}: {len(case.jobs)} jobs for {len(system.teachers)} teachers on {len(system.devices)} devices"
    yield f"weights {weights / 1e9:.1f} GB, room for {room / 1e9:.1f} GB, {len(system.links)} links"
    yield (
        f"no schedule ends before {found.makespan_lb_ns / 1e9:.3f} s, keeps devices busier than "
        f"{100 * found.busy_fraction_ub:.1f} %, or has a mean latency below {found.latency_mean_lb_ns / 1e9:.3f} s"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell, the first to the left: the same on a terminal and in a file."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        yield "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])


_FIGURES = ("end", "stall", "missed", "mean latency", "p99", "bytes", "swaps", "streams", "Jain")


def _cells(case: Case, metrics: Metrics, found: Bounds) -> tuple[str, ...]:
    stall = metrics.exposed_stall_ns / (len(case.system.devices) * metrics.makespan_ns)
    latency = metrics.latency_mean_ns / found.latency_mean_lb_ns
    return (
        f"{metrics.makespan_ns / 1e9:.3f} s ({metrics.makespan_ns / found.makespan_lb_ns:.3f}x)",
        f"{100 * stall:.1f} %",
        f"{metrics.missed_deadlines} of {len(case.jobs)}",
        f"{metrics.latency_mean_ns / 1e9:.3f} s ({latency:.2f}x)",
        f"{metrics.latency_p99_ns / 1e9:.3f} s",
        f"{metrics.bytes_moved / 1e9:.1f} GB ({metrics.bytes_moved / found.bytes_lb_all_deadlines_met:.2f}x)",
        str(metrics.loads),
        str(metrics.streams),
        f"{metrics.jain_mean_latency:.3f}",
    )
