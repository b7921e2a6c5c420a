"""What a Hugging Face model folder holds, read from config.json and the headers of its safetensors files.

No weight is loaded. Every file must have exactly the length that its header promises: a copy that broke off is found
here and not in the middle of a run. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import ConfigError, DistillError
from distill.registry import nearest

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
_HEADER_LIMIT = 100_000_000
"""The safetensors library reads no longer header."""
_VOCABULARY_TENSORS = (
    "lm_head.weight",
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model on disk. `role` is the setting that names it: `student`, `teachers.math`."""

    role: str
    path: Path
    architecture: str
    vocab_rows: int
    """Rows of the embedding and the head."""
    context_length: int
    parameters: int
    stored_bytes: int
    dtype: str
    """Of most of its bytes, as safetensors spells it."""
    layers: tuple[str, ...]
    """Names of the modules whose weight is a matrix, or has more dimensions."""

    def loaded_bytes(self, itemsize: int) -> int:
        """Weight bytes in a process that holds every parameter with `itemsize` bytes."""
        return self.parameters * itemsize


def inspect_folder(path: Path, role: str, broken: type[DistillError]) -> ModelFolder:
    """Raises ConfigError when `path` is not a model folder, `broken` when its weights are damaged or incomplete."""
    config = read_json(existing_folder(path, role) / "config.json", role)
    text_config = {**config, **config.get("text_config", {})}
    tensors = read_tensors(path, role, broken)
    rows = _number(text_config, "vocab_size", path, role)
    for name, entry in tensors.items():
        if name.endswith(_VOCABULARY_TENSORS) and len(entry.shape) == 2 and entry.shape[0] != rows:
            raise broken(
                f"{role}: {name} in {path} has {entry.shape[0]} rows, and config.json says vocab_size {rows}",
                why="a model whose configuration and weights disagree cannot be loaded",
                fix="save the model again with save_pretrained",
            )
    sizes: dict[str, int] = {}
    for entry in tensors.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + _bytes(entry)
    return ModelFolder(
        role=role,
        path=path,
        architecture=", ".join(config.get("architectures") or [str(config.get("model_type", "unknown"))]),
        vocab_rows=rows,
        context_length=_context(text_config, path, role),
        parameters=sum(math.prod(entry.shape) for entry in tensors.values()),
        stored_bytes=sum(sizes.values()),
        dtype=max(sizes, key=lambda dtype: sizes[dtype]),
        layers=tuple(
            name.removesuffix(".weight")
            for name, entry in tensors.items()
            if name.endswith(".weight") and len(entry.shape) > 1
        ),
    )


def existing_folder(path: Path, role: str) -> Path:
    """`path`, or a ConfigError with the folder that was probably meant."""
    if path.is_dir():
        return path
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    guess = nearest(path.name, siblings)
    missing = next((parent for parent in reversed(path.parents) if not parent.exists()), path)
    raise ConfigError(
        f"{role}: there is no model folder {path}" + ("" if missing == path else f" ({missing} does not exist)"),
        why="models are Hugging Face folders on this machine; nothing is downloaded during a run",
        fix=f"did you mean {path.parent / guess}?"
        if guess
        else f"check {role}, or download first: hf download NAME --local-dir {path}",
    )


def read_json(path: Path, role: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    if not path.is_file():  # a pipe of this name would be waited for
        raise ConfigError(f"{role}: {path.parent} has no {path.name}", fix="give the folder that save_pretrained wrote")
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{role}: {path} cannot be read: {error.strerror}", fix="check who may read it") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{role}: {path} is not valid JSON: {error}", fix="save or copy the folder again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{role}: {path} is not a JSON object", fix="save or copy the folder again")
    return values


def read_tensors(
    path: Path, role: str, broken: type[DistillError], single: str = "model.safetensors"
) -> dict[str, TensorEntry]:
    """Name -> entry of every tensor of the folder, from the header of `single`, else of the shards in its index."""
    index = path / f"{single}.index.json"
    if (path / single).is_file():
        return read_header(path / single, role, broken)
    if not index.is_file():
        other = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise ConfigError(
            f"{role}: {path} has no {single}" + (f", only {other[0]}" if other else ""),
            why="weights are read from safetensors files only",
            fix="load the model in transformers and save it with save_pretrained",
        )
    weight_map: Mapping[str, str] = read_json(index, role).get("weight_map", {})
    tensors: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).is_file():
            raise broken(
                f"{role}: {path / shard} is missing", why=f"{index.name} lists it", fix="copy the folder again"
            )
        tensors |= read_header(path / shard, role, broken)
    absent = sorted(set(weight_map) - set(tensors))
    if absent or not tensors:
        what = (
            f"{absent[0]}, which {index.name} promises, is in none of its files"
            if absent
            else f"{index.name} names no tensor"
        )
        raise broken(f"{role}: {path}: {what}", fix="copy the folder again")
    return tensors


def read_header(file: Path, role: str, broken: type[DistillError]) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, whose length is checked against its header. Raises `broken`."""
    fix = "copy or save the file again"
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise broken(
                f"{role}: {file} is not a whole safetensors file: {size} bytes, its header alone has {8 + length}",
                fix=fix,
            )
        try:
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {
                name: TensorEntry(entry["dtype"], tuple(map(int, entry["shape"]))) for name, entry in entries.items()
            }
            spans = {
                name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in entries.items()
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise broken(f"{role}: the header of {file} is damaged: {error}", fix=fix) from error
    for name, (begin, end) in spans.items():
        if tensors[name].dtype in _BITS and end - begin != _bytes(tensors[name]):
            raise broken(
                f"{role}: {file}: {name} takes {end - begin} bytes, and its shape needs {_bytes(tensors[name])}",
                fix=fix,
            )
    expected = 8 + length + max((end for _, end in spans.values()), default=0)
    if size != expected:
        raise broken(
            f"{role}: {file} is damaged: expected {expected} bytes, found {size}",
            why="the file does not end where its header says: probably a copy that broke off",
            fix=fix,
        )
    return tensors


def _bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * _BITS.get(entry.dtype, 8) // 8


def _number(config: Mapping[str, Any], key: str, path: Path, role: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{role}: {path / 'config.json'} has no usable {key}: {value!r}",
            fix="give the folder that save_pretrained wrote",
        )
    return value


def _context(config: Mapping[str, Any], path: Path, role: str) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        if isinstance(config.get(key), int):
            return _number(config, key, path, role)
    return _number(config, "max_position_embeddings", path, role)
