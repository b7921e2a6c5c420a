"""Where metrics go. A sink is built by `cls(folder, config, run_name, resumed_from)` and is a `distill.protocols.Sink`.

`resumed_from` is the step of the checkpoint that the run goes on from, 0 for a new run: what an earlier process wrote
of later steps is done again, and must not be there twice.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from distill.config import ObserveConfig
from distill.errors import MissingDependency
from distill.observe.metrics import METRICS

# The classes of generated protobuf modules exist only at run time.
_Event: Any = getattr(event_pb2, "Event")  # noqa: B009
_SessionLog: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
_Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009
METRICS_FILE = "metrics.jsonl"


class JsonlSink:
    """metrics.jsonl: one JSON object a line, `{"step": 3, "time": unix seconds, name: value, …}`, flushed at once.

    A value that is not finite is null. Evaluations end later than their step, and have lines of their own.
    """

    def __init__(self, folder: Path, config: ObserveConfig, run_name: str, resumed_from: int = 0) -> None:
        path = folder / METRICS_FILE
        _drop_after(path, resumed_from)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars in `tensorboard/`, written by tensorboard's own event writer: neither torch nor tensorflow is needed."""

    def __init__(self, folder: Path, config: ObserveConfig, run_name: str, resumed_from: int = 0) -> None:
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=5)
        if resumed_from:
            start = _SessionLog(status=_SessionLog.START)
            self._writer.add_event(_Event(wall_time=time.time(), step=resumed_from + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [_Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(_Event(wall_time=time.time(), step=step, summary=_Summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. A resumed run goes on as the same wandb run, named by its folder.

    Raises MissingDependency when the package is not there.
    """

    def __init__(self, folder: Path, config: ObserveConfig, run_name: str, resumed_from: int = 0) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise MissingDependency(
                f"observe.sinks: wandb needs the package {error.name!r}, which is not installed",
                fix="pip install 'distill-engine[wandb]', or take wandb out of observe.sinks",
            ) from error
        identity = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]
        self._run: Any = wandb.init(
            project=config.wandb_project or "distill", name=run_name, id=identity, resume="allow", dir=str(folder)
        )
        self._run.define_metric("step", hidden=True)
        for name, metric in METRICS.items():
            summary = {"sum": "last"}.get(metric.reduction, metric.reduction)
            self._run.define_metric(
                name.partition("<")[0] + ("*" if "<" in name else ""), step_metric="step", summary=summary
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # An evaluation ends after later steps were written: "step" is a value, for wandb's own counter only rises.
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path) -> dict[str, tuple[array[float], array[float]]]:
    """metrics.jsonl by name: steps and values. Nulls, and a last line that was cut short, are left out."""
    found: dict[str, tuple[array[float], array[float]]] = {}
    if not path.exists():
        return found
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = _parse(line)
            if record is None:
                continue
            step = float(record.pop("step"))
            del record["time"]
            for name, value in record.items():
                if value is not None:
                    steps, values = found.setdefault(name, (array("d"), array("d")))
                    steps.append(step)
                    values.append(value)
    return found


def _parse(line: str) -> dict[str, Any] | None:
    """One line's object; None for a line that a killed process left unfinished."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _drop_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`; none of them when the run starts anew."""
    if not path.exists():
        return
    kept = path.with_suffix(".kept")
    with path.open(encoding="utf-8") as lines, kept.open("w", encoding="utf-8") as out:
        for line in lines:
            record = _parse(line)
            if step and record is not None and record["step"] <= step:
                out.write(line if line.endswith("\n") else line + "\n")
    kept.replace(path)
