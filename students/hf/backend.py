"""The Hugging Face student: one model, one optimiser, one step a batch.

Legend: N response tokens of a micro-batch, V common vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.config.models import StudentConfig
from distill.errors import ConfigError, StudentError
from distill.protocols import Objective
from distill.types import Batch, ScoredSample, StepResult
from students.hf import checkpoint
from students.hf.batching import MicroBatch, TeacherRows, require_sound, split
from students.hf.model import hf_weights, load_model, pick_device, response_logits, weight_bytes, write_model
from students.hf.optim import build_optimizer, lr_at
from students.memory import peak_memory_bytes

NAMED_SAMPLES = 8
"""Sample ids that an error about a whole batch lists."""


@dataclass
class _TeacherTally:
    """Sums over the rows of one teacher in one batch."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, metrics: dict[str, Tensor], tokens: int) -> None:
        self.tokens += tokens
        for name, values_N in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(values_N.double().sum())

    def mean(self, name: str) -> float:
        return self.sums[name] / self.tokens


class HFStudent:
    """Trains a causal language model of transformers on the scores of its teachers (`StudentBackend`).

    The loss of a step is the sum over response tokens and teachers of weight * divergence, divided by the number of
    response tokens of the whole batch: it does not depend on how the batch is split. Weights are kept in float32;
    `config.dtype` is that of the forward pass. On the CPU a step is reproducible bit by bit for a seed and a number of
    threads.
    """

    def __init__(self, config: StudentConfig, *, seed: int, total_steps: int, vocab_size: int) -> None:
        """`vocab_size`: the common vocabulary (the tokenizer's length), which logits are cut to. Raises ConfigError or
        EnvironmentFault when the model or the device cannot be had."""
        self._config = config
        self._total_steps = total_steps
        self._vocab_size = vocab_size
        self._device = pick_device(config.device)
        self._version = 0
        torch.manual_seed(seed)
        self._adopt(load_model(config.model, vocab_size, self._device))

    def _adopt(self, model: PreTrainedModel) -> None:
        model.train()
        if self._config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model = model
        self._optimizer = build_optimizer(model, self._config)

    @property
    def version(self) -> int:
        return self._version

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        """One optimiser step. Raises TeacherError or StudentError; then neither weights nor moments have changed."""
        began = time.monotonic()
        if batch.version != self._version:
            raise StudentError(
                f"the batch is for weight version {batch.version}, the student has {self._version}",
                why="a step on the wrong weights would be lost, or done twice",
                fix="load the checkpoint of that version before the step",
            )
        require_sound(batch, objective.spec, self._vocab_size)
        tallies: dict[str, _TeacherTally] = {}
        loss = 0.0
        try:
            for samples in split(batch.samples, self._config.micro_batch_tokens):
                part = self._loss_sum(samples, objective, tallies) / batch.response_tokens
                part.backward()
                loss += float(part.detach())
            grad_norm = self._clip(batch)
            lr = lr_at(self._version, self._config, self._total_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._version += 1
        return StepResult(
            version=self._version,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=batch.response_tokens,
            seconds=time.monotonic() - began,
            kl={teacher: tally.mean("kl") for teacher, tally in tallies.items()},
            entropy_gap={
                name: tally.mean("entropy_gap") for name, tally in tallies.items() if "entropy_gap" in tally.sums
            },
            token_share={teacher: tally.tokens / batch.response_tokens for teacher, tally in tallies.items()},
            peak_memory_bytes=peak_memory_bytes(),
        )

    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Token mean of KL(p || q) per domain, without learning. Several teachers of a sample count by their weights.

        Exact when the objective's signal is full; otherwise what the objective's `kl` metric knows.
        """
        require_sound(batch, objective.spec, self._vocab_size)
        totals: dict[str, list[float]] = {}
        self._model.eval()
        try:
            with torch.no_grad():
                for domain in dict.fromkeys(item.sample.domain for item in batch.samples):
                    samples = [item for item in batch.samples if item.sample.domain == domain]
                    total = totals.setdefault(domain, [0.0, 0.0])
                    for part in split(samples, self._config.micro_batch_tokens):
                        for teacher_rows in self._forward(MicroBatch.collate(part, self._device), objective):
                            _, metrics = objective(teacher_rows.rows)
                            weights_N = teacher_rows.weights_N.double()
                            total[0] += float((weights_N * metrics["kl"].double()).sum())
                            total[1] += float(weights_N.sum())
        finally:
            self._model.train()
        return {domain: kl / weight for domain, (kl, weight) in totals.items() if weight}

    def weights(self) -> Iterator[tuple[str, str, tuple[int, ...], Any]]:
        """(Hugging Face name, dtype name, shape, flat uint8 array). On the CPU the arrays are views of the weights: use
        them before the next step."""
        return weight_bytes(self._model)

    def save(self, folder: Path) -> None:
        """Write a checkpoint that is also a Hugging Face folder; see `students.hf.checkpoint`."""
        with checkpoint.whole_folder(folder) as fresh:
            write_model(self._model, self._tokenizer_folder, fresh)
            state = checkpoint.optimizer_state(self._optimizer, self._model)
            checkpoint.write_state(fresh, self._version, state, self._device)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint as if never interrupted. Raises ConfigError when it is broken or of another student;
        the student is unchanged then."""
        version, tensors = checkpoint.read_state(folder)
        model = load_model(folder, self._vocab_size, self._device)
        if _shapes(model) != _shapes(self._model):
            raise ConfigError(
                f"checkpoint {folder} is of another model than {self._config.model}",
                why="its weights have other names or shapes",
                fix="resume with the student.model that the run was started with",
            )
        before = self._model, self._optimizer
        try:
            self._adopt(model)
            checkpoint.restore_optimizer(self._optimizer, model, tensors)
        except ConfigError:
            self._model, self._optimizer = before
            raise
        checkpoint.restore_rng(tensors, self._device)
        self._version = version

    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face folder: safetensors, config, generation config, tokenizer."""
        with checkpoint.whole_folder(folder) as fresh:
            write_model(self._model, self._tokenizer_folder, fresh)

    @property
    def _tokenizer_folder(self) -> Path:
        return self._config.tokenizer or self._config.model

    def _forward(self, micro: MicroBatch, objective: Objective) -> Iterator[TeacherRows]:
        low_precision = self._config.dtype == "bfloat16"
        cast = torch.autocast(self._device.type, torch.bfloat16) if low_precision else contextlib.nullcontext()
        with cast:
            logits_NV = response_logits(self._model, micro.input_ids_BT, micro.rows_N, self._vocab_size)
        return micro.by_teacher(logits_NV, objective.spec)

    def _loss_sum(
        self, samples: tuple[ScoredSample, ...], objective: Objective, tallies: dict[str, _TeacherTally]
    ) -> Tensor:
        """Sum over the response tokens of `samples` of the weighted losses of all their teachers."""
        total = torch.zeros((), device=self._device)
        for teacher_rows in self._forward(MicroBatch.collate(samples, self._device), objective):
            loss_N, metrics = objective(teacher_rows.rows)
            total = total + (teacher_rows.weights_N * loss_N).sum()
            tallies.setdefault(teacher_rows.teacher, _TeacherTally()).add(metrics, len(loss_N))
        return total

    def _clip(self, batch: Batch) -> float:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))
        if not math.isfinite(norm):
            ids = [item.sample.id for item in batch.samples]
            more = f" and {len(ids) - NAMED_SAMPLES} more" if len(ids) > NAMED_SAMPLES else ""
            raise StudentError(
                f"the gradient's norm is {norm} after the samples {', '.join(ids[:NAMED_SAMPLES])}{more}",
                why="the step was not applied; weights and optimiser are as before it",
                fix="lower student.lr, use student.dtype=float32, or an objective with bounded gradients (jsd)",
            )
        return norm


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in hf_weights(model).items()}
