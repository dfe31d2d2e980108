"""The statistics of an evaluation, against brute force and numbers by hand."""

import math
from itertools import combinations

import numpy as np
import pytest

from launch.evaluation.statistics import distinct, interval, means_with_intervals, pass_at_k


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_correct_one(samples: int) -> None:
    for correct in range(samples + 1):
        right = [place < correct for place in range(samples)]
        for k in range(1, samples + 1):
            share = np.mean([any(chosen) for chosen in combinations(right, k)])
            assert pass_at_k(correct, samples, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_neither_overflows_nor_loses_digits_with_many_samples() -> None:
    assert pass_at_k(1, 10_000, 100) == pytest.approx(0.01, rel=1e-9)
    exact = 1 - math.comb(9_000, 3_000) / math.comb(10_000, 3_000)
    assert pass_at_k(1_000, 10_000, 3_000) == pytest.approx(exact, rel=1e-12)


def test_pass_at_k_is_unknown_with_fewer_samples_than_k() -> None:
    assert math.isnan(pass_at_k(2, 3, 4))


def test_distinct_n_counts_over_all_responses_to_a_query() -> None:
    responses = [[1, 2, 1], [1, 2], []]
    assert distinct(responses, 1) == 2 / 5
    assert distinct(responses, 2) == 2 / 3  # 1 2, 2 1, and 1 2 again; none from one response into the next
    assert math.isnan(distinct(responses, 4))


def test_an_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    values = np.random.default_rng(0).exponential(size=(100, 400))  # 400 experiments of 100 queries, true mean 1
    mean, low, high = means_with_intervals(values, seed=0)
    np.testing.assert_allclose(mean, values.mean(axis=0))
    assert 0.90 < np.mean((low <= 1) & (high >= 1)) < 0.97
    np.testing.assert_allclose(np.mean(high - low), 2 * 1.96 / 10, rtol=0.1)


def test_intervals_come_from_the_seed_and_from_the_same_draws_for_all_columns() -> None:
    one = np.random.default_rng(0).normal(size=(30, 1))
    _, low, high = means_with_intervals(np.hstack([one, one + 1]), seed=3)
    np.testing.assert_allclose([low[1] - low[0], high[1] - high[0]], 1)
    assert means_with_intervals(one, seed=3)[1] == low[0]
    assert means_with_intervals(one, seed=4)[1] != low[0]


def test_queries_without_a_value_are_left_out_of_mean_and_interval() -> None:
    nan = math.nan
    mean, low, high = means_with_intervals(np.array([[1, nan, nan], [2, nan, 3], [4, nan, nan]]), seed=0)
    np.testing.assert_allclose(mean, [7 / 3, nan, 3])
    np.testing.assert_allclose(low, [1, nan, 3])
    np.testing.assert_allclose(high, [4, nan, 3])


def test_intervals_are_students() -> None:
    ends = interval([0.1, 0.2, 0.3])
    assert ends is not None
    assert ends[0] == pytest.approx(0.2 - 4.302653 * 0.1 / 3**0.5, abs=1e-6)  # t of 2 degrees of freedom, from a table
    assert ends[1] == pytest.approx(0.2 + 4.302653 * 0.1 / 3**0.5, abs=1e-6)
    assert interval([0.1]) is None
