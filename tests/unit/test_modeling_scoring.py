"""Scores of a group of requests: packed, padded, streamed and with adapters, against transformers' own rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from distill.modeling.adapters import LoraAdapter
from distill.modeling.forward import TensorFeed, stream_bytes
from distill.modeling.skeleton import Skeleton
from distill.serving.embedded import scoring
from distill.serving.embedded.jobs import InputScores, Job, Sampling, Wanted
from distill.serving.embedded.scoring import next_group, score, score_streamed
from distill.serving.embedded.served import Limits, ServedModel
from tests.builders_modeling import (
    CPU,
    VOCAB,
    adapter_of,
    merged,
    reference,
    resident,
    sequences_of,
    weights_of,
    write_adapter,
    write_model,
)

LIMITS = Limits(CPU, torch.float32)
TOP = 5


def job(ids: np.ndarray, start: int = 0, *, call: int = 0, **wanted: Any) -> Job:
    return Job("r", ids.astype(np.int32), Sampling(0, 1.0, 1.0, 0, (), 0), Wanted(start, top_k=TOP, **wanted), call)


def jobs_of(seed: int) -> list[Job]:
    random = np.random.default_rng(seed)
    found: list[Job] = []
    for ids in sequences_of(seed):
        start = len(ids) // 3
        own = random.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (len(ids) - 1 - start, 1)), axis=1)[:, :3]
        found.append(job(ids, start, row_ids=own, token_ids=np.asarray([7, 3], np.int32), full=True))
    return found


@torch.no_grad()
def rows_of(model: Any, job: Job) -> np.ndarray:
    """(R, V) log-probabilities as transformers gives them for the job alone."""
    logits = model(input_ids=torch.from_numpy(job.prompt[None].astype(np.int64)), use_cache=False).logits[0]
    return torch.log_softmax(logits[job.wanted.start : -1].float(), -1).numpy()


def require(jobs: Sequence[Job], found: Sequence[InputScores], models: Sequence[Any]) -> None:
    for job, scores, model in zip(jobs, found, models, strict=True):
        rows = rows_of(model, job)
        assert scores.full is not None and scores.top_ids is not None and scores.top_logprobs is not None
        assert scores.picked is not None and scores.row_logprobs is not None and job.wanted.row_ids is not None
        np.testing.assert_allclose(scores.full, rows, rtol=0, atol=2e-5)
        targets = job.prompt[job.wanted.start + 1 :]
        np.testing.assert_array_equal(scores.token_ids, targets)
        np.testing.assert_array_equal(scores.logprobs, scores.full[np.arange(len(rows)), targets])
        best = np.take_along_axis(scores.full, scores.top_ids.astype(np.int64), 1)
        np.testing.assert_array_equal(scores.top_logprobs, best)
        np.testing.assert_array_equal(scores.picked, scores.full[:, [7, 3]])
        own = np.take_along_axis(scores.full, job.wanted.row_ids.astype(np.int64), 1)
        np.testing.assert_array_equal(scores.row_logprobs, own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention does not let itself be replaced."""
    folder = tmp_path_factory.mktemp("models") / "bloom"
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)
    transformers.BloomForCausalLM(config).save_pretrained(folder)
    return folder


def test_packed_requests_are_scored_like_each_alone(folder: Path) -> None:
    jobs = jobs_of(1)
    model = reference(folder)
    require(jobs, score(ServedModel.load(folder, LIMITS), jobs), [model] * len(jobs))


def test_a_model_that_cannot_be_packed_is_scored_with_padding_that_keeps_to_the_budget(
    bloom: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedModel.load(bloom, Limits(CPU, torch.float32, context_length=128))
    jobs = [job(ids, row_ids=np.zeros((len(ids) - 1, 1), np.int32), token_ids=np.asarray([7, 3]), full=True)
            for ids in sequences_of(2)]  # fmt: skip
    monkeypatch.setattr(scoring, "_TOKENS", {"cpu": 64})
    shapes: list[tuple[int, ...]] = []
    genuine = served.hidden
    monkeypatch.setattr(served, "hidden", lambda ids: shapes.append(tuple(ids.shape)) or genuine(ids))
    found = score(served, jobs)
    assert len(shapes) > 1 and all(rows * width <= 64 for rows, width in shapes)
    require(jobs, found, [reference(bloom)] * len(jobs))


@pytest.mark.parametrize("packed", [True, False])
def test_adapters_and_their_base_are_scored_in_one_call(
    packed: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr(scoring, "why_not", lambda *_: "this test says so")
    served = ServedModel.load(folder, LIMITS)
    folders = [write_adapter(tmp_path / str(seed), folder, "plain", seed) for seed in range(2)]
    adapters: list[LoraAdapter | None] = [*(adapter_of(each, served.model) for each in folders), None]
    models = [*(merged(folder, each) for each in folders), reference(folder)]
    jobs = jobs_of(3)
    found = score(served, jobs, [adapters[index % 3] for index in range(len(jobs))])
    require(jobs, found, [models[index % 3] for index in range(len(jobs))])
    require(jobs, score(served, jobs), [models[2]] * len(jobs))


@pytest.mark.parametrize("family", ["llama", "qwen3, tied", "qwen3-moe"])
def test_streamed_scores_are_those_of_the_resident_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family)
    jobs = jobs_of(4)
    skeleton = resident(folder)
    expected = score(ServedModel(skeleton.model, folder, LIMITS), jobs)
    skeleton = Skeleton.build(folder, dtype=torch.float32, device=CPU)
    room = torch.zeros(stream_bytes(skeleton), dtype=torch.uint8)
    found = score_streamed(skeleton, TensorFeed(skeleton, weights_of(folder)), room, jobs, VOCAB)
    assert not skeleton.attached
    for one, other in zip(found, expected, strict=True):
        for name in InputScores.__slots__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_requests_without_rows_need_no_forward(folder: Path) -> None:
    (found,) = score(ServedModel.load(folder, LIMITS), [job(np.asarray([5]))])
    assert found.logprobs.shape == (0,) and found.top_ids is not None and found.top_ids.shape == (0, TOP)


def test_a_group_is_the_oldest_request_and_those_behind_it_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_TOKENS", {"cpu": 10})
    waiting = [job(np.arange(length), call=call) for length, call in [(4, 1), (3, 2), (2, 1), (9, 1), (1, 1)]]
    assert next_group(waiting, "cpu", one_call=False) == waiting[:3]
    assert next_group(waiting, "cpu", one_call=True) == [waiting[0], waiting[2]]
    assert next_group([job(np.arange(11)), *waiting], "cpu", one_call=False)[0].prompt.size == 11
    assert len(next_group([job(np.arange(11)), *waiting], "cpu", one_call=False)) == 1


def test_the_model_keeps_its_own_attention_for_writing(folder: Path) -> None:
    served = ServedModel.load(folder, LIMITS)
    before = served.config._attn_implementation
    score(served, jobs_of(5))
    assert served.config._attn_implementation == before != "distill_packed"
