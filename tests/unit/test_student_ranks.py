"""A student on two ranks, in real processes: it learns what one process learns, and its checkpoints fit any number."""

from __future__ import annotations

import math
import shutil
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distill.config.models import ObjectiveConfig
from distill.errors import ConfigError, EnvironmentFault, PeerFault, TeacherError
from distill.idle_steps import is_idle
from distill.objectives import build_objective
from distill.objectives.divergence import JSD
from distill.objectives.policy_gradient import PolicyGradient
from distill.protocols import WeightShard
from distill.types import Batch, ScoredSample, StepResult, TeacherScores
from students.hf import shards
from students.hf.parallel import balanced
from students.hf.shards import piece, require_coverage
from students.ranks import COLLECTIVE_TIMEOUT_S
from tests.builders_ranks import Ranks, add_up, start_student
from tests.builders_student import make_batch, write_experts, write_student

pytestmark = pytest.mark.timeout(280)
KINDS = pytest.mark.parametrize("kind", ["fsdp", "ddp"])
TEACHERS = ({"math": 1.0}, {"code": 0.5, "math": 0.5})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks(2)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_student(tmp_path_factory.mktemp("student") / "model", tied=True)


def two(kind: str, **changes: Any) -> dict[str, Any]:
    return {"ranks": 2, "parallel": kind, "micro_batch_tokens": 24, **changes}


def batch_of(step: int, count: int = 7, objective: Any = None) -> Batch:
    return make_batch((objective or JSD()).spec, version=step, seed=step, count=count, teachers=TEACHERS)


# --- jobs: what each rank is told to do


def train(model: Path, changes: dict[str, Any], steps: int, count: int, objective: Any) -> tuple[list[StepResult], Any]:
    student = start_student(model, **changes)
    results = [student.step(batch_of(step, count, objective), objective) for step in range(steps)]
    return results, weights_of(student)


def stand_still(model: Path, changes: dict[str, Any], same_rewards: bool) -> tuple[list[StepResult], list[Any]]:
    """A step that teaches, one that does not, and one that does. What is between them: the weights after each."""
    if same_rewards:
        section: dict[str, Any] = {"name": "policy_gradient", "importance": "none", "outcome": {"teacher_weight": 0.0}}
    else:
        section = {"name": "jsd", "reduction": "domain_balanced", "domain_weights": {"math": 1.0, "code": 0.0}}
    rules = ObjectiveConfig.model_validate(section)
    objective = build_objective(rules)
    student = start_student(model, rules, weight_decay=0.5, ema_decay=0.9, **changes)
    results: list[StepResult] = []
    weights: list[Any] = []
    for version, teaches in enumerate((True, False, True)):
        domain = "math" if teaches or same_rewards else "code"
        batch = make_batch(objective.spec, version=version, seed=version, count=7, domains=(domain,))
        samples = [
            replace(
                item.sample,
                prompt_ids=batch.samples[0].sample.prompt_ids,
                reward=float(teaches and index % 2),
            )
            for index, item in enumerate(batch.samples)
        ]
        scored = tuple(replace(item, sample=sample) for item, sample in zip(batch.samples, samples, strict=True))
        results.append(student.step(Batch(version, scored), objective))
        weights.append({name: value.copy() for name, value in weights_of(student).items()})
    return results, weights


def weights_of(student: Any) -> dict[str, Any]:
    return {
        name: np.frombuffer(data.tobytes(), dtype if dtype != "bfloat16" else np.uint16).reshape(shape)
        for name, dtype, shape, data in student.weights()
    }


def save_after(model: Path, changes: dict[str, Any], steps: int, folder: Path) -> Any:
    student = start_student(model, **changes)
    for step in range(steps):
        student.step(batch_of(step), JSD())
    student.save(folder)
    results = [student.step(batch_of(steps + step), JSD()) for step in range(2)]
    return results, weights_of(student)


