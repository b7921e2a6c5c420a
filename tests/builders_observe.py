"""A made-up run for the observer: sample, scores, steps, and a clock that a test winds by hand."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from distill.config import ObserveConfig
from distill.observe import EvalRecord, Observer
from distill.protocols import PublishResult, TeacherFigures
from distill.types import Sample, ScoredSample, StepResult, TeacherScores, sample_id

TEACHERS = ("math", "code", "style")


class Clock:
    """Stands in for time.monotonic in the observer."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def wind(monkeypatch: pytest.MonkeyPatch, now: float = 1000.0) -> Clock:
    clock = Clock(now)
    monkeypatch.setattr("distill.observe.observer.time", SimpleNamespace(monotonic=clock, strftime=time.strftime))
    return clock


def observer(folder: Path, **changes: Any) -> Observer:
    settings: dict[str, Any] = {
        "run_name": "made-up",
        "total_steps": 10,
        "teachers": TEACHERS,
        "domain_teachers": {"sums": ("math",), "programs": ("code", "style")},
        "console": Console(file=io.StringIO(), width=120),
    }
    config = changes.pop("config", ObserveConfig(sinks=["jsonl"], progress="none"))
    return Observer(folder, config, **(settings | changes))


def scored(ordinal: int = 0, *, versions: Sequence[int] = (0, 0), teacher: str = "math") -> ScoredSample:
    length = len(versions)
    sample = Sample(
        id=sample_id(ordinal),
        ordinal=ordinal,
        domain="sums",
        teachers={teacher: 1.0},
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -1.0, np.float32),
        versions=np.asarray(versions, np.int32),
        finish_reason="stop",
    )
    return ScoredSample(sample, (TeacherScores(teacher, np.full(length, -0.5, np.float32)),))


def stepped(version: int, **changes: Any) -> StepResult:
    settings: dict[str, Any] = {
        "version": version,
        "loss": 1.0 / version,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "tokens": 20,
        "seconds": 0.5,
        "kl": dict.fromkeys(TEACHERS, 0.5 / version),
        "token_share": dict.fromkeys(TEACHERS, 1 / 3),
        "entropy_gap": {},
        "peak_memory_bytes": 10**9,
    }
    return StepResult(**(settings | changes))


def published(version: int) -> PublishResult:
    return PublishResult(version, "digest", 4_000_000, 0.1, ("rollout-0",), {}, {"rollout-0": "shm"})


def tell_step(
    seen: Observer,
    version: int,
    samples: Sequence[ScoredSample] | None = None,
    *,
    swaps: Mapping[str, int] | None = None,
    set_aside: Mapping[str, int] | None = None,
    **changes: Any,
) -> None:
    seen.step(
        stepped(version, **changes),
        samples if samples is not None else [scored(version, versions=[version - 1] * 4)],
        set_aside=set_aside or {},
        queue_age_s=dict.fromkeys(TEACHERS, 0.2),
        swaps=swaps or dict.fromkeys(TEACHERS, version),
        slots=TeacherFigures(
            loads=2 * version, load_bytes=100 * version, busy_s=3.0 * version, stalled_s=float(version)
        ),
        publish=published(version),
        store_size=7,
    )


def evaluated(
    seen: Observer, who: str, domain: str, accuracy: float | None, *, step: int = 0, kl: float | None = None
) -> None:
    seen.evaluation(EvalRecord(step, step, who, domain, accuracy, kl, 100))
