"""One vocabulary for everybody: the student's tokenizer, its equality with every teacher's, the ids that end an answer.

Teachers read the very ids that the student wrote. A teacher whose tokenizer differs would score other words than those,
unless it is said to be compared by its text: then it has a vocabulary of its own.
Which id ends an answer is no part of that equality: a base model and its chat model share their ids and often end with
different ones. It is compared by itself, because a student learns its end from its teachers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import ConfigError
from distill.preflight.folder import ModelFolder, existing_folder, read_json
from distill.teacher_manager import Spelling

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer taken apart. Two with equal fingerprints have the same token behind every id; `check_same` also looks
    at the bytes that it stands for."""

    tokenizer: Any
    tokens: Mapping[int, str]
    parts: Mapping[str, Any]
    fingerprint: str
    decoder: Any = None
    """Makes text of tokens. It is no part of the fingerprint: what matters of it are the bytes of each id."""

    @property
    def size(self) -> int:
        """V: one more than the largest id, which is `len(tokenizer)` where ids have no holes."""
        return max(self.tokens) + 1


@dataclass(frozen=True)
class Vocabularies:
    """The student's vocabulary, and those of teachers that do not share it."""

    student: Vocabulary
    end_ids: tuple[int, ...]
    """The student's ids that end an answer."""
    foreign: Mapping[str, Vocabulary]
    """Teacher -> its own vocabulary, where that is another."""
    notes: tuple[str, ...]

    def of(self, teacher: str) -> Vocabulary:
        return self.foreign.get(teacher, self.student)


def load_vocabulary(path: Path, role: str) -> Vocabulary:
    """The tokenizer in `path`. Raises ConfigError."""
    existing_folder(path, role)
    if not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    ):
        raise ConfigError(
            f"{role}: no tokenizer in {path}",
            why="every teacher is compared with the student's tokenizer before anything is loaded",
            fix=f"give {role}.tokenizer, or put tokenizer.json and tokenizer_config.json beside the weights",
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"{role}: the tokenizer in {path} cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}",
            fix="save it again with save_pretrained",
        ) from error
    tokens = {int(index): str(token) for token, index in tokenizer.get_vocab().items()}
    if not tokens:
        raise ConfigError(f"{role}: the tokenizer in {path} knows no token", fix="save it again with save_pretrained")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inner: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model: dict[str, Any] = inner.get("model") or {}
    parts = {
        "begin token": tokenizer.bos_token_id,
        "added tokens": inner.get("added_tokens"),
        "normalizer": inner.get("normalizer"),
        "pre-tokenizer": inner.get("pre_tokenizer"),
        "merges": model.get("merges"),
        "kind of model": model.get("type"),
    }
    canonical = json.dumps([sorted(tokens.items()), parts], sort_keys=True).encode()
    return Vocabulary(tokenizer, tokens, parts, hashlib.sha256(canonical).hexdigest(), inner.get("decoder"))


def check_same(student: Vocabulary, student_path: Path, path: Path, role: str) -> Vocabulary:
    """The vocabulary in `path`. Raises ConfigError, which shows where the two tokenizers first differ."""
    if _same_files(student_path, path):
        return student
    other = load_vocabulary(path, role)
    difference = _difference(student, other)
    if not difference:
        return other
    raise ConfigError(
        f"{role}: its tokenizer in {path} is not the student's: {difference}",
        why="a teacher scores the ids that the student wrote: under another tokenizer they spell other words",
        fix="use teachers and a student of one family, whose tokenizers are equal; or compare what they spell, with "
        f"{role}.alignment=bytes objective=span_kl",
    )


def load_foreign(student: Vocabulary, path: Path, role: str) -> Vocabulary:
    """The vocabulary in `path`, which is not to be the student's. Raises ConfigError when it is."""
    other = load_vocabulary(path, role)
    if other.fingerprint == student.fingerprint:
        raise ConfigError(
            f"{role}.alignment has no effect: its tokenizer in {path} is the student's",
            why="a setting that is ignored is a mistake",
            fix=f"remove {role}.alignment",
        )
    return other


def _same_files(one: Path, other: Path) -> bool:
    """Byte for byte the same tokenizer, so that large ones need not be parsed for each teacher."""
    if one == other:
        return True
    if not (other / "tokenizer.json").is_file():
        return False

    def content(folder: Path, name: str) -> bytes | None:
        return (folder / name).read_bytes() if (folder / name).is_file() else None

    return all(content(one, name) == content(other, name) for name in _FILES)


