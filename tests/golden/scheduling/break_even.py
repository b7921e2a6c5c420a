"""RESIDENT against STREAM: the table of the data, number by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.teacher_manager.timeline.break_even import Placement
from tests.golden.scheduling.tally import Tally


def table(case: Mapping[str, Any], tally: Tally) -> None:
    for row in case["rows"]:
        each = Placement(
            total_params=row["total_params"],
            active_params=row["active_params"],
            layers=row["layers"],
            bytes=row["bytes"],
            flops_per_s=row["flops_eff_per_s"],
            bytes_per_s=row["bandwidth_bytes_per_s"],
        )
        got = {
            "break_even_tokens": each.break_even_tokens,
            "copy_ns": each.copy_ns,
            "stream_device_bytes": each.stream_bytes,
            "tokens_for_resident_overhead": {
                fraction: each.tokens_for_overhead(float(fraction)) for fraction in row["tokens_for_resident_overhead"]
            },
        }
        tally.equal(row["name"], got, {name: row[name] for name in got})
        for batch in row["batches"]:
            tally.equal(f"{row['name']}, {batch['tokens']} tokens", _batch(each, batch["tokens"]), batch)


def _batch(each: Placement, tokens: int) -> dict[str, int | float]:
    work_ns, stream_ns = each.compute_ns(tokens), each.stream_ns(tokens)
    first_ns = each.copy_ns + work_ns
    return {
        "tokens": tokens,
        "compute_ns": work_ns,
        "resident_first_visit_ns": first_ns,
        "resident_reuse_ns": work_ns,
        "stream_ns": stream_ns,
        "visits_until_resident_wins": each.visits_until_resident_wins(tokens),
        "prefetched_resident_exposed_ns_behind_equal_visit": each.exposed_ns(tokens),
        "stream_saves_fraction": 1 - stream_ns / first_ns,
        "copy_overhead_fraction_resident": each.copy_ns / first_ns,
    }
