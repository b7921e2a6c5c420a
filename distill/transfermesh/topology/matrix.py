"""Finds a square matrix of link classes in a paste and reads it.

A table is a header line with device names and the rows below it. Rows decide: a row is a label followed by cells, in
whatever the line begins with (prompt, log prefix, comment sign). Where blanks between cells or names were lost, the
closed list of cells and the labels of the rows say where to cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distill.errors import ConfigError

_NUMBERED = re.compile(r"(?<!\w)(?:GPU|NIC)\d+")
_FIRST_GPU = re.compile(r"(?<!\w)GPU\d+(?![\w.\-]*:)")
"""Not where it is the name of the host that a log begins its lines with."""
_BAR = str.maketrans("|│┃", "   ")
_TAIL = re.compile(r"[\d,.\-]+|N/A")
_TITLES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_LONGEST_LINE = 20_000
"""Characters; a matrix of 1,000 devices has shorter ones."""
_TITLE_WORDS = {word for title in _TITLES for word in title.split()}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The cells of one tool. `other` are cells of its matrices that say something else, such as peer access."""

    tool: str
    classes: str
    itself: str
    other: frozenset[str] = frozenset()

    @property
    def cell(self) -> re.Pattern[str]:
        return re.compile(f"(?:{self.classes}|{self.itself})")

    def all_cells(self, word: str) -> bool:
        """Whether the word is one cell, or several without a blank between them."""
        return word in self.other or re.fullmatch(f"(?:{self.classes}|{self.itself})+", word) is not None


@dataclass(frozen=True, slots=True)
class Row:
    """`text` is what follows the label on line `line` (counted from 1)."""

    label: str
    text: str
    line: int


@dataclass(slots=True)
class Table:
    """`header` is "" when rows stand without one."""

    header: str
    rows: list[Row] = field(default_factory=list[Row])

    @property
    def labels(self) -> list[str]:
        return [row.label for row in self.rows]


@dataclass(frozen=True, slots=True)
class Matrix:
    """cells[i][j]: class between device i and j. tails: what follows the cells of a row. titles: of these columns."""

    devices: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    tails: tuple[str, ...]
    titles: tuple[str, ...]


class NoMatrix(ConfigError):
    """The text has nothing that looks like one."""


def find_tables(lines: Sequence[str], vocabulary: Vocabulary) -> list[Table]:
    """Every header with what stands below it, in order; those with neither rows nor a usable header are left out."""
    tables: list[Table] = []
    for number, line in enumerate(lines, start=1):
        line = line.translate(_BAR).rstrip(" `")
        header = tables[-1].header if tables else ""
        if len(line) > _LONGEST_LINE:
            continue
        if row := _row(line, number, header, vocabulary):
            if not tables:
                tables.append(Table(""))
            tables[-1].rows.append(row)
        elif _is_header(line):
            tables.append(Table(line))
    return tables


def _row(line: str, number: int, header: str, vocabulary: Vocabulary) -> Row | None:
    found = _label(line, header, vocabulary)
    if found is None:
        return None
    label, text = found
    if text.startswith(":") or "=" in text:  # a legend, or a log's prefix
        return None
    words = [word for word in text.split() if not _TAIL.fullmatch(word) or vocabulary.all_cells(word)]
    cells = sum(vocabulary.all_cells(word) for word in words)
    foreign = [word for word in words if not vocabulary.all_cells(word)]
    token_like = all(len(word) <= 8 and word == word.upper() for word in foreign)
    return Row(label, text, number) if cells and (cells >= len(foreign) or token_like) else None


def _label(line: str, header: str, vocabulary: Vocabulary) -> tuple[str, str] | None:
    """The device that a row begins with, and the rest of the line."""
    if numbered := list(_NUMBERED.finditer(line)):
        last = numbered[-1]
        return last[0], line[last.end() :]
    for name in _words(header):
        if found := re.search(rf"(?<![\w.-]){re.escape(name)}(?=\s)", line):
            return name, line[found.end() :]
    cells = rf"(?:\s*(?:{vocabulary.classes}|{vocabulary.itself}))+\s*$"
    if found := re.search(rf"(?<![\w.-])([A-Za-z][\w.-]*?)(?={cells})", line):
        name, text = found[1], line[found.end() :]
        if name in header or len(text.split()) > 1:
            return name, text
    return None


def _words(header: str) -> list[str]:
    """Of its devices, the longest first, so that mlx5_10 is not taken for mlx5_1."""
    return sorted({*_devices_in(header).split()} - _TITLE_WORDS, key=len, reverse=True)


def _devices_in(header: str) -> str:
    """A header from its first GPU on, without the prompt or prefix of a log; "" without a GPU."""
    first = _FIRST_GPU.search(header)
    return header[first.start() :] if first else ""


def _is_header(line: str) -> bool:
    """Names of devices and titles of columns make up most of the line, from the first GPU on."""
    words = _devices_in(line).split()
    names = sum(word in _TITLE_WORDS or re.search(r"[A-Za-z].*\d$", word) is not None for word in words)
    return bool(words) and 2 * names >= len(words)


def whole_matrices(tables: Iterable[Table], vocabulary: Vocabulary) -> list[Matrix]:
    """Every table that is a whole matrix of link classes, one of several devices first.

    Raises ConfigError when there is none: what is wrong with the table that has the most rows.
    """
    whole: list[Matrix] = []
    faults: list[tuple[int, ConfigError]] = []
    for table in tables:
        if _says_something_else(table, vocabulary):
            continue
        try:
            whole.append(read(table, vocabulary))
        except ConfigError as error:
            faults.append((len(table.rows), error))
    if whole:
        return sorted(whole, key=lambda matrix: len(matrix.devices) == 1)
    if faults:
        raise max(faults, key=lambda fault: fault[0])[1]
    raise NoMatrix(
        f"no topology matrix in this text: no header that names GPU0 and no rows with the classes of {vocabulary.tool}",
        fix=f"paste the whole output of `{vocabulary.tool}`",
    )