def _difference(student: Vocabulary, teacher: Vocabulary) -> str:
    """Where the two first differ; empty where every id means the same."""
    if student.fingerprint == teacher.fingerprint:
        return "" if student.decoder == teacher.decoder else _other_bytes(student, teacher)
    ids = [
        index
        for index in sorted({*student.tokens, *teacher.tokens})
        if student.tokens.get(index) != teacher.tokens.get(index)
    ]
    if ids:
        shown = ", ".join(
            f"{index} is {_token(student, index)} there and {_token(teacher, index)} here" for index in ids[:3]
        )
        return f"{len(ids)} ids differ ({len(student.tokens)} ids there, {len(teacher.tokens)} here); id {shown}"
    part = next(name for name in student.parts if student.parts[name] != teacher.parts[name])
    was, now = (_brief(each.parts[part]) for each in (student, teacher))
    return f"the same ids, but another {part}: {was} there, {now} here"


def _other_bytes(student: Vocabulary, teacher: Vocabulary) -> str:
    """Two decoders may be written differently and make the same of every id."""
    try:
        was, now = (Spelling.read(each.tokenizer, (), "").token_bytes for each in (student, teacher))
    except ConfigError:  # a kind of tokenizer that does not tell its bytes: then the decoders must be equal
        return f"the same ids, but another decoder: {_brief(student.decoder)} there, {_brief(teacher.decoder)} here"
    changed = [index for index, pair in enumerate(zip(was, now, strict=True)) if pair[0] != pair[1]]
    if not changed:
        return ""
    first = changed[0]
    return f"{len(changed)} ids stand for other bytes; id {first} is {was[first]!r} there and {now[first]!r} here"


def _brief(part: Any) -> str:
    return json.dumps(part, ensure_ascii=False)[:80]


def _token(vocabulary: Vocabulary, index: int) -> str:
    return repr(vocabulary.tokens[index]) if index in vocabulary.tokens else "not used"


def check_rows(model: ModelFolder, size: int) -> str | None:
    """A note when the head is padded beyond the vocabulary. Raises ConfigError when it is too small for it."""
    if model.vocab_rows < size:
        raise ConfigError(
            f"{model.role}: its head has {model.vocab_rows} rows, and the tokenizer {size} ids",
            why="an id without a row can be neither read nor scored",
            fix="resize the embeddings (resize_token_embeddings), or use the tokenizer that it was trained with",
        )
    if model.vocab_rows > size:
        return (
            f"{model.role}: {model.vocab_rows} head rows, the tokenizer has {size}: the rest is cut before the softmax"
        )
    return None


def end_ids(model: Path, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's, and those that transformers would stop at.

    These are in generation_config.json, or in config.json where there is none. The folder of a teacher elsewhere may
    hold a tokenizer and nothing else.
    """
    files = [model / name for name in ("generation_config.json", "config.json")]
    declared = next((read_json(file, str(model)).get("eos_token_id") for file in files if file.is_file()), None)
    values = [vocabulary.tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return tuple(sorted({value for value in values if isinstance(value, int) and 0 <= value < vocabulary.size}))


def check_ends(
    vocabulary: Vocabulary, student: Sequence[int], teacher: Sequence[int], role: str, student_model: Path
) -> str | None:
    """A note when a teacher ends its answers with other ids too. Raises ConfigError when it ends them with others only:
    it gives the student's end next to no probability, so the student would learn never to end."""
    if not teacher:
        return f"{role}: it names no end token, so nobody knows whether it ends answers where the student does"
    only_teacher = [index for index in teacher if index not in student]
    if not only_teacher:
        return None
    ids = ", ".join(f"{index} ({_token(vocabulary, index)})" for index in only_teacher)
    own = ", ".join(f"{index} ({_token(vocabulary, index)})" for index in student)
    file = student_model / "generation_config.json"
    remedy = f"add {', '.join(map(str, only_teacher))} to eos_token_id (a list) in {file}"
    if set(teacher) & set(student):
        return f"{role}: it also ends answers with {ids}, where the student goes on; to end there, {remedy}"
    raise ConfigError(
        f"{role}: it ends its answers with {ids}, and the student with {own}",
        why="the student writes until an end of its own, which this teacher calls improbable: answers would grow to "
        "rollout.max_new_tokens",
        fix=f"{remedy}, so that the student ends there too; or start from the student's chat model",
    )


def foreign_notes(vocabulary: Vocabulary, ends: Sequence[int], role: str) -> list[str]:
    """What is to be known of a teacher with another tokenizer."""
    notes = [f"{role}: a tokenizer of its own, {vocabulary.size} ids: compared on the text that both spell"]
    if not ends:
        notes.append(f"{role}: it names no end token, so it does not teach where an answer ends")
    return notes
