"""A teacher with another tokenizer: bytes of tokens, what it is asked, and what its scores say of the student's tokens.

The planted student joins "ab", "cd" and " a"; the planted teacher joins "bc" and " a", and spells é in bytes.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.errors import ConfigError, TeacherError
from distill.objectives.alignment import align
from distill.objectives.policy_gradient import PolicyGradient
from distill.objectives.span_kl import SpanKL
from distill.store.codec import Snapshot, decode, encode
from distill.teacher_manager import OwnPrompts, Spelling, Teacher, Translation
from distill.teacher_manager.gate import canary_ids
from distill.teacher_manager.own_prompts import prompt_key
from distill.types import (
    Batch,
    GenerateRequest,
    Generation,
    Ids,
    Sample,
    ScoredSample,
    Signal,
    SignalSpec,
    TeacherScores,
)
from students.hf.batching import Lesson, MicroBatch
from students.hf.soundness import require_sound
from tests.builders import scored
from tests.builders_teachers import FakeServer, Rig, write_tensors
from tests.builders_tokenizers import BYTE_LEVEL, FALLBACK, byte_level, fallback

THINK = len(FALLBACK)
CORPUS = [
    "the cat sat on the mat",
    "das Maß ist voll",
    "x = [a for a in b]\n    return x",
    "漢字 and 🙂 emoji",
    "it's 12345",
]
PROMPT, TEACHERS_PROMPT = np.array([0, 3], np.int32), np.array([1, 13, 7], np.int32)


def student() -> Spelling:
    return Spelling.read(byte_level(), [1], "student")


def teacher() -> Spelling:
    return Spelling.read(fallback(), [2], "teachers.t")


def translation(**changes: Any) -> Translation:
    found = Translation("t", student(), teacher(), OwnPrompts("t", {prompt_key(PROMPT): TEACHERS_PROMPT}), 40, 40)
    return replace(found, **changes)


def ids(*tokens: str) -> Ids:
    return np.array([BYTE_LEVEL.index(token) for token in tokens], np.int32)


def theirs(*tokens: str) -> list[int]:
    return [[*FALLBACK, "<think>"].index(token) for token in tokens]


def sample(*tokens: str, **changes: Any) -> Sample:
    response = ids(*tokens)
    zeros = np.zeros(len(response), np.float32)
    found = Sample("s", 0, "d", {"t": 1.0}, PROMPT, response, zeros - 1, zeros.astype(np.int32), "stop")
    return replace(found, **changes)


def test_bytes_of_a_byte_level_tokenizer_are_those_of_its_alphabet() -> None:
    spelled = dict(zip(BYTE_LEVEL, student().token_bytes, strict=True))
    assert spelled["ab"] == b"ab" and spelled["Ġa"] == b" a" and spelled["Ã©"] == "é".encode()
    assert spelled["Ã"] == b"\xc3" and spelled["©"] == b"\xa9"
    assert spelled["<s>"] == spelled["</s>"] == spelled["<|turn|>"] == b"", "special tokens have no text"


def test_bytes_of_a_tokenizer_with_byte_fallback_are_its_texts_and_its_bytes() -> None:
    table = teacher().token_bytes
    assert [table[index] for index in theirs("<0xC3>", "▁a", "bc", "▁")] == [b"\xc3", b" a", b"bc", b" "]
    assert [table[index] for index in theirs("<bos>", "<end>")] == [b"", b""]
    assert table[THINK] == b"<think>", "an added token that is no special one is text"


@pytest.mark.parametrize("text", ["abcd", " ab é", "a  b", "é", "abéab a"])
def test_a_text_is_spelled_by_both_in_tokens_of_its_very_bytes(text: str) -> None:
    for spelling in (student(), teacher()):
        assert b"".join(spelling.spell(spelling.encode(text, ended=False))) == text.encode()


def test_a_text_that_goes_on_gets_no_space_before_it_and_no_special_tokens_from_its_letters() -> None:
    assert teacher().encode("ab", ended=True).tolist() == theirs("a", "b", "<end>")
    assert 2 not in teacher().encode("a<end>", ended=False)
    assert teacher().encode("a<think>b", ended=False).tolist() == theirs("a", "<think>", "b")


def test_a_tokenizer_that_does_not_tell_its_bytes_is_refused_with_the_reason() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(ConfigError, match=r"teachers\.t: .*which bytes its tokens are: it is WordLevel without"):
        Spelling.read(words, [], "teachers.t")
    with pytest.raises(ConfigError, match=r"it is BPE without .* and without byte fallback"):
        Spelling.read(fallback(byte_fallback=False), [], "teachers.t")
    strange = byte_level()
    definition = strange.backend_tokenizer.to_str().replace('"ab"', '"a b"').replace('"a","b"', '"a"," b"')
    with pytest.raises(ConfigError, match=r"its token 11, 'a b', is not of the byte-level alphabet"):
        Spelling.read(_Backed(definition, strange), [], "teachers.t")


class _Backed:
    """A tokenizer of transformers over a definition that `tokenizers` itself would not make."""

    def __init__(self, definition: str, like: Any) -> None:
        self.eos_token_id = like.eos_token_id
        self.backend_tokenizer = self
        self._definition = definition
        self._ids: dict[str, int] = like.backend_tokenizer.get_vocab(with_added_tokens=True)

    def to_str(self) -> str:
        return self._definition

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return {"a b" if token == "ab" else token: index for token, index in self._ids.items()}


def test_the_teacher_is_asked_about_its_own_prompt_and_its_own_tokens_of_the_response() -> None:
    question = translation().question(sample("ab", "cd", "Ġa", "b", "</s>"))
    response = theirs("a", "bc", "d", "▁a", "b", "<end>")
    assert question.request.input_ids.tolist() == [*TEACHERS_PROMPT, *response]
    assert question.request.response_len == 6


def test_scores_of_a_span_stand_at_its_first_token_and_the_ends_of_both_are_one_span() -> None:
    item = sample("ab", "cd", "Ġa", "b", "</s>")
    logq = -np.array([1, 2, 4, 8, 16, 32], np.float32)
    found = translation().question(item).answer(item, TeacherScores("t", logq))
    assert found.spans is not None
    # a|bc|d| a|b|end against ab|cd| a|b|end: they meet after abcd, after " a", after b and after the end
    assert found.spans.tolist() == [0, 0, 1, 2, 3]
    assert found.logprobs.tolist() == [-7, 0, -8, -16, -32]
    assert (found.logprobs.dtype, found.spans.dtype) == (np.float32, np.int32)


def test_a_span_with_an_untrained_token_is_left_out_whole() -> None:
    item = sample("ab", "cd", "Ġa", "b", loss_mask=np.array([1, 0, 1, 1], np.int8))
    found = translation().question(item).answer(item, TeacherScores("t", np.full(5, -1, np.float32)))
    assert found.spans is not None
    assert found.spans.tolist() == [-1, -1, 1, 2] and found.logprobs.tolist() == [0, 0, -1, -1]


def test_what_comes_after_a_broken_character_is_not_aligned_and_special_tokens_have_no_span() -> None:
    item = sample("ab", "<|turn|>", "Ã", "a", "</s>")
    question = translation().question(item)
    assert question.request.input_ids.tolist() == [*TEACHERS_PROMPT, *theirs("a", "b")]
    found = question.answer(item, TeacherScores("t", -np.ones(2, np.float32)))
    assert found.spans is not None
    assert found.spans.tolist() == [0, -1, -1, -1, -1] and found.logprobs.tolist() == [-2, 0, 0, 0, 0]


def test_a_response_without_text_is_one_request_that_teaches_nothing() -> None:
    item = sample("<|turn|>", "Ã")
    question = translation().question(item)
    assert question.request.response_len == 1
    found = question.answer(item, TeacherScores("t", -np.ones(1, np.float32)))
    assert found.spans is not None
    assert found.spans.tolist() == [-1, -1] and not found.logprobs.any()


def test_a_teacher_without_an_end_token_is_not_asked_about_the_end() -> None:
    silent = replace(teacher(), end_ids=frozenset(), end_id=None)
    item = sample("ab", "</s>")
    question = translation(spelling=silent).question(item)
    assert question.request.response_len == 2
    found = question.answer(item, TeacherScores("t", -np.ones(2, np.float32)))
    assert found.spans is not None
    assert found.spans.tolist() == [0, -1]


def test_a_prompt_of_unknown_text_and_a_response_beyond_the_context_are_faults_of_their_sample() -> None:
    with pytest.raises(TeacherError, match="s: its prompt is none of the run's data, so teacher t") as caught:
        translation().question(sample("ab", prompt_ids=np.array([5], np.int32)))
    assert (caught.value.sample_id, caught.value.teacher) == ("s", "t")
    with pytest.raises(TeacherError, match="teacher t spells it in 6 tokens, more than its context of 5") as caught:
        translation(context_length=5).question(sample("ab", "</s>"))
    assert caught.value.sample_id == "s"
    with pytest.raises(TeacherError, match="the student spells it in 4 tokens, more than its context of 3"):
        translation(student_context_length=3).question(sample("ab", "</s>"))


def test_what_the_teacher_writes_comes_back_in_the_students_tokens() -> None:
    asked = translation().prompt(GenerateRequest("e", PROMPT, 8, stop_token_ids=(1,)))
    assert asked.input_ids.tolist() == TEACHERS_PROMPT.tolist() and asked.stop_token_ids == (2,)
    output = np.array(theirs("a", "bc", "d", "<end>"), np.int32)
    wrote = Generation("e", output, -np.array([1, 2, 4, 8], np.float32), ("t@1",) * 4, "stop")
    back = translation().written(wrote)
    assert back.output_ids.tolist() == ids("ab", "cd", "</s>").tolist()
    assert back.logprobs.tolist() == [-7, 0, -8]
    assert (back.versions, back.finish_reason) == (("t@1",) * 3, "stop")


def write_teacher(folder: Path, size: int, seed: int) -> Path:
    """As `write_tensors`, over another vocabulary."""
    tensors = load_file(write_tensors(folder, seed) / "model.safetensors")
    save_file(tensors | {"table": tensors["table"][:size]}, folder / "model.safetensors")
    return folder


async def test_a_manager_asks_each_teacher_in_its_own_tokens_and_checks_it_over_its_own_vocabulary(
    tmp_path: Path,
) -> None:
    size = len(FALLBACK) + 1
    own = Teacher.open("same", write_tensors(tmp_path / "same", 1))
    other = Teacher.open("t", write_teacher(tmp_path / "t", size, 14), vocab_size=size)
    server = FakeServer()
    rig = Rig(tmp_path, [own, other], [server], translations={"t": translation()})
    await rig.manager.start()
    item = sample("ab", "cd", "Ġa", "b", "</s>", teachers={"t": 1.0, "same": 0.5})
    result = await rig.manager.score(item)
    table = load_file(tmp_path / "t" / "model.safetensors")["table"].astype(np.float64)
    first, second = result.scores
    span = [table[theirs(*each)].sum() for each in (["a", "bc", "d"], ["▁a"], ["b"], ["<end>"])]
    np.testing.assert_allclose(first.logprobs, [span[0], 0, *span[1:]], rtol=1e-6)
    assert second.spans is None and np.array_equal(second.logprobs, rig.expected(item)[1])
    assert canary_ids(size).max() < size, "a canary over 64 ids would not fit"
    assert dict(rig.manager.token_counts()) == {"t": 3 + 6, "same": 2 + 5}

    (answer,) = await rig.manager.generate("t", [GenerateRequest("e", PROMPT, 3)])
    best = teacher().token_bytes[int(table.argmax())]
    assert best == b"bc" and b"".join(student().spell(answer.output_ids)) == best * 3
    await rig.manager.close()


async def test_a_sample_that_cannot_be_translated_opens_the_barrier_for_the_others(tmp_path: Path) -> None:
    size = len(FALLBACK) + 1
    other = Teacher.open("t", write_teacher(tmp_path / "t", size, 14), vocab_size=size)
    rig = Rig(tmp_path, [other], [FakeServer()], barrier=True, translations={"t": translation()})
    await rig.manager.start()
    bad, good = sample("ab", prompt_ids=np.array([5], np.int32)), sample("cd", id="g", ordinal=1)
    for item in (bad, good):
        rig.manager.announce(item.id, ["t"], 3)
    with pytest.raises(TeacherError, match="none of the run's data"):
        await rig.manager.score(bad)
    assert (await rig.manager.score(good)).sample is good
    await rig.manager.close()


def test_spans_survive_the_store_and_only_trained_rows_reach_the_objective() -> None:
    item = scored(3, length=4)
    spans = np.array([0, 0, -1, 1], np.int32)
    mask = np.array([1, 1, 0, 1], np.int8)
    marked = ScoredSample(replace(item.sample, loss_mask=mask), (replace(item.scores[0], spans=spans),))
    (back,) = decode(encode(Snapshot(3, [marked], ()))).items
    assert np.array_equal(back.scores[0].spans, spans)  # pyright: ignore[reportArgumentType]
    micro = MicroBatch.collate((Lesson(back, 1.0),), torch.device("cpu"), packed=True)
    (part,) = micro.teacher_parts(SignalSpec(Signal.SAMPLED), dtype=torch.float32)
    assert part.rows.span_N is not None and part.rows.span_N.tolist() == [0, 0, 1]
    assert part.rows.teacher_logp_N.tolist() == item.scores[0].logprobs[[0, 1, 3]].tolist()


def trained(kind: str) -> Spelling:
    """A tokenizer learnt from CORPUS, put together as those of a family of models are."""
    if kind == "qwen":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+"), "isolated")
        byte_level_part = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level_part])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    definition = json.loads(tokenizer.to_str())
    # byte tokens are ordinary ones, as in Llama's own tokenizer.json
    definition["added_tokens"] = [each for each in definition["added_tokens"] if each["content"] == "<unk>"]
    whole = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(definition)))
    return Spelling.read(whole, [], kind)


def test_an_objective_of_single_tokens_refuses_scores_of_spans() -> None:
    item = scored(3, length=4)
    spanned = replace(item.scores[0], spans=np.arange(4, dtype=np.int32))
    batch = Batch(0, (ScoredSample(item.sample, (spanned,)),))
    require_sound(batch, SpanKL(), 50)
    with pytest.raises(ConfigError, match="its teacher t has another tokenizer, which the objective PolicyGradient"):
        require_sound(batch, PolicyGradient(), 50)
    wrong = Batch(0, (ScoredSample(item.sample, (replace(spanned, spans=np.zeros(3, np.int32)),)),))
    with pytest.raises(TeacherError, match=r"spans must have shape \(4,\), got shape \(3,\)"):
        require_sound(wrong, SpanKL(), 50)


@pytest.fixture(scope="module")
def families() -> dict[str, Spelling]:
    return {kind: trained(kind) for kind in ("qwen", "llama")}


ANY_CHARACTER = st.one_of(
    st.sampled_from(" \n'thecat12ß漢🙂"), st.characters(max_codepoint=0x24FF, exclude_categories=["Cs"])
)


@settings(deadline=None, max_examples=80)
@given(
    text=st.text(
        alphabet=st.one_of(
            st.sampled_from(" \n'thecat12ß漢🙂"), st.characters(max_codepoint=0x24FF, exclude_categories=["Cs"])
        ),
        max_size=30,
    )
)
def test_tokenizers_of_both_families_spell_any_text_in_its_bytes_and_align_to_its_end(
    families: dict[str, Spelling], text: str
) -> None:
    text = unicodedata.normalize("NFC", text)
    spelled = {kind: each.spell(each.encode(text, ended=False)) for kind, each in families.items()}
    for kind, tokens in spelled.items():
        assert b"".join(tokens) == text.encode(), kind
    found = align(spelled["qwen"], spelled["llama"])
    assert not len(found.student_unaligned) and not len(found.teacher_unaligned)
