"""Packed rows, shared prefixes and streamed layers give what each sequence gives alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.modeling.forward import TensorFeed, hidden, stream, stream_bytes
from distill.modeling.head import logits
from distill.modeling.packed import PackedBatch, sharing
from distill.modeling.packed_attention import why_not
from distill.modeling.skeleton import Skeleton
from tests.builders_modeling import (
    CPU,
    FAMILIES,
    SIZES,
    VOCAB,
    alone,
    reference,
    resident,
    sequences_of,
    weights_of,
    write_model,
)


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=bound)


# --- packing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_give_what_each_gives_alone(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family)
    model = resident(folder).model
    assert why_not(model, VOCAB) is None
    sequences = sequences_of(1)
    starts = [len(ids) // 3 for ids in sequences]
    expected = alone(reference(folder), sequences, starts)
    for least in (2, 10**6):
        batch = PackedBatch.of(sequences, starts, least_shared=least)
        assert batch.layout.shares == (least == 2)
        close(hidden(model, batch), expected)


def test_in_bfloat16_packing_changes_no_more_than_rounding(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    sequences = sequences_of(2)
    starts = [0] * len(sequences)
    exact = alone(reference(folder), sequences, starts)
    low = alone(reference(folder, torch.bfloat16), sequences, starts).float()
    packed = hidden(resident(folder, torch.bfloat16).model, PackedBatch.of(sequences, starts)).float()
    assert float((packed - exact).pow(2).mean()) <= 1.5 * float((low - exact).pow(2).mean())


ids_of = st.lists(st.integers(3, 5), min_size=1, max_size=12)
"""Few different ids: beginnings are often alike."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = write_model(tmp_path_factory.mktemp("model") / "a", "qwen2 with a window")
    return resident(folder).model, reference(folder)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(ids_of, min_size=1, max_size=9),
    st.integers(1, 4),
    st.lists(st.integers(0, 11), min_size=9, max_size=9),
    st.lists(st.sampled_from(["a", "b"]), min_size=9, max_size=9),
)
def test_whatever_begins_alike_is_computed_once_with_the_same_result(
    pair: tuple[Any, Any], lists: list[list[int]], least: int, starts: list[int], owners: list[str]
) -> None:
    sequences = [np.asarray(ids, np.int32) for ids in lists]
    starts = [min(start, len(ids) - 1) for start, ids in zip(starts, sequences, strict=False)]
    owners = owners[: len(sequences)]
    batch = PackedBatch.of(sequences, starts, least_shared=least, owners=owners)
    assert batch.counts == tuple(len(ids) - 1 - start for start, ids in zip(starts, sequences, strict=True))
    assert batch.tokens == sum(batch.lengths) <= sum(len(ids) - 1 for ids in sequences)
    for ids, rows, owner in zip(sequences, batch.rows, owners, strict=True):
        assert batch.ids_T[rows].tolist() == ids[:-1].tolist()
        assert batch.layout.position_ids[0, rows].tolist() == list(range(len(ids) - 1)) if len(rows) else True
        assert all(batch.spans[owner].start <= row < batch.spans[owner].stop for row in rows)
    close(hidden(pair[0], batch), alone(pair[1], sequences, starts))


@given(st.lists(ids_of, min_size=0, max_size=7), st.integers(1, 3))
def test_no_other_groups_would_save_more_tokens(lists: list[list[int]], least: int) -> None:
    sequences = [np.asarray(ids, np.int64) for ids in sorted(lists)]
    groups = sharing(sequences, least)
    assert sorted(index for group, _ in groups for index in group) == list(range(len(sequences)))
    for group, shared in groups:
        assert (shared >= least) == (len(group) > 1)
        assert len({tuple(sequences[index][:shared]) for index in group}) == 1
    saved = sum(shared * (len(group) - 1) for group, shared in groups)

    def best(begin: int) -> int:
        """Over all ways to cut the sorted sequences into runs."""
        found = [0] if begin == len(sequences) else []
        for end in range(begin + 1, len(sequences) + 1):
            run = [tuple(each) for each in sequences[begin:end]]
            alike = next((n for n in range(min(map(len, run)), 0, -1) if len({each[:n] for each in run}) == 1), 0)
            if len(run) == 1 or alike >= least:
                found.append((len(run) - 1) * (alike if len(run) > 1 else 0) + best(end))
        return max(found)

    assert saved == best(0)


def test_responses_to_one_prompt_share_it_and_not_the_system_prompt_of_all() -> None:
    system = list(range(3, 13))
    prompts = [system + [20 + index] * 30 for index in range(2)]
    sequences = [np.asarray([*prompt, 40 + answer, 1, 1]) for answer in range(4) for prompt in prompts]
    batch = PackedBatch.of(sequences, [0] * 8)
    assert batch.tokens == 2 * 40 + 8 * 2
    assert sorted(batch.lengths) == [2] * 8 + [40] * 2


# --- streaming -----------------------------------------------------------------------------------------------------


class CountedFeed(TensorFeed):
    """Notes what it was asked for, on which thread, and which of the buffers it may write to overlap."""

    def __init__(self, skeleton: Skeleton, folder: Path) -> None:
        super().__init__(skeleton, weights_of(folder))
        self.filled: list[tuple[int, int, int]] = []
        self.rows_taken = 0
        self.threads: set[int] = set()

    def fill(self, index: int, buffer: torch.Tensor) -> None:
        self.threads.add(threading.get_ident())
        self.filled.append((index, buffer.data_ptr(), len(buffer)))
        super().fill(index, buffer)

    def rows(self, ids_U: torch.Tensor) -> torch.Tensor:
        self.rows_taken += len(ids_U)
        return super().rows(ids_U)


