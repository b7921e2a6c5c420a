"""The Hugging Face student: one model, one optimiser, one step a batch.

Legend: N trained tokens of a micro-batch, V common vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.config.models import LoraConfig, ObjectiveConfig, StudentConfig
from distill.errors import ConfigError, DistillError, StudentError
from distill.modeling import packed_attention
from distill.objectives import kernels
from distill.protocols import HeadFolder, Objective, WeightShard
from distill.types import Batch, Signal, StepResult
from students.hf import checkpoint, lora
from students.hf.batching import Lesson, MicroBatch, split
from students.hf.head import HeadInput, ReplacedHead, require_known_logits
from students.hf.lean_layers import lean
from students.hf.learning import HeadJob, Tally, lessons_of
from students.hf.model import (
    checkpoint_activations,
    copy_tokenizer,
    embedding_names,
    load_model,
    model_state,
    pick_device,
    weight_bytes,
    write_model,
)
from students.hf.optim import build_optimizer, lr_at
from students.hf.parallel import Sharded, make_parallel
from students.hf.parameters import Average, Parameters
from students.hf.shards import WeightNames
from students.hf.soundness import require_sound
from students.hf.state import first_difference, restore_training, training_state
from students.hf.teacher_heads import TeacherHeads
from students.memory import peak_memory_bytes

NAMED_SAMPLES = 8
"""Sample ids that an error about a whole batch lists."""


@dataclass
class _Trained:
    """A model and all that training keeps beside it; replaced as one when a checkpoint is loaded."""

    model: PreTrainedModel
    head: ReplacedHead
    parameters: Parameters
    optimizer: torch.optim.Optimizer
    average: Average | None
    names: WeightNames
    why_plain: str | None
    why_padded: str | None

    @property
    def packed(self) -> bool:
        return self.why_padded is None


class HFStudent:
    """Trains a causal language model of transformers on the scores of its teachers (`StudentBackend`).

    The loss of a step is the sum over trained tokens and teachers of weight * divergence, with factors that come from
    the whole batch (`objective.reduction`): it does not depend on how the batch is split. On the CPU a step is
    reproducible bit by bit for a seed and a number of threads.
    """

    def __init__(
        self,
        config: StudentConfig,
        *,
        seed: int,
        total_steps: int,
        vocab_size: int,
        rules: ObjectiveConfig | None = None,
        teacher_heads: Mapping[str, HeadFolder] = MappingProxyType({}),
    ) -> None:
        """`vocab_size`: the common vocabulary (the tokenizer's length), which logits are cut to. `rules`: how tokens
        and teachers are put together; of it, only reduction, mixture and outcome are read. `teacher_heads`: of teachers
        whose full rows come as hidden states.

        Raises ConfigError, MissingDependency or EnvironmentFault when the model or the device cannot be had.
        """
        self._config = config
        self._rules = ObjectiveConfig() if rules is None else rules
        self._total_steps = total_steps
        self._vocab_size = vocab_size
        self._device = pick_device(config.device)
        self._parallel = make_parallel(config.parallel, config.ranks, self._device)
        self._version = 0
        torch.manual_seed(seed)
        self._trained = self._start(config.model)
        self._heads = TeacherHeads(teacher_heads, vocab_size=vocab_size, device=self._device)
        if self._parallel.rank > 0:
            torch.manual_seed(seed + self._parallel.rank)  # dropout must not repeat rank 0's

    def _start(self, folder: Path) -> _Trained:
        """Everything anew, from the weights in `folder`."""
        config = self._config
        low_precision = config.dtype == "bfloat16"
        # weights that are spread over ranks stay float32, and are rounded on their way to a forward pass; no device
        # need have room for all of them
        spread = isinstance(self._parallel, Sharded)
        dtype = torch.bfloat16 if low_precision and not spread else torch.float32
        device = torch.device("cpu") if spread else self._device
        model = load_model(folder, self._vocab_size, device, dtype)
        if config.lora is not None:
            lora.adapt(model, config.lora)
        head = ReplacedHead(model)
        require_known_logits(model, head, self._vocab_size)
        # whatever the objective turns out to be
        kernels.choose(config.loss_kernel, self._kernel_head(head, sampled_only=True), kernels.why_unusable)
        why_plain = "student.lean_layers is false"
        if config.lean_layers:
            why_plain = lean(model, self._vocab_size)
        why_padded = "student.packing is false"
        if config.packing:
            why_padded = packed_attention.pack(model, self._vocab_size)
        model.train()
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        self._parallel.spread(model, low_precision=low_precision)
        parameters = Parameters(model, keep_all=config.lora is not None or low_precision)
        optimizer = build_optimizer(parameters.named, config, embeddings=embedding_names(model))
        average = None if config.ema_decay is None else Average(parameters, config.ema_decay)
        # published, exported: what the student computes with, but for the rounding of merged adapters
        names = WeightNames(model, model_state(model), torch.bfloat16 if low_precision else None)
        return _Trained(model, head, parameters, optimizer, average, names, why_plain, why_padded)

    @property
    def version(self) -> int:
        return self._version

    @property
    def why_plain(self) -> str | None:
        """Why the model's layers are its own and not the lean ones; None where they are lean."""
        return self._trained.why_plain

    @property
    def why_padded(self) -> str | None:
        """Why samples are padded and not packed; None where they are packed."""
        return self._trained.why_padded

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        """One optimiser step; none where the gradient is exactly 0, and a version later all the same.

        Raises TeacherError or StudentError; then neither weights nor moments have changed.
        """
        began = time.monotonic()
        if batch.version != self._version:
            raise StudentError(
                f"the batch is for weight version {batch.version}, the student has {self._version}",
                why="a step on the wrong weights would be lost, or done twice",
                fix="load the checkpoint of that version before the step",
            )
        require_sound(batch, objective, self._vocab_size, self._heads.sizes)
        trained = self._trained
        lessons = lessons_of(batch, self._rules)
        mine = [lessons[each.sample.id] for each in self._parallel.share(batch.samples) if each.sample.id in lessons]
        try:
            told = self._parallel.together(lambda: self._learn(mine, batch, objective).plain())
            self._parallel.sum_gradients(trained.parameters.values())
            grad_norm = self._clip(batch)
            lr = lr_at(self._version, self._config, self._total_steps)
            if grad_norm:
                self._move(lr)
        finally:
            trained.parameters.zero_grad()
        self._version += 1
        tokens = sum(len(lesson.trained) for lesson in lessons.values())
        tally = Tally.total(told)
        return StepResult(
            version=self._version,
            loss=tally.loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            seconds=time.monotonic() - began,
            kl=tally.means("kl"),
            entropy_gap=tally.means("entropy_gap"),
            token_share={teacher: count / tokens for teacher, count in tally.tokens.items()},
            objective={name: tally.means(name) for name in tally.metrics if name not in ("kl", "entropy_gap")},
            peak_memory_bytes=peak_memory_bytes(),
        )

    def _move(self, lr: float) -> None:
        """Apply the gradient. Not for one of exactly 0: decay and the memory of earlier steps would move weights that
        nothing holds in place, and where no sample counts only ddp has a gradient that AdamW would see."""
        trained = self._trained
        for group in trained.optimizer.param_groups:
            group["lr"] = lr
        trained.optimizer.step()
        trained.parameters.write_back()
        if trained.average is not None:
            trained.average.update()

    def _learn(self, lessons: list[Lesson], batch: Batch, objective: Objective) -> Tally:
        """Forward and backward over this rank's lessons."""
        job = self._head_job(objective, self._rules.mixture)
        tally = Tally()

        def work(micro: MicroBatch, at: HeadInput) -> Tensor:
            loss, metrics = job.loss(micro, at)
            tally.add(loss, metrics)
            return loss

        for loss in self._passes(lessons, batch, work):
            loss.backward()
        return tally

    def _head_job(self, objective: Objective, mixture: str) -> HeadJob:
        kernel = self.loss_kernel(objective).kernel
        return HeadJob(objective, self._vocab_size, self._config.head_chunk_tokens, mixture, self._heads, kernel)

    def loss_kernel(self, objective: Objective) -> kernels.Choice:
        """What computes the head's loss under `objective`. Raises as `kernels.choose` does."""
        head = self._kernel_head(self._trained.head, sampled_only=objective.contract.reads_sampled_only)
        return kernels.choose(self._config.loss_kernel, head, kernels.why_unusable)

    def _kernel_head(self, head: ReplacedHead, *, sampled_only: bool) -> kernels.Head:
        on_gpu = self._device.type == "cuda"
        return kernels.Head(
            device=self._device.type,
            dtype=self._config.dtype,
            sampled_only=sampled_only,
            vocab_size=self._vocab_size,
            transform=(1.0, None) if head.transform is None else (head.transform.scale, head.transform.cap),
            capability=torch.cuda.get_device_capability(self._device) if on_gpu else None,
        )

    def _passes(
        self, lessons: list[Lesson], batch: Batch, work: Callable[[MicroBatch, HeadInput], Tensor]
    ) -> Iterator[Tensor]:
        """What the model returns for each micro-batch of this rank's lessons, with `work` at its head.

        All ranks take part in as many micro-batches, those that have no more without a loss; an error waits until all
        are through, lest the others wait for this one.
        """
        parts = list(split(lessons, self._config.micro_batch_tokens, packed=self._trained.packed))
        rounds = self._parallel.rounds(len(parts))
        faults: list[DistillError] = []

        def careful(micro: MicroBatch, at: HeadInput, idle: bool) -> Tensor:
            try:
                return at.nothing() if idle else work(micro, at)
            except DistillError as error:
                faults.append(error)
                return at.nothing()

        for index in range(rounds):
            idle = index >= len(parts)
            micro = self._collate((Lesson(batch.samples[0], 0.0),) if idle else parts[index])
            with (
                self._parallel.micro_step(last=index == rounds - 1),
                self._trained.head.doing(micro.rows_N, partial(careful, micro, idle=idle)),
            ):
                yield self._trained.model(**micro.model_inputs)
            if faults and self._parallel.ranks == 1:
                break
        if faults:
            raise faults[0]

    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Token mean of KL(p || q) per domain, without learning. Several teachers of a sample count by their weights.

        Exact when the objective's signal is full, over the compared outcomes for a top-k. From sampled tokens alone it
        is an estimate of KL(q || p), for samples that a teacher wrote.
        """
        require_sound(batch, objective, self._vocab_size, self._heads.sizes)
        self._trained.model.eval()
        try:
            told = self._parallel.together(lambda: self._measure(batch, objective))
        finally:
            self._trained.model.train()
        result: dict[str, float] = {}
        for domain in told[0]:
            kl, weight = (sum(part[domain][index] for part in told) for index in (0, 1))
            if weight:
                result[domain] = kl / weight
        return result

    @torch.no_grad()
    def _measure(self, batch: Batch, objective: Objective) -> dict[str, list[float]]:
        """Domain -> sum of weight * KL and sum of weights, over this rank's share."""
        job = self._head_job(objective, "weighted")
        totals: dict[str, list[float]] = {}
        sign = -1.0 if objective.spec.signal is Signal.SAMPLED else 1.0

        def work(micro: MicroBatch, at: HeadInput) -> Tensor:
            _, metrics = job.loss(micro, at)
            for part in micro.teacher_parts(objective.spec, dtype=torch.float32, heads=self._heads):
                weights_n = part.weights_n.double()
                # of tokens that a teacher wrote, the mean of log p - log q estimates -KL(q || p)
                kl_n = metrics[part.teacher]["kl"].double() * sign
                total[0] += float((weights_n * kl_n).sum())
                total[1] += float(weights_n.sum())
            return at.nothing()

        with self._parallel.forward_only():
            for domain in dict.fromkeys(item.sample.domain for item in batch.samples):
                of_domain = [item for item in batch.samples if item.sample.domain == domain]
                shared = [each for each in self._parallel.share(of_domain) if each.sample.loss_tokens]
                mine = [Lesson(each, 1.0, np.zeros(each.sample.loss_tokens)) for each in shared]
                total = totals.setdefault(domain, [0.0, 0.0])
                for _ in self._passes(mine, batch, work):
                    pass
        return totals

    def weights(self) -> Iterator[tuple[str, str, tuple[int, ...], Any]]:
        """(Hugging Face name, dtype name, shape, flat uint8 array): what the student computes with.

        Adapters are merged in, and the sum rounded to the weight's dtype. On the CPU the arrays are views of the
        weights where they can be: use them before the next step.
        """
        return weight_bytes(self._trained.model, self._trained.names)

    def shards(self) -> Iterator[WeightShard]:
        """This rank's pieces of the same."""
        return self._trained.names.pieces(model_state(self._trained.model), self._parallel)

    def save(self, folder: Path) -> None:
        """Write a checkpoint that is also a Hugging Face folder; see `students.hf.checkpoint`."""
        trained = self._trained
        checkpoint.save(
            folder,
            self._parallel,
            self._write_model,
            version=self._version,
            tensors=training_state(trained.parameters, trained.optimizer, trained.average),
            device=self._device,
        )

    def _write_model(self, folder: Path) -> None:
        write_model(
            self._trained.model,
            self._trained.names,
            self._tokenizer_folder,
            folder,
            first=self._parallel.rank == 0,
        )

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint as if never interrupted. Raises ConfigError when it is broken or of another student;
        the student is unchanged then."""
        saved = checkpoint.read(folder, self._parallel)
        # adapters are merged in the folder's weights, and belong to those that training started from
        trained = self._start(self._config.model if self._config.lora else folder)
        if trained.names.stored != self._trained.names.stored:
            raise ConfigError(
                f"checkpoint {folder} is of another model than {self._config.model}",
                why="its weights have other names or shapes",
                fix="resume with the student.model that the run was started with",
            )
        restore_training(saved, trained.parameters, trained.optimizer, trained.average)
        if self._config.lora is not None:
            self._require_same_base(folder, trained)
        saved.restore_rng(self._device)
        self._trained, self._version = trained, saved.version

    def _require_same_base(self, folder: Path, trained: _Trained) -> None:
        """Merged with the checkpoint's adapters, today's base must give the checkpoint's weights."""
        different = first_difference(folder, trained.names.whole(model_state(trained.model)))
        if different is not None:
            raise ConfigError(
                f"checkpoint {folder}: with its adapters, {different} is another than in the checkpoint",
                why=f"{self._config.model} is not the base that they were trained on",
                fix="resume with the student.model that the run was started with",
            )

    def export(self, folder: Path) -> None:
        """Write an ordinary Hugging Face folder: safetensors, config, generation config, tokenizer. It holds the
        averaged weights where `student.ema_decay` is set, and the adapter alone where `student.lora.export` says so."""
        trained = self._trained
        average = trained.average
        with contextlib.nullcontext() if average is None else trained.parameters.replaced_by(average.values):
            if self._config.lora is not None and self._config.lora.export == "adapter":
                checkpoint.export(folder, self._parallel, partial(self._write_adapter, self._config.lora))
            else:
                checkpoint.export(folder, self._parallel, self._write_model)

    def _write_adapter(self, config: LoraConfig, folder: Path) -> None:
        state = lora.adapter_state(self._trained.model)
        if self._parallel.rank == 0:
            lora.write_adapter(state, config, self._config.model, folder)
            copy_tokenizer(self._tokenizer_folder, folder)

    @property
    def _tokenizer_folder(self) -> Path:
        return self._config.tokenizer or self._config.model

    def _collate(self, lessons: tuple[Lesson, ...]) -> MicroBatch:
        return MicroBatch.collate(lessons, self._device, packed=self._trained.packed)

    def _clip(self, batch: Batch) -> float:
        norm = self._parallel.clip(self._trained.parameters.values(), self._config.max_grad_norm)
        if not math.isfinite(norm):
            ids = [item.sample.id for item in batch.samples]
            more = f" and {len(ids) - NAMED_SAMPLES} more" if len(ids) > NAMED_SAMPLES else ""
            raise StudentError(
                f"the gradient's norm is {norm} after the samples {', '.join(ids[:NAMED_SAMPLES])}{more}",
                why="the step was not applied; weights and optimiser are as before it",
                fix="lower student.lr, use student.dtype=float32, or an objective with bounded gradients (jsd)",
            )
        return norm
