"""TRL's side of `benchmarks.versus_trl`: steps of `DistillationTrainer`. Runs in TRL's environment, without Distill."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from benchmarks.common import PeakMemory
from benchmarks.versus_trl import BETAS, LR, MAX_GRAD_NORM, WARM_UP, WEIGHT_DECAY, clock, report_case


class Watch(TrainerCallback):
    """Loss, time, time of the teacher's layers and peak memory of each step."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._peak = PeakMemory()
        self.losses: list[float] = []
        self.whole: list[float] = []
        self.teacher: list[float] = []
        self.peaks: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.teacher.append(0.0)
        self._peak.start()
        self._step_began = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.whole.append(self._now() - self._step_began)
        self.peaks.append(self._peak.stop())

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is not None and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def watch_teacher(self, layers: Any) -> None:
        def before(*_: Any) -> None:
            self._teacher_began = self._now()

        def after(*_: Any) -> None:
            self.teacher[-1] += self._now() - self._teacher_began

        layers.register_forward_pre_hook(before)
        layers.register_forward_hook(after)


def settings_of(case: dict[str, Any], folder: str) -> DistillationConfig:
    return DistillationConfig(
        output_dir=folder,
        per_device_train_batch_size=len(case["answers"]),
        gradient_accumulation_steps=1,
        max_steps=case["steps"] + WARM_UP,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        beta=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def run(case: dict[str, Any]) -> dict[str, Any]:
    """First loss; seconds of each counted step with and without the teacher's layers; bytes of each peak."""
    watch = Watch(clock(case))
    prompts, answers = zip(*case["answers"], strict=True)
    with tempfile.TemporaryDirectory() as scratch:
        settings = settings_of(case, scratch)
        trainer = DistillationTrainer(
            model=case["student"],
            teacher_model=case["teacher"],
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["w3"] * (len(answers) * settings.max_steps)}),
            processing_class=AutoTokenizer.from_pretrained(case["student"], padding_side="left"),
            callbacks=[watch],
        )
        trainer._generate = lambda _prompts: (list(prompts), list(answers), None, None, [])
        watch.watch_teacher(trainer.teacher_model.base_model)
        trainer.train()
    return {
        "loss": watch.losses[0],
        "with": watch.whole[WARM_UP:],
        "without": [whole - teacher for whole, teacher in zip(watch.whole, watch.teacher, strict=True)][WARM_UP:],
        "peaks": watch.peaks[WARM_UP:],
    }


if __name__ == "__main__":
    report_case(run)
