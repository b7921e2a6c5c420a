"""Teachers' heads on the student's side: full rows come as hidden states, and log q is made here a chunk at a time.

A head is read from the teacher's folder when the student starts, cut to the common vocabulary, in the dtype that the
teacher's server computes in. Teachers with equal heads share one; on the CPU the file is mapped, so ranks of one
machine share its pages.

Legend: n rows of one teacher, C rows of a chunk, V common vocabulary, D hidden size of the teacher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from distill.errors import ConfigError, TeacherError
from distill.objectives.head import LogitsTransform
from distill.objectives.head_loss import TeacherHead
from distill.objectives.rows import TokenRows, first
from distill.protocols import HeadFolder
from students.hf.head import logits_transform

SLACK = 1e-2
"""Largest difference in nats between log q of a sampled token as the teacher said it and as it is made here."""
SLACK_HALF = 0.5
"""The same where the server's logits were rounded to half precision: bfloat16 moves one near 40 by up to 0.125."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Tempered:
    """What a model does to its logits, and then their division by a temperature."""

    temperature: float
    transform: LogitsTransform | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        return (logits if self.transform is None else self.transform(logits)) / self.temperature


@dataclass(frozen=True)
class KeptHead:
    weight_VD: Tensor
    bias_V: Tensor | None
    transform: LogitsTransform | None
    folder: Path