def go_on(model: Path, changes: dict[str, Any], folder: Path) -> Any:
    student = start_student(model, **changes)
    student.load(folder)
    results = [student.step(batch_of(student.version), JSD()) for _ in range(2)]
    return results, weights_of(student)


def measure(model: Path, changes: dict[str, Any]) -> dict[str, float]:
    student = start_student(model, **changes)
    held_out = make_batch(JSD().spec, seed=9, count=5, teachers=TEACHERS, domains=("math", "math", "math", "code"))
    first = student.evaluate(held_out, JSD())
    student.step(batch_of(0), JSD())  # the weights are spread again behind an evaluation
    assert student.evaluate(held_out, JSD()) != first
    return first


def shards_and_weights(model: Path, changes: dict[str, Any]) -> tuple[list[WeightShard], dict[str, Any]]:
    student = start_student(model, **changes)
    pieces = [
        WeightShard(each.name, each.dtype, each.shape, each.offset, each.size, each.data.copy())
        for each in student.shards()
    ]
    return pieces, weights_of(student)


def export(model: Path, changes: dict[str, Any], folder: Path) -> None:
    student = start_student(model, **changes)
    student.step(batch_of(0), JSD())
    student.export(folder)


def gathered_at_once(model: Path, changes: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Most bytes of gathered weights that lived at one time during an export and a round of shards; bytes of all."""
    student = start_student(model, **changes)
    total = sum(value.nbytes for value in weights_of(student).values())
    live = most = 0

    def let_go(nbytes: int) -> None:
        nonlocal live
        live -= nbytes

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal live, most
        result = tensor.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]: of a DTensor
        live += result.nbytes
        most = max(most, live)
        weakref.finalize(result, let_go, result.nbytes)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "whole", counted)
        student.export(folder)
        deque(student.shards(), maxlen=0)
    return most, total


def meet_a_broken_sample(model: Path, changes: dict[str, Any]) -> Any:
    student = start_student(model, **changes)
    before = weights_of(student)
    fault = None
    try:
        student.step(with_broken(batch_of(0)), JSD())
    except (TeacherError, PeerFault) as error:
        fault = error
    unchanged = all(np.array_equal(before[name], value) for name, value in weights_of(student).items())
    return fault, unchanged, student.version, student.step(batch_of(0), JSD())


def with_broken(batch: Batch) -> Batch:
    """The same, with NaN in the last score row of the longest sample."""
    longest = max(batch.samples, key=lambda item: len(item.sample.prompt_ids) + len(item.sample.response_ids))
    scores = longest.scores[0]
    assert scores.full_logprobs is not None
    full = scores.full_logprobs.copy()
    full[-1] = np.nan
    bad = ScoredSample(
        longest.sample, (TeacherScores(scores.teacher, scores.logprobs, full_logprobs=full), *longest.scores[1:])
    )
    return Batch(batch.version, tuple(bad if item is longest else item for item in batch.samples))


# --- the same as one process


def require_equal(results: Any, expected: Any, tolerance: float = 1e-5) -> None:
    (steps, weights), (own_steps, own_weights) = results, expected
    for step, own in zip(steps, own_steps, strict=True):
        assert step.loss == pytest.approx(own.loss, rel=tolerance)
        assert step.grad_norm == pytest.approx(own.grad_norm, rel=tolerance)
        assert step.kl == pytest.approx(own.kl, rel=tolerance)
        assert step.entropy_gap == pytest.approx(own.entropy_gap, rel=tolerance, abs=tolerance)
        assert step.token_share == own.token_share
        assert (step.version, step.lr, step.tokens) == (own.version, own.lr, own.tokens)
    assert weights.keys() == own_weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(value, own_weights[name], atol=tolerance, rtol=0, err_msg=name)


@KINDS
@pytest.mark.parametrize("count", [7, 1], ids=["uneven shares", "a rank without a sample"])
@pytest.mark.parametrize("objective", [JSD(), PolicyGradient(discount=0.9)], ids=lambda value: type(value).__name__)
def test_two_ranks_learn_what_one_learns(ranks: Ranks, model: Path, kind: str, count: int, objective: Any) -> None:
    first, second = ranks.do(train, model, two(kind), 3, count, objective)
    require_equal(first, train(model, {}, 3, count, objective))
    assert [step.loss for step in first[0]] == [step.loss for step in second[0]]
    assert all(np.array_equal(first[1][name], value) for name, value in second[1].items())


@KINDS
@pytest.mark.parametrize("same_rewards", [True, False], ids=["equal rewards", "no sample that counts"])
def test_a_step_without_a_gradient_moves_no_weight_on_two_ranks_as_on_one(
    ranks: Ranks, model: Path, kind: str, same_rewards: bool
) -> None:
    first, second = ranks.do(stand_still, model, two(kind), same_rewards)
    alone = stand_still(model, {}, same_rewards)
    for results, weights in (first, second, alone):
        assert [step.version for step in results] == [1, 2, 3]
        assert [is_idle(step) for step in results] == [False, True, False]
        assert [step.lr for step in results] == [step.lr for step in alone[0]]
        learnt, idle, last = weights
        assert all(np.array_equal(learnt[name], value) for name, value in idle.items()), "neither decay nor momentum"
        assert any(not np.array_equal(learnt[name], value) for name, value in last.items())
        for name, value in last.items():
            np.testing.assert_allclose(value, alone[1][-1][name], atol=1e-5, rtol=0, err_msg=name)


@KINDS
def test_lean_layers_on_two_ranks_learn_what_plain_ones_learn_on_one(ranks: Ranks, model: Path, kind: str) -> None:
    first, _ = ranks.do(train, model, two(kind), 2, 7, JSD())
    require_equal(first, train(model, {"lean_layers": False}, 2, 7, JSD()))


@KINDS
def test_checkpointed_activations_change_nothing(ranks: Ranks, model: Path, kind: str) -> None:
    first, _ = ranks.do(train, model, two(kind, gradient_checkpointing=True), 2, 7, JSD())
    require_equal(first, train(model, {}, 2, 7, JSD()))


@KINDS
def test_in_bfloat16_they_publish_what_they_compute_with_and_stay_near_one_process(
    ranks: Ranks, model: Path, kind: str
) -> None:
    (steps, weights), _ = ranks.do(train, model, two(kind, dtype="bfloat16"), 2, 7, JSD())
    own_steps, own_weights = train(model, {"dtype": "bfloat16"}, 2, 7, JSD())
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in own_steps], rel=0.05)
    assert {value.dtype for value in weights.values()} == {value.dtype for value in own_weights.values()}


@KINDS
def test_lora_adapters_are_trained_and_published_merged(ranks: Ranks, model: Path, kind: str) -> None:
    lora = {"r": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}
    first, _ = ranks.do(train, model, two(kind, lora=lora), 2, 7, JSD())
    require_equal(first, train(model, {"lora": lora}, 2, 7, JSD()))


@KINDS
def test_adapters_of_fused_experts_are_too(ranks: Ranks, mixtral: Path, kind: str) -> None:
    first, _ = ranks.do(train, mixtral, two(kind, lora={"r": 4}), 2, 7, JSD())
    require_equal(first, train(mixtral, {"lora": {"r": 4}}, 2, 7, JSD()))


@KINDS
def test_an_evaluation_is_over_all_samples_of_all_ranks(ranks: Ranks, model: Path, kind: str) -> None:
    first, second = ranks.do(measure, model, two(kind))
    assert first == second == pytest.approx(measure(model, {}), rel=1e-5)
    assert set(first) == {"math", "code"}


@KINDS
def test_a_sample_that_is_at_fault_stops_all_ranks_unchanged_and_they_go_on(
    ranks: Ranks, model: Path, kind: str
) -> None:
    answers = ranks.do(meet_a_broken_sample, model, two(kind))
    faults = [fault for fault, *_ in answers]
    assert sorted(type(fault).__name__ for fault in faults) == ["PeerFault", "TeacherError"]
    cause = next(fault for fault in faults if isinstance(fault, TeacherError))
    assert cause.sample_id.startswith("v0-s") and cause.sample_id in str(cause)
    peer = next(fault for fault in faults if isinstance(fault, PeerFault))
    assert cause.what in peer.what
    for _, unchanged, version, step in answers:
        assert (unchanged, version, step.version) == (True, 0, 1)
        assert step.loss == pytest.approx(start_student(model).step(batch_of(0), JSD()).loss, rel=1e-5)


# --- shards


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its three experts are one tensor in the model, and many in its files."""
    return write_experts(tmp_path_factory.mktemp("experts") / "model", "mixtral")


@KINDS
@pytest.mark.parametrize("shape", ["model", "mixtral"])
def test_the_shards_of_all_ranks_hold_every_element_exactly_once(
    ranks: Ranks, shape: str, kind: str, request: pytest.FixtureRequest
) -> None:
    answers = ranks.do(shards_and_weights, request.getfixturevalue(shape), two(kind))
    weights = answers[0][1]
    pieces = [shard for its, _ in answers for shard in its]
    boxes: dict[str, Any] = {name: (value.shape, []) for name, value in weights.items()}
    rebuilt = {name: np.full_like(value, np.nan) for name, value in weights.items()}
    for shard in pieces:
        assert (shard.shape, shard.dtype) == (weights[shard.name].shape, "float32")
        boxes[shard.name][1].append((shard.offset, shard.size))
        where = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.size, strict=True))
        rebuilt[shard.name][where] = shard.data.view(np.float32).reshape(shard.size)
    require_coverage(boxes, "the shards")
    for name, value in weights.items():
        np.testing.assert_array_equal(rebuilt[name], value, err_msg=name)
    total = sum(value.nbytes for value in weights.values())
    for its, _ in answers:
        assert 0.3 * total < sum(shard.data.nbytes for shard in its) < 0.7 * total, "each rank has about its half"


