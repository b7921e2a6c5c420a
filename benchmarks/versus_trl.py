"""One training step of the Hugging Face student beside one of TRL's `DistillationTrainer`: time and memory.

    python -m benchmarks.versus_trl --trl-python /path/to/venv-with-trl/bin/python

Both sides take the same students and teachers, the same prompts and answers, the same objective (reverse KL over the
full vocabulary, mean over the answers' tokens), float32, AdamW, clipping at 1, no gradient checkpointing and no
generation: TRL's trainer is handed the answers in place of its own `_generate`. Each side runs in its own processes, in
turns. That both report the same first loss shows that they do the same work.

TRL runs the teacher inside of its step; here a teacher is scored elsewhere, before the step. So two figures are given:
  with teacher     from token ids to new weights on both sides. On our side the teacher's forward pass and the
                   log-softmax of its logits are done in the same process before the step, one sample at a time.
  without teacher  TRL's step less the time of the teacher's layers (the teacher's head stays in, for it is part of the
                   loss there), and our step alone.
Memory is the peak of the resident set above what it was before the step, on both sides with both models in the process,
and includes the teacher's log-probabilities on our side. Weights are random, in the shapes of `SHAPES`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import MB, PeakMemory, machine_line, median, print_table, run_case, spread

MODULE = "benchmarks.versus_trl"
VOCAB = 49_152
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}
"""Llama-shaped, with tied embeddings; the second is that of SmolLM2-135M."""
LR, BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-5, (0.9, 0.98), 0.01, 1.0
PAD, BOS, EOS = 0, 1, 2
WARM_UP = 1
"""Steps that are not counted: the first one makes the optimiser's moments."""

Answers = list[tuple[list[int], list[int]]]
"""Prompt and answer of each sample."""


def write_model(folder: Path, shape: str, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=2048, pad_token_id=PAD, **SHAPES[shape]
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {f"w{index}": index for index in range(3, VOCAB)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    ).save_pretrained(folder)


def draw_answers(samples: int, prompt: Sequence[int], answer: Sequence[int], seed: int) -> Answers:
    """Random tokens; lengths between the bounds given."""
    rng = random.Random(seed)

    def tokens(bounds: Sequence[int]) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(rng.randint(*bounds))]

    return [(tokens(prompt), tokens(answer)) for _ in range(samples)]