class TeacherHeads:
    """The heads of all teachers whose full rows come as hidden states."""

    def __init__(self, sources: Mapping[str, HeadFolder], *, vocab_size: int, device: torch.device) -> None:
        """Raises ConfigError for a teacher whose head cannot be found."""
        self._kept: dict[bytes, Tensor] = {}
        self._heads = {name: self._keep(name, source, vocab_size, device) for name, source in sources.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Teacher -> D."""
        return {name: head.weight_VD.shape[1] for name, head in self._heads.items()}

    @property
    def distinct_bytes(self) -> int:
        """What all heads take together, each once."""
        return sum(weight.nbytes for weight in self._kept.values())

    def of(self, teacher: str) -> KeptHead:
        return self._heads[teacher]

    def _keep(self, name: str, source: HeadFolder, vocab_size: int, device: torch.device) -> KeptHead:
        config: Any = AutoConfig.from_pretrained(source.folder, local_files_only=True)
        weight_name, bias_name = _head_names(name, source.folder, config)
        weight_VD = self._one(source, weight_name, vocab_size, device, name)
        bias_V = None if bias_name is None else self._one(source, bias_name, vocab_size, device, name)
        transform: LogitsTransform | None = logits_transform(config)
        if source.temperature != 1.0:
            transform = Tempered(source.temperature, transform)
        return KeptHead(weight_VD, bias_V, transform, source.folder)

    def _one(self, source: HeadFolder, tensor: str, vocab_size: int, device: torch.device, teacher: str) -> Tensor:
        """The first `vocab_size` rows of a tensor of the folder; the one that is there already if that is the same."""
        rows = _read_rows(teacher, source.folder, tensor, vocab_size).to(_DTYPES[source.dtype])
        digest = xxhash.xxh3_128(f"{rows.dtype} {tuple(rows.shape)}".encode())
        digest.update(rows.contiguous().view(torch.uint8).numpy().data)
        return self._kept.setdefault(digest.digest(), rows.to(device))


class HiddenRows:
    """Full rows of one teacher from its hidden states, sample by sample on the host (`FullSource`). Only a chunk of
    them is ever moved, and only a chunk of rows ever made."""

    def __init__(self, arrays: Sequence[NDArray[Any]], head: KeptHead, rows: TokenRows) -> None:
        """`arrays`: (rows of a sample, D) each; `rows`: of all of them, for what the teacher said of its tokens."""
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])
        self._head = head
        self._rows = rows
        half = head.weight_VD.dtype in (torch.bfloat16, torch.float16)
        self._slack = SLACK_HALF if half else SLACK

    def logp(self, keep: slice | Tensor, like_CV: Tensor) -> Tensor:
        """log q (C, V) of the rows `keep`, which rise, with the dtype and on the device of `like_CV`.

        Raises TeacherError where the head and the hidden states are not of the same teacher: log q of a sampled token
        is then another than the teacher said.
        """
        hidden_CD = as_tensor(rows_of(self._arrays, self._ends, keep)).to(like_CV.device)
        head = self._head
        made = TeacherHead(hidden_CD, head.weight_VD, head.bias_V, head.transform)
        logp_CV = made.logp(slice(None), like_CV)
        self._require_same(logp_CV, keep)
        return logp_CV

    def _require_same(self, logp_CV: Tensor, keep: slice | Tensor) -> None:
        at = keep if isinstance(keep, slice) else keep.to(self._rows.tokens_N.device)
        tokens_C, said_C = self._rows.tokens_N[at].to(logp_CV.device), self._rows.teacher_logp_N[at].to(logp_CV)
        made_C = logp_CV.gather(-1, tokens_C[:, None])[:, 0]
        bad_C = ~((made_C - said_C).abs() <= self._slack + 1e-4 * said_C.abs())
        if not bool(bad_C.any()):
            return
        row = first(bad_C)
        place = self._rows.describe((keep.start or 0) + row if isinstance(keep, slice) else int(keep[row]))
        raise TeacherError(
            f"{place}: its hidden state and the head in {self._head.folder} give log q = {float(made_C[row]):.4f} of "
            f"the sampled token, the teacher said {float(said_C[row]):.4f}",
            why="the student would learn from another distribution than the teacher's",
            fix="check that the folder is as it was when the run began, or set teacher_manager.full_rows=rows",
            **place.blame,
        )


def as_tensor(hidden: NDArray[Any]) -> Tensor:
    """int16 holds the bits of bfloat16."""
    tensor = torch.from_numpy(hidden)
    return tensor.view(torch.bfloat16) if hidden.dtype == np.int16 else tensor


def rows_of(arrays: Sequence[NDArray[Any]], ends: NDArray[np.int64], keep: slice | Tensor) -> NDArray[Any]:
    """The rows `keep`, which rise, of the arrays laid end to end; copied, because what came through shared memory is
    read-only. `ends`: where each array ends."""
    wanted = np.arange(ends[-1])[keep] if isinstance(keep, slice) else keep.cpu().numpy()
    pieces: list[NDArray[Any]] = []
    begin = 0
    for array, end in zip(arrays, ends.tolist(), strict=True):
        low, high = np.searchsorted(wanted, [begin, end])
        if high > low:
            pieces.append(array[wanted[low:high] - begin])
        begin = end
    return np.concatenate(pieces)


def _head_names(teacher: str, folder: Path, config: Any) -> tuple[str, str | None]:
    """What the folder calls the head's weight and bias. Of a tied head it holds the embedding."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    head: Any = model.get_output_embeddings()
    stored = _files_of(folder)
    named = list(model.named_parameters(remove_duplicate=False))
    found: list[str] = []
    for wanted in (getattr(head, "weight", None), getattr(head, "bias", None)):
        names = [name for name, parameter in named if parameter is wanted]
        here = [name for name in names if name in stored]
        if names and not here:
            raise ConfigError(
                f"teachers.{teacher}: {folder} holds no {' and no '.join(names)}, the head of {type(model).__name__}",
                why="the student makes the teacher's rows from its hidden states and its head",
                fix="set teacher_manager.full_rows=rows",
            )
        found += here[:1]
    if not found:
        raise ConfigError(
            f"teachers.{teacher}: {type(model).__name__} has no linear head", fix="set teacher_manager.full_rows=rows"
        )
    return found[0], found[1] if len(found) > 1 else None


def _files_of(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        return dict.fromkeys(file.keys(), path)


def _read_rows(teacher: str, folder: Path, tensor: str, rows: int) -> Tensor:
    path = _files_of(folder)[tensor]
    try:
        with safe_open(path, "pt") as file:
            part = file.get_slice(tensor)[:rows]
    except (OSError, SafetensorError) as error:
        raise TeacherError(f"teachers.{teacher}: {path} cannot be read: {error}", teacher=teacher) from error
    if len(part) < rows:
        raise ConfigError(
            f"teachers.{teacher}: {tensor} in {folder} has {len(part)} rows, the common vocabulary {rows} ids"
        )
    return part
