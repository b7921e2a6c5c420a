"""What every transport of TransferMesh must do, run over each that this machine has."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill import registry
from distill.transfermesh import MemoryLoader, model_digest, tensor_digest
from distill.transfermesh.manifest import ITEM_BYTES
from tests.builders_mesh import ScriptedLoader, endpoints, model, publisher, receivers, same, tensor

pytestmark = pytest.mark.parametrize("transport", registry.names("transport"))

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
layouts = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=6)


@given(layout=layouts, seed=st.integers(0, 2**32), bucket_bytes=st.integers(64, 700), large=st.integers(0, 3000))
@settings(max_examples=30, deadline=None)
def test_weights_arrive_bit_exact_whatever_their_layout_and_the_bucket_size(
    transport, layout, seed, bucket_bytes, large
):
    weights = [tensor(f"t{index}", dtype, shape, seed + index) for index, (dtype, shape) in enumerate(layout)]
    weights.append(tensor("large", "int8", (large,), seed))
    loaders = {"a": MemoryLoader(), "b": MemoryLoader()}
    with receivers(loaders) as started, publisher(transport, bucket_bytes=bucket_bytes) as made:
        report = made.publish(weights, 3, endpoints(started))
        assert (report.committed, report.failed) == (("a", "b"), {})
        assert [receiver.version for receiver in started] == [3, 3]
    assert all(same(loader, weights) for loader in loaders.values())
    assert report.digest == model_digest({name: tensor_digest(data) for name, _, _, data in weights})
    assert report.nbytes == sum(data.nbytes for *_, data in weights)
    assert report.transports == {"a": transport, "b": transport}


def test_each_version_replaces_the_last(transport):
    loader = MemoryLoader()
    with receivers({"a": loader}) as started, publisher(transport) as made:
        for version in range(1, 6):
            assert made.publish(model(version), version, endpoints(started)).committed == ("a",)
            assert same(loader, model(version)) and loader.version == version


def test_a_model_may_grow_and_shrink_between_versions(transport):
    loader = MemoryLoader()
    with receivers({"a": loader}) as started, publisher(transport, bucket_bytes=1 << 20) as made:
        for version, size in enumerate((100, 300_000, 7)):
            weights = [tensor("w", "float32", (size,), version)]
            assert made.publish(weights, version, endpoints(started)).failed == {}
            assert same(loader, weights)


def test_tensors_are_given_to_the_loader_aligned_and_flat(transport):
    seen: list[tuple[int, int, int]] = []

    class Watching(MemoryLoader):
        def load(self, name, data):
            seen.append((data.ndim, data.ctypes.data % 8, data.nbytes))
            super().load(name, data)

    with receivers({"a": Watching()}) as started, publisher(transport, bucket_bytes=4096) as made:
        made.publish(model(), 1, endpoints(started))
    assert seen == [(1, 0, data.nbytes) for *_, data in model()]


def test_a_slow_receiver_gets_right_bytes_while_a_fast_one_waits_for_its_room(transport):
    turn = itertools.count()

    def dawdle() -> None:
        if next(turn) % 3 == 0:
            time.sleep(0.02)

    slow, fast = ScriptedLoader(load=dawdle), MemoryLoader()
    weights = [tensor(f"t{index}", "uint8", (900,), index) for index in range(20)]
    with receivers({"slow": slow, "fast": fast}) as started, publisher(transport) as made:
        assert made.publish(weights, 1, endpoints(started)).committed == ("slow", "fast")
    assert same(slow, weights) and same(fast, weights)
    assert made.stats == {}, "a closed publisher holds nothing"


def test_an_update_without_tensors_is_an_update(transport):
    with receivers({"a": MemoryLoader()}) as started, publisher(transport) as made:
        assert made.publish([], 4, endpoints(started)).committed == ("a",)
        assert started[0].version == 4
