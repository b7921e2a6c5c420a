"""Preflight of a teacher whose tokenizer is not the student's: when it is let through, and how it reads the prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.config.compose import load_config
from distill.errors import ConfigError
from distill.preflight import Preflight, inspect
from distill.teacher_manager import Translation
from distill.teacher_manager.own_prompts import prompt_key
from tests.builders_config import weights, write_jsonl, write_run
from tests.builders_tokenizers import BYTE_LEVEL, FALLBACK, byte_level, fallback

SPAN_KL = {"name": "span_kl"}
ALIGNED = {"math": {"model": "./experts/math", "alignment": "bytes"}, "code": {"model": "./experts/code"}}
OWN_IDS = len(FALLBACK) + 1


def speak(folder: Path, tokenizer: Any, rows: int, context: int = 32) -> None:
    """A model of `rows` head rows with this tokenizer."""
    from safetensors.numpy import save_file

    (folder / "tokenizer.json").unlink()
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"vocab_size": rows, "max_position_embeddings": context, "eos_token_id": None})
    )
    save_file(weights(rows), folder / "model.safetensors")


def run(folder: Path, *, rows: int = OWN_IDS, context: int = 32, own: Any = None, **changes: Any) -> Path:
    """Student and `code` are byte-level; `math` has a tokenizer of its own."""
    settings = {"teachers": ALIGNED, "objective": SPAN_KL} | changes
    path = write_run(folder, **settings)
    for name in ("base", "experts/code"):
        speak(folder / name, byte_level(), len(BYTE_LEVEL))
    speak(folder / "experts/math", own or fallback(), rows, context)
    write_jsonl(folder / "math.jsonl", [{"prompt": "abcd a"}, {"prompt": "bc"}])
    write_jsonl(folder / "code.jsonl", [{"prompt": "cde"}])
    return path


def look(path: Path, *overrides: str) -> Preflight:
    return inspect(load_config(path, list(overrides)).config)


def of_math(found: Preflight) -> Translation:
    translation = found.translations["math"]
    assert isinstance(translation, Translation)
    return translation


def test_a_teacher_with_another_tokenizer_keeps_its_own_vocabulary_and_its_own_prompts(tmp_path: Path) -> None:
    found = look(run(tmp_path, rows=OWN_IDS + 3))
    assert found.vocab_size == len(BYTE_LEVEL)
    assert found.teacher_vocab_sizes == {"math": OWN_IDS, "code": len(BYTE_LEVEL)}
    assert list(found.translations) == ["math"]
    translation = of_math(found)
    student_ids = np.array([BYTE_LEVEL.index(token) for token in ("ab", "cd", "Ġa")], np.int32)
    own = [FALLBACK.index(token) for token in ("▁a", "bc", "d", "▁a")]
    assert translation.prompts.by_ids[prompt_key(student_ids)].tolist() == own, "as it spells a text from its beginning"
    assert len(translation.prompts.by_ids) == 2, "those that it scores"
    assert (translation.context_length, translation.spelling.end_id) == (32, 2)
    assert any("teachers.math: a tokenizer of its own, 17 ids" in note for note in found.notes)
    assert any("20 head rows, the tokenizer has 17" in note for note in found.notes)


def test_it_reads_the_held_out_prompts_of_others_where_it_is_to_answer_them(tmp_path: Path) -> None:
    held_out = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "ee", "answer": "a", "domain": "code"}])
    path = run(tmp_path, evaluation={"data": [{"path": str(held_out)}]})
    key = prompt_key(np.array([BYTE_LEVEL.index("e")] * 2, np.int32))
    assert key in of_math(look(path, "evaluation.teachers=true")).prompts.by_ids
    assert key not in of_math(look(path, "evaluation.teachers=false")).prompts.by_ids
    look(path, "evaluation.teachers=false", "evaluation.max_new_tokens=30")
    with pytest.raises(
        ConfigError, match=r"evaluation\.max_new_tokens is 30: together 33, .* as its own tokenizer counts"
    ):
        look(path, "evaluation.teachers=true", "evaluation.max_new_tokens=30")


def test_chat_messages_go_through_the_teachers_own_template(tmp_path: Path) -> None:
    own = fallback()
    path = run(tmp_path, own=own)
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": [{"role": "a", "content": "bc"}]}])
    with pytest.raises(ConfigError, match="the student's tokenizer has no chat template"):
        look(path)
    chatty = byte_level()
    chatty.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chatty.save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"teachers\.math's tokenizer has no chat template"):
        look(path, "teachers.code.tokenizer=" + str(tmp_path / "base"))
    own.chat_template = "{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}"
    own.save_pretrained(tmp_path / "experts/math")
    prompts = of_math(look(path, "teachers.code.tokenizer=" + str(tmp_path / "base"))).prompts.by_ids
    key = prompt_key(np.array([BYTE_LEVEL.index("b"), BYTE_LEVEL.index("c")], np.int32))
    assert prompts[key].tolist() == [FALLBACK.index(token) for token in ("▁a", "bc")], "the role, then the content"


@pytest.mark.parametrize(
    ("objective", "complaint"),
    [
        ({"name": "policy_gradient"}, r"teachers\.math\.alignment: the objective policy_gradient cannot use"),
        ({"name": "reverse_kl", "support": "full"}, r"the objective reverse_kl cannot use[\s\S]*objective=span_kl"),
        (
            {"name": "span_kl", "mixture": "arithmetic"},
            r"mixture is arithmetic, and teachers\.math has another tokenizer",
        ),
    ],
)
def test_objectives_that_compare_single_tokens_refuse_it(
    tmp_path: Path, objective: dict[str, Any], complaint: str
) -> None:
    data = [{"path": "math.jsonl", "domain": "x", "teachers": ["math", "code"]}]
    with pytest.raises(ConfigError, match=complaint):
        look(run(tmp_path, objective=objective, data=data))


def test_without_the_setting_another_tokenizer_is_refused_and_with_it_an_equal_one(tmp_path: Path) -> None:
    path = run(tmp_path)
    with pytest.raises(ConfigError, match=r"is not the student's[\s\S]*teachers\.math\.alignment=bytes"):
        look(path, "teachers.math.alignment=null")
    with pytest.raises(ConfigError, match=r"teachers\.code\.alignment has no effect: .* is the student's"):
        look(path, "teachers.code.alignment=bytes")


def test_a_tokenizer_whose_bytes_are_not_known_and_a_context_too_short_for_its_spelling_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"teachers\.math: its tokenizer does not say which bytes its tokens are"):
        look(run(tmp_path / "a", own=fallback(byte_fallback=False)))
    path = run(tmp_path / "b", context=16)
    write_jsonl(tmp_path / "b" / "math.jsonl", [{"prompt": "ab" * 8}])
    complaint = r"the prompt has 16 tokens, .*context of 16 \(teachers\.math\.model, as its own tokenizer counts\)"
    with pytest.raises(ConfigError, match=complaint):
        look(path)
