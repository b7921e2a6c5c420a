from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distill.packing import DTYPES, PackingError, pack, unpack

ARRAYS = st.dictionaries(
    st.text(max_size=8),
    hnp.arrays(
        st.sampled_from(sorted(DTYPES, key=str)).map(np.dtype),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    max_size=4,
)


@given(ARRAYS)
def test_arrays_come_back_bit_for_bit(arrays: dict[str, np.ndarray]) -> None:
    meta, back = unpack(pack({"n": len(arrays)}, arrays))
    assert meta == {"n": len(arrays)}
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        assert back[name].tobytes() == array.tobytes()


def test_big_endian_and_strided_arrays_are_stored_little_endian_and_whole() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    assert unpack(pack(None, {"x": array}))[1]["x"].tolist() == array.tolist()


@given(st.binary(max_size=64))
def test_noise_is_refused_and_never_crashes(noise: bytes) -> None:
    with pytest.raises(PackingError):
        unpack(noise)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_buffer_is_refused_or_keeps_its_bounds(place: int, value: int) -> None:
    whole = bytearray(pack({"a": [1, 2]}, {"x": np.arange(5, dtype=np.float32)}))
    whole[place % len(whole)] = value
    try:
        arrays = unpack(bytes(whole))[1]
    except PackingError:
        return
    assert all(array.nbytes <= len(whole) for array in arrays.values())


def test_a_buffer_cut_short_names_the_array() -> None:
    with pytest.raises(PackingError, match="x: 5 elements"):
        unpack(pack(None, {"x": np.arange(5, dtype=np.float64)})[:-1])


def test_objects_cannot_be_packed() -> None:
    with pytest.raises(PackingError, match="cannot be packed"):
        pack(None, {"x": np.array([{}])})
