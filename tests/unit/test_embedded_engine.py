"""The engine against transformers itself: the same tokens and numbers, whatever shares the batch or changes."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from distill.errors import ConfigError, EnvironmentFault, ServerError
from distill.modeling.forward import hidden
from distill.modeling.packed import PackedBatch
from distill.serving.embedded.engine import Engine
from distill.serving.embedded.jobs import Job, Refusal, Result
from distill.serving.embedded.rows import Rows
from distill.serving.embedded.served import Limits, ServedModel
from distill.serving.embedded.weights import live_tensors
from tests.builders_embedded import (
    CPU32,
    EOS,
    VOCAB,
    finish,
    job,
    prompt,
    reference,
    reference_rows,
    running_engine,
    save_model,
    wait,
)

KINDS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "b", seed=1)


def at_token(count: int, action: Callable[[], Any]) -> Callable[[Result], None]:
    """A progress callback that acts, on the engine thread, right after token `count`."""

    def progress(result: Result) -> None:
        if len(result.output_ids) == count:
            action()

    return progress


def load_into(engine: Engine, folder: Path, version: str) -> Callable[[], None]:
    """An operation that puts the weights of `folder` into the running model."""
    new = live_tensors(reference(folder))

    def operation() -> None:
        for name, tensor in live_tensors(engine.require_model().model).items():
            tensor.copy_(new[name])
        engine.set_version(version)

    return operation


def waiting_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.002)


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_numbers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = reference(save_model(tmp_path, kind, **KINDS[kind]))
    prompts = [prompt(n, seed=n) for n in (3, 17, 1, 9)]
    with running_engine(tmp_path) as engine:
        results = finish(engine, *(job(ids, 20, temperature=0) for ids in prompts))
    for ids, result in zip(prompts, results, strict=True):
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        assert result.output_ids.tolist() == expected[len(ids) :]
        rows = reference_rows(model, expected)[len(ids) - 1 :]
        numbers = rows[np.arange(20), expected[len(ids) :]]
        assert np.abs(result.output_logprobs - numbers).max() <= 1e-5


def test_sampled_numbers_are_of_the_temperature_scaled_distribution(folder: Path) -> None:
    ids = prompt(7)
    with running_engine(folder) as engine:
        (result,) = finish(engine, job(ids, 30, temperature=0.6, top_p=0.9, top_k=20, seed=3))
    whole = ids + result.output_ids.tolist()
    rows = reference_rows(reference(folder), whole, temperature=0.6)[len(ids) - 1 :]
    assert np.abs(result.output_logprobs - rows[np.arange(30), result.output_ids]).max() <= 1e-5


def test_a_seeded_request_writes_the_same_alone_in_a_batch_and_when_it_joins_late(folder: Path) -> None:
    ids = prompt(11)
    with running_engine(folder, max_batch_size=8) as engine:
        (alone,) = finish(engine, job(ids, 40, seed=5))
        crowd = [job(prompt(2 + 3 * i, seed=i), 10 + 5 * i, seed=100 + i) for i in range(12)]
        together = finish(engine, *crowd[:6], job(ids, 40, seed=5), *crowd[6:])[6]
        late = job(ids, 40, seed=5)
        first = job(prompt(25, seed=1), 60, seed=9)
        first.on_progress = at_token(20, lambda: engine.submit([late]))
        finish(engine, first)
        joined = wait(late.done)
        (another,) = finish(engine, job(ids, 40, seed=6))
    assert together.output_ids.tolist() == alone.output_ids.tolist() == joined.output_ids.tolist()
    assert another.output_ids.tolist() != alone.output_ids.tolist()


def test_a_cut_sample_goes_on_with_the_same_draws_when_its_seed_is_sent_again(folder: Path) -> None:
    ids = prompt(6)
    with running_engine(folder) as engine:
        (whole,) = finish(engine, job(ids, 20, seed=8))
        (rest,) = finish(engine, job(ids + whole.output_ids[:9].tolist(), 11, seed=8))
    assert rest.output_ids.tolist() == whole.output_ids[9:].tolist()


def test_a_stop_id_ends_the_text_and_is_part_of_it(folder: Path) -> None:
    ids = prompt(5)
    with running_engine(folder) as engine:
        (free,) = finish(engine, job(ids, 30, seed=2))
        stop = int(free.output_ids[7])
        (cut,) = finish(engine, job(ids, 30, seed=2, stops=(EOS, stop)))
    first = free.output_ids.tolist().index(stop)
    assert cut.output_ids.tolist() == free.output_ids[: first + 1].tolist()
    assert cut.finish is not None and (cut.finish.kind, cut.finish.matched) == ("stop", stop)
    assert free.finish is not None and free.finish.kind == "length"


def test_head_rows_beyond_the_vocabulary_are_cut_before_the_softmax(tmp_path: Path) -> None:
    save_model(tmp_path, rows=80)
    ids = prompt(10)
    limits = Limits(CPU32.device, CPU32.dtype, vocab_size=VOCAB)
    with running_engine(tmp_path, limits=limits) as engine:
        (result,) = finish(engine, job(ids, 40, seed=1, start=0, top=VOCAB))
    rows = reference_rows(reference(tmp_path), ids + result.output_ids.tolist())
    assert result.output_ids.max() < VOCAB
    assert np.abs(result.output_logprobs - rows[9 + np.arange(40), result.output_ids]).max() <= 1e-5
    assert result.scores is not None and result.scores.top_logprobs is not None
    assert np.allclose(np.exp(result.scores.top_logprobs.astype(np.float64)).sum(-1), 1, atol=1e-5)
    assert (result.scores.log_tail == -np.inf).all()


def test_more_requests_than_rows_wait_their_turn(folder: Path) -> None:
    with running_engine(folder, max_batch_size=3) as engine:
        jobs = [job(prompt(3 + i % 5, seed=i), 5 + i % 4, seed=i) for i in range(20)]
        results = finish(engine, *jobs)
        assert engine.idle and engine.running == 0
    assert [len(result.output_ids) for result in results] == [5 + i % 4 for i in range(20)]


def test_a_reproducible_engine_gives_the_same_bits_whatever_else_is_asked(folder: Path) -> None:
    def call(number: int, new: int) -> list[Job]:
        start = -1 if new else 0
        return [job(prompt(4 + i, seed=i), new, seed=i, start=start, top=3, call=number) for i in range(5)]

    def bits(results: list[Result]) -> list[tuple[bytes, ...]]:
        return [
            (r.output_ids.tobytes(), r.output_logprobs.tobytes(), r.scores.log_tail.tobytes() if r.scores else b"")
            for r in results
        ]

    with running_engine(folder, reproducible=True) as engine:
        expected = [bits(finish(engine, *call(1, 20))), bits(finish(engine, *call(2, 0)))]
        for round_ in range(3):
            crowd = [
                job(prompt(2 + 5 * i, seed=i), 7 * (i % 3), start=0, seed=50 + i, call=100 + i + 10 * round_)
                for i in range(6)
            ]
            written, scored = call(1, 20), call(2, 0)
            engine.submit(crowd[: 2 * round_])
            engine.submit(written)
            engine.submit(scored)
            engine.submit(crowd[2 * round_ :])
            assert [bits([wait(one.done) for one in group]) for group in (written, scored)] == expected
            for one in crowd:
                wait(one.done)


def test_rows_that_come_free_under_load_are_filled_several_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    genuine = Rows.prefill
    monkeypatch.setattr(
        Rows, "prefill", lambda self, served, jobs: (sizes.append(len(jobs)), genuine(self, served, jobs))[1]
    )
    with running_engine(folder, max_batch_size=32) as engine:
        finish(engine, *(job(prompt(4, seed=i), 5 + i % 23, seed=i) for i in range(200)))
        assert sum(sizes) == 200 and sizes[0] == 32
        assert np.mean(sizes[1:-8]) >= 3
        quiet = job(prompt(5), 30)
        quiet.on_progress = at_token(3, lambda: engine.submit([late]))
        late = job(prompt(6), 3)
        finish(engine, quiet)
        assert wait(late.done).finish is not None and sizes[-2:] == [1, 1]


# --- scoring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_row_t_scores_token_t_and_agrees_with_transformers(kind: str, tmp_path: Path) -> None:
    model = reference(save_model(tmp_path, kind, **KINDS[kind]))
    asked = [(prompt(n, seed=n), start) for n, start in ((30, 0), (4, 2), (17, 9), (2, 1), (2, 0), (1, 0))]
    with running_engine(tmp_path) as engine:
        results = finish(engine, *(job(ids, 0, start=start, top=5, temperature=0.3) for ids, start in asked))
    for (ids, start), result in zip(asked, results, strict=True):
        scores = result.scores
        assert scores is not None and scores.token_ids.tolist() == ids[start + 1 :]
        if len(ids) == 1:
            continue
        rows = reference_rows(model, ids)[start:]
        count = len(ids) - 1 - start
        assert scores.logprobs.shape == (count,)
        assert np.allclose(scores.logprobs, rows[np.arange(count), scores.token_ids], atol=1e-5)
        assert scores.top_ids is not None and scores.top_logprobs is not None
        assert np.allclose(scores.top_logprobs, -np.sort(-rows, -1)[:, :5], atol=1e-5)
        assert np.allclose(np.take_along_axis(rows, scores.top_ids.astype(int), 1), scores.top_logprobs, atol=1e-5)


def test_log_tail_is_the_log_of_the_mass_beside_the_top_k_even_when_it_is_tiny(tmp_path: Path) -> None:
    model = reference(save_model(tmp_path, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.mul_(12)  # so peaked that the tail is far below float32's epsilon
    model.save_pretrained(tmp_path)
    ids = prompt(20)
    with running_engine(tmp_path) as engine:
        (result,) = finish(engine, job(ids, 0, start=0, top=30))
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
    expected = logp.sort(-1).values[:, :-30].logsumexp(-1).numpy()
    assert expected.min() < -25
    assert result.scores is not None and result.scores.log_tail is not None
    assert np.abs(result.scores.log_tail - expected).max() < 1e-3


def test_many_rows_go_through_the_head_in_parts_without_a_seam(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.serving.embedded.scoring._HEAD_ELEMENTS", 7 * VOCAB)
    asked = [prompt(n, seed=n) for n in (20, 5, 31, 2)]
    with running_engine(folder) as engine:
        results = finish(engine, *(job(ids, 0, start=1, top=3 + i) for i, ids in enumerate(asked)))
    for i, (ids, result) in enumerate(zip(asked, results, strict=True)):
        rows = reference_rows(reference(folder), ids)[1:]
        assert result.scores is not None and result.scores.top_logprobs is not None
        assert np.allclose(result.scores.logprobs, rows[np.arange(len(rows)), ids[2:]], atol=1e-5)
        assert np.allclose(result.scores.top_logprobs, -np.sort(-rows, -1)[:, : 3 + i], atol=1e-5)


def test_scoring_goes_on_while_others_write(folder: Path) -> None:
    with running_engine(folder) as engine:
        scored = job(prompt(12), 0, start=0)
        seen: list[int] = []
        writer = job(prompt(4), 60, seed=1)
        scored.done.add_done_callback(lambda _: seen.append(engine.running))
        writer.on_progress = at_token(5, lambda: engine.submit([scored]))
        finish(engine, writer)
        wait(scored.done)
    assert seen == [1]


# --- changes in the middle -----------------------------------------------------------------------------------------


def mixed_rows(old: Any, new: Any, ids: list[int], output: list[int], change: int) -> np.ndarray:
    """Rows of the output when `new` takes over after `change` tokens and the cache of `old` is kept."""
    name = "cache" if "cache" in inspect.signature(type(old).forward).parameters else "past_key_values"
    kept: dict[str, Any] = {name: DynamicCache(), "use_cache": True}
    with torch.no_grad():
        before = old(torch.tensor([ids + output[: change - 1]]), **kept).logits[0]
        after = new(torch.tensor([output[change - 1 : -1]]), **kept).logits[0]
    return torch.log_softmax(torch.cat([before[len(ids) - 1 :], after]), -1).numpy()


def test_weights_may_change_between_two_tokens_and_the_spans_say_where(folder: Path, other: Path) -> None:
    ids = prompt(9)
    with running_engine(folder) as engine:
        swap = load_into(engine, other, "v1")
        writer = job(ids, 30, seed=4)
        writer.on_progress = at_token(12, lambda: engine.run_between_steps(swap))
        bystander = job(prompt(5, seed=3), 40, seed=1)
        result, beside = finish(engine, writer, bystander)
    assert result.spans == [("v0", 0, 12), ("v1", 12, 30)]
    assert beside.spans == [("v0", 0, 12), ("v1", 12, 40)]
    assert result.weight_version == "v1"
    output = result.output_ids.tolist()
    rows = mixed_rows(reference(folder), reference(other), ids, output, 12)
    assert np.abs(result.output_logprobs - rows[np.arange(30), output]).max() <= 1e-5
    stale = reference_rows(reference(folder), ids + output)[len(ids) - 1 :]
    assert np.abs(result.output_logprobs - stale[np.arange(30), output])[12:].max() > 0.1


def test_in_place_pause_keeps_the_cache_and_retract_reads_everything_again(folder: Path, other: Path) -> None:
    ids = prompt(9)
    for mode in ("in_place", "retract"):
        with running_engine(folder) as engine:
            writer = job(ids, 30, seed=4)
            pause = lambda engine=engine, mode=mode: engine.run_between_steps(lambda: engine.pause(mode))  # noqa: E731
            writer.on_progress = at_token(12, pause)
            engine.submit([writer])
            waiting_until(lambda engine=engine: engine.paused)
            wait(engine.run_between_steps(load_into(engine, other, "v1")))
            assert not writer.done.done()
            wait(engine.run_between_steps(engine.resume))
            result = wait(writer.done)
        output = result.output_ids.tolist()
        assert result.spans == [("v0", 0, 12), ("v1", 12, 30)]
        assert result.retractions == (mode == "retract")
        if mode == "in_place":
            rows = mixed_rows(reference(folder), reference(other), ids, output, 12)
        else:
            rows = reference_rows(reference(other), ids + output)[len(ids) - 1 :]
        assert np.abs(result.output_logprobs - rows[np.arange(30), output])[12:].max() <= 1e-5


def test_retracting_without_a_change_does_not_change_the_text(folder: Path) -> None:
    ids = prompt(9)
    with running_engine(folder) as engine:
        (plain,) = finish(engine, job(ids, 30, seed=4))
        writer = job(ids, 30, seed=4)

        def twice() -> None:
            engine.pause("retract")
            engine.resume()

        writer.on_progress = at_token(12, lambda: engine.run_between_steps(twice))
        (result,) = finish(engine, writer)
    assert result.output_ids.tolist() == plain.output_ids.tolist()
    assert result.retractions == 1 and result.spans == [("v0", 0, 30)]


def test_every_token_has_the_top_row_that_its_job_asked_for_in_company_and_over_a_retraction(folder: Path) -> None:
    def twice() -> None:
        engine.pause("retract")
        engine.resume()

    with running_engine(folder) as engine:
        jobs = [job(prompt(5 + k, seed=k), 30, seed=k, top=k, temperature=0.8) for k in (3, 0, 7)]
        jobs[0].on_progress = at_token(12, lambda: engine.run_between_steps(twice))
        results = finish(engine, *jobs)
    for one, result in zip(jobs, results, strict=True):
        k = one.wanted.top_k
        whole = one.prompt.tolist() + result.output_ids.tolist()
        rows = reference_rows(reference(folder), whole, temperature=0.8)[len(one.prompt) - 1 :]
        assert result.retractions == 1 and len(result.output_ids) == 30
        assert len(result.output_tops) == (30 if k else 0)
        for row, (ids, values) in zip(rows, result.output_tops, strict=k > 0):
            assert ids.tolist() == np.argsort(-row, kind="stable")[:k].tolist()
            assert np.allclose(values, row[ids], atol=1e-5)


def test_abort_hands_out_what_was_written_and_spares_the_others(folder: Path) -> None:
    ids = prompt(9)
    with running_engine(folder) as engine:
        (whole,) = finish(engine, job(ids, 30, seed=4))
        victim, other = job(ids, 30, seed=4, rid="victim"), job(ids, 30, seed=4)
        victim.on_progress = at_token(
            10, lambda: engine.run_between_steps(lambda: engine.abort(lambda one: one.rid == "victim"))
        )
        cut, spared = finish(engine, victim, other)
    assert cut.finish is not None and cut.finish.kind == "abort"
    assert cut.output_ids.tolist() == whole.output_ids[:10].tolist() and len(cut.output_logprobs) == 10
    assert cut.spans == [("v0", 0, 10)]
    assert spared.output_ids.tolist() == whole.output_ids.tolist()


def test_a_pause_that_aborts_ends_running_and_waiting_requests_and_holds_new_ones(folder: Path) -> None:
    with running_engine(folder, max_batch_size=1) as engine:
        running, waiting = job(prompt(4), 50, seed=1), job(prompt(5), 50, seed=2)
        running.on_progress = at_token(5, lambda: engine.run_between_steps(lambda: engine.pause("abort")))
        first, second = finish(engine, running, waiting)
        assert [len(first.output_ids), len(second.output_ids)] == [5, 0]
        assert second.finish is not None and second.finish.kind == "abort"
        held = job(prompt(6), 5, seed=3)
        engine.submit([held])
        wait(engine.run_between_steps(lambda: None))
        assert not held.done.done() and engine.waiting == 1
        wait(engine.run_between_steps(engine.resume))
        assert len(wait(held.done).output_ids) == 5


def test_stopping_the_engine_aborts_what_is_left(folder: Path) -> None:
    with running_engine(folder) as engine:
        writer = job(prompt(4), 100, seed=1)
        engine.submit([writer])
    assert wait(writer.done).finish.kind == "abort"


# --- faults --------------------------------------------------------------------------------------------------------


def poison(engine: Engine, token: int, monkeypatch: pytest.MonkeyPatch, *, steps: str) -> None:
    """The model raises whenever it reads `token`: at prefill, at decode steps, or when scoring."""
    genuine = ServedModel.hidden_after
    assert engine.require_model() is not None

    def after(self: ServedModel, cache: Any, ids: torch.Tensor, *args: Any) -> Any:
        if (ids == token).any() and (ids.shape[1] > 1 or steps == "all"):
            raise RuntimeError("poisoned")
        return genuine(self, cache, ids, *args)

    def packed(model: Any, batch: PackedBatch, *adapters: Any) -> Any:
        if (batch.ids_T == token).any():
            raise RuntimeError("poisoned")
        return hidden(model, batch, *adapters)

    monkeypatch.setattr(ServedModel, "hidden_after", after)
    monkeypatch.setattr("distill.serving.embedded.scoring.hidden", packed)


@pytest.mark.parametrize("new", [0, 12])
def test_a_request_that_the_model_chokes_on_fails_alone(
    folder: Path, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = -1 if new else 0
    good: Callable[[int], Job] = lambda i: job([5 + i, 6, 7], new, seed=i, start=start)  # noqa: E731
    with running_engine(folder) as engine:
        expected = finish(engine, *(good(i) for i in range(4)))
        poison(engine, 60, monkeypatch, steps="prefill")
        bad = job([60, 6, 7], new, seed=9, start=start)
        jobs = [good(0), good(1), bad, good(2), good(3)]
        engine.submit(jobs)
        with pytest.raises(ServerError, match="poisoned"):
            wait(bad.done)
        results = [wait(one.done) for one in jobs if one is not bad]
    assert [r.output_ids.tolist() for r in results] == [e.output_ids.tolist() for e in expected]


def test_a_decode_step_that_fails_costs_only_the_request_at_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def jobs() -> list[Job]:
        return [job(prompt(3 + i, seed=i), 25, seed=i) for i in range(6)]

    with running_engine(folder) as engine:
        expected = finish(engine, *jobs())
        only_one = [
            token
            for token in range(3, VOCAB)
            if [token in e.output_ids[:-1] for e in expected].count(True) == 1
            and not any(token in one.prompt for one in jobs())
        ]
        token = only_one[0]
        poison(engine, token, monkeypatch, steps="all")
        again = jobs()
        engine.submit(again)
        for one, before in zip(again, expected, strict=True):
            if token in before.output_ids[:-1]:
                with pytest.raises(ServerError, match="poisoned"):
                    wait(one.done)
            else:
                assert wait(one.done).output_ids.tolist() == before.output_ids.tolist()


def test_numbers_that_are_not_finite_end_no_server_no_answer_and_are_not_hidden(folder: Path) -> None:
    with running_engine(folder) as engine:
        weight = live_tensors(engine.require_model().model)["model.norm.weight"]
        kept = copy.deepcopy(weight)
        wait(engine.run_between_steps(lambda: weight.fill_(torch.nan)))
        engine.submit([broken := job(prompt(4), 5)])
        with pytest.raises(ServerError, match="not finite"):
            wait(broken.done)
        (scored,) = finish(engine, job(prompt(4), 0, start=0))
        assert scored.scores is not None and np.isnan(scored.scores.logprobs).all(), "the client refuses these"
        wait(engine.run_between_steps(lambda: weight.copy_(kept)))
        (result,) = finish(engine, job(prompt(4), 5))
    assert np.isfinite(result.output_logprobs).all()


def test_an_engine_that_dies_says_so_and_leaves_nobody_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    told: list[bool] = []
    with running_engine(folder) as engine:
        engine.on_death = lambda: told.append(True)
        scored, waiting = job(prompt(4), 0, start=0), job(prompt(4), 5)
        monkeypatch.setattr("distill.serving.embedded.engine.score", lambda *_: sys.exit("a fault of ours"))
        engine.submit([scored, waiting])
        with pytest.raises(ServerError, match="going down"):
            wait(scored.done)
        assert wait(waiting.done).finish.kind == "abort"
        engine._thread.join(30)
        assert told == [True] and isinstance(engine.failure, SystemExit)
        with pytest.raises(Refusal, match="going down"):
            engine.submit([job(prompt(4))])
        with pytest.raises(Refusal, match="going down"):
            engine.run_between_steps(lambda: None)


def test_an_operation_that_fails_is_told_to_whoever_asked(folder: Path) -> None:
    with running_engine(folder) as engine:
        future = engine.run_between_steps(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            wait(future)
        assert len(finish(engine, job(prompt(4), 5))[0].output_ids) == 5


def test_another_dtype_serves_with_numbers_near_those_of_float32(folder: Path) -> None:
    ids = prompt(12)
    rows = reference_rows(reference(folder), ids)
    with running_engine(folder, limits=Limits(CPU32.device, torch.bfloat16)) as engine:
        scored, written = finish(engine, job(ids, 0, start=0, top=4), job(ids, 10, seed=1))
    assert scored.scores is not None and scored.scores.logprobs.dtype == np.float32
    difference = np.abs(scored.scores.logprobs - rows[np.arange(11), ids[1:]])
    assert 0 < difference.max() < 0.2
    assert len(written.output_ids) == 10


# --- models that cannot be served ----------------------------------------------------------------------------------


def test_folders_that_cannot_be_served_are_refused_with_the_reason(tmp_path: Path) -> None:
    good = save_model(tmp_path / "good")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ServedModel.load(tmp_path, CPU32)
    with pytest.raises(ConfigError, match=r"61 rows.*62"):
        ServedModel.load(good, Limits(CPU32.device, CPU32.dtype, vocab_size=62))
    with pytest.raises(EnvironmentFault, match="do not fit"):
        ServedModel.load(good, Limits(CPU32.device, CPU32.dtype, memory_bytes=1000))
    weights = good / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read"):
        ServedModel.load(good, CPU32)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        ServedModel.load(good, CPU32)
