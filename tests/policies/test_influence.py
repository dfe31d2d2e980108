"""How much of the observer's reward the pioneer's response explains: arrays made by hand, a small real chain."""

from __future__ import annotations

import numpy as np
import pytest

from policies.influence import components, measure_influence, share_interval
from tests.policies.conftest import MakeCory

QUERIES = 4000


def drawn(query: float, draft: float, luck: float) -> np.ndarray:
    """Rewards of 2 × 2 responses whose parts have these variances."""
    draw = np.random.default_rng(0)
    parts = ((query, (QUERIES, 1, 1)), (draft, (QUERIES, 2, 1)), (luck, (QUERIES, 2, 2)))
    return sum((np.sqrt(part) * draw.standard_normal(shape) for part, shape in parts), np.zeros((QUERIES, 2, 2)))


def test_where_the_observer_copies_the_draft_explains_all_but_the_query() -> None:
    half = np.array([[[1.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]]] * 10)
    found = components(half)
    assert (found.draft, found.luck) == (0.5, 0.0) and found.query == pytest.approx(-0.25)  # no query differs
    copied = components(drawn(query=1.0, draft=3.0, luck=0.0))
    assert copied.share == pytest.approx(0.75, abs=0.03) and copied.luck == pytest.approx(0.0, abs=1e-12)


def test_where_the_observer_looks_at_nothing_the_draft_explains_nothing() -> None:
    blind = drawn(query=1.0, draft=0.0, luck=3.0)
    found = components(blind)
    assert abs(found.share) < 0.03
    low, high = share_interval(blind)
    assert low < 0 < high and high - low < 0.15


def test_the_parts_are_found_again_and_add_up_to_the_variance() -> None:
    rewards = drawn(query=1.0, draft=2.0, luck=3.0)
    found = components(rewards)
    assert tuple(found) == pytest.approx((1.0, 2.0, 3.0), rel=0.1)
    assert sum(found) == pytest.approx(float(rewards.var()), rel=0.03)
    low, high = share_interval(rewards)
    assert low < 2 / 6 < high


def test_numbers_worked_out_by_hand() -> None:
    # Luck: within drafts the variances are 0.5, 0, 0, 0. Means by draft .5 1 | 0 0, by query .75 and 0.
    found = components(np.array([[[0.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]))
    assert tuple(found) == pytest.approx((0.28125 - 0.0625 / 2, 0.0625 - 0.125 / 2, 0.125))


def test_what_does_not_vary_has_no_influence_and_one_response_tells_nothing() -> None:
    assert np.isnan(components(np.ones((3, 2, 2))).share)
    with pytest.raises(ValueError, match="two or more of each"):
        components(np.ones((3, 2, 1)))


def test_the_probe_plays_two_observers_after_each_of_two_pioneers_and_the_same_again(make_cory: MakeCory) -> None:
    algorithm = make_cory()
    pioneers, observers = measure_influence(algorithm, queries=5)
    assert pioneers.shape == (5, 2) and observers.shape == (5, 2, 2) and len({*observers.flat}) > 3
    again = measure_influence(algorithm, queries=5)
    assert np.array_equal(again[0], pioneers) and np.array_equal(again[1], observers)