def run_ours(case: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from distill.config.models import StudentConfig
    from distill.objectives.divergence import ReverseKL
    from distill.types import Batch, Sample, ScoredSample, TeacherScores
    from students.hf.backend import HFStudent

    answers: Answers = case["answers"]
    config = StudentConfig.model_validate(
        {
            "model": Path(case["student"]),
            "lr": LR,
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
            "lr_schedule": "constant",
            "warmup_steps": 0,
            "device": "cpu",
            # one forward pass for all samples, as on the other side
            "micro_batch_tokens": len(answers) * max(len(prompt) + len(answer) for prompt, answer in answers),
        }
        | case["settings"]
    )
    student = HFStudent(config, seed=0, total_steps=1000, vocab_size=VOCAB)
    teacher = AutoModelForCausalLM.from_pretrained(case["teacher"], dtype=torch.float32).eval()
    objective = ReverseKL()

    def score(index: int, prompt: list[int], answer: list[int]) -> ScoredSample:
        with torch.no_grad():
            ids = torch.tensor([prompt + answer])
            hidden_TD = teacher.model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
            logp_TV = teacher.lm_head(hidden_TD).log_softmax(-1)
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

    def step() -> tuple[float, float]:
        now = clock(case)
        began = now()
        batch = Batch(student.version, tuple(score(index, *pair) for index, pair in enumerate(answers)))
        scored = now()
        losses.append(student.step(batch, objective).loss)
        return now() - began, scored - began

    losses: list[float] = []
    for _ in range(WARM_UP):
        step()
    peaks, times = [], []
    for _ in range(case["steps"]):
        peak = PeakMemory()
        peak.start()
        times.append(step())
        peaks.append(peak.stop())
    return {
        "loss": losses[0],
        "with": [whole for whole, _ in times],
        "without": [whole - teacher_time for whole, teacher_time in times],
        "peaks": peaks,
    }


def run_trl(case: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    answers: Answers = case["answers"]
    now = clock(case)
    whole: list[float] = []
    teacher: list[float] = []
    peaks: list[int] = []
    losses: list[float] = []
    began = [0.0, 0.0]
    peak = PeakMemory()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            teacher.append(0.0)
            peak.start()
            began[0] = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            whole.append(now() - began[0])
            peaks.append(peak.stop())

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs is not None and "loss" in logs:
                losses.append(float(logs["loss"]))

    with tempfile.TemporaryDirectory() as scratch:
        settings = DistillationConfig(
            output_dir=scratch,
            per_device_train_batch_size=len(answers),
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
        trainer = DistillationTrainer(
            model=case["student"],
            teacher_model=case["teacher"],
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["w3"] * (len(answers) * (case["steps"] + WARM_UP))}),
            processing_class=AutoTokenizer.from_pretrained(case["student"], padding_side="left"),
            callbacks=[Clock()],
        )
        prompts, completions = [prompt for prompt, _ in answers], [answer for _, answer in answers]
        trainer._generate = lambda _prompts: (prompts, completions, None, None, [])
        layers = trainer.teacher_model.base_model
        layers.register_forward_pre_hook(lambda *_: began.__setitem__(1, now()))
        layers.register_forward_hook(lambda *_: teacher.__setitem__(-1, teacher[-1] + now() - began[1]))
        trainer.train()
    return {
        "loss": losses[0],
        "with": whole[WARM_UP:],
        "without": [a - b for a, b in zip(whole[WARM_UP:], teacher[WARM_UP:], strict=True)],
        "peaks": peaks[WARM_UP:],
    }


def clock(case: dict[str, Any]) -> Any:
    return time.perf_counter if case["clock"] == "wall" else time.process_time


def compare(shape: str, lengths: str, args: argparse.Namespace, folder: Path) -> list[list[str]]:
    bounds = {"equal": ([args.prompt] * 2, [args.answer] * 2), "mixed": ([8, args.prompt], [16, args.answer])}[lengths]
    answers = draw_answers(args.samples, *bounds, seed=1)
    tokens = sum(len(prompt) + len(answer) for prompt, answer in answers)
    case = {
        "student": str(folder / f"{shape}-student"),
        "teacher": str(folder / f"{shape}-teacher"),
        "answers": answers,
        "steps": args.steps,
        "clock": args.clock,
        "settings": json.loads(args.settings),
    }
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for _ in range(args.rounds):  # in turns, so that a change of the machine's load meets both
        for side, python in (("ours", args.python), ("trl", args.trl_python)):
            found[side].append(run_case(MODULE, case | {"side": side}, threads=args.threads, python=python))
    losses = {side: results[0]["loss"] for side, results in found.items()}
    if abs(losses["ours"] - losses["trl"]) > args.loss_tolerance * abs(losses["trl"]):
        raise SystemExit(f"{shape}, {lengths}: the two sides do not do the same work: first losses {losses}")

    def joined(side: str, name: str) -> list[float]:
        return [value for result in found[side] for value in result[name]]

    rows = []
    answer_tokens = sum(len(answer) for _, answer in answers)
    for name in ("with", "without"):
        ours, trl = joined("ours", name), joined("trl", name)
        rows.append(
            [
                f"{shape}, {lengths}, {tokens} tokens ({answer_tokens} of answers)",
                f"{name} teacher",
                f"{spread(ours)}, {tokens / median(ours):.0f} tokens/s",
                f"{spread(trl)}, {tokens / median(trl):.0f} tokens/s",
                f"{median(trl) / median(ours):.2f}",
            ]
        )
    ours, trl = [[value / MB for value in joined(side, "peaks")] for side in ("ours", "trl")]
    rows.append([rows[0][0], "peak memory", spread(ours, "MB"), spread(trl, "MB"), f"{median(ours) / median(trl):.2f}"])
    rows.append([rows[0][0], "first loss", f"{losses['ours']:.5f}", f"{losses['trl']:.5f}", ""])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="the Python of an environment with trl and the same torch (required)")
    parser.add_argument("--python", default=sys.executable, help="the Python of our side")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", choices=("equal", "mixed"), default=["equal", "mixed"])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens; mixed: 8 to this many")
    parser.add_argument("--answer", type=int, default=128, help="answer tokens; mixed: 16 to this many")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a process, after one to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, in turns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: time that the process had a core"
    )
    parser.add_argument("--settings", default="{}", help="JSON: more settings of our StudentConfig")
    parser.add_argument("--loss-tolerance", type=float, default=1e-3, help="relative; beyond it the run is refused")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        case = json.loads(args.case)
        print(json.dumps({"ours": run_ours, "trl": run_trl}[case["side"]](case)))
        return
    if not args.trl_python:
        parser.error("--trl-python is needed: the Python of an environment with trl")
    print(machine_line(args.threads, ("torch", "transformers")))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = []
        for shape in args.models:
            write_model(folder / f"{shape}-student", shape, seed=0)
            write_model(folder / f"{shape}-teacher", shape, seed=1)
            for lengths in args.lengths:
                rows += compare(shape, lengths, args, folder)
    print_table(
        f"V {VOCAB}, {args.samples} samples, {args.clock} time, {args.rounds} processes of {args.steps} steps, "
        "median [least, most]",
        ["case", "what", "ours", "TRL", "ratio (time: TRL / ours; memory: ours / TRL)"],
        rows,
    )


if __name__ == "__main__":
    main()
