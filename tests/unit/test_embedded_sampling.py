"""Drawing tokens: the right distribution, the right numbers, and draws that depend on nothing but seed and position."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.serving.embedded.sampling import Rules, draw, uniforms


def rules(count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Rules:
    return Rules(
        np.full(count, temperature, np.float32), np.full(count, top_p, np.float64), np.full(count, top_k, np.int64)
    )


def uniform(count: int, seed: int = 0) -> np.ndarray:
    return uniforms(np.full(count, seed, np.uint64), np.arange(count))


def test_uniform_numbers_fill_the_unit_interval_evenly_over_seeds_and_over_positions() -> None:
    over_positions = uniform(20_000)
    over_seeds = uniforms(np.arange(20_000).astype(np.uint64), np.full(20_000, 7))
    for numbers in (over_positions, over_seeds):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts, _ = np.histogram(numbers, 20, (0, 1))
        assert abs(counts - 1000).max() < 150  # five standard deviations
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04


def test_sampled_frequencies_follow_the_temperature_scaled_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    count = 40_000
    tokens = draw(logits.expand(count, 4), rules(count, temperature=2.0), uniform(count)).tokens_N.numpy()
    expected = torch.softmax(logits / 2.0, -1).numpy()
    assert np.allclose(np.bincount(tokens, minlength=4) / count, expected, atol=0.015)


def test_reported_numbers_are_scaled_by_temperature_and_not_renormalised_for_top_k_and_top_p() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits, rules(6, temperature=0.7, top_p=0.8, top_k=5), uniform(6))
    expected = torch.log_softmax(logits / 0.7, -1)
    assert torch.allclose(drawn.logp_NV, expected, atol=1e-6)
    assert torch.allclose(drawn.logprobs_N, expected.gather(1, drawn.tokens_N[:, None])[:, 0], atol=1e-6)


def test_greedy_takes_the_largest_and_reports_at_temperature_one() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    drawn = draw(logits, rules(5, temperature=0.0), uniform(5))
    assert torch.equal(drawn.tokens_N, logits.argmax(-1))
    assert torch.allclose(drawn.logp_NV, torch.log_softmax(logits, -1))


def test_top_k_limits_the_choice_to_the_k_largest_and_keeps_their_proportions() -> None:
    logits = torch.tensor([0.0, 1.0, 0.5, 2.0, -3.0])
    count = 20_000
    tokens = draw(logits.expand(count, 5), rules(count, top_k=2), uniform(count)).tokens_N.numpy()
    assert set(tokens) == {1, 3}
    assert abs((tokens == 3).mean() - 1 / (1 + np.exp(-1.0))) < 0.02


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    count = 4_000
    for top_p, kept in ((0.4, {0}), (0.7, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        tokens = draw(logits.expand(count, 4), rules(count, top_p=top_p), uniform(count)).tokens_N.numpy()
        assert set(tokens) == kept


def test_a_token_without_mass_is_never_drawn_even_at_the_ends_of_the_interval() -> None:
    logits = torch.full((3, 6), -torch.inf)
    logits[:, 2] = 0.0
    logits[:, 3] = 1.0
    edges = np.array([0.0, 0.5, 1 - 2.0**-53])
    assert set(draw(logits, rules(3), edges).tokens_N.tolist()) <= {2, 3}


def test_rows_that_are_not_numbers_give_numbers_that_are_not_finite_and_spare_the_others() -> None:
    logits = torch.zeros(3, 5)
    logits[1] = torch.nan
    drawn = draw(logits, rules(3), uniform(3))
    assert torch.isfinite(drawn.logprobs_N).tolist() == [True, False, True]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.5, 1.0]),
    top_k=st.sampled_from([0, 3]),
    others=st.integers(0, 7),
    at=st.integers(0, 7),
)
def test_a_draw_is_the_same_alone_and_among_any_others(
    seed: int, position: int, temperature: float, top_p: float, top_k: int, others: int, at: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 1000)
    logits = torch.randn(others + 1, 40, generator=generator)
    at %= others + 1
    seeds = np.arange(others + 1).astype(np.uint64)
    seeds[at] = seed
    positions = np.arange(others + 1)
    positions[at] = position
    mixed = rules(others + 1)
    mixed.temperature_N[:] = [0.0, 1.0, 0.5, 2.0, 1.0, 0.0, 1.0, 0.9][: others + 1]
    mixed.top_k_N[:] = [0, 2, 0, 4, 0, 0, 1, 0][: others + 1]
    mixed.temperature_N[at], mixed.top_p_N[at], mixed.top_k_N[at] = temperature, top_p, top_k
    together = draw(logits, mixed, uniforms(seeds, positions))
    alone = draw(
        logits[at : at + 1],
        rules(1, temperature, top_p, top_k),
        uniforms(np.array([seed], np.uint64), np.array([position])),
    )
    assert together.tokens_N[at] == alone.tokens_N[0]
