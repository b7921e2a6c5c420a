"""Writing a Hugging Face folder from a stream of tensors, none of which need stay in memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from students.hf.shards import Stored, as_bytes, dtype_name

FILE_BYTES = 5_000_000_000
"""Weights that one file holds before another begins, as in transformers' own `save_pretrained` of long."""
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name -> that in a safetensors header."""


def write_weights(folder: Path, stored: Sequence[Stored], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write `tensors`, which come in any order and are exactly `stored`, as safetensors, with an index if needed.

    Each is written as it comes and then let go. Raises OSError; the rest of the stream is taken even then, because
    other ranks may wait for it.
    """
    files = _files(stored)
    names = _file_names(len(files))
    places: dict[str, tuple[BinaryIO, int]] = {}
    handles: list[BinaryIO] = []
    stream = iter(tensors)
    written: set[str] = set()
    try:
        for name, content in zip(names, files, strict=True):
            handle = (folder / name).open("wb")
            handles.append(handle)
            places |= {each: (handle, offset) for each, offset in _begin(handle, content).items()}
        for name, tensor in stream:
            handle, offset = places[name]
            handle.seek(offset)
            handle.write(as_bytes(tensor).data)
            written.add(name)
        for handle in handles:
            handle.flush()
    finally:
        drain(stream)
        for handle in handles:
            handle.close()
    assert written == places.keys(), "the stream and the list of what is stored are of one model"
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(each.nbytes for each in stored)},
            "weight_map": {each.name: name for name, content in zip(names, files, strict=True) for each in content},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def drain(stream: Iterator[Any]) -> None:
    """Take part in what other ranks gather, without keeping it."""
    for _ in stream:
        pass


def write_config(model: PreTrainedModel, dtype: str, folder: Path) -> None:
    """config.json and generation_config.json."""
    config: Any = copy.deepcopy(model.config)
    # a spread model is of a class made for that, derived from its own
    config.architectures = [next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))]
    config.dtype = dtype
    config.save_pretrained(folder)
    generation: Any = model.generation_config
    if generation is not None:
        generation.save_pretrained(folder)


def _files(stored: Sequence[Stored]) -> list[list[Stored]]:
    files: list[list[Stored]] = [[]]
    filled = 0
    for each in stored:
        if files[-1] and filled + each.nbytes > FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(each)
        filled += each.nbytes
    return files


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def _begin(handle: BinaryIO, content: Sequence[Stored]) -> dict[str, int]:
    """Write the header (length, JSON). Returns where the bytes of each tensor go in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends: dict[str, int] = {}
    end = 0
    # larger items first: then each begins at a multiple of its size
    for each in sorted(content, key=lambda each: -each.dtype.itemsize):
        ends[each.name] = end
        kind = _DTYPES[dtype_name(each.dtype)]
        header[each.name] = {"dtype": kind, "shape": list(each.shape), "data_offsets": [end, end + each.nbytes]}
        end += each.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    handle.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + begin for name, begin in ends.items()}
