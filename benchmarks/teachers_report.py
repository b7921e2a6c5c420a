"""The tables and the plot of `benchmarks.teachers`, from what it found, and whether its targets are met."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import median, print_table, spread, write_plot
from distill.teacher_manager.timeline.break_even import Placement

MOST_OVER_BOUND = 1.10
LEAST_OF_RESIDENT = 0.85
MOST_OFF_SIMULATED = 0.10
MOST_OFF_FORMULA = 0.15
LEAST_SHARE = 0.9
"""Of B* tokens: visits from here on count as visits of B* tokens, whose measurement has a spread."""


def tables(found: Mapping[str, Any]) -> None:
    swap_table(found)
    throughput_table(found)
    break_even_table(found)
    trace_table(found)
    print_table("Targets", ["what", "target", "found", ""], targets(found))


def swap_table(found: Mapping[str, Any]) -> None:
    size = found["teacher"]["bytes"]
    rows = [
        [f"from {tier}", *_rates(each["seconds"], size), f"{each['read_bytes'] / 1e6:.0f} MB"]
        for tier, each in found["swaps"].items()
    ]
    rows.append(["from host, digests and canary checked", *_rates(found["visits"]["checked swap"], size), "–"])
    loads = found["baselines"]["from_pretrained"]
    rows.append(["transformers, from_pretrained, page cache", *_rates(loads["swap"], size), "–"])
    print_table(f"Swaps of {size / 1e6:.1f} MB", ["swap", "time", "swaps/s", "GB/s", "read from storage"], rows)


def _rates(seconds: Sequence[float], size: int) -> list[str]:
    typical = median(seconds)
    return [spread(seconds), f"{1 / typical:.1f}", f"{size / typical / 1e9:.2f}"]


def throughput_table(found: Mapping[str, Any]) -> None:
    tokens = found["arguments"]["visit"]
    visits, baselines = found["visits"], found["baselines"]
    ways: list[tuple[str, Sequence[float] | None]] = [
        ("all resident", visits["resident"]),
        ("swapped, nothing overlapped", visits["swapped"]),
        ("streamed", visits["streamed"]),
        ("transformers, from_pretrained a visit", baselines["from_pretrained"]["visit"]),
        ("accelerate, disk offload", baselines["disk_offload"] and baselines["disk_offload"]["visit"]),
    ]
    rows = [
        [how, "–", "accelerate is not installed"]
        if seconds is None
        else [how, spread(seconds), f"{tokens / median(seconds):.0f}"]
        for how, seconds in ways
    ]
    print_table(f"Visits of {tokens} tokens, a teacher after the other", ["how", "visit", "scored tokens/s"], rows)


def placement(found: Mapping[str, Any]) -> Placement:
    """The teacher behind the emulated link, with the speed that was measured first and the bandwidth that loads had."""
    costs = found["teacher"]
    return Placement(
        costs["total_params"],
        costs["active_params"],
        costs["layers"],
        costs["bytes"],
        round(found["speed"]["flops_per_s"]),
        round(costs["bytes"] / median(found["choices"]["load"])),
    )


def break_even(found: Mapping[str, Any]) -> list[dict[str, float]]:
    """By tokens a visit: visits for which one load costs as much as streaming each, by the formula and as measured.

    k visits cost load + k * visit, or k * stream: they are equal at k = load / (stream - visit).
    """
    seen, formula = found["choices"], placement(found)
    load_s = median(seen["load"])
    rows: list[dict[str, float]] = []
    for tokens in sorted(seen["resident"], key=int):
        visit_s, stream_s = median(seen["resident"][tokens]), median(seen["streamed"][tokens])
        extra_ns = formula.stream_ns(int(tokens)) - formula.compute_ns(int(tokens))
        extra_s = stream_s - visit_s
        rows.append(
            {
                "tokens": int(tokens),
                "visit_s": visit_s,
                "stream_s": stream_s,
                "formula": formula.copy_ns / extra_ns,
                "measured": load_s / extra_s if extra_s > 0 else float("inf"),
            }
        )
    return rows


def break_even_tokens(found: Mapping[str, Any]) -> float:
    """Tokens that a resident teacher scores, by the line through the measured visits, while one load takes place."""
    seen = found["choices"]
    points = sorted((int(tokens), median(seconds)) for tokens, seconds in seen["resident"].items())
    (low, low_s), (high, high_s) = points[0], points[-1]
    slope = (high_s - low_s) / (high - low)
    return median(seen["load"]) / slope


def break_even_table(found: Mapping[str, Any]) -> None:
    seen, formula = found["choices"], placement(found).break_even_tokens
    print_table(
        f"On a link of {found['link_bytes_per_s'] / 1e6:.0f} MB/s: B* is {formula:.0f} tokens by the formula and "
        f"{break_even_tokens(found):.0f} measured; a load takes {spread(seen['load'])}",
        ["tokens a visit", "resident", "streamed", "break-even visits, formula", "measured"],
        [
            [
                f"{row['tokens']:.0f}",
                spread(_by(seen["resident"], row)),
                spread(_by(seen["streamed"], row)),
                f"{row['formula']:.2f}",
                f"{row['measured']:.2f}",
            ]
            for row in break_even(found)
        ],
    )


def _by(values: Mapping[Any, Sequence[float]], row: Mapping[str, float]) -> Sequence[float]:
    """JSON has no whole numbers as keys."""
    tokens = int(row["tokens"])
    return values[tokens] if tokens in values else values[str(tokens)]


def by_visit(found: Mapping[str, Any], value: Callable[[Mapping[str, Any]], float]) -> dict[int, list[float]]:
    """A figure of each repeat, by tokens a visit."""
    rows: dict[int, list[float]] = {}
    for trace in found["traces"]:
        rows.setdefault(trace["visit"], []).append(value(trace))
    return rows


def over_bound(trace: Mapping[str, Any]) -> float:
    return trace["measured"]["makespan_s"] / trace["bound_s"]


def simulated_over_bound(trace: Mapping[str, Any]) -> float:
    return trace["simulated"]["makespan_s"] / trace["bound_s"]


def off_simulated(trace: Mapping[str, Any]) -> float:
    return trace["measured"]["makespan_s"] / trace["simulated"]["makespan_s"] - 1


def of_resident(trace: Mapping[str, Any]) -> float:
    return trace["resident"]["makespan_s"] / trace["measured"]["makespan_s"]


def trace_table(found: Mapping[str, Any]) -> None:
    rows: list[list[str]] = []
    tokens = found["traces"][0]["tokens"]
    for visit, ratios in by_visit(found, over_bound).items():
        mine = [trace for trace in found["traces"] if trace["visit"] == visit]
        rows.append(
            [
                f"{visit} ({median([trace['share'] for trace in mine]):.2f} B*)",
                spread([trace["measured"]["makespan_s"] for trace in mine]),
                spread([trace["tokens"] / trace["measured"]["makespan_s"] for trace in mine], ""),
                _counts(mine, "measured"),
                spread(ratios, ""),
                spread([simulated_over_bound(trace) for trace in mine], ""),
                _counts(mine, "simulated"),
                spread([of_resident(trace) for trace in mine], "") if "resident" in mine[0] else "–",
            ]
        )
    print_table(
        f"{found['teacher']['count']} teachers in the room of 2, {tokens} tokens a trace",
        [
            "tokens a visit",
            "makespan",
            "tokens/s",
            "loads + streams",
            "/ bound",
            "simulated / bound",
            "its loads + streams",
            "tokens/s, of all resident",
        ],
        rows,
    )


def _counts(traces: Sequence[Mapping[str, Any]], what: str) -> str:
    loads, streams = (median([trace[what][name] for trace in traces]) for name in ("loads", "streams"))
    return f"{loads:.0f} + {streams:.0f}"


def targets(found: Mapping[str, Any]) -> list[list[str]]:
    """(what, target, found, met or missed); medians over the repeats."""
    shares = by_visit(found, lambda trace: trace["share"])
    large = [visit for visit, values in shares.items() if median(values) >= LEAST_SHARE]
    over, kept, off = (by_visit(found, value) for value in (over_bound, _resident_or_one, off_simulated))
    rows: list[list[str]] = []

    def judge(what: str, target: str, value: float, met: bool) -> None:
        rows.append([what, target, f"{value:.3f}", "met" if met else "missed"])

    for visit in large:
        value = median(over[visit])
        judge(f"makespan / bound, {visit} tokens a visit", f"<= {MOST_OVER_BOUND}", value, value <= MOST_OVER_BOUND)
        value = median(kept[visit])
        judge(f"tokens/s of all resident, {visit}", f">= {LEAST_OF_RESIDENT}", value, value >= LEAST_OF_RESIDENT)
    for visit, values in off.items():
        value = median(values)
        judge(f"measured / simulated - 1, {visit}", f"+-{MOST_OFF_SIMULATED}", value, abs(value) <= MOST_OFF_SIMULATED)
    value = break_even_tokens(found) / placement(found).break_even_tokens - 1
    judge("B* measured / formula - 1", f"+-{MOST_OFF_FORMULA}", value, abs(value) <= MOST_OFF_FORMULA)
    for row in break_even(found)[:2]:
        value = row["measured"] / row["formula"] - 1
        judge(
            f"break-even visits of {row['tokens']:.0f} tokens, measured / formula - 1",
            f"+-{MOST_OFF_FORMULA}",
            value,
            abs(value) <= MOST_OFF_FORMULA,
        )
    return rows


def _resident_or_one(trace: Mapping[str, Any]) -> float:
    return of_resident(trace) if "resident" in trace else 1.0


def plot(found: Mapping[str, Any], path: Path) -> None:
    over, simulated = by_visit(found, over_bound), by_visit(found, simulated_over_bound)
    seen = break_even(found)
    formula = placement(found)
    write_plot(
        path,
        [
            (
                f"Makespan / bound, {found['teacher']['count']} teachers in the room of 2",
                "tokens a visit",
                {
                    "measured": [(visit, median(values)) for visit, values in over.items()],
                    "simulated": [(visit, median(values)) for visit, values in simulated.items()],
                },
            ),
            (
                "One visit on the same link, seconds",
                "tokens",
                {
                    "streamed": [(row["tokens"], row["stream_s"]) for row in seen],
                    "streamed, formula": [(row["tokens"], formula.stream_ns(int(row["tokens"])) / 1e9) for row in seen],
                    "resident": [(row["tokens"], row["visit_s"]) for row in seen],
                    "resident, formula": [
                        (row["tokens"], formula.compute_ns(int(row["tokens"])) / 1e9) for row in seen
                    ],
                },
            ),
        ],
        y_label="",
    )