def stream_room(skeleton: Skeleton) -> torch.Tensor:
    return torch.full((stream_bytes(skeleton),), 255, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_logits_are_the_resident_ones_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family)
    sequences = sequences_of(3)
    batch = PackedBatch.of(sequences, [2 * (len(ids) > 3) for ids in sequences])
    model = resident(folder, dtype).model
    expected_ND = hidden(model, batch)
    skeleton = Skeleton.build(folder, dtype=dtype, device=CPU)
    for _ in range(2):
        found_ND = stream(skeleton, batch, TensorFeed(skeleton, weights_of(folder)), stream_room(skeleton))
        assert torch.equal(found_ND, expected_ND)
        assert torch.equal(logits(skeleton.model, found_ND, VOCAB), logits(model, expected_ND, VOCAB))
        skeleton.detach_all()
        assert all(parameter.is_meta for parameter in skeleton.model.parameters())


@pytest.mark.parametrize("family", ["qwen3", "qwen3, tied", "mixtral"])
def test_a_stream_holds_two_layers_or_the_head_and_the_rows_of_its_own_ids(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family, num_hidden_layers=5)
    skeleton = Skeleton.build(folder, dtype=torch.float32, device=CPU)
    feed, room = CountedFeed(skeleton, folder), stream_room(skeleton)
    sequences = [np.asarray([7, 8, 9, 7, 8, 9, 9, 5]), np.asarray([7, 9, 30])]
    stream(skeleton, PackedBatch.of(sequences, [0, 0]), feed, room)
    assert feed.rows_taken == len({7, 8, 9})
    layers = [piece.nbytes for piece in skeleton.pieces[1:-1]]
    matrix = skeleton.embeddings.nbytes if skeleton.tied else 0
    assert len(room) == max(2 * max(layers), skeleton.head.nbytes + matrix)
    assert [index for index, _, _ in feed.filled] == [1, 2, 3, 4, 5, 6] + ([0] if skeleton.tied else [])
    first = room.data_ptr()
    for index, begin, nbytes in feed.filled:
        assert first <= begin and begin + nbytes <= first + len(room), index
    at = [begin for _, begin, _ in feed.filled[:5]]
    assert at == [at[0], at[1], at[0], at[1], at[0]] and at[1] - at[0] == max(layers)
    assert threading.get_ident() not in feed.threads and len(feed.threads) == 1


def test_a_layer_is_fetched_while_the_one_before_it_computes(tmp_path: Path) -> None:
    """The second layer's fetch ends only after the first layer has begun to compute, and the other way round."""
    folder = write_model(tmp_path / "model")
    skeleton = Skeleton.build(folder, dtype=torch.float32, device=CPU)
    fetching, computing = threading.Event(), threading.Event()

    class Slow(CountedFeed):
        def fill(self, index: int, buffer: torch.Tensor) -> None:
            if index == 2:
                fetching.set()
                assert computing.wait(60), "the first layer does not compute before the second is there"
            super().fill(index, buffer)

    def during(*_: Any) -> None:
        assert fetching.wait(60), "the second layer is not fetched before the first is through"
        computing.set()

    hook = skeleton.decoder_layers[0].mlp.register_forward_pre_hook(during)
    batch = PackedBatch.of(sequences_of(4), [0] * 9)
    found = stream(skeleton, batch, Slow(skeleton, folder), stream_room(skeleton))
    hook.remove()
    assert torch.equal(found, hidden(resident(folder).model, batch))


@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_a_feed_that_fails_ends_the_stream_with_nothing_attached(index: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    skeleton = Skeleton.build(folder, dtype=torch.float32, device=CPU)
    weights = weights_of(folder)
    del weights[next(iter(skeleton.sources(index)))]
    batch, room = PackedBatch.of(sequences_of(5), [0] * 9), stream_room(skeleton)
    with pytest.raises(ConfigError, match="the weights lack"):
        stream(skeleton, batch, TensorFeed(skeleton, weights), room)
    assert not skeleton.attached
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    found = stream(skeleton, batch, TensorFeed(skeleton, weights_of(folder)), room)
    assert torch.equal(found, hidden(resident(folder).model, batch))


def test_attention_that_is_more_than_packing_knows_is_refused_by_its_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).save_pretrained(tmp_path)
    skeleton = Skeleton.build(tmp_path, dtype=torch.float32, device=CPU)
    batch = PackedBatch.of(sequences_of(6), [0] * 9)
    with pytest.raises(ConfigError, match="GptOssAttention wants s_aux"):
        stream(skeleton, batch, TensorFeed(skeleton, weights_of(tmp_path)), stream_room(skeleton))
    assert not skeleton.attached


def test_a_room_of_another_size_or_a_skeleton_in_use_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    skeleton = resident(folder)
    batch = PackedBatch.of(sequences_of(6), [0] * 9)
    with pytest.raises(ValueError, match="5 pieces are attached"):
        stream(skeleton, batch, TensorFeed(skeleton, weights_of(folder)), stream_room(skeleton))
    skeleton.detach_all()
    with pytest.raises(ValueError, match=f"needs {stream_bytes(skeleton)} bytes"):
        stream(skeleton, batch, TensorFeed(skeleton, weights_of(folder)), stream_room(skeleton)[1:])
