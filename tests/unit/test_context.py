"""Privileged context: what one teacher reads beside the student's prompt, and which row it is of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.config import ContextConfig
from distill.config.compose import load_config
from distill.errors import ConfigError, TeacherError
from distill.preflight import Preflight, inspect
from distill.preflight.context import with_context
from distill.rollout.prompts import PromptRow
from distill.teacher_manager import Context, OwnPrompts, Translation
from distill.teacher_manager.own_prompts import prompt_key
from distill.teacher_manager.translation import questions
from distill.types import GenerateRequest, Ids, Sample, Signal, SignalSpec, Support, sample_id
from tests.builders import sample
from tests.builders_config import write_jsonl, write_run
from tests.builders_tokenizers import BYTE_LEVEL, FALLBACK, byte_level, fallback
from tests.unit.test_preflight_foreign import speak

PRIVILEGED = {"model": "./experts/math", "context": {"template": "{prompt}{answer}="}}
TEACHERS = {"math": PRIVILEGED, "code": {"model": "./experts/code"}}


def row(prompt: Any, answer: str | None = "7", **columns: Any) -> PromptRow:
    return PromptRow(Path("rows.jsonl"), 3, "d", prompt, answer, {"t": 1.0}, columns)


def read(prompt: Any, context: dict[str, str], **columns: Any) -> Any:
    return with_context(row(prompt, **columns), ContextConfig(**context), "teachers.t").prompt


def test_a_template_takes_the_place_of_a_text() -> None:
    assert read("1+6?", {"template": "{prompt} ({answer}, {{{hint}}})"}, hint=12) == "1+6? (7, {12})"
    assert read("{answer}", {"template": "{prompt}"}) == "{answer}", "braces of the data are text"
    assert read("1+6?", {"system": "Be {brief}.", "template": "Q: {prompt}"}) == "Be {brief}.\n\nQ: 1+6?"


def test_in_a_chat_the_template_is_the_last_message_of_the_user_and_instructions_the_first_of_the_system() -> None:
    chat = [
        {"role": "user", "content": "1+6?"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "so"},
    ]
    filled = read(chat, {"template": "{prompt}: {answer}"})
    assert filled == [*chat[:2], {"role": "user", "content": "so: 7"}]
    assert chat[2]["content"] == "so", "the student's prompt stays as it is"
    assert read(chat, {"system": "Know it."}) == [{"role": "system", "content": "Know it."}, *chat]
    begun = [{"role": "system", "content": "Be kind."}, *chat]
    assert read(begun, {"system": "Know it."})[0] == {"role": "system", "content": "Know it.\n\nBe kind."}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (row("a", answer=None), "the row has no answer, and teachers.t.context.template names it"),
        (row("a", hint=None), "the row has no column 'hint', and teachers.t.context.template names it"),
        (row("a", hint=["b"]), "the column 'hint' is not a text"),
        (row([{"role": "assistant", "content": "x"}], hint="b"), "no message is the user's"),
        (row([{"role": "user", "content": [{"type": "image"}]}], hint="b"), "the user's last message is not a text"),
    ],
)
def test_a_row_that_the_template_cannot_use_is_named_with_its_line(changed: PromptRow, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^rows\.jsonl:3: ") as caught:
        with_context(changed, ContextConfig(template="{prompt}{answer}{hint}"), "teachers.t")
    assert says in str(caught.value)


def look(path: Path, *overrides: str) -> Preflight:
    return inspect(load_config(path, list(overrides)).config)


def ids(text: str) -> list[int]:
    """In the tokenizer of `write_run`: characters behind three special tokens."""
    return [3 + "abcdefghij=".index(letter) for letter in text]


def rollout(found: Preflight, ordinal: int, samples_per_prompt: int = 1, **changes: Any) -> Sample:
    """A sample of the run's own stream."""
    prompt = found.prompts.stream.at(ordinal // samples_per_prompt)
    return replace(
        sample(ordinal), prompt_ids=prompt.input_ids, teachers=prompt.teachers, id=sample_id(ordinal), **changes
    )


def test_the_teacher_reads_its_own_row_behind_it_the_response_as_it_is_and_others_read_the_students_prompt(
    tmp_path: Path,
) -> None:
    data = [{"path": "math.jsonl", "domain": "x", "teachers": ["math", "code"]}]
    path = write_run(tmp_path, teachers=TEACHERS, data=data, rollout={"max_new_tokens": 8, "samples_per_prompt": 2})
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab", "answer": answer} for answer in "cde"])
    found = look(path)
    assert list(found.translations) == ["math"]
    seen: set[str] = set()
    for ordinal in range(6):
        item = rollout(found, ordinal, 2)
        answer = found.prompts.stream.at(ordinal // 2).answer or ""
        first, second = questions(item, SignalSpec(Signal.SAMPLED), found.translations)
        assert first.request.input_ids.tolist() == [*ids(f"ab{answer}="), *item.response_ids]
        assert second.request.input_ids.tolist() == [*ids("ab"), *item.response_ids]
        assert first.request.response_len == second.request.response_len == len(item.response_ids)
        seen.add(answer)
    assert seen == {"c", "d", "e"}, "rows that read the same to the student keep their own references"


def test_what_the_student_chose_goes_along_and_scores_come_back_as_they_are(tmp_path: Path) -> None:
    path = write_run(tmp_path, teachers=TEACHERS)
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab", "answer": "c"}])
    found = look(path)
    ordinal = next(n for n in range(2) if "math" in found.prompts.stream.at(n).teachers)
    chosen = np.arange(6, dtype=np.int32).reshape(3, 2)
    spec = SignalSpec(Signal.TOPK, 2, Support.STUDENT)
    (question,) = questions(rollout(found, ordinal, topk_ids=chosen), spec, found.translations)
    assert question.request.student_ids is chosen
    assert question.alignment is None


def test_a_prompt_that_is_no_row_of_its_own_is_refused_with_the_sample(tmp_path: Path) -> None:
    path = write_run(tmp_path, teachers=TEACHERS)
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab", "answer": "c"}])
    found = look(path)
    reader = found.translations["math"]
    ordinal = next(n for n in range(2) if "math" in found.prompts.stream.at(n).teachers)
    item = rollout(found, ordinal)
    for other in (
        replace(item, prompt_ids=np.array(ids("abab"), np.int32)),
        replace(item, id="eval-0"),
        replace(item, ordinal=1 - ordinal, id=sample_id(1 - ordinal)),
    ):
        with pytest.raises(TeacherError, match="its prompt is none of the run's data, so teacher math") as caught:
            reader.question(other)
        assert (caught.value.sample_id, caught.value.teacher) == (other.id, "math")


def test_a_response_beyond_the_teachers_context_is_a_fault_of_its_sample() -> None:
    prompt, own = np.array([4, 5], np.int32), np.array([7, 8, 9], np.int32)
    reader = Context("t", OwnPrompts("t", {prompt_key(prompt): own}), context_length=5)
    item = replace(sample(0), prompt_ids=prompt, id="s")
    with pytest.raises(TeacherError, match=r"s: teacher t reads 6 tokens .* and can read 5") as caught:
        reader.question(item)
    assert caught.value.sample_id == "s"
    assert replace(reader, context_length=6).question(item).request.input_ids.tolist() == [7, 8, 9, *item.response_ids]


def held_out(folder: Path, *answers: str) -> dict[str, Any]:
    rows = [{"prompt": "ab", "answer": answer, "domain": "math"} for answer in answers]
    return {"data": [{"path": str(write_jsonl(folder / "held.jsonl", rows))}]}


def test_held_out_prompts_are_answered_with_the_context_and_must_be_told_apart_by_the_student(tmp_path: Path) -> None:
    for name, answers in (("one", "d"), ("two", "de")):
        folder = tmp_path / name
        write_run(folder, teachers=TEACHERS, evaluation=held_out(folder, *answers))
        write_jsonl(folder / "math.jsonl", [{"prompt": "ab", "answer": "c"}])
    request = GenerateRequest("e", np.array(ids("ab"), np.int32), 4, stop_token_ids=(2,))
    asked = look(tmp_path / "one" / "teachers.yaml").translations["math"].prompt(request)
    assert asked.input_ids.tolist() == ids("abd="), "the held-out row's reference, not that of the trained one"
    assert asked.stop_token_ids == (2,)
    with pytest.raises(ConfigError, match=r"held\.jsonl:2: another held-out prompt reads the same to the student"):
        look(tmp_path / "two" / "teachers.yaml")


def test_a_context_that_leaves_no_room_for_an_answer_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = write_run(tmp_path, teachers=TEACHERS)
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab", "answer": "c" * 22}])
    with pytest.raises(
        ConfigError,
        match=r"math\.jsonl:1: the prompt has 25 tokens, and rollout\.max_new_tokens is 8: together 33, more than the "
        r"context of 32 \(teachers\.math\.model, which reads teachers\.math\.context too\)",
    ):
        look(path)
    look(path, "rollout.max_new_tokens=7")


def test_a_template_about_a_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    context = {"template": "{prompt}{solutoin}"}
    path = write_run(tmp_path, teachers=TEACHERS | {"math": PRIVILEGED | {"context": context}})
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab", "solution": "c"}])
    with pytest.raises(ConfigError, match=r"teachers\.math\.context\.template names 'solutoin'") as caught:
        look(path)
    assert "did you mean 'solution'?" in caught.value.fix


def test_a_teacher_with_another_tokenizer_spells_its_context_in_its_own_tokens(tmp_path: Path) -> None:
    math = {"model": "./experts/math", "alignment": "bytes", "context": {"template": "{prompt} {answer}"}}
    path = write_run(tmp_path, teachers=TEACHERS | {"math": math}, objective={"name": "span_kl"})
    for name in ("base", "experts/code"):
        speak(tmp_path / name, byte_level(), len(BYTE_LEVEL))
    speak(tmp_path / "experts/math", fallback(), len(FALLBACK) + 1)
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab", "answer": answer} for answer in ("a", "bc")])
    write_jsonl(tmp_path / "code.jsonl", [{"prompt": "cde"}])
    found = look(path)
    reader = found.translations["math"]
    assert isinstance(reader, Translation)
    own: list[Ids] = []
    for ordinal in range(3):
        if "math" in found.prompts.stream.at(ordinal).teachers:
            response = np.array([BYTE_LEVEL.index("cd")], np.int32)
            question = reader.question(rollout(found, ordinal, response_ids=response))
            own.append(question.request.input_ids[: -question.request.response_len])
    spelled = sorted([FALLBACK[index] for index in prompt] for prompt in own)
    assert spelled == [["▁a", "b", "▁", "bc"], ["▁a", "b", "▁a"]]
