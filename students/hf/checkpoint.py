"""Checkpoints of the student: a Hugging Face folder with one more folder, `trainer`, inside. No pickle.

    <folder>/model.safetensors, config.json, tokenizer.json ...   loadable by AutoModelForCausalLM
    <folder>/trainer/rank-00000.safetensors                       a rank's pieces of the moments, its random generators
    <folder>/trainer/state.json                                   weight version, ranks; size and xxh3-128 of every file

A folder appears whole or not at all: it is written beside its place, flushed to the disk, and renamed. Any number of
ranks can go on from it: each reads the parts that it holds now, from whichever files they are in. All functions here
are called on every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from distill.errors import ConfigError, EnvironmentFault
from students.hf.parallel import Alone
from students.hf.shards import Box, intersection, laid_out_like, local, own_piece, piece, require_coverage

FORMAT = "distill-student-2"
TRAINER = "trainer"
STATE = f"{TRAINER}/state.json"
_RNG = "rng/"
_WriteModel = Callable[[Path], None]


class _File(msgspec.Struct, frozen=True):
    bytes: int
    xxh3: str


class _State(msgspec.Struct, frozen=True):
    """trainer/state.json."""

    format: str
    version: int
    files: dict[str, _File]
    ranks: int = 1


def export(folder: Path, parallel: Alone, write_model: _WriteModel) -> None:
    """Write what `write_model` writes into a folder, whole or not at all. Raises EnvironmentFault."""
    _replace(folder, parallel, write_model, None)


def save(
    folder: Path,
    parallel: Alone,
    write_model: _WriteModel,
    *,
    version: int,
    tensors: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Write a checkpoint. `tensors`: what training needs beside the model's folder, such as `exp_avg/<parameter>`.

    Spread tensors are written in pieces, each by the rank that holds it, all others by rank 0. Raises EnvironmentFault.
    """

    def fill(fresh: Path) -> None:
        write_model(fresh)
        (fresh / TRAINER).mkdir(exist_ok=True)
        _write_rank(fresh / rank_file(parallel.rank), tensors, parallel, device)

    _replace(folder, parallel, fill, version)


def rank_file(rank: int) -> str:
    return f"{TRAINER}/rank-{rank:05d}.safetensors"


