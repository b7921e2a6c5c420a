"""A teacher as files: where its weights lie, how large they are, and what a server that loaded them must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from distill.errors import TeacherError
from distill.transfermesh.digest import model_digest, tensor_digest
from distill.weights.files import FLOATS, SPELLING, StoredTensor, cast_checksum, stored_tensors, tensor_checksums


@dataclass(slots=True)
class Teacher:
    """One teacher. `open` reads the headers; the digests are read once, when they are first asked for."""

    name: str
    folder: Path
    tensors: Mapping[str, StoredTensor]
    held_dtype: str | None = None
    """What servers hold its floats as, in safetensors' spelling; None: as they are stored."""
    vocab_size: int | None = None
    """Its log-probabilities are over ids below it; None: the run's vocabulary."""
    temperature: float = 1.0
    """What its logits are divided by before they are normalised."""
    _written: Mapping[Path, int] = field(default_factory=dict[Path, int])
    """File -> when it was last written (ns), as `open` found it."""
    _digest: str = ""
    _checksums: dict[str, str] = field(default_factory=dict[str, str])
    _casts: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    @classmethod
    def open(
        cls,
        name: str,
        folder: Path,
        *,
        server_dtype: str | None = None,
        vocab_size: int | None = None,
        temperature: float = 1.0,
    ) -> Teacher:
        """Raises ConfigError without weights in `folder`, TeacherError for a file that is broken or too short.

        `server_dtype` (float32, bfloat16, float16) is what the servers hold: it decides how large the teacher is there.
        """
        held_dtype = None if server_dtype is None else SPELLING[server_dtype]
        tensors = stored_tensors(folder)
        written = {file: file.stat().st_mtime_ns for file in dict.fromkeys(each.file for each in tensors.values())}
        return cls(name, folder, tensors, held_dtype, vocab_size, temperature, written)

    @property
    def bytes(self) -> int:
        """Weight bytes that a server holds."""
        return sum(tensor.nbytes_as(self.held_dtype) for tensor in self.tensors.values())

    @property
    def checksums(self) -> Mapping[str, str]:
        """Tensor name -> xxh3-64 in the file, read when it was first asked for and never again.

        A file that is changed later no longer agrees with what a server loads from it, which is what we want to notice.
        """
        if not self._checksums:
            self._checksums = tensor_checksums(self.folder)
        return self._checksums

    @property
    def digest(self) -> str:
        """One digest of all the weights, 32 hex digits."""
        if not self._digest:
            self._digest = model_digest(self.checksums)
        return self._digest

    @property
    def version(self) -> str:
        """The label that replies of these weights carry: its name, and 8 hex digits of where each tensor lies in which
        file and when that was last written. It reads no weights: whether they are right is the gate's matter."""
        places = xxhash.xxh3_64()
        for file in dict.fromkeys(tensor.file for tensor in self.tensors.values()):
            places.update(f"{file.resolve()} {self._written[file]}\n".encode())
        for tensor in self.tensors.values():
            places.update(f"{tensor.name} {tensor.dtype} {tensor.begin} {tensor.end}\n".encode())
        return f"{self.name}@{places.hexdigest()[:8]}"

    def check_files(self) -> None:
        """Raises TeacherError when the files are no longer what `open` saw: gone, cut short or of another layout."""
        if stored_tensors(self.folder) != self.tensors:
            raise TeacherError(
                f"teacher {self.name}: the tensors in {self.folder} are not those of the run's start",
                why="scores before and after the change would come from two different teachers",
                fix="put the files back, or start a new run",
            )

    def differences(self, held: Mapping[str, str]) -> list[str]:
        """Names of tensors that a server holds with other bytes than the file's; empty when all agree.

        `held` is the server's own name -> xxh3-64. A float tensor may have been cast to another float dtype when it was
        loaded, and one of two equal tensors (tied embeddings) may be left out. Any other tensor that the server does
        not list is a difference, unless the server has names of its own (SGLang fuses q, k and v into one tensor): then
        the canary has to stand in for those.
        """
        changed = [name for name in self.tensors if name in held and not self._agrees(name, held[name])]
        listed = {self.checksums[name] for name in self.tensors if name in held}
        unlisted = [name for name in self.tensors if name not in held and self.checksums[name] not in listed]
        has_own_names = bool(held.keys() - self.tensors.keys())
        return changed if has_own_names else changed + unlisted

    def _agrees(self, name: str, held: str) -> bool:
        if held == self.checksums[name]:
            return True
        return any(held == self._cast(name, dtype) for dtype in FLOATS if dtype != self.tensors[name].dtype)

    def _cast(self, name: str, dtype: str) -> str | None:
        """What the tensor's digest is after a cast; None when the file is no longer the one that was digested."""
        tensor = self.tensors[name]
        if (name, dtype) not in self._casts:
            if tensor_digest(tensor.bytes()) != self.checksums[name]:
                return None
            self._casts[name, dtype] = cast_checksum(tensor, dtype)
        return self._casts[name, dtype]
