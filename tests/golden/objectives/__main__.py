"""`python -m tests.golden.objectives DIR`: exit 0 when all cases pass, 1 when not, 2 when DIR is not of the format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.golden.objectives.data import NotGolden
from tests.golden.objectives.runner import Report, run_folder

SHOWN = 10
"""Failures printed for a set; the rest are counted."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.objectives", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="manifests (*.json) and their arrays (*.npz)")
    folder = parser.parse_args(argv).folder
    try:
        reports = [tell(report) for report in run_folder(folder)]
    except NotGolden as error:
        print(f"not golden data: {error}", file=sys.stderr)
        return 2
    cases, passed = sum(report.cases for report in reports), sum(report.passed for report in reports)
    print(f"{'all':<20} {cases:>5} cases  {passed:>5} passed  {sum(report.seconds for report in reports):>6.1f} s")
    return 0 if passed == cases else 1


def tell(report: Report) -> Report:
    worst = report.worst
    nearest = f"  worst error / tolerance {worst.ratio:.2g} ({worst.case}, {worst.precision})" if worst else ""
    print(
        f"{report.name:<20} {report.cases:>5} cases  {report.passed:>5} passed  {report.seconds:>6.1f} s{nearest}",
        flush=True,
    )
    for verdict in report.failures[:SHOWN]:
        print(f"    {verdict.case} in {verdict.precision}: {verdict.failure}")
    if len(report.failures) > SHOWN:
        print(f"    and {len(report.failures) - SHOWN} more")
    return report


if __name__ == "__main__":
    sys.exit(main())