def _says_something_else(table: Table, vocabulary: Vocabulary) -> bool:
    words = {word for row in table.rows for word in row.text.split()}
    classes = any(re.fullmatch(f"(?:{vocabulary.itself})*(?:{vocabulary.classes})+.*", word) for word in words)
    return not classes and not words.isdisjoint(vocabulary.other)


def read(table: Table, vocabulary: Vocabulary) -> Matrix:
    """Raises ConfigError, naming devices: header and rows differ, a cell is missing, unknown or not symmetric."""
    labels = table.labels
    for label in labels:
        if labels.count(label) > 1:
            raise _broken(vocabulary, f"the matrix is not square: there are two rows {label}")
    titles = _check_header(table, vocabulary)
    parsed = [_cells(row, labels, vocabulary) for row in table.rows]
    cells = tuple(cells for cells, _ in parsed)
    _check_symmetric(labels, cells, vocabulary)
    return Matrix(tuple(labels), cells, tuple(tail for _, tail in parsed), titles)


def _check_header(table: Table, vocabulary: Vocabulary) -> tuple[str, ...]:
    """The titles after the devices, which must be those of the rows in the same order."""
    labels = table.labels
    devices = _devices_in(table.header)
    joined = r"\s*".join(map(re.escape, labels))
    if labels and (found := re.match(rf"{joined}(?=\W|$|CPU|NUMA|GPU)", devices)):
        titles = _titles(devices[found.end() :])
        if titles is not None:
            return titles
    names = _header_names(table)
    missing = [name for name in names if name not in labels]
    unnamed = [label for label in labels if label not in names]
    if not names:
        detail = f"the header, the line that names the devices, is missing above the row {labels[0]}"
    elif not missing and not unnamed:
        detail = f"the header names the devices in another order or number ({', '.join(names)}) than the rows do"
    else:
        parts = [f"the header lacks {', '.join(unnamed)}, of which there are rows (is it cut off?)"] if unnamed else []
        parts += [f"the header names {', '.join(missing)}, of which there is no row"] if missing else []
        detail = "the matrix is not square: " + "; ".join(parts)
    raise _broken(vocabulary, detail)


def _titles(text: str) -> tuple[str, ...] | None:
    """Titles of columns in a header's end, where the last may be cut off; None when something else stands there."""
    rest = "".join(text.split()).lower()
    found: list[str] = []
    for title in _TITLES:
        whole = title.replace(" ", "").lower()
        if rest and (rest.startswith(whole) or whole.startswith(rest)):
            found.append(title)
            rest = rest[len(whole) :]
    return None if rest else tuple(found)


def _header_names(table: Table) -> list[str]:
    text = _devices_in(table.header)
    for title in _TITLES:
        text = re.sub(title.replace(" ", r"\s*"), " ", text)
    known = sorted(table.labels, key=len, reverse=True)
    pieces = "|".join([*map(re.escape, known), r"(?:GPU|NIC)\d+"])
    return [name for word in text.split() for name in re.findall(rf"(?:{pieces})(?!\d)|\S+", word)]


def _cells(row: Row, labels: Sequence[str], vocabulary: Vocabulary) -> tuple[tuple[str, ...], str]:
    """The classes of one row, and what follows them."""
    cells: list[str] = []
    at = 0
    where = f"line {row.line}: row {row.label}"
    for column in labels:
        at += len(row.text[at:]) - len(row.text[at:].lstrip())
        found = vocabulary.cell.match(row.text, at)
        if found is None:
            word = _word_at(row.text, at)
            if not word or _TAIL.fullmatch(word):
                detail = f"the matrix is not square: {len(cells)} cells for {len(labels)} devices"
                raise _broken(vocabulary, f"{where}: {detail}")
            raise _broken(vocabulary, f"{where}, column {column}: {word!r} is no link class")
        cells.append(found[0])
        at = found.end()
    tail = row.text[at:]
    if re.match(r"[^\s\d]", tail) and not vocabulary.cell.match(tail):
        raise _broken(vocabulary, f"{where}, column {labels[-1]}: {_word_at(row.text, at)!r} is no link class")
    if vocabulary.cell.match(tail.lstrip()) and not _TAIL.match(tail.lstrip()):
        raise _broken(vocabulary, f"{where}: the matrix is not square: more cells than the {len(labels)} devices")
    return tuple(cells), tail


def _word_at(text: str, at: int) -> str:
    """The word around a position, "" at the end of the text."""
    start = at
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    return (text[start:].split() or [""])[0] if at < len(text) else ""


def _check_symmetric(labels: Sequence[str], cells: Sequence[Sequence[str]], vocabulary: Vocabulary) -> None:
    for i, a in enumerate(labels):
        if cells[i][i] != vocabulary.itself:
            raise _broken(
                vocabulary, f"row {a} has {cells[i][i]} where {vocabulary.itself} must be, at the device itself"
            )
        for j, b in enumerate(labels[:i]):
            if cells[i][j] != cells[j][i]:
                raise _broken(
                    vocabulary,
                    f"the matrix is not symmetric: {a} to {b} is {cells[i][j]}, {b} to {a} is {cells[j][i]}",
                )
            if cells[i][j] == vocabulary.itself:
                raise _broken(vocabulary, f"{a} to {b} is {vocabulary.itself}, which is for a device and itself")


def _broken(vocabulary: Vocabulary, detail: str) -> ConfigError:
    return ConfigError(f"{vocabulary.tool}: {detail}", fix="paste the output once more, whole and unchanged")
