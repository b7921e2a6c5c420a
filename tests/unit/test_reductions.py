"""How token losses become one number. Legend: S samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.objectives.reductions import REDUCTIONS, row_weights

quick = settings(deadline=None, max_examples=50)
every_reduction = pytest.mark.parametrize("reduction", list(REDUCTIONS))
samples = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.sampled_from(["", "x", "y"])), min_size=1, max_size=12
)


def weights(reduction: str, batch: list[tuple[int, str, str]], **more: Any) -> np.ndarray:
    counts, domains, trajectories = zip(*batch, strict=True)
    return row_weights(reduction, loss_tokens=counts, domains=domains, trajectories=trajectories, **more)


@every_reduction
@quick
@given(batch=samples)
def test_the_tokens_of_a_batch_have_mass_1_together(reduction: str, batch: list[tuple[int, str, str]]) -> None:
    """A loss of 1 at every token is a loss of 1."""
    counts = np.asarray([count for count, _, _ in batch])
    weights_S = weights(reduction, batch)
    assert (weights_S * counts).sum() == pytest.approx(1.0 if counts.any() else 0.0)
    assert (weights_S[counts == 0] == 0).all() and (weights_S[counts > 0] > 0).all()


@every_reduction
@quick
@given(batch=samples, data=st.data())
def test_a_sample_counts_the_same_in_any_order(
    reduction: str, batch: list[tuple[int, str, str]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = weights(reduction, [batch[s] for s in order])
    np.testing.assert_allclose(shuffled, weights(reduction, batch)[list(order)], rtol=1e-12)


@every_reduction
@quick
@given(batch=samples)
def test_samples_without_trained_tokens_change_nothing(reduction: str, batch: list[tuple[int, str, str]]) -> None:
    empty = [(0, "d", ""), (0, "a", "x")]
    np.testing.assert_allclose(weights(reduction, batch + empty)[: len(batch)], weights(reduction, batch), rtol=1e-12)


BATCH = [(2, "a", "x"), (4, "a", "x"), (1, "b", ""), (3, "b", "")]


@pytest.mark.parametrize(
    ("reduction", "want"),
    [
        ("token_mean", [1 / 10] * 4),
        ("seq_mean", [1 / 8, 1 / 16, 1 / 4, 1 / 12]),
        ("domain_balanced", [1 / 12, 1 / 12, 1 / 8, 1 / 8]),
        ("segment_mean", [1 / 12, 1 / 24, 1 / 3, 1 / 9]),
        ("segment_token", [1 / 14, 1 / 14, 1 / 7, 1 / 7]),
    ],
)
def test_a_token_counts_as_its_reduction_says(reduction: str, want: list[float]) -> None:
    assert weights(reduction, BATCH).tolist() == pytest.approx(want)


def test_domain_weights_are_shares_of_the_domains_that_are_there() -> None:
    got = weights("domain_balanced", BATCH, domain_weights={"a": 3.0, "b": 1.0, "absent": 5.0})
    assert got.tolist() == pytest.approx([0.75 / 6, 0.75 / 6, 0.25 / 4, 0.25 / 4])


def test_a_batch_of_domains_that_weigh_0_has_no_mass() -> None:
    assert weights("domain_balanced", BATCH, domain_weights={"a": 0.0, "b": 0.0, "c": 1.0}).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("reduction", "domain_weights", "message"),
    [
        ("token_maen", None, "did you mean 'token_mean'"),
        ("token_mean", {"a": 1.0}, "domain_weights: has no effect with reduction=token_mean"),
        ("domain_balanced", {"a": 1.0}, "there is none for the domain 'b'"),
        ("domain_balanced", {"a": 1.0, "b": -1.0}, "domain_weights.b: must be a number of at least 0"),
        ("domain_balanced", {"a": 1.0, "b": float("nan")}, "domain_weights.b: must be a number of at least 0"),
    ],
)
def test_what_cannot_be_weighed_is_refused(reduction: str, domain_weights: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        weights(reduction, BATCH, domain_weights=domain_weights)
    assert message in str(caught.value)
