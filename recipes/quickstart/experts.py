"""A process that trains experts one after the other; prepare.py starts two of them, one a core.

It prints JSON lines: {"expert": "sort", "done": 10, "total": 120} while it works.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from domains import DOMAINS, split
from training import EXPERTS, train_expert
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

PROGRESS_EVERY = 10


def printer(expert: str) -> Callable[[int, int], None]:
    """A `Report` that prints every tenth step and the last."""

    def report(done: int, total: int) -> None:
        if done % PROGRESS_EVERY == 0 or done == total:
            print(json.dumps({"expert": expert, "done": done, "total": total}), flush=True)

    return report


def make_expert(name: str, root: Path, seed: int, data_seed: int) -> None:
    """Train expert `name` from `root`/base and save it as `root`/experts/`name`."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(root / "base")
    model = LlamaForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    train_expert(model, tokenizer, split(DOMAINS[name], data_seed), seed, EXPERTS[name], printer(name))
    folder = root / "experts" / name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experts", nargs="+", choices=list(EXPERTS))
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True, help="of the order of the training questions")
    parser.add_argument("--data-seed", type=int, required=True, help="of the split into training and held-out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.experts:
        make_expert(name, args.root, args.seed, args.data_seed)


if __name__ == "__main__":
    main()
