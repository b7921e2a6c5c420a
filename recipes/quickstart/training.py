"""Training and measuring of the tiny models: cross entropy on answers, exact match on questions.

Everything is reproducible for a seed on one CPU: one thread, seeded draws, no dropout.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from domains import Row, Split
from tinymodel import EOS, PAD_ID
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MAX_ANSWER_TOKENS = 17  # MMMDCCCLXXXVIII has 15 letters; then the end token
IGNORED_LABEL = -100
BATCH_ROWS = 64

Report = Callable[[int, int], None]
"""Called with (steps done, steps expected)."""


class MissedWindow(Exception):
    """No snapshot of this base lies in the window; another seed may do better."""


def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> dict[str, float]:
    """Share of `rows` a domain that the model answers exactly, end token included, greedily."""
    prompts = tokenizer([row.prompt for row in rows], return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(  # pyright: ignore[reportAttributeAccessIssue]: its type asks for more than any model has
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        do_sample=False,
        max_new_tokens=MAX_ANSWER_TOKENS,
    )
    right: dict[str, list[bool]] = {}
    for row, ids in zip(rows, output[:, prompts["input_ids"].shape[1] :].tolist(), strict=True):
        written = tokenizer.decode([token for token in ids if token != PAD_ID])
        right.setdefault(row.domain, []).append(written == row.answer + EOS)
    return {domain: sum(hits) / len(hits) for domain, hits in right.items()}


def train_step(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, optimizer: torch.optim.AdamW, rows: Sequence[Row]
) -> None:
    """One AdamW step on the mean cross entropy of the answers' tokens and their end tokens."""
    texts = [row.prompt + row.answer + EOS for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)
    for label, row in zip(labels, rows, strict=True):
        label[: 1 + len(row.prompt)] = IGNORED_LABEL  # BOS and one token a character
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _adamw(model: LlamaForCausalLM, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)


def _set_lr(optimizer: torch.optim.AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@dataclass(frozen=True)
class BaseRecipe:
    """How the base is made: trained on all domains until it knows a little of each and none well.

    The letter tasks jump from 0 to 80 % within 20 to 40 steps, so the stop is closed-loop: short strides, each
    followed by a measurement. A stride that passes `ceiling` is undone and tried again with half the learning rate
    and less of the domain that jumped; shares favour the domain that is furthest behind.
    """

    lr: float = 2e-3
    warmup_steps: int = 20
    first_check: int = 60
    stride: int = 5
    max_strides: int = 60
    floor: float = 0.15
    ceiling: float = 0.36
    share_target: float = 0.35

    @property
    def most_steps(self) -> int:
        return self.first_check + self.stride * self.max_strides


def train_base(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    splits: Mapping[str, Split],
    seed: int,
    recipe: BaseRecipe,
    report: Report = lambda done, total: None,
) -> dict[str, float]:
    """Train `model` in place into the window; returns its accuracies on the development questions.

    Raises MissedWindow when no stride ends with every domain between `floor` and `ceiling`.
    """
    rng = random.Random(f"base, seed {seed}")
    development = [split.domain.row(question) for split in splits.values() for question in split.development]
    shares = dict(zip(splits, (0.30, 0.35, 0.35), strict=True))
    optimizer = _adamw(model, recipe.lr)

    def stride(steps: Iterable[int], lr: float) -> None:
        for step in steps:
            _set_lr(optimizer, lr * min(1.0, (step + 1) / recipe.warmup_steps))
            names = rng.choices(list(shares), weights=list(shares.values()), k=BATCH_ROWS)
            train_step(model, tokenizer, optimizer, [splits[name].fresh(rng) for name in names])

    lr, step, total = recipe.lr, recipe.first_check, recipe.most_steps
    scores: dict[str, float] = {}
    stride(range(recipe.first_check), lr)
    snapshot = _snapshot(model, optimizer)
    for _ in range(recipe.max_strides):
        report(step, total)
        stride(range(step, step + recipe.stride), lr)
        step += recipe.stride
        scores = accuracy(model, tokenizer, development)
        if max(scores.values()) > recipe.ceiling:
            model.load_state_dict(snapshot[0])
            optimizer.load_state_dict(copy.deepcopy(snapshot[1]))
            lr /= 2
            shares = {name: share * (0.3 if scores[name] > recipe.ceiling else 1.0) for name, share in shares.items()}
            continue
        if min(scores.values()) >= recipe.floor:
            report(total, total)
            return scores
        snapshot = _snapshot(model, optimizer)
        shares = {name: 0.15 + max(0.0, recipe.share_target - score) for name, score in scores.items()}
    reached = ", ".join(f"{score:.1%} of {name}" for name, score in scores.items())
    raise MissedWindow(
        f"the base of seed {seed} answers {reached} after {step} steps; "
        f"wanted: each between {recipe.floor:.0%} and {recipe.ceiling:.0%}"
    )


def _snapshot(model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


@dataclass(frozen=True)
class ExpertRecipe:
    """How an expert is made from the base: one domain only, learning rate falling linearly to `lr_final_ratio`."""

    steps: int
    lr: float = 3e-3
    warmup_steps: int = 10
    lr_final_ratio: float = 0.02


EXPERTS: dict[str, ExpertRecipe] = {"sort": ExpertRecipe(120), "rev": ExpertRecipe(120), "roman": ExpertRecipe(200)}


def train_expert(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    split: Split,
    seed: int,
    recipe: ExpertRecipe,
    report: Report = lambda done, total: None,
) -> None:
    """Train `model` in place on one domain."""
    rng = random.Random(f"expert {split.domain.name}, seed {seed}")
    optimizer = _adamw(model, recipe.lr)
    for step in range(recipe.steps):
        decay = 1.0 - (1.0 - recipe.lr_final_ratio) * step / recipe.steps
        _set_lr(optimizer, recipe.lr * min((step + 1) / recipe.warmup_steps, decay))
        train_step(model, tokenizer, optimizer, [split.fresh(rng) for _ in range(BATCH_ROWS)])
        report(step + 1, recipe.steps)
