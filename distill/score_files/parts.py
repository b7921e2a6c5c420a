"""The output while it grows: one Parquet file for each stretch of rows, which become the row groups of a single one.

A Parquet file has no end before it is closed, so a job that is killed would leave nothing that can be read. Parts are
whole: the job goes on behind the last of them. All is in a folder beside the output, which goes when that is whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distill.errors import ConfigError, EnvironmentFault

_PART = re.compile(r"part-(\d{12})-(\d{9})\.parquet")
_SETTINGS = "job.json"
_RESUME = "--resume goes on behind the rows that are scored"


class Parts:
    """The folder of one job: `OUTPUT.partial`."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.folder = output.with_name(f"{output.name}.partial")

    def make(self) -> None:
        """The folder, if it is not there. Raises EnvironmentFault."""
        with _room(self.folder):
            self.folder.mkdir(exist_ok=True)

    def open(self, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Go on in the folder, or begin. Raises ConfigError for parts that are there unasked, or of another job."""
        written = self.folder / _SETTINGS
        if self.done:
            if not resume:
                raise ConfigError(
                    f"{self.folder} holds what a broken job scored", fix=f"{_RESUME}; or remove that folder"
                )
            self._check_same(json.loads(written.read_text()), settings)
        with _room(self.folder):
            for left in self.folder.glob("*.tmp"):
                left.unlink()
            _replace(written, lambda path: path.write_text(json.dumps(settings)))

    @property
    def done(self) -> int:
        """Rows from the beginning that are scored."""
        return sum(count for _, count, _ in self._parts())

    def write(self, first: int, count: int, table: Any) -> None:
        """An Arrow table: the scores of `count` rows from number `first` on. Raises EnvironmentFault."""
        import pyarrow.parquet as pq

        with _room(self.folder):
            path = self.folder / f"part-{first:012d}-{count:09d}.parquet"
            _replace(path, lambda new: pq.write_table(table, new, compression="zstd"))

    def finish(self, schema: Any) -> None:
        """Put the parts together under the output's name, all at once, and remove the folder."""
        import pyarrow.parquet as pq

        def together(path: Path) -> None:
            with pq.ParquetWriter(path, schema, compression="zstd") as writer:
                for _, _, part in self._parts():
                    table = pq.read_table(part)
                    if table.num_rows:
                        writer.write_table(table, row_group_size=table.num_rows)

        with _room(self.folder):
            new = self.folder / "whole.tmp"
            together(new)
            _sync(new)
            new.replace(self._output)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _parts(self) -> list[tuple[int, int, Path]]:
        """(first row, rows, file), as far as none is missing."""
        found = sorted(self.folder.glob("part-*.parquet"))
        parts: list[tuple[int, int, Path]] = []
        behind = 0
        for path in found:
            match = _PART.fullmatch(path.name)
            if match is None or int(match[1]) != behind:
                raise ConfigError(
                    f"{self.folder}: {path.name} does not follow row {behind}",
                    why="a part before it is missing",
                    fix="remove the folder, and score anew",
                )
            parts.append((int(match[1]), int(match[2]), path))
            behind += int(match[2])
        return parts

    def _check_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name, value in now.items():
            if before.get(name) != value:
                shown = "" if isinstance(value, dict) else f": {before.get(name)} then, {value} now"
                raise ConfigError(
                    f"--resume: {name} is not as it was when {self.folder} was begun{shown}",
                    why="one file would hold scores of two kinds",
                    fix="give the same, or remove that folder",
                )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a file whole, or not at all."""
    new = path.with_suffix(".tmp")
    write(new)
    _sync(new)
    new.replace(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _room(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentFault(f"no space left for the scores in {folder}", fix=f"make room; {_RESUME}") from error
        raise EnvironmentFault(f"{folder} cannot be written: {error.strerror or error}") from error


def nested(arrays: Sequence[Any], kind: Any) -> Any:
    """Lists of numbers, or with two dimensions lists of lists, as one Arrow array of `kind`."""
    import numpy as np
    import pyarrow as pa

    values = np.concatenate([np.asarray(each).reshape(-1) for each in arrays]) if arrays else []
    flat = pa.array(values, type=kind)
    if arrays and arrays[0].ndim == 2:
        rows = np.concatenate([np.full(len(each), each.shape[1]) for each in arrays])
        flat = pa.ListArray.from_arrays(pa.array(_offsets(rows), pa.int32()), flat)
    return pa.ListArray.from_arrays(pa.array(_offsets([len(each) for each in arrays]), pa.int32()), flat)


def _offsets(lengths: Any) -> Any:
    import numpy as np

    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
