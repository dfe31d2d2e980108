"""Intervals and tests, checked by their coverage and against numbers computed by hand."""

import math

import numpy as np
import pytest

from launch.display.statistics import Estimate, column_cis, mean_ci, sign_flip_p


@pytest.mark.parametrize("queries", [5, 20])
@pytest.mark.parametrize("skewed", [False, True])
def test_bootstrap_intervals_cover_the_true_mean_with_nominal_probability(queries: int, skewed: bool) -> None:
    random = np.random.default_rng(0)
    draw = random.exponential if skewed else random.normal
    estimates = column_cis(draw(size=(queries, 2000)) - float(skewed), "bootstrap", seed=0)  # 2000 trials, true mean 0
    coverage = np.mean([low is not None and high is not None and low <= 0 <= high for _, low, high, _ in estimates])
    assert 0.93 <= coverage < 0.98


def test_bootstrap_intervals_over_many_queries_match_the_normal_approximation() -> None:
    values = np.random.default_rng(0).exponential(size=(500, 50))
    estimates = column_cis(values, "bootstrap", seed=0)
    np.testing.assert_allclose([estimate.mean for estimate in estimates], values.mean(axis=0))
    widths = [(estimate.high or 0.0) - (estimate.low or 0.0) for estimate in estimates]
    np.testing.assert_allclose(np.mean(widths), 2 * 1.96 / 500**0.5, rtol=0.05)


def test_a_bootstrap_interval_is_longer_on_the_side_of_the_long_tail() -> None:
    (estimate,) = column_cis(np.array([[0.0], [0.1], [0.2], [0.3], [0.4], [9.0]]), "bootstrap", seed=0)
    assert estimate.low is not None and estimate.high is not None
    assert estimate.high - estimate.mean > 2 * (estimate.mean - estimate.low)


def test_bootstrap_intervals_depend_on_the_seed_and_share_resamples_across_columns() -> None:
    column = np.random.default_rng(0).exponential(size=(30, 1))
    first, second = column_cis(np.hstack([column, column + 1]), "bootstrap", seed=3)
    assert second[:3] == pytest.approx([value + 1 for value in first[:3] if value is not None])
    assert column_cis(column, "bootstrap", seed=3)[0].high == pytest.approx(first.high)
    assert column_cis(column, "bootstrap", seed=4)[0].high != pytest.approx(first.high)


def test_missing_values_are_left_out_of_mean_and_interval() -> None:
    nan = math.nan
    skewed, empty, single, constant = column_cis(
        np.array([[1, nan, nan, 2], [2, nan, 3, 2], [4, nan, nan, nan]]), "bootstrap", seed=0
    )
    assert skewed.mean == pytest.approx(7 / 3) and skewed.n == 3
    assert skewed.low is not None and skewed.low < 1
    assert math.isnan(empty.mean) and empty[1:] == (None, None, 0) and empty.format("{:.2f}") == "-"
    assert single == (3, None, None, 1) and single.format("{:.2f}") == "3.00"
    assert constant == (2, 2, 2, 2) and constant.format("{:.2f}") == "2.00 [2.00, 2.00]"


def test_the_interval_of_a_proportion_is_never_empty() -> None:
    # Wilson's interval of 20 of 20: from n / (n + z^2), z = 1.96, to 1
    assert list(mean_ci(np.ones(20), "wilson")) == pytest.approx([1, 20 / (20 + 1.959964**2), 1, 20])
    assert list(mean_ci(np.array([1.0, 0.0, 0.0, 0.0]), "wilson")) == pytest.approx([0.25, 0.0456, 0.6994, 4], abs=1e-4)
    mean, *others = mean_ci([None], "wilson")
    assert np.isnan(mean) and others == [None, None, 0]


def test_the_default_interval_is_students_t_over_the_known_values() -> None:
    estimate = mean_ci([0.1, None, 0.2, math.nan, 0.3])
    assert estimate.n == 3 and estimate.mean == pytest.approx(0.2)
    half_width = 4.302653 * 0.1 / 3**0.5  # t of 2 degrees of freedom, from a table
    assert estimate[1:3] == pytest.approx([0.2 - half_width, 0.2 + half_width], abs=1e-6)
    assert mean_ci([0.1, None]) == Estimate(0.1, None, None, 1)
    assert math.isnan(mean_ci([math.nan, None]).mean) and mean_ci([math.nan, None])[1:] == (None, None, 0)


@pytest.mark.parametrize(
    ("numbers", "p"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], 2 / 32),  # as extreme as five can be
        ([1.0, 2.0, 3.0], 2 / 8),
        ([-1.0, 2.0, 3.0], 4 / 8),  # sums of 4 or more: 6 and 4
        ([1.0, -1.0], 1.0),
    ],
)
def test_the_sign_flip_test_is_exact_for_few_pairs(numbers: list[float], p: float) -> None:
    assert sign_flip_p(numbers) == pytest.approx(p)


def test_many_pairs_are_tested_by_random_sign_flips() -> None:
    assert sign_flip_p([1.0, -1.0] * 20) == 1.0  # 2^40 signs would not fit into memory
    assert 0 < (sign_flip_p([1.0] * 40) or 0) < 1e-3
