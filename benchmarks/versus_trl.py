"""One training step of the Hugging Face student beside one of TRL's `DistillationTrainer`: time and memory.

    python -m benchmarks.versus_trl --trl-python /path/to/venv-with-trl/bin/python

Both sides take the same students and teachers, the same prompts and answers, the same objective (reverse KL over the
full vocabulary, mean over the answers' tokens), float32, AdamW, clipping at 1, no gradient checkpointing and no
generation: TRL's trainer is handed the answers in place of its own `_generate`. Each side runs in its own processes, in
turns. That both report the same first loss shows that they do the same work.

TRL runs the teacher inside of its step; here a teacher is scored elsewhere, before the step. So figures come in three:
  with teacher     from token ids to new weights on both sides. On our side the teacher's forward pass and the
                   log-softmax of its logits are done in the same process before the step, one sample at a time.
  without teacher  TRL's step less the time of the teacher's layers (the teacher's head stays in, for it is part of the
                   loss there), and our step alone.
  own step         what a training process of each side does: TRL's step with the teacher inside, ours without.
Memory is the peak of the resident set above what it was before the step, on both sides with both models in the process,
and includes the teacher's log-probabilities on our side. Weights are random, in the shapes of `SHAPES`.
By default 16 processes of 5 steps run one after another: about ten minutes on two cores, most of them for smollm2-135m.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import MB, Turns, machine_line, median, print_table, require_packages, run_case, spread

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


def clock(case: dict[str, Any]) -> Callable[[], float]:
    return time.perf_counter if case["clock"] == "wall" else time.process_time


def report_case(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """What a side's module does when `run_case` starts it: run the case, and print what it found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    print(json.dumps(run(json.loads(parser.parse_args().case))))


Found = dict[str, list[dict[str, Any]]]
"""Side -> what each of its processes reported."""


def measure(name: str, case: dict[str, Any], args: argparse.Namespace, turns: Turns) -> Found:
    """Both sides in turns, so that a change of the machine's load meets both."""
    found: Found = {"ours": [], "theirs": []}
    for _ in range(args.rounds):
        for side, python in (("ours", args.python), ("theirs", args.trl_python)):
            turns.start(f"{name}, {'ours' if side == 'ours' else 'TRL'}")
            found[side].append(run_case(f"{MODULE}_{side}", case, threads=args.threads, python=python))
    return found


def compare(shape: str, lengths: str, args: argparse.Namespace, folder: Path, turns: Turns) -> list[list[str]]:
    """The rows of one model and one kind of samples."""
    bounds = {"equal": ([args.prompt] * 2, [args.answer] * 2), "mixed": ([8, args.prompt], [16, args.answer])}[lengths]
    answers = draw_answers(args.samples, *bounds, seed=1)
    case = {
        "student": str(folder / f"{shape}-student"),
        "teacher": str(folder / f"{shape}-teacher"),
        "answers": answers,
        "steps": args.steps,
        "clock": args.clock,
        "settings": json.loads(args.settings),
        "onednn": not args.no_onednn,
    }
    found = measure(f"{shape}, {lengths}", case, args, turns)
    losses = {side: results[0]["loss"] for side, results in found.items()}
    if abs(losses["ours"] - losses["theirs"]) > args.loss_tolerance * abs(losses["theirs"]):
        raise SystemExit(f"{shape}, {lengths}: the two sides do not do the same work: first losses {losses}")
    tokens = sum(len(prompt) + len(answer) for prompt, answer in answers)
    name = f"{shape}, {lengths}, {tokens} tokens ({sum(len(answer) for _, answer in answers)} of answers)"
    return [
        *([name, *row] for row in time_rows(found, tokens)),
        [name, "peak memory", *memory_row(found)],
        [name, "first loss", f"{losses['ours']:.5f}", f"{losses['theirs']:.5f}", ""],
    ]


def joined(found: Found, side: str, what: str) -> list[float]:
    return [value for result in found[side] for value in result[what]]


def time_rows(found: Found, tokens: int) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, ours_what, theirs_what in (
        ("with teacher on both sides", "with", "with"),
        ("without teacher on both sides", "without", "without"),
        ("each side's own step", "without", "with"),
    ):
        ours, theirs = joined(found, "ours", ours_what), joined(found, "theirs", theirs_what)
        speeds = [f"{spread(times)}, {tokens / median(times):.0f} tokens/s" for times in (ours, theirs)]
        rows.append([name, *speeds, f"{median(theirs) / median(ours):.2f}"])
    return rows


def memory_row(found: Found) -> list[str]:
    ours, theirs = ([value / MB for value in joined(found, side, "peaks")] for side in ("ours", "theirs"))
    return [spread(ours, "MB"), spread(theirs, "MB"), f"{median(ours) / median(theirs):.2f}"]


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
    parser.add_argument("--no-onednn", action="store_true", help="MKL's products on our side too, on any processor")
    args = parser.parse_args(argv)
    if not args.trl_python:
        parser.error("--trl-python is needed: the Python of an environment with trl")
    packages = ["torch", "transformers"]
    require_packages(args.python, ["distill", *packages], install="-e .")
    require_packages(args.trl_python, ["trl", "datasets", *packages], install="trl torch transformers")
    turns = Turns(2 * len(args.models) * len(args.lengths) * args.rounds)
    print(machine_line(args.threads, packages), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = []
        for shape in args.models:
            write_model(folder / f"{shape}-student", shape, seed=0)
            write_model(folder / f"{shape}-teacher", shape, seed=1)
            for lengths in args.lengths:
                rows += compare(shape, lengths, args, folder, turns)
    print_table(
        f"V {VOCAB}, {args.samples} samples, {args.clock} time, {args.rounds} processes of {args.steps} steps, "
        "median [least, most]",
        ["case", "what", "ours", "TRL", "ratio (time: TRL / ours; memory: ours / TRL)"],
        rows,
    )


if __name__ == "__main__":
    main()
