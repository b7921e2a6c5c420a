"""How a tokenizer spells text: the bytes of each of its tokens, and its tokens for a text that goes on from others.

Two kinds of tokenizers say exactly which bytes a token stands for. Byte-level BPE writes each byte as a character of
GPT-2's table (openai/gpt-2, encoder.py, bytes_to_unicode). SentencePiece with byte fallback writes text as it is, a
space as a mark and any other byte as `<0xAB>`. Every other kind is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.errors import ConfigError
from distill.types import Ids

END = b"\xff\xfeend\xff"
"""Stands for an end token on both sides. 0xff and 0xfe are in no UTF-8 text, so nothing else is taken for it."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"
"""SentencePiece's mark for a space."""
_LISTS = ("normalizers", "pretokenizers", "decoders")


@dataclass(frozen=True)
class Spelling:
    """One tokenizer. V ids, of which `end_ids` end an answer."""

    token_bytes: Sequence[bytes]
    """(V,) b"" for special tokens and unused ids."""
    end_ids: frozenset[int]
    end_id: int | None
    """The id that it ends its own answers with; None when it has none."""
    _encoder: Any

    @classmethod
    def read(cls, tokenizer: Any, end_ids: Sequence[int], role: str) -> Spelling:
        """From a tokenizer of transformers; `role` is the setting for errors.

        Raises ConfigError when it does not say which bytes its tokens are.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _unreadable(role, "it has no tokenizer.json")
        definition: dict[str, Any] = json.loads(backend.to_str())
        ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        own = tokenizer.eos_token_id
        return cls(
            token_bytes=_table(definition, ids, role),
            end_ids=frozenset(end_ids),
            end_id=own if own in end_ids else min(end_ids, default=None),
            _encoder=_continuing(definition),
        )

    def spell(self, ids: Ids) -> list[bytes]:
        """The bytes of each token of a response, END for an end token at its end."""
        spelled = [self.token_bytes[int(index)] for index in ids]
        if len(ids) and int(ids[-1]) in self.end_ids:
            spelled[-1] = END
        return spelled

    def encode(self, text: str, *, ended: bool) -> Ids:
        """The tokens of a text that goes on from others: none is put before it, and what looks like a special token is
        text. `ended`: with the end token behind them, where there is one."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return np.asarray([*ids, self.end_id] if ended and self.end_id is not None else ids, np.int32)


def readable(spelled: Sequence[bytes]) -> tuple[str, bool]:
    """The text up to the first byte that is no UTF-8, and whether it is all of it and an end token follows."""
    ended = bool(spelled) and spelled[-1] == END
    raw = b"".join(spelled[:-1] if ended else spelled)
    try:
        return raw.decode(), ended
    except UnicodeDecodeError as error:
        return raw[: error.start].decode(), False


def _table(definition: Mapping[str, Any], ids: Mapping[str, int], role: str) -> list[bytes]:
    """The bytes of every id."""
    added = {each["id"]: each for each in definition.get("added_tokens") or ()}
    kinds = {part["type"] for key in ("pre_tokenizer", "normalizer", "decoder") for part in _parts(definition.get(key))}
    byte_level = "ByteLevel" in kinds
    if not byte_level and not _falls_back_to_bytes(definition):
        kind = (definition.get("model") or {}).get("type")
        raise _unreadable(role, f"it is {kind} without a byte-level alphabet and without byte fallback")
    table = [b""] * (max(ids.values(), default=-1) + 1)
    for token, index in ids.items():
        if index in added:
            table[index] = b"" if added[index]["special"] else added[index]["content"].encode()
        elif byte_level:
            table[index] = _byte_level(token, index, role)
        else:
            table[index] = _with_fallback(token)
    return table


def _falls_back_to_bytes(definition: Mapping[str, Any]) -> bool:
    marks_spaces = any(
        part["type"] == "Metaspace" or (part["type"] == "Replace" and part.get("content") == _SPACE_MARK)
        for key in ("pre_tokenizer", "normalizer")
        for part in _parts(definition.get(key))
    )
    return marks_spaces and bool((definition.get("model") or {}).get("byte_fallback"))


def _parts(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A component of tokenizer.json, or the members of a sequence of some."""
    if component is None:
        return
    inner = [part for key in _LISTS for part in component.get(key, ())]
    if not inner:
        yield component
    for part in inner:
        yield from _parts(part)


def _gpt2_alphabet() -> dict[str, int]:
    """Character -> byte. Bytes that print stand for themselves, the others take the characters from 256 on."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _gpt2_alphabet()


def _byte_level(token: str, index: int, role: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError as error:
        raise _unreadable(role, f"its token {index}, {token!r}, is not of the byte-level alphabet") from error


def _with_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()


def _continuing(definition: Mapping[str, Any]) -> Any:
    """A tokenizer for text in the middle of a sequence."""
    from tokenizers import Tokenizer

    model = dict(definition["model"])
    if "dropout" in model:
        model["dropout"] = None  # the same text must have the same tokens every time
    changed = {
        **definition,
        "model": model,
        "truncation": None,
        "padding": None,
        "normalizer": _without_prefix(definition.get("normalizer")),
        "pre_tokenizer": _without_prefix(definition.get("pre_tokenizer")),
    }
    tokenizer: Any = Tokenizer.from_str(json.dumps(changed))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _without_prefix(component: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The component without the space that it would put before a text."""
    if component is None or component["type"] == "Prepend":
        return None
    changed = dict(component)
    for key in _LISTS:
        if key in changed:
            changed[key] = [kept for part in changed[key] if (kept := _without_prefix(part)) is not None]
    if "prepend_scheme" in changed:
        changed["prepend_scheme"] = "never"
    if "add_prefix_space" in changed:
        changed["add_prefix_space"] = False
    return changed


def _unreadable(role: str, why: str) -> ConfigError:
    return ConfigError(
        f"{role}: its tokenizer does not say which bytes its tokens are: {why}",
        why="tokenizers are compared byte by byte",
        fix="use a byte-level BPE tokenizer or SentencePiece with byte fallback, or models of one tokenizer",
    )
