"""Tests of the influence on synthetic rewards."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.influence import share_interval, variance_components

QUERIES = 4000


def sample_rewards(query: float, draft: float, residual: float) -> np.ndarray:
    """Samples rewards of 2 × 2 responses with these variance components."""
    rng = np.random.default_rng(0)
    parts = ((query, (QUERIES, 1, 1)), (draft, (QUERIES, 2, 1)), (residual, (QUERIES, 2, 2)))
    return sum((np.sqrt(part) * rng.standard_normal(shape) for part, shape in parts), np.zeros((QUERIES, 2, 2)))


def test_if_the_observer_copies_the_draft_explains_all_variance_except_the_query() -> None:
    half = np.array([[[1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]]] * 10)
    estimate = variance_components(half)
    assert (estimate.draft, estimate.residual) == (0.5, 0.0)
    assert estimate.query == pytest.approx(-0.25)  # queries do not differ
    copied = variance_components(sample_rewards(query=1.0, draft=3.0, residual=0.0))
    assert copied.share == pytest.approx(0.75, abs=0.03) and copied.residual == pytest.approx(0.0, abs=1e-12)


def test_if_the_observer_ignores_the_draft_it_explains_nothing() -> None:
    rewards = sample_rewards(query=1.0, draft=0.0, residual=3.0)
    assert abs(variance_components(rewards).share) < 0.03
    low, high = share_interval(rewards)
    assert low < 0 < high and high - low < 0.15


def test_components_are_estimated_and_add_up_to_the_variance() -> None:
    rewards = sample_rewards(query=1.0, draft=2.0, residual=3.0)
    estimate = variance_components(rewards)
    assert tuple(estimate) == pytest.approx((1.0, 2.0, 3.0), rel=0.1)
    assert sum(estimate) == pytest.approx(float(rewards.var()), rel=0.03)
    low, high = share_interval(rewards)
    assert low < 2 / 6 < high


def test_components_match_a_calculation_by_hand() -> None:
    # Residual: the variances within drafts are 0.5, 0, 0, 0. Means by draft .5 1 | 0 0, by query .75 and 0.
    estimate = variance_components(np.array([[[0.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]))
    assert tuple(estimate) == pytest.approx((0.28125 - 0.0625 / 2, 0.0625 - 0.125 / 2, 0.125))


def test_constant_rewards_have_no_influence_and_single_responses_are_an_error() -> None:
    assert np.isnan(variance_components(np.ones((3, 2, 2))).share)
    with pytest.raises(ValueError, match="must be 2 or more"):
        variance_components(np.ones((3, 2, 1)))
