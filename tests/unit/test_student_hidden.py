"""Full rows as hidden states: the student learns from them what it learns from the rows themselves."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from distill.config.models import ObjectiveConfig
from distill.errors import ConfigError, TeacherError
from distill.objectives import build_objective
from distill.objectives.divergence import ReverseKL
from distill.protocols import HeadFolder
from distill.serving.embedded.scoring import as_numpy
from distill.store.codec import Snapshot, decode, encode
from distill.types import Batch, ScoredSample, Signal, SignalSpec, TeacherScores
from students.hf.backend import HFStudent
from students.hf.batching import Lesson, MicroBatch
from students.hf.teacher_heads import TeacherHeads
from tests.builders_student import HEAD_ROWS, VOCAB, make_batch, student_config, write_student

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student and teachers of other sizes, one with a tied head."""
    root = tmp_path_factory.mktemp("models")
    return {
        "student": write_student(root / "student", seed=1),
        "math": write_student(root / "math", seed=2, hidden=48),
        "code": write_student(root / "code", seed=3, hidden=64, tied=True),
    }


@torch.no_grad()
def scored(
    sample: Any, name: str, folder: Path, dtype: torch.dtype, temperature: float
) -> tuple[TeacherScores, TeacherScores]:
    """(full rows, hidden states) of a teacher, as a server makes them."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
    at = slice(len(sample.prompt_ids) - 1, -1)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, at]
    logits = model(input_ids=ids, use_cache=False).logits[0, at, :VOCAB].float()
    rows = (logits / temperature).log_softmax(-1)
    sampled = rows.gather(-1, torch.from_numpy(sample.response_ids.astype(np.int64))[:, None])[:, 0].numpy()
    return TeacherScores(name, sampled, full_logprobs=rows.numpy()), TeacherScores(
        name, sampled, hidden=as_numpy(hidden)
    )


def both(
    folders: Mapping[str, Path],
    teachers: Sequence[Mapping[str, float]],
    *,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
) -> tuple[Batch, Batch]:
    """The same samples with full rows, and with hidden states."""
    batch = make_batch(SignalSpec(Signal.SAMPLED), teachers=teachers)
    kinds: tuple[list[ScoredSample], list[ScoredSample]] = ([], [])
    for item in batch.samples:
        pairs = [scored(item.sample, name, folders[name], dtype, temperature) for name in item.sample.teachers]
        for kind, scores in zip(kinds, zip(*pairs, strict=True), strict=True):
            kind.append(ScoredSample(item.sample, scores))
    full, hidden = (dataclasses.replace(batch, samples=tuple(kind)) for kind in kinds)
    return full, hidden


def student(folders: Mapping[str, Path], rules: ObjectiveConfig, heads: Mapping[str, HeadFolder]) -> HFStudent:
    config = student_config(folders["student"], head_chunk_tokens=5)
    return HFStudent(config, seed=0, total_steps=20, vocab_size=VOCAB, rules=rules, teacher_heads=heads)


def heads_of(folders: Mapping[str, Path], dtype: str = "float32", temperature: float = 1.0) -> dict[str, HeadFolder]:
    return {name: HeadFolder(folders[name], dtype, temperature) for name in folders if name != "student"}


ONE, TWO = ({"math": 1.0},), ({"math": 0.7, "code": 0.6}, {"code": 1.0}, {"math": 2.0})
OBJECTIVES = (
    {"name": "reverse_kl"},
    {"name": "reverse_kl", "teacher_smoothing": 0.1},
    {"name": "forward_kl"},
    {"name": "jsd", "beta": 0.3},
    {"name": "skew_kl"},
    {"name": "total_variation"},
)


@pytest.mark.parametrize("mixture", ["weighted", "arithmetic", "geometric"])
@pytest.mark.parametrize("settings", OBJECTIVES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_step_from_hidden_states_is_the_step_from_full_rows(
    folders: dict[str, Path], settings: dict[str, Any], mixture: str
) -> None:
    rules = ObjectiveConfig.model_validate(settings | {"mixture": mixture})
    objective = build_objective(rules)
    steps, weights = [], []
    for batch, heads in zip(both(folders, TWO), ({}, heads_of(folders)), strict=True):
        learner = student(folders, rules, heads)
        assert learner.evaluate(batch, objective)["math"] > 0
        steps.append(learner.step(batch, objective))
        weights.append({name: data.view(np.float32) for name, _, _, data in learner.weights()})
    full, hidden = steps
    assert hidden.loss == pytest.approx(full.loss, abs=1e-5)
    assert hidden.grad_norm == pytest.approx(full.grad_norm, rel=1e-4)
    assert hidden.kl == pytest.approx(full.kl, abs=1e-5)
    assert hidden.entropy_gap == pytest.approx(full.entropy_gap, abs=1e-5)
    for name, values in weights[0].items():
        np.testing.assert_allclose(weights[1][name], values, atol=2e-5)


def rows_made(batch: Batch, heads: TeacherHeads) -> np.ndarray:
    """All rows of the first teacher, as the student makes them."""
    micro = MicroBatch.collate(tuple(Lesson(item, 1.0) for item in batch.samples), CPU, packed=False)
    (part,) = micro.teacher_parts(SignalSpec(Signal.FULL), dtype=torch.float32, heads=heads)
    assert part.full is not None
    count = len(part.index_n)
    halves = [part.full.logp(keep, torch.empty(0, VOCAB)) for keep in (slice(0, 3), torch.arange(3, count))]
    return torch.cat(halves).numpy()


def rows_given(batch: Batch) -> np.ndarray:
    return np.concatenate([item.scores[0].full_logprobs for item in batch.samples])  # type: ignore[misc]


@pytest.mark.parametrize(("name", "temperature"), [("math", 1.0), ("code", 1.0), ("math", 0.6)])
def test_rows_are_made_to_within_1e_5(folders: dict[str, Path], name: str, temperature: float) -> None:
    full, hidden = both(folders, ({name: 1.0},), temperature=temperature)
    heads = TeacherHeads(heads_of(folders, temperature=temperature), vocab_size=VOCAB, device=CPU)
    np.testing.assert_allclose(rows_made(hidden, heads), rows_given(full), atol=1e-5, rtol=0)


def test_a_bfloat16_teachers_rows_are_made_from_its_own_bits(folders: dict[str, Path]) -> None:
    full, hidden = both(folders, ONE, dtype=torch.bfloat16)
    heads = TeacherHeads(heads_of(folders, "bfloat16"), vocab_size=VOCAB, device=CPU)
    assert hidden.samples[0].scores[0].hidden.dtype == np.int16  # type: ignore[union-attr]
    made, given = rows_made(hidden, heads), rows_given(full)
    # the server rounds logits to bfloat16 and so does the CPU here; another order of sums may end one step away
    np.testing.assert_allclose(made, given, atol=0.07)
    assert np.median(np.abs(made - given)) < 1e-5


CAPPED: dict[str, Any] = {
    "vocab_size": HEAD_ROWS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["scaled", "capped"])
def test_what_a_model_does_to_its_logits_is_done_to_them_here(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    if kind == "scaled":
        model: Any = CohereForCausalLM(CohereConfig(**CAPPED, logit_scale=0.25))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**CAPPED, final_logit_softcapping=3.0))
    model.save_pretrained(tmp_path)
    full, hidden = both({"math": tmp_path}, ONE, temperature=2.0)
    heads = TeacherHeads({"math": HeadFolder(tmp_path, "float32", 2.0)}, vocab_size=VOCAB, device=CPU)
    np.testing.assert_allclose(rows_made(hidden, heads), rows_given(full), atol=1e-5, rtol=0)
    plain = TeacherHeads({"math": HeadFolder(tmp_path, "float32")}, vocab_size=VOCAB, device=CPU)
    with pytest.raises(TeacherError, match="the teacher said"):
        rows_made(hidden, plain)


def test_equal_heads_are_kept_once(folders: dict[str, Path], tmp_path: Path) -> None:
    twin = shutil.copytree(folders["math"], tmp_path / "twin")
    weights = load_file(twin / "model.safetensors")
    weights["model.norm.weight"] += 1  # another model with the same head, and other padded rows
    weights["lm_head.weight"][VOCAB:] += 1
    save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
    sources = heads_of(folders | {"twin": twin})
    heads = TeacherHeads(sources, vocab_size=VOCAB, device=CPU)
    assert heads.of("math").weight_VD is heads.of("twin").weight_VD
    assert heads.sizes == {"math": 48, "code": 64, "twin": 48}
    assert heads.distinct_bytes == VOCAB * (48 + 64) * 4
    half = TeacherHeads(sources | {"twin": HeadFolder(twin, "bfloat16")}, vocab_size=VOCAB, device=CPU)
    assert half.distinct_bytes == VOCAB * ((48 + 64) * 4 + 48 * 2)


def test_a_head_of_another_teacher_is_noticed_by_the_sampled_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    other = write_student(tmp_path / "other", seed=9, hidden=48)
    _, hidden = both(folders, ONE)
    learner = student(folders, ObjectiveConfig(), {"math": HeadFolder(other, "float32")})
    with pytest.raises(TeacherError, match=r"its hidden state and the head in .*other give log q") as caught:
        learner.step(hidden, ReverseKL())
    assert caught.value.teacher == "math" and caught.value.sample_id.startswith("v0-s")
    assert learner.version == 0


@pytest.mark.parametrize("change", ["rows", "width", "rows of full", "missing"])
def test_hidden_states_of_another_shape_name_the_sample(folders: dict[str, Path], change: str) -> None:
    full, hidden = both(folders, ONE)
    first = hidden.samples[0]
    states = first.scores[0].hidden
    assert states is not None
    scores = {
        "rows": dataclasses.replace(first.scores[0], hidden=states[1:]),
        "width": dataclasses.replace(first.scores[0], hidden=states[:, 1:]),
        "rows of full": full.samples[0].scores[0],
        "missing": dataclasses.replace(first.scores[0], hidden=None),
    }[change]
    batch = dataclasses.replace(hidden, samples=(dataclasses.replace(first, scores=(scores,)), *hidden.samples[1:]))
    with pytest.raises(TeacherError, match=r"sample v0-s0, teacher math: hidden must have shape \(\d+, 48\)"):
        student(folders, ObjectiveConfig(), heads_of(folders)).step(batch, ReverseKL())


def test_a_folder_without_its_head_is_refused_at_the_start(folders: dict[str, Path], tmp_path: Path) -> None:
    headless = shutil.copytree(folders["math"], tmp_path / "headless")
    weights = load_file(headless / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"teachers\.math: .*headless holds no lm_head\.weight"):
        TeacherHeads({"math": HeadFolder(headless, "float32")}, vocab_size=VOCAB, device=CPU)
    with pytest.raises(ConfigError, match=f"has {HEAD_ROWS} rows, the common vocabulary {HEAD_ROWS + 1} ids"):
        TeacherHeads(heads_of(folders), vocab_size=HEAD_ROWS + 1, device=CPU)


def test_a_head_in_one_of_several_files_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folders["math"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 1
    whole = TeacherHeads(heads_of(folders), vocab_size=VOCAB, device=CPU).of("math")
    parted = TeacherHeads({"math": HeadFolder(tmp_path, "float32")}, vocab_size=VOCAB, device=CPU).of("math")
    assert torch.equal(whole.weight_VD, parted.weight_VD)


def test_a_store_keeps_hidden_states_bit_by_bit(folders: dict[str, Path]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, hidden = both(folders, ONE, dtype=dtype)
        again = decode(encode(Snapshot(0, hidden.samples, ())))
        for before, after in zip(hidden.samples, again.items, strict=True):
            ours, theirs = before.scores[0].hidden, after.scores[0].hidden
            assert ours is not None and theirs is not None and ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes()
