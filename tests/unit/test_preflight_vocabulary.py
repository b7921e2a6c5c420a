"""Two tokenizers are one when every id stands for the same bytes, however their files are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from distill.errors import ConfigError
from distill.preflight.vocabulary import check_same, load_vocabulary
from tests.builders_tokenizers import byte_level


def speak(folder: Path, tokenizer: Any, decoder: dict[str, Any]) -> Path:
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": decoder}))
    return folder


def test_decoders_that_are_written_differently_and_make_the_same_bytes_are_one_tokenizer(tmp_path: Path) -> None:
    flags = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    one = speak(tmp_path / "one", byte_level(), flags)
    other = speak(tmp_path / "other", byte_level(), flags | {"add_prefix_space": False})
    student = load_vocabulary(one, "student")
    assert check_same(student, one, other, "teachers.t").decoder != student.decoder


def test_a_token_that_stands_for_other_bytes_is_named(tmp_path: Path) -> None:
    words = {token: index for index, token in enumerate(["<pad>", "<end>", "a", "Ã"])}
    own = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<pad>"))
    own.normalizer = normalizers.Replace(" ", "▁")
    own.decoder = decoders.ByteFallback()
    own.add_special_tokens(["<pad>", "<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>")
    one = speak(tmp_path / "one", tokenizer, {"type": "ByteFallback"})
    flags = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    other = speak(tmp_path / "other", tokenizer, flags)
    with pytest.raises(
        ConfigError, match=r"1 ids stand for other bytes; id 3 is b'\\xc3\\x83' there and b'\\xc3' here"
    ):
        check_same(load_vocabulary(one, "student"), one, other, "teachers.t")
