"""A tiny student, tiny teachers, and batches that those teachers scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from distill.config.models import StudentConfig
from distill.types import Batch, Sample, ScoredSample, Signal, SignalSpec, TeacherScores
from students.hf.backend import HFStudent
from tests.builders_objectives import log_outside

VOCAB = 24
"""Tokens of the tokenizer: the common vocabulary."""
HEAD_ROWS = 32
"""Rows of the models' heads; those past VOCAB are padding."""


def start_student(model: Path, **changes: Any) -> HFStudent:
    return HFStudent(student_config(model, **changes), seed=0, total_steps=20, vocab_size=VOCAB)


def weights_of(student: HFStudent) -> dict[str, bytes]:
    return {name: data.tobytes() for name, _, _, data in student.weights()}


def write_student(
    folder: Path, *, seed: int = 0, tied: bool = False, layers: int = 2, hidden: int = 32, dropout: float = 0.0
) -> Path:
    """A tiny Llama-shaped model with a tokenizer beside it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=HEAD_ROWS,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        # peaked enough for its distributions to differ from token to token
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(ord("a") + index): 3 + index for index in range(VOCAB - 3)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def write_experts(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """A tiny mixture of three experts, `mixtral` or `qwen3_moe`, with a tokenizer beside it. In the model a layer's
    experts are two tensors, in its files nine."""
    settings: dict[str, Any] = {
        "vocab_size": HEAD_ROWS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    write_student(folder)
    torch.manual_seed(seed)
    if kind == "mixtral":
        model: Any = MixtralForCausalLM(MixtralConfig(**settings, num_local_experts=3))
    else:
        experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 4}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts))
    model.save_pretrained(folder)
    return folder


def student_config(model: Path, **changes: object) -> StudentConfig:
    """`eps` is large, so that a step is smooth in the gradient: with a small one AdamW moves a weight whose gradient is
    only rounding by as much as any other, and two ways to add up the same gradient end far apart."""
    settings = {"model": model, "lr": 1e-2, "warmup_steps": 2, "device": "cpu", "eps": 1e-3} | changes
    return StudentConfig.model_validate(settings)


def make_batch(
    spec: SignalSpec,
    *,
    version: int = 0,
    count: int = 6,
    seed: int = 0,
    teachers: Sequence[Mapping[str, float]] = ({"math": 1.0},),
    domains: Sequence[str] = ("math",),
) -> Batch:
    """`count` samples of random tokens and lengths. Sample i has the teachers and the domain number i, in turn."""
    rng = np.random.default_rng(seed)
    samples: list[ScoredSample] = []
    for index in range(count):
        weights = teachers[index % len(teachers)]
        response = int(rng.integers(1, 9))
        sample = Sample(
            id=f"v{version}-s{index}",
            ordinal=index,
            domain=domains[index % len(domains)],
            teachers=weights,
            prompt_ids=rng.integers(3, VOCAB, int(rng.integers(1, 8))).astype(np.int32),
            response_ids=rng.integers(2, VOCAB, response).astype(np.int32),
            logprobs=np.full(response, -np.log(VOCAB), np.float32),
            versions=np.full(response, version, np.int32),
            finish_reason="length",
        )
        samples.append(ScoredSample(sample, tuple(planted_scores(sample, teacher, spec) for teacher in weights)))
    return Batch(version, tuple(samples))


def planted_scores(sample: Sample, teacher: str, spec: SignalSpec) -> TeacherScores:
    """Scores of a teacher whose distribution depends on the previous token only, as a table that its name seeds."""
    table = np.random.default_rng(list(teacher.encode())).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
    ids = np.concatenate([sample.prompt_ids, sample.response_ids])
    before = ids[len(sample.prompt_ids) - 1 : -1]
    logits = torch.from_numpy(table[before])
    logp = logits.log_softmax(-1)
    sampled = logp.gather(-1, torch.from_numpy(sample.response_ids.astype(np.int64))[:, None])[:, 0].numpy()
    if spec.signal is Signal.FULL:
        return TeacherScores(teacher, sampled, full_logprobs=logp.numpy())
    if spec.signal is Signal.SAMPLED:
        return TeacherScores(teacher, sampled)
    top = logp.topk(min(spec.k, VOCAB), -1)
    tail = log_outside(logits, top.indices) if spec.k < VOCAB else torch.full((len(logp),), -torch.inf)
    return TeacherScores(
        teacher,
        sampled,
        topk_ids=top.indices.numpy().astype(np.int32),
        topk_logprobs=top.values.numpy(),
        log_tail=tail.numpy(),
    )