@pytest.mark.parametrize("shape", ["model", "mixtral"])
def test_the_export_of_sharded_ranks_is_an_ordinary_folder(
    ranks: Ranks, shape: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(shape)
    assert ranks.do(export, source, two("fsdp"), tmp_path / "two") == [None, None]
    export(source, {}, tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    ours, own = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert ours.keys() == own.keys() == load_file(source / "model.safetensors").keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, own[name], atol=1e-5, rtol=0)
    loaded, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "two", source))
    assert type(loaded) is type(base)
    assert loaded.config.architectures == base.config.architectures
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "two" / name).read_text() == (tmp_path / "one" / name).read_text()


def test_no_rank_ever_gathers_more_than_a_few_tensors(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    for most, total in ranks.do(gathered_at_once, model, two("fsdp"), tmp_path / "out"):
        assert 0 < most < 0.3 * total


def test_the_shards_of_one_process_are_its_weights(model: Path) -> None:
    pieces, weights = shards_and_weights(model, {})
    assert [shard.name for shard in pieces] == list(weights)
    for shard in pieces:
        assert (shard.size, shard.offset) == (shard.shape, (0,) * len(shard.shape))
        assert shard.data.tobytes() == weights[shard.name].tobytes()


# --- checkpoints


@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp", "fsdp"), ("ddp", "ddp"), ("fsdp", None), (None, "fsdp"), ("ddp", "fsdp")],
    ids=lambda value: value or "one",
)
def test_any_number_of_ranks_goes_on_from_a_checkpoint(
    ranks: Ranks, model: Path, tmp_path: Path, before: str | None, after: str | None
) -> None:
    folder = tmp_path / "checkpoint"
    how = two(before) if before else {}
    straight = ranks.do(save_after, model, how, 2, folder)[0] if before else save_after(model, how, 2, folder)
    AutoModelForCausalLM.from_pretrained(folder)
    assert len(list((folder / "trainer").glob("rank-*.safetensors"))) == (2 if before else 1)
    resumed = ranks.do(go_on, model, two(after), folder)[0] if after else go_on(model, {}, folder)
    if before == after:
        assert [step.loss for step in resumed[0]] == [step.loss for step in straight[0]]
        assert all(np.array_equal(resumed[1][name], value) for name, value in straight[1].items())
    require_equal(resumed, straight)


