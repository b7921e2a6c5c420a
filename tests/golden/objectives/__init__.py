"""Runs golden data for the objectives (`FORMAT.md` beside the data) on the product's own code, never on a second one.

    python -m tests.golden.objectives tests/golden/data/objectives

Adding a set: a module named like the set (`s3_estimators.py`) with `KINDS`, a mapping from a case's kind to a function
`(case, precision) -> {name: number or array}`. It returns what the product gives for every name in `case.expect` (names
that begin with `wrong_` may be left out), or raises `Mismatch` for a claim that is no number. Where the case wants an
error, or accepts one, the function just lets the product's DistillError out.
"""
