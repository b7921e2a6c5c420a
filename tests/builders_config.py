"""Runs on disk for tests: tiny model folders, data and a teachers.yaml, made without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from distill.config.models import RunConfig
from distill.config.resume import settings_of

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
LETTERS = "abcdefghij="
HIDDEN = 8


def write_tokenizer(folder: Path, letters: str = LETTERS, *, end: str | None = EOS, split: str = ".") -> int:
    """A character tokenizer; returns the number of its ids."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: index for index, token in enumerate((PAD, BOS, EOS, *letters))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(split), behavior="isolated")
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": PAD, "bos_token": BOS} | ({"eos_token": end} if end else {})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(ids)


def write_model(
    folder: Path, *, letters: str = LETTERS, rows: int | None = None, context: int = 32, tokenizer: bool = True
) -> Path:
    """A model folder whose weights are those of a tiny language model by name and shape."""
    folder.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(folder, letters) if tokenizer else 3 + len(letters)
    rows = size if rows is None else rows
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "max_position_embeddings": context,
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(rows), folder / "model.safetensors")
    return folder


def weights(rows: int) -> dict[str, Any]:
    return {
        "model.embed_tokens.weight": np.zeros((rows, HIDDEN), np.float32),
        "model.layers.0.input_layernorm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": np.zeros((rows, HIDDEN), np.float32),
    }


def write_checkpoint(folder: Path, step: int, made_by: RunConfig) -> None:
    """What decides where a run in `folder` would go on; there is nothing in it to load."""
    place = folder / "checkpoints" / f"step-{step:08d}"
    (place / "student").mkdir(parents=True)
    (place / "samples.dpk").touch()
    (place / "state.json").write_text(json.dumps({"step": step, "settings": settings_of(made_by)}))


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings() -> dict[str, Any]:
    """The smallest whole run: a student, two teachers, one data file for each."""
    return {
        "student": {"model": "./base"},
        "teachers": {"math": {"model": "./experts/math"}, "code": {"model": "./experts/code"}},
        "data": [{"path": "math.jsonl", "domain": "math"}, {"path": "code.jsonl", "domain": "code"}],
        "rollout": {"max_new_tokens": 8},
        "trainer": {"steps": 3, "batch_size": 4},
    }


def write_yaml(folder: Path, values: dict[str, Any], name: str = "teachers.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def write_run(folder: Path, **changes: Any) -> Path:
    """The run of `settings` with everything that it names; `changes` replace whole sections of teachers.yaml."""
    for name in ("base", "experts/math", "experts/code"):
        write_model(folder / name)
    write_jsonl(folder / "math.jsonl", [{"prompt": "abc="}, {"prompt": "ab="}])
    write_jsonl(folder / "code.jsonl", [{"prompt": "cde="}])
    return write_yaml(folder, settings() | changes)