def _replace(folder: Path, parallel: Alone, fill: _WriteModel, version: int | None) -> None:
    """Fill a folder beside `folder`, then put it there; an older one is removed. While that is replaced there is an
    instant without either. `version`: of a checkpoint, which gets its state.json."""
    folder = folder.absolute()
    first = parallel.rank == 0

    def begin() -> str:
        fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
        if first:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        return str(fresh)

    def write() -> dict[str, tuple[int, str]]:
        fill(fresh)
        mine = _own_files(fresh, parallel.rank)
        for path in mine:
            _flush(path)
        found = {str(path.relative_to(fresh)): _fingerprint(path) for path in mine} if version is not None else {}
        return {name: (file.bytes, file.xxh3) for name, file in found.items()}

    def finish() -> None:
        if first:
            if version is not None:
                files = {name: _File(*file) for part in written for name, file in part.items()}
                state = _State(FORMAT, version, files, parallel.ranks)
                (fresh / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
                _flush(fresh / STATE)
            _put_in_place(fresh, folder)

    try:
        fresh = Path(parallel.together(lambda: _on_disk(folder, parallel, begin))[0])
        written = parallel.together(lambda: _on_disk(folder, parallel, write))
        parallel.together(lambda: _on_disk(folder, parallel, finish))
    finally:
        if first:
            shutil.rmtree(folder.with_name(f".{folder.name}.{os.getpid()}.new"), ignore_errors=True)


def _on_disk(folder: Path, parallel: Alone, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (OSError, SafetensorError) as error:
        shared = ", on storage that the machines of all ranks share" if parallel.ranks > 1 else ""
        raise EnvironmentFault(
            f"cannot write {folder}: {error}",
            why="the folder was not replaced; what was there before is still good",
            fix=f"free space on the disk, or choose another folder with run.dir{shared}",
        ) from error


def _own_files(fresh: Path, rank: int) -> list[Path]:
    """What this rank has written: its own state, and rank 0 all that is no rank's state."""
    own = fresh / rank_file(rank)
    others = [path for path in sorted(fresh.rglob("*")) if path.is_file() and path.parent != fresh / TRAINER]
    return [*(others if rank == 0 else ()), *([own] if own.is_file() else ())]


def _put_in_place(fresh: Path, folder: Path) -> None:
    stale = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    for path in [*(path for path in fresh.rglob("*") if path.is_dir()), fresh]:
        _flush(path)
    if folder.exists():
        shutil.rmtree(stale, ignore_errors=True)
        folder.rename(stale)
    fresh.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(stale, ignore_errors=True)


def _write_rank(path: Path, tensors: Mapping[str, Tensor], parallel: Alone, device: torch.device) -> None:
    """Write this rank's pieces; the header says of each where in which shape it belongs."""
    contents: dict[str, Tensor] = {}
    places: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor) or parallel.rank == 0:
            contents[key] = local(tensor.detach()).contiguous()
            places[key] = tuple(tensor.shape), own_piece(tensor, parallel)[0]
    contents[f"{_RNG}cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        contents[f"{_RNG}cuda"] = torch.cuda.get_rng_state(device)
    save_file(contents, path, metadata={"places": json.dumps(places)})


class Saved:
    """A checkpoint that was looked through: no byte of it is lost or changed, and no element is missing."""

    def __init__(self, folder: Path, state: _State, parallel: Alone) -> None:
        self.version = state.version
        self._parallel = parallel
        self._files = [safe_open(folder / rank_file(rank), "pt") for rank in range(state.ranks)]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, Box]]] = {}
        for number, file in enumerate(self._files):
            for key, (shape, offset) in json.loads(file.metadata()["places"]).items():
                size = tuple(file.get_slice(key).get_shape())
                self._shapes[key] = tuple(shape)
                self._pieces.setdefault(key, []).append((number, (tuple(offset), size)))
        boxes = {key: (shape, [box for _, box in self._pieces[key]]) for key, shape in self._shapes.items()}
        require_coverage(boxes, f"checkpoint {folder}")

    def named(self, kind: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors `<kind>/<name>`, by name. One that has the shape of `like[name]` is spread as that is."""
        names = [key.removeprefix(f"{kind}/") for key in self._shapes if key.startswith(f"{kind}/")]
        return {name: self._take(f"{kind}/{name}", like.get(name)) for name in names}

    @property
    def kinds(self) -> list[str]:
        """What there is of the parameters: the first parts of the tensors' keys."""
        return list(dict.fromkeys(key.partition("/")[0] for key in self._shapes))

    def restore_rng(self, device: torch.device) -> None:
        """Go on with the random numbers of this rank. A rank that the checkpoint does not know keeps its own."""
        if self._parallel.rank >= len(self._files):
            return
        file = self._files[self._parallel.rank]
        torch.set_rng_state(file.get_tensor(f"{_RNG}cpu").clone())
        if device.type == "cuda" and f"{_RNG}cuda" in file.keys():  # noqa: SIM118 (not a mapping)
            torch.cuda.set_rng_state(file.get_tensor(f"{_RNG}cuda").clone(), device)

    def _take(self, key: str, like: Tensor | None) -> Tensor:
        shape = self._shapes[key]
        if isinstance(like, DTensor) and tuple(like.shape) == shape:
            box = piece(shape, self._parallel.rank, self._parallel.ranks)
            return laid_out_like(self._read(key, box), like)
        return self._read(key, ((0,) * len(shape), shape))

    def _read(self, key: str, wanted: Box) -> Tensor:
        """The elements of one box, put together from the pieces that hold them. A copy: the files may go away."""
        parts = [(number, box, intersection(wanted, box)) for number, box in self._pieces[key]]
        for number, box, shared in parts:
            if shared == wanted == box:
                return self._files[number].get_tensor(key).clone()
        dtype = self._files[self._pieces[key][0][0]].get_slice(key)[:0].dtype
        result = torch.empty(wanted[1], dtype=dtype)
        for number, box, shared in parts:
            if shared is not None:
                source = self._files[number].get_slice(key)[_within(shared, box)]
                result[_within(shared, wanted)] = source
        return result


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    begins = [begin - origin for begin, origin in zip(part[0], box[0], strict=True)]
    return tuple(slice(begin, begin + length) for begin, length in zip(begins, part[1], strict=True))


def read(folder: Path, parallel: Alone) -> Saved:
    """Open a checkpoint, after every one of its files was checked: each rank checks some of them.

    Raises ConfigError for a folder that is no checkpoint of ours, or that lost or changed a byte.
    """

    states: list[_State] = []

    def look() -> None:
        state = _read_header(folder)
        for name in sorted(state.files)[parallel.rank :: parallel.ranks]:
            _require_unchanged(folder, name, state.files[name])
        states.append(state)

    parallel.together(look)
    with _broken_files(folder):
        return Saved(folder, states[0], parallel)


@contextlib.contextmanager
def _broken_files(folder: Path) -> Generator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"checkpoint {folder}: the state of its ranks cannot be read: {error}",
            fix="resume from an older checkpoint, on storage that the machines of all ranks share",
        ) from error


def _require_unchanged(folder: Path, name: str, expected: _File) -> None:
    path = folder / name
    found = _fingerprint(path) if path.is_file() else None
    if found != expected:
        is_now = "missing" if found is None else f"{found.bytes} bytes with another digest"
        raise ConfigError(
            f"checkpoint {folder}: {name} is {is_now}, written were {expected.bytes} bytes",
            why="training from changed weights or moments would go wrong silently",
            fix="resume from an older checkpoint",
        )


def _read_header(folder: Path) -> _State:
    hint = "give a folder that a run wrote under its checkpoints"
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    except OSError as error:
        raise ConfigError(f"{folder} is not a checkpoint of a student: {STATE} cannot be read", fix=hint) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"checkpoint {folder}: {STATE} is broken: {error}", fix=hint) from error
    missing = [name for name in map(rank_file, range(state.ranks)) if name not in state.files]
    if state.format != FORMAT or missing:
        was = f"in format {state.format!r}, not {FORMAT!r}" if state.format != FORMAT else f"silent of {missing[0]}"
        raise ConfigError(f"checkpoint {folder}: {STATE} is {was}", fix=hint)
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
