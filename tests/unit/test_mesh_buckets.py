"""How a version is cut into buckets and put together again."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.transfermesh import Manifest, MemoryLoader, TensorSpec
from distill.transfermesh.buckets import Assembly, cut, layout
from distill.transfermesh.digest import bucket_digest
from tests.builders_mesh import endpoints, model, publisher, receivers

sizes = st.lists(st.integers(0, 1000), max_size=12)


def arrays_of(lengths: list[int]) -> list[np.ndarray]:
    return [np.random.default_rng(index).integers(0, 256, length, np.uint8) for index, length in enumerate(lengths)]


@given(lengths=sizes, bucket_bytes=st.integers(64, 800))
@settings(deadline=None)
def test_buckets_are_bounded_and_split_only_what_does_not_fit_into_one(lengths, bucket_bytes):
    buckets = cut(arrays_of(lengths), bucket_bytes)
    assert [bucket.seq for bucket in buckets] == list(range(len(buckets)))
    assert all(bucket.nbytes <= bucket_bytes for bucket in buckets)
    pieces = [piece for bucket in buckets for piece in bucket.slices]
    for tensor, length in enumerate(lengths):
        mine = [piece.nbytes for piece in pieces if piece.tensor == tensor]
        assert sum(mine) == length
        assert len(mine) == 1 or length > bucket_bytes


@given(lengths=sizes, bucket_bytes=st.integers(64, 800))
@settings(deadline=None)
def test_what_is_written_and_what_is_gathered_is_the_same_and_comes_together_again(lengths, bucket_bytes):
    arrays = arrays_of(lengths)
    manifest = Manifest(1, tuple(TensorSpec(f"t{i}", "uint8", (length,), length) for i, length in enumerate(lengths)))
    assembly = Assembly(manifest)
    found: dict[str, bytes] = {}
    for bucket in cut(arrays, bucket_bytes):
        room = np.zeros(bucket.nbytes, np.uint8)
        bucket.write_to(room)
        assert b"".join(bucket.gathered()) == room.tobytes()
        assert bucket.digest == bucket_digest(bucket.views)
        assembly.expect(bucket.slices)
        found |= {name: data.tobytes() for name, data in assembly.add(bucket.slices, room)}
    assert assembly.complete
    assert found == {f"t{index}": array.tobytes() for index, array in enumerate(arrays)}


def test_slices_of_a_bucket_begin_at_multiples_of_64():
    (bucket,) = cut(arrays_of([1, 0, 65, 64]), 1 << 20)
    assert layout(bucket.slices) == ([0, 64, 64, 192], 256)


def test_a_tensor_that_is_whole_in_shared_memory_is_given_to_the_loader_without_a_copy():
    writeable: dict[str, bool] = {}

    class Watching(MemoryLoader):
        def load(self, name, data):
            writeable[name] = data.flags.writeable
            super().load(name, data)

    with receivers({"a": Watching()}) as started, publisher("shm", bucket_bytes=2048) as made:
        assert made.publish(model(), 1, endpoints(started)).committed == ("a",)
    # The publisher's segment is mapped read-only; only a tensor in pieces is put together in memory of the receiver.
    assert {name for name, own in writeable.items() if own} == {"embed.weight"}
