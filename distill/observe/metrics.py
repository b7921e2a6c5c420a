"""The one table of metric names. A name that is not in it cannot be written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    unit: str
    reduction: Reduction
    """How the values of several steps become one: in the report's curves and in wandb's summary."""
    help: str


METRICS: dict[str, Metric] = {
    "train/loss": Metric("nat", "mean", "the objective, over the batch as `objective.reduction` says"),
    "train/grad_norm": Metric("1", "mean", "norm of the gradient before clipping"),
    "train/lr": Metric("1", "last", "learning rate of the step"),
    "train/samples": Metric("sample", "sum", "samples that the step learnt from"),
    "train/tokens": Metric("token", "sum", "response tokens that carried a loss"),
    "quarantine/samples": Metric("sample", "sum", "samples of the step's batch that were set aside, and not learnt"),
    "reward/<domain>": Metric("1", "mean", "mean reward of the batch's samples of a domain, where outcomes count"),
    "train/response_tokens": Metric("token", "mean", "mean length of the batch's responses"),
    "teacher/kl/<teacher>": Metric(
        "nat", "mean", "KL(student ‖ teacher), mean over the tokens that the teacher scored"
    ),
    "teacher/token_share/<teacher>": Metric(
        "1", "mean", "share of the batch's response tokens that the teacher scored"
    ),
    "teacher/entropy_gap/<teacher>": Metric("nat", "mean", "entropy of the teacher minus entropy of the student"),
    "objective/<metric>/<teacher>": Metric(
        "1", "mean", "what else the objective measures, mean over the tokens that the teacher scored; see objectives"
    ),
    "teacher/queue_age_s/<teacher>": Metric("s", "max", "how long the teacher's oldest waiting sample has waited"),
    "teacher/quarantined/<teacher>": Metric("sample", "sum", "samples of the batch set aside because of the teacher"),
    "teacher/swaps/<teacher>": Metric("1", "last", "times the teacher was loaded into a slot, since the run began"),
    "staleness/max": Metric("version", "max", "weight versions that the oldest token of the batch lags behind"),
    "staleness/mean": Metric("version", "mean", "the same, mean over samples, each by its oldest token"),
    "rate/rollout_tok_s": Metric("token/s", "mean", "response tokens written per second in which any rollout ran"),
    "rate/score_tok_s": Metric("token/s", "mean", "tokens scored per second in which any teacher scored"),
    "rate/train_tok_s": Metric("token/s", "mean", "response tokens learnt per second of the training step"),
    "time/step_s": Metric("s", "sum", "wall time since the step before"),
    "time/rollout_s": Metric(
        "s", "sum", "seconds in which any rollout ran; like those below, counted in the step in which the work ended"
    ),
    "time/score_s": Metric("s", "sum", "seconds in which any teacher scored"),
    "teacher/dropped/<teacher>": Metric("1", "last", "samples that went on without the teacher, since the run began"),
    "slots/stall_share": Metric(
        "1",
        "last",
        "share of the time in which a teacher was wanted in which its slots stood still, since the run began",
    ),
    "teacher/cache_hit_share": Metric(
        "1", "last", "share of the response tokens to score that the score cache knew, since the run began"
    ),
    "slots/load_bytes": Metric("B", "last", "weights that were copied into slots, since the run began"),
    "slots/streams": Metric("1", "last", "batches that were scored layer by layer, since the run began"),
    "time/swap_s": Metric("s", "sum", "seconds in which any teacher was being loaded"),
    "time/train_s": Metric("s", "sum", "seconds in which the student learnt"),
    "time/publish_s": Metric("s", "sum", "seconds in which weights were sent"),
    "time/wait_samples_s": Metric(
        "s", "sum", "seconds of the step in which the student neither learnt, sent weights nor was saved"
    ),
    "publish/seconds": Metric("s", "mean", "duration of one weight update, until all receivers agreed"),
    "publish/bytes": Metric("B", "sum", "payload of the weight update"),
    "publish/receivers": Metric("1", "last", "rollout servers that committed the weight update"),
    "memory/peak_gb": Metric("GB", "max", "largest memory of the run's processes on the controller's machine so far"),
    "memory/student_peak_gb": Metric("GB", "max", "largest memory of the training process, as its backend reports it"),
    "store/size": Metric("sample", "last", "scored samples that wait for the student"),
    "eval/accuracy/<domain>": Metric("1", "last", "share of held-out prompts that the student answers right"),
    "eval/kl/<domain>": Metric(
        "nat",
        "last",
        "KL(student ‖ teacher) on fixed held-out answers; KL(teacher ‖ student), estimated, from sampled tokens",
    ),
    "eval/teacher_accuracy/<teacher>/<domain>": Metric(
        "1", "last", "share of held-out prompts that a teacher answers right"
    ),
}

_FAMILIES = {_name.partition("/<")[0]: _name for _name in METRICS if "<" in _name}


def metric(name: str) -> Metric:
    """The table's entry; "teacher/kl/math" is one of "teacher/kl/<teacher>". Raises KeyError if there is none."""
    if name in METRICS and "<" not in name:
        return METRICS[name]
    for family in ("/".join(name.split("/")[:2]), name.partition("/")[0]):
        if family in _FAMILIES and len(name) > len(family) + 1:
            return METRICS[_FAMILIES[family]]
    raise KeyError(f"{name!r} is not in distill.observe.metrics.METRICS")


def check_names(names: Iterable[str]) -> None:
    for name in names:
        metric(name)
