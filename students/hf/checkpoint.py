"""Checkpoints of the student: a Hugging Face folder with one more folder, `trainer`, inside. No pickle.

    <folder>/model.safetensors, config.json, tokenizer.json ...   loadable by AutoModelForCausalLM
    <folder>/trainer/state.safetensors                            optimiser moments, random generators
    <folder>/trainer/state.json                                   weight version; size and xxh3-128 of every other file

A folder appears whole or not at all: it is written beside its place, flushed to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from distill.errors import ConfigError, EnvironmentFault

FORMAT = "distill-student-1"
STATE = Path("trainer/state.json")
TENSORS = Path("trainer/state.safetensors")


class _File(msgspec.Struct, frozen=True):
    bytes: int
    xxh3: str


class _State(msgspec.Struct, frozen=True):
    """trainer/state.json."""

    format: str
    version: int
    files: dict[str, _File]


@contextlib.contextmanager
def whole_folder(folder: Path) -> Generator[Path]:
    """A temporary folder that becomes `folder` when the block ends without an error; an older `folder` is removed.

    Raises EnvironmentFault when the disk refuses. While an older folder is replaced there is an instant without either.
    """
    folder = folder.absolute()
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    stale = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        for path in [*fresh.rglob("*"), fresh]:
            _flush(path)
        if folder.exists():
            shutil.rmtree(stale, ignore_errors=True)
            folder.rename(stale)
        fresh.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(stale, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise EnvironmentFault(
            f"cannot write {folder}: {error}",
            why="the folder was not replaced; what was there before is still good",
            fix="free space on the disk, or choose another folder with run.dir",
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_state(folder: Path, version: int, optimizer: dict[str, dict[str, Tensor]], device: torch.device) -> None:
    """Add the training state to a folder that holds the model already. `optimizer` is parameter name -> its state."""
    tensors = {f"{key}/{name}": tensor for name, state in optimizer.items() for key, tensor in state.items()}
    tensors["rng/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(device)
    (folder / STATE).parent.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    files = {str(path.relative_to(folder)): _fingerprint(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(_State(FORMAT, version, files))))


def read_state(folder: Path) -> tuple[int, dict[str, Tensor]]:
    """Weight version and tensors of a checkpoint, after every one of its files was checked.

    Raises ConfigError for a folder that is no checkpoint of ours, or that lost or changed a byte.
    """
    state = _read_header(folder)
    for name, expected in state.files.items():
        path = folder / name
        found = _fingerprint(path) if path.is_file() else None
        if found != expected:
            is_now = "missing" if found is None else f"{found.bytes} bytes with another digest"
            raise ConfigError(
                f"checkpoint {folder}: {name} is {is_now}, written were {expected.bytes} bytes",
                why="training from changed weights or moments would go wrong silently",
                fix="resume from an older checkpoint",
            )
    tensors = load_file(folder / TENSORS)
    # load_file maps the file; the run may rotate the folder away while the tensors live
    return state.version, {name: tensor.clone() for name, tensor in tensors.items()}


def restore_rng(tensors: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["rng/cpu"])
    if device.type == "cuda" and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"], device)


def optimizer_state(optimizer: torch.optim.Optimizer, model: PreTrainedModel) -> dict[str, dict[str, Tensor]]:
    """Parameter name -> the optimiser's tensors for it; empty before the first step."""
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


def restore_optimizer(optimizer: torch.optim.Optimizer, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_state`. Raises ConfigError when the tensors belong to other parameters."""
    parameters = dict(model.named_parameters())
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition("/")
        if key == "rng":
            continue
        parameter = parameters.get(name)
        if parameter is None or (key != "step" and tensor.shape != parameter.shape):
            raise ConfigError(f"checkpoint: {full_name} has no place in this model", why="it is of another student")
        optimizer.state[parameter][key] = tensor.to(parameter.device)


def _read_header(folder: Path) -> _State:
    hint = "give a folder that a run wrote under its checkpoints"
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    except OSError as error:
        raise ConfigError(f"{folder} is not a checkpoint of a student: {STATE} cannot be read", fix=hint) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"checkpoint {folder}: {STATE} is broken: {error}", fix=hint) from error
    if state.format != FORMAT:
        raise ConfigError(f"checkpoint {folder}: {STATE} is in format {state.format!r}, not {FORMAT!r}", fix=hint)
    return state


def _fingerprint(path: Path) -> _File:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return _File(path.stat().st_size, digest.hexdigest())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
