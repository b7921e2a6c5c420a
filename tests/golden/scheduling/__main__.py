"""`python -m tests.golden.scheduling DIR [--logs OUT]`: compares every number of every case below DIR.

Exit 0 when all are equal, every schedule obeys the rules and scheduler and planners meet their targets, 1 when not, 2
when DIR is not of the format.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.golden.scheduling.runner import NotGolden, Report, find, run_families
from tests.golden.scheduling.standing import Table

SHOWN = 10
"""Failures printed for a family; the rest are counted."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.scheduling", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="cases (*.json), in folders by family")
    parser.add_argument("--logs", type=Path, metavar="OUT", help="write the online schedule of each trace here")
    arguments = parser.parse_args(argv)
    table = Table()
    try:
        reports = [tell(report) for report in run_families(find(arguments.folder), table, arguments.logs)]
    except NotGolden as error:
        print(f"not golden data: {error}", file=sys.stderr)
        return 2
    for line in (*table.planned.lines(), *table.lines()):
        print(line)
    if table.slowest_ms:
        print(f"\nslowest decision of the online scheduler: {table.slowest_ms:.2f} ms")
    missed = [*table.planned.missed_targets(), *table.missed_targets()]
    for target in missed:
        print(f"target missed: {target}")
    return 1 if missed or any(report.failures for report in reports) else 0


def tell(report: Report) -> Report:
    counts = f"{report.cases:>4} cases  {report.numbers:>6} numbers  {len(report.failures):>4} differ"
    print(f"{report.family:<12} {counts}  {report.seconds:>7.1f} s", flush=True)
    for failure in report.failures[:SHOWN]:
        print(f"    {failure}")
    if len(report.failures) > SHOWN:
        print(f"    and {len(report.failures) - SHOWN} more")
    return report


if __name__ == "__main__":
    sys.exit(main())
