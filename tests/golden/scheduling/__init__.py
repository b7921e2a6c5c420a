"""Scheduling cases with known answers (`FORMAT.md` beside the data), on the product's simulator, policies and bounds.

    python -m tests.golden.scheduling tests/golden/data/scheduling --logs /tmp/logs

`runner` says which module looks at which kind of case. `online` names the scheduler that is compared with the simple
policies: everything that the runner prints about "online" comes from `online.scheduler`.
"""
