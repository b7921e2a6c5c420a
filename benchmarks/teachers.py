"""Many teachers in the room of a few: swaps, scored tokens a second, and how close a run comes to what is possible.

    python -m benchmarks.teachers                 8 random teachers, a few minutes on two cores
    python -m benchmarks.teachers --quick         small ones and one repeat: whether it works, no figures to keep

Everything is real: model servers in processes of their own with one thread each, weights that are copied and checked,
the Teacher Manager of a run. Only the link is emulated, for the last part: copies are slowed down until they take as
long as scoring `--break-even` tokens, B* = weight bytes * F / (2 * link bytes/s * active parameters). F is measured.

It writes teachers.json and teachers.svg into `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import teachers_report as report
from benchmarks.common import Turns, machine_line, median, run_case
from benchmarks.teachers_house import House, Served, Shape, build_house, serve
from benchmarks.teachers_sharing import make_trace, measure, predict
from benchmarks.teachers_swaps import Speed, checked_swaps, choices, open_client, speed, swaps, visits

TIERS = ("host", "page cache", "disk")
SHARES = (0.5, 1.0, 2.0)
"""Tokens a visit, as shares of the break-even."""
ROOM = 2.2
"""Teachers that the shared slot holds: two, and the layer buffers of a stream."""


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = machine_line(1, ("torch", "transformers", "accelerate"))
    print(machine, flush=True)
    with tempfile.TemporaryDirectory(prefix="teachers-", dir=args.scratch) as scratch:
        house = build_house(Path(scratch), args.teachers, Shape(args.hidden, args.layers, args.vocab))
        found = asyncio.run(run(house, args))
    found |= {"machine": machine, "load_at_the_end": os.getloadavg(), "arguments": plain(args)}
    found["teacher"] = {"count": args.teachers, **asdict(house.costs)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "teachers.json").write_text(json.dumps(found, indent=1) + "\n")
    report.tables(found)
    report.plot(found, args.out / "teachers.svg")
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}; written to {args.out}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small teachers, one repeat")
    parser.add_argument("--teachers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--visit", type=int, default=1024, help="tokens a visit, where the link is not slowed down")
    parser.add_argument("--break-even", type=int, default=2048, help="B* that the emulated link gives, in tokens")
    parser.add_argument("--copies", type=int, default=8, help="work of a teacher in a trace, in B* tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=None, help="where the teachers are written, on a disk")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    args = parser.parse_args(arguments)
    if args.quick:
        args.teachers, args.hidden, args.layers, args.length = min(args.teachers, 4), 64, 4, 32
        args.visit, args.break_even, args.copies, args.repeats = 256, 1024, 2, 1
    if args.teachers < 3:
        parser.error("--teachers must be 3 or more: two have room together")
    if args.break_even % (4 * args.length):
        parser.error(f"--break-even must be a multiple of 4 samples, {4 * args.length} tokens")
    return args


def plain(args: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


async def run(house: House, args: argparse.Namespace) -> dict[str, Any]:
    """All figures, in the order in which they are made."""
    turns = Turns(len(TIERS) + 4 + args.repeats)
    found: dict[str, Any] = {"swaps": {}}
    for tier in TIERS:
        turns.start(f"swaps from {tier}")
        found["swaps"][tier] = await swaps(house, tier, args.repeats)
    found["visits"] = await at_full_speed(house, args, turns)
    found["baselines"] = baselines(house, args, turns)
    found |= await on_a_slow_link(house, args, turns)
    return found


async def at_full_speed(house: House, args: argparse.Namespace, turns: Turns) -> dict[str, Any]:
    """Visits by teachers that are resident, swapped and streamed, and swaps as a run does them."""
    turns.start("visits, all resident, swapped and streamed")
    found: dict[str, Any] = {}
    with serve(house, room=args.teachers + 0.2) as served:
        client = await open_client(served)
        try:
            for how in ("resident", "swapped", "streamed"):
                found[how] = await visits(client, house, how, args.visit, args.length, args.repeats)
        finally:
            await client.close()
        found["checked swap"] = await checked_swaps(served, house.root / "canaries.json", args.repeats)
    return found


def baselines(house: House, args: argparse.Namespace, turns: Turns) -> dict[str, Any]:
    """The same visits by transformers and by accelerate; None where a package is missing."""
    case = {
        "folders": [str(folder) for folder in house.folders.values()],
        "tokens": args.visit,
        "length": args.length,
        "vocab": args.vocab,
        "laps": args.repeats,
        "scratch": str(house.root / "offload"),
    }
    found: dict[str, Any] = {}
    for how, package in (("from_pretrained", "transformers"), ("disk_offload", "accelerate")):
        turns.start(how)
        there = find_spec(package) is not None
        found[how] = run_case("benchmarks.teachers_baselines", case | {"how": how}, threads=1) if there else None
    return found


async def on_a_slow_link(house: House, args: argparse.Namespace, turns: Turns) -> dict[str, Any]:
    """Swap or stream on an emulated link, and traces through the manager, measured and simulated."""
    with serve(house, room=args.teachers + 0.2, name="wide") as wide:
        turns.start("swapped or streamed on the slow link")
        link = await link_for(house, await speed_of(wide, args), args)
        found: dict[str, Any] = {"link_bytes_per_s": link, "traces": []}
        with serve(house, room=ROOM, link_bytes_per_s=link, name="shared") as shared:
            found["speed"] = asdict(await speed_of(shared, args))
            client = await open_client(shared)
            try:
                points = [round(share * args.break_even) for share in (0.25, *SHARES)]
                found["choices"] = await choices(client, house, points, args.length, 2 * args.repeats + 1)
            finally:
                await client.close()
            found["checked_copy_s"] = await checked_swaps(shared, house.root / "canaries.json", 1)
            for _ in range(args.repeats):
                turns.start("traces through the manager")
                found["traces"] += await traces(house, args, shared, wide, median(found["checked_copy_s"]))
    return found


async def link_for(house: House, now: Speed, args: argparse.Namespace) -> float:
    """Bytes/s with which a swap takes as long as scoring `--break-even` tokens, the checks after its copy included."""
    aim_s = 2 * args.break_even * house.costs.active_params / now.flops_per_s
    trial = house.costs.bytes / aim_s
    with serve(house, room=ROOM, link_bytes_per_s=trial, name="trial") as served:
        taken_s = median(await checked_swaps(served, house.root / "canaries.json", 1))
    checks_s = max(0.0, taken_s - aim_s)
    return house.costs.bytes / max(aim_s - checks_s, aim_s / 4)


async def speed_of(served: Served, args: argparse.Namespace) -> Speed:
    """Of calls between half and twice B* tokens, as visits are."""
    client = await open_client(served)
    try:
        return await speed(client, served.house, args.length, (args.break_even // 2, 2 * args.break_even), 5)
    finally:
        await client.close()


async def traces(
    house: House, args: argparse.Namespace, shared: Served, wide: Served, load_s: float
) -> list[dict[str, Any]]:
    """One trace for each number of tokens a visit: in the room of two, and with all resident. Speeds are measured
    before and after: a shared machine is not as fast at all times."""
    link, canaries = house.costs.bytes / load_s, house.root / "canaries.json"
    rows: list[dict[str, Any]] = []
    before = await speed_of(shared, args)
    for share in SHARES:
        visit, rounds = round(share * args.break_even), max(1, round(args.copies / share))
        trace = make_trace(house, before, visit=visit, length=args.length, rounds=rounds, load_s=load_s)
        outcome = await measure(shared, trace, before, link, canaries)
        after = await speed_of(shared, args)
        now = before.mean(after)
        predicted, bound_s = predict(
            house, trace, now, link_bytes_per_s=link, budget_bytes=shared.budget_bytes, loads=outcome.loads
        )
        share = visit / (now.flops_per_s * load_s / (2 * house.costs.active_params))  # with the speed of now
        row = {"visit": visit, "share": share, "tokens": trace.tokens, "speed": asdict(now), "bound_s": bound_s}
        row |= {"measured": asdict(outcome), "simulated": asdict(predicted)}
        if visit >= args.break_even:
            row["resident"] = asdict(await measure(wide, trace, now, 1e10, canaries))
        rows.append(row)
        before = await speed_of(shared, args) if "resident" in row else after
    return rows


if __name__ == "__main__":
    main()
