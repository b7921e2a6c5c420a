"""Differences of weights: nothing is lost, whatever the bytes are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from distill.weights.delta import decode, encode

ITEM_BYTES = st.sampled_from([1, 2, 4, 8])
OCTETS = arrays.arrays(np.uint8, st.integers(0, 400))


def _round(octets: np.ndarray, base: np.ndarray, item_bytes: int) -> tuple[str, int]:
    part = encode(octets, base, item_bytes)
    stored = np.frombuffer(part.data, np.uint8) if len(part.data) else np.empty(0, np.uint8)
    np.testing.assert_array_equal(decode(part.form, stored, base, item_bytes), octets)
    return part.form, len(part.data)


@given(octets=OCTETS, item_bytes=ITEM_BYTES, data=st.data())
def test_what_is_decoded_is_what_was_encoded(octets: np.ndarray, item_bytes: int, data: st.DataObject) -> None:
    """Any bytes: NaN payloads, negative zeros and sizes that are no multiple of an element are among them."""
    base = data.draw(arrays.arrays(np.uint8, octets.size))
    form, size = _round(octets, base, item_bytes)
    assert size <= octets.size and (form == "equal") == bool((octets == base).all())


@given(
    values=arrays.arrays(np.uint32, st.integers(1, 100), elements=st.sampled_from([0x7FC00001, 0xFF800000, 0x80000000]))
)
def test_nan_payloads_infinities_and_negative_zeros_keep_their_bits(values: np.ndarray) -> None:
    octets = values.view(np.uint8)
    _round(octets, np.zeros_like(octets), 4)


def test_a_small_change_of_bfloat16_weights_takes_a_fraction_of_their_bytes() -> None:
    random = np.random.default_rng(1)
    base = random.integers(0, 2**16, 100_000, np.uint16)
    changed = base.copy()
    changed[random.permutation(100_000)[:20_000]] ^= random.integers(0, 8, 20_000, np.uint16)
    form, size = _round(changed.view(np.uint8), base.view(np.uint8), 2)
    assert form == "xor" and size < 0.25 * changed.nbytes


def test_unrelated_weights_are_kept_as_they_are() -> None:
    random = np.random.default_rng(2)
    one, other = (random.integers(0, 256, 10_000, np.uint8) for _ in range(2))
    assert _round(one, other, 4) == ("raw", 10_000)


@pytest.mark.parametrize("stored", [b"", b"no frame", encode(np.ones(8, np.uint8), np.zeros(8, np.uint8), 1).data])
def test_what_is_no_difference_of_this_base_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="difference"):
        decode("xor", np.frombuffer(stored, np.uint8), np.zeros(1000, np.uint8), 4)
