"""`distill-run teachers plan`: what sharing slots will cost a run, and the cheapest change that halves it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from distill.cli.plan import size
from distill.cli.program import Parser, say, show
from distill.cli.rates import MEASURED, GivenSpeeds, Speed
from distill.cli.teachers_outlook import Given, Outlook, TeacherOutlook, look_ahead
from distill.config import RunConfig
from distill.config.compose import load_config
from distill.config.explain import located
from distill.errors import ConfigError
from distill.preflight import inspect, is_prepared
from distill.run_folder import without_folder
from distill.teacher_manager.capacity import NO_STALL, SEEDS, STEPS, WARM, Change, Expected

_HELP = """\
Say what it will cost that the teachers of a run share slots, before anything is loaded: what each teacher takes and how
it will be visited, how far the slots are from their limit, and how long they will stand still for swaps, by a
simulation of the run's own workload with its own scheduler. Then what would halve that.

  distill-run teachers plan teachers.yaml
  distill-run teachers plan teachers.yaml teacher_manager.slots=2 --step-s 30
  distill-run teachers plan teachers.yaml server.dtype=bfloat16 --link-gb-per-s 50 --device-tflops 350 --json

The configuration is checked as by --dry-run. Rates that are not given are measured on this machine where slots compute
on its processor, and assumed elsewhere; each figure says which."""

_NOTICED = 1.03
"""A step that is longer by less is not: lengths are drawn."""


def plan(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = _parser().parse_intermixed_args(list(argv))
    given = Given(
        GivenSpeeds(
            link_bytes=_times(arguments.link_gb_per_s, 1e9),
            disk_bytes=_times(arguments.disk_gb_per_s, 1e9),
            device_flops=_times(arguments.device_tflops, 1e12),
        ),
        arguments.tokens_per_sample,
        arguments.step_s,
    )
    loaded = load_config(arguments.run, arguments.overrides)
    with located(loaded.written):
        config = without_folder(loaded.config)
        if config.prepare is not None and not is_prepared(config.prepare):
            raise ConfigError(
                f"prepare.output: {config.prepare.output} is not made yet, so the teachers have no size",
                fix=f"start the run once, which first starts {config.prepare.script}",
            )
        with _busy():
            outlook = look_ahead(config, inspect(config), given)
    if arguments.json:
        say(json.dumps(as_json(outlook), indent=2) + "\n")
    else:
        _print(config, outlook)
    return 0


def _busy() -> AbstractContextManager[object]:
    watched = sys.stderr is not None and sys.stderr.isatty()
    return Console(stderr=True).status("looking at the teachers, simulating the run") if watched else nullcontext()


def _parser() -> Parser:
    parser = Parser(
        prog="distill-run teachers plan", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="teachers.yaml", help="the run's file, or a folder with one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="other settings, as for distill-run")
    speeds = parser.add_argument_group("speeds, GB = 1e9 bytes")
    speeds.add_argument("--link-gb-per-s", type=_above_zero, metavar="X", help="from host memory to a slot's device")
    speeds.add_argument("--disk-gb-per-s", type=_above_zero, metavar="X", help="of the disk that teachers lie on")
    speeds.add_argument(
        "--device-tflops", type=_above_zero, metavar="X", help="1e12 FLOP/s that a slot reaches: peak x utilisation"
    )
    load = parser.add_argument_group("demand")
    load.add_argument(
        "--tokens-per-sample",
        type=_whole,
        metavar="N",
        help="prompt and response, on average; default: the mean prompt and rollout.max_new_tokens",
    )
    load.add_argument(
        "--step-s",
        type=_above_zero,
        metavar="S",
        help="seconds of a step in which nobody waits for a teacher; default: as long as the slots compute for it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and below 1e9")
    return value


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0 and below 2^31")
    return int(text)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


# --- as JSON -------------------------------------------------------------------------------------------------------


def as_json(outlook: Outlook) -> dict[str, Any]:
    """All that is printed, and more. The unit of a figure is the end of its key; shares and ratios have none."""
    demand = outlook.demand
    return {
        "speeds": {
            "link_bytes_per_s": _source(outlook.speeds.link),
            "disk_bytes_per_s": _source(outlook.speeds.disk),
            "device_flop_per_s": _source(outlook.speeds.device),
        },
        "demand": {
            "batch_size": demand.batch_size,
            "max_staleness": demand.max_staleness,
            "deadline_s": demand.deadline_s,
            "tokens_per_sample": {"value": demand.tokens_per_sample, "source": outlook.tokens_source},
            "step_s": {"value": outlook.write_s, "source": outlook.step_source},
        },
        "teachers": [asdict(teacher) for teacher in outlook.teachers],
        "slots": outlook.slots,
        "slot_bytes": outlook.slot_bytes,
        "resident_together": outlook.resident_together,
        "swap_s": outlook.swap_s,
        "load": outlook.load,
        "load_limit": outlook.load_limit,
        "least_step_s": outlook.least_step_s,
        "host_memory": asdict(outlook.host) | {"needed_bytes": outlook.host.needed_bytes},
        "expected": _expected(outlook.expected),
        "changes": [
            {"name": each.name, "what": each.what, "halves": each.halves} | _expected(each.expected)
            for each in outlook.changes
        ],
        "cheapest_change": None if outlook.cheapest is None else outlook.cheapest.name,
    }


def _source(speed: Speed) -> dict[str, Any]:
    return {"value": speed.value, "source": speed.source, "how": speed.how}


def _expected(expected: Expected) -> dict[str, Any]:
    return {
        "step_s": expected.step_s,
        "busy_s": expected.busy_s,
        "stall_s": expected.stall_s,
        "stall_share": expected.stall_share,
        "stall_per_sample_s": expected.stall_per_sample_s,
        "loads_per_step": expected.loads,
        "streams_per_step": expected.streams,
        "late_share": expected.late_share,
    }


# --- as text -------------------------------------------------------------------------------------------------------


def _print(config: RunConfig, outlook: Outlook) -> None:
    pairs = Table(show_header=False, box=None, pad_edge=False)
    pairs.add_column(style="bold", no_wrap=True)
    pairs.add_column(overflow="fold")
    for name, value in _rows(config, outlook):
        pairs.add_row(name, escape(value))
    show(_teachers(outlook.teachers), pairs, _changes(outlook), *_verdict(outlook))


def _teachers(teachers: Sequence[TeacherOutlook]) -> Table:
    table = Table("teacher", "kind", "bytes", "samples", "mode", Column("why", overflow="fold"), "B*", "swap", "first")
    for each in teachers:
        table.add_row(
            escape(each.name),
            each.kind,
            f"{each.bytes:,}",
            f"{each.sample_share:.0%}",
            each.mode,
            escape(each.why),
            _tokens(each.break_even_tokens),
            _seconds(each.swap_s),
            _seconds(each.first_swap_s),
        )
    return table


def _rows(config: RunConfig, outlook: Outlook) -> Iterator[tuple[str, str]]:
    demand, speeds, host = outlook.demand, outlook.speeds, outlook.host
    yield "link", f"{speeds.link.value / 1e9:.3g} GB/s ({_whence(speeds.link)})"
    yield "disk", f"{speeds.disk.value / 1e9:.3g} GB/s ({_whence(speeds.disk)})"
    yield "device", f"{speeds.device.value / 1e12:.3g} TFLOP/s ({_whence(speeds.device)})"
    yield "tokens of a sample", f"{demand.tokens_per_sample:,} ({outlook.tokens_source})"
    yield "step", f"{_seconds(outlook.write_s)} ({outlook.step_source}) for {demand.batch_size:,} samples"
    together = "all teachers together" if outlook.resident_together else "not all teachers together"
    given = "given" if config.teacher_manager.slot_gb is not None else "as the largest teacher needs"
    yield "slots", f"{outlook.slots} of {outlook.slot_bytes:,} bytes ({given}); they hold {together}"
    yield "all weights once", f"{_seconds(outlook.swap_s)} over one link (bytes / link)"
    yield "load of scoring", f"rho = {outlook.load:.2f} ({'assumed' if demand.step_s is None else 'from --step-s'})"
    yield "its limit", _limit(outlook)
    yield (
        "host memory",
        f"{size(host.needed_bytes)} of {size(host.machine_bytes)} ({MEASURED}): teachers as stored "
        f"{size(host.teachers_bytes)}, slots {size(host.slots_bytes)}, rollout servers {size(host.rollout_bytes)}",
    )


def _limit(outlook: Outlook) -> str:
    if outlook.resident_together:
        return f"rho <= 1: nothing is swapped; {_least(outlook)}"
    share = f"{_seconds(outlook.swap_s)} / ({outlook.slots} x {outlook.demand.deadline_s:g} s)"
    return f"rho <= {outlook.load_limit:.4g} = 1 - {share}, for teacher_manager.deadline_s; {_least(outlook)}"


def _least(outlook: Outlook) -> str:
    if outlook.least_step_s is None:
        return "swaps alone take longer than that"
    return f"a step of {_seconds(outlook.least_step_s)} or more is within it"


def _changes(outlook: Outlook) -> Table:
    table = Table(
        Column("simulated", overflow="fold"), "step", "stall a step", "of slot time", "loads", "streams", "late"
    )
    table.add_row("as it is", *_cells(outlook.expected))
    for change in outlook.changes:
        table.add_row(escape(change.what), *_cells(change.expected))
    return table


def _cells(expected: Expected) -> tuple[str, ...]:
    return (
        _seconds(expected.step_s),
        _seconds(expected.stall_s),
        f"{expected.stall_share:.1%}",
        f"{expected.loads:.1f}",
        f"{expected.streams:.1f}",
        f"{expected.late_share:.1%}",
    )


def _verdict(outlook: Outlook) -> Iterator[str]:
    yield (
        f"Simulated on a virtual clock: {STEPS} steps, the first {WARM} not counted, mean of {len(SEEDS)} seeds. "
        "Stall: a slot stands still although a sample waits."
    )
    yield _pace(outlook)
    if outlook.host.needed_bytes > outlook.host.machine_bytes:
        yield "note: host memory does not hold all that: loads will come from the disk"
    if outlook.expected.stall_share < NO_STALL:
        yield "No stall is expected."
    elif outlook.cheapest is None:
        yield "None of these changes halves the stall."
    else:
        yield f"The cheapest that at least halves the stall: {outlook.cheapest.what}."
        if (larger := _larger_batch(outlook.changes)) and outlook.cheapest is not larger:
            yield f"So does {larger.what}, which costs no hardware and changes the training."


def _pace(outlook: Outlook) -> str:
    """Whether anybody notices."""
    took, least = outlook.expected.step_s, outlook.write_s
    if outlook.demand.max_staleness == 0:
        return f"A step takes {_seconds(took)}: {_seconds(least)}, and then the scores, as trainer.max_staleness is 0."
    if took <= _NOTICED * least:
        return f"The teachers do not slow the run: a step takes {_seconds(least)} without them."
    return f"The teachers slow the run: a step takes {_seconds(took)}, and {_seconds(least)} without waiting for them."


def _larger_batch(changes: Sequence[Change]) -> Change | None:
    return next((change for change in changes if change.name == "batch_size" and change.halves), None)


def _whence(speed: Speed) -> str:
    return f"{speed.source}: {speed.how}"


def _tokens(count: float) -> str:
    return f"{count:,.0f} tokens" if count >= 100 else f"{count:.3g} tokens"


def _seconds(value: float) -> str:
    """Three figures, in a unit that people read."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us" if value else "0 s"