def test_everything_beside_the_weights_is_resharded_too(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """Master weights of bfloat16 and a moving average."""
    changes = {"dtype": "bfloat16", "ema_decay": 0.5}
    straight = ranks.do(save_after, model, two("fsdp", **changes), 2, tmp_path / "two")[0]
    resumed = ranks.do(go_on, model, two("fsdp", **changes), tmp_path / "two")[0]
    assert all(np.array_equal(resumed[1][name], value) for name, value in straight[1].items())
    steps, _ = go_on(model, changes, tmp_path / "two")
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in straight[0]], rel=0.05)


def test_dropout_differs_between_ranks_and_a_resume_repeats_it(ranks: Ranks, tmp_path: Path) -> None:
    source = write_student(tmp_path / "model", dropout=0.3)
    straight = ranks.do(save_after, source, two("fsdp"), 2, tmp_path / "checkpoint")[0]
    resumed = ranks.do(go_on, source, two("fsdp"), tmp_path / "checkpoint")[0]
    assert [step.loss for step in resumed[0]] == [step.loss for step in straight[0]]
    states = [load_file(path)["rng/cpu"] for path in sorted((tmp_path / "checkpoint/trainer").glob("rank-*"))]
    assert not torch.equal(*states)


def test_a_checkpoint_without_the_file_of_a_rank_is_refused_on_all_ranks(
    ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    ranks.do(save_after, model, two("fsdp"), 1, tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    (tmp_path / "bad/trainer/rank-00001.safetensors").unlink()
    faults = ranks.do(go_on, model, two("fsdp"), tmp_path / "bad")
    assert sorted(type(fault).__name__ for fault in faults) == ["ConfigError", "PeerFault"]
    assert all("rank-00001.safetensors is missing" in str(fault) for fault in faults)
    with pytest.raises(ConfigError, match=r"rank-00001\.safetensors is missing"):
        go_on(model, {}, tmp_path / "bad")


def test_a_folder_that_cannot_be_written_stops_all_ranks(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    faults = ranks.do(save_after, model, two("fsdp"), 1, tmp_path / "file" / "checkpoint")
    assert [type(fault) for fault in faults] == [EnvironmentFault, PeerFault]


# --- a rank that is gone


@pytest.mark.faults
def test_a_rank_that_loses_the_other_says_so_at_once() -> None:
    pair = Ranks(2)
    try:
        assert pair.do(add_up, 3) == [6, 6]
        pair.begin(add_up, 1_000_000_000)
        pair.processes[1].kill()
        began = time.monotonic()
        fault = pair.answer(0)
        took = time.monotonic() - began
    finally:
        pair.close()
    assert type(fault) is PeerFault and "student rank 0 lost contact with the other ranks during 'step'" in str(fault)
    assert took < COLLECTIVE_TIMEOUT_S / 10


# --- what needs no second process


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 9))
def test_shares_hold_every_sample_once_and_differ_by_no_more_than_one_sample(lengths: list[int], count: int) -> None:
    shares = balanced(lengths, count)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.lists(st.integers(0, 7), max_size=3), st.integers(1, 6))
def test_pieces_of_any_shape_cover_it(shape: list[int], count: int) -> None:
    boxes = [piece(shape, rank, count) for rank in range(count)]
    if shape:
        require_coverage({"w": (tuple(shape), boxes)}, "the pieces")
    assert sum(math.prod(size) for _, size in boxes) == math.prod(shape)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 3))], "3 of 9 elements are in no piece"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "pieces overlap"),
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], "lies outside"),
        ([((0,), (9,))], "lies outside"),
    ],
)
def test_pieces_that_do_not_cover_a_tensor_once_are_refused(boxes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_coverage({"w": ((3, 3), boxes)}, "checkpoint x")
