"""Our side of `benchmarks.versus_trl`: steps of the Hugging Face student, and its teacher beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import PeakMemory
from benchmarks.versus_trl import BETAS, LR, MAX_GRAD_NORM, VOCAB, WARM_UP, WEIGHT_DECAY, clock, report_case
from distill.config.models import StudentConfig
from distill.objectives import gemm
from distill.objectives.divergence import ReverseKL
from distill.types import Batch, Sample, ScoredSample, TeacherScores
from students.hf.backend import HFStudent


def student_of(case: dict[str, Any]) -> HFStudent:
    settings = {
        "model": Path(case["student"]),
        "lr": LR,
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "device": "cpu",
        # one forward pass for all samples, as on the other side
        "micro_batch_tokens": len(case["answers"])
        * max(len(prompt) + len(answer) for prompt, answer in case["answers"]),
    }
    config = StudentConfig.model_validate(settings | case["settings"])
    return HFStudent(config, seed=0, total_steps=1000, vocab_size=VOCAB)


@torch.no_grad()
def score(teacher: PreTrainedModel, index: int, prompt: list[int], answer: list[int]) -> ScoredSample:
    """Sample number `index` with the teacher's log-probabilities of the whole vocabulary, as a server sends them."""
    model: Any = teacher
    hidden_TD = model.model(torch.tensor([prompt + answer]), use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    logp_TV = model.lm_head(hidden_TD).log_softmax(-1)
    sampled = logp_TV[range(len(answer)), answer].numpy()
    sample = Sample(
        id=f"s{index}",
        ordinal=index,
        domain="d",
        teachers={"t": 1.0},
        prompt_ids=np.asarray(prompt, np.int32),
        response_ids=np.asarray(answer, np.int32),
        logprobs=sampled,
        versions=np.zeros(len(answer), np.int32),
        finish_reason="length",
    )
    return ScoredSample(sample, (TeacherScores("t", sampled, full_logprobs=logp_TV.numpy()),))


def run(case: dict[str, Any]) -> dict[str, Any]:
    """First loss; seconds of each counted step with and without the teacher; bytes of each peak."""
    gemm.ONEDNN = gemm.ONEDNN and case["onednn"]
    now = clock(case)
    student = student_of(case)
    teacher = AutoModelForCausalLM.from_pretrained(case["teacher"], dtype=torch.float32).eval()
    result: dict[str, Any] = {"loss": None, "with": [], "without": [], "peaks": []}
    for step in range(WARM_UP + case["steps"]):
        peak = PeakMemory()
        peak.start()
        began = now()
        samples = tuple(score(teacher, index, *pair) for index, pair in enumerate(case["answers"]))
        scored = now()
        loss = student.step(Batch(student.version, samples), ReverseKL()).loss
        ended, highest = now(), peak.stop()
        del samples  # before the next step's start is taken
        if step == 0:
            result["loss"] = loss
        if step >= WARM_UP:
            result["with"].append(ended - began)
            result["without"].append(ended - scored)
            result["peaks"].append(highest)
    return result


if __name__ == "__main__":
    report_case(run)
