"""Intervals against how often they hold the truth, and against numbers by hand."""

import math

import numpy as np
import pytest

from launch.display.statistics import Estimate, column_cis, hedges_g, mean_ci, sign_flip_p


@pytest.mark.parametrize("queries", [5, 20])
@pytest.mark.parametrize("skewed", [False, True])
def test_an_interval_over_queries_holds_the_true_mean_about_as_often_as_it_says(queries: int, skewed: bool) -> None:
    random = np.random.default_rng(0)
    draw = random.exponential if skewed else random.normal
    found = column_cis(draw(size=(queries, 2000)) - float(skewed), "bootstrap", seed=0)  # 2000 experiments, true mean 0
    held = np.mean([low is not None and high is not None and low <= 0 <= high for _, low, high, _ in found])
    assert 0.93 <= held < 0.98


def test_an_interval_over_many_queries_is_as_wide_as_the_normal_distribution_makes_it() -> None:
    values = np.random.default_rng(0).exponential(size=(500, 50))
    found = column_cis(values, "bootstrap", seed=0)
    np.testing.assert_allclose([each.mean for each in found], values.mean(axis=0))
    widths = [(each.high or 0.0) - (each.low or 0.0) for each in found]
    np.testing.assert_allclose(np.mean(widths), 2 * 1.96 / 500**0.5, rtol=0.05)


def test_an_interval_over_queries_reaches_further_to_the_side_of_the_long_tail() -> None:
    (found,) = column_cis(np.array([[0.0], [0.1], [0.2], [0.3], [0.4], [9.0]]), "bootstrap", seed=0)
    assert found.low is not None and found.high is not None
    assert found.high - found.mean > 2 * (found.mean - found.low)


def test_intervals_come_from_the_seed_and_from_the_same_draws_for_all_columns() -> None:
    one = np.random.default_rng(0).exponential(size=(30, 1))
    first, second = column_cis(np.hstack([one, one + 1]), "bootstrap", seed=3)
    assert second[:3] == pytest.approx([end + 1 for end in first[:3] if end is not None])
    assert column_cis(one, "bootstrap", seed=3)[0].high == pytest.approx(first.high)
    assert column_cis(one, "bootstrap", seed=4)[0].high != pytest.approx(first.high)


def test_queries_without_a_value_are_left_out_of_mean_and_interval() -> None:
    nan = math.nan
    some, none, single, alike = column_cis(
        np.array([[1, nan, nan, 2], [2, nan, 3, 2], [4, nan, nan, nan]]), "bootstrap", seed=0
    )
    assert some.mean == pytest.approx(7 / 3) and some.n == 3
    assert some.low is not None and some.low < 1
    assert math.isnan(none.mean) and none[1:] == (None, None, 0) and none.shown("{:.2f}") == "-"
    assert single == (3, None, None, 1) and single.shown("{:.2f}") == "3.00"
    assert alike == (2, 2, 2, 2) and alike.shown("{:.2f}") == "2.00 [2.00, 2.00]"


def test_a_proportion_is_never_certain() -> None:
    # Wilson's interval of 20 of 20: from n / (n + z^2), z = 1.96, to 1
    assert list(mean_ci(np.ones(20), "wilson")) == pytest.approx([1, 20 / (20 + 1.959964**2), 1, 20])
    assert list(mean_ci(np.array([1.0, 0.0, 0.0, 0.0]), "wilson")) == pytest.approx([0.25, 0.0456, 0.6994, 4], abs=1e-4)


def test_an_interval_over_seeds_is_students_and_of_those_that_have_a_value() -> None:
    found = mean_ci([0.1, None, 0.2, math.nan, 0.3])
    assert found.n == 3 and found.mean == pytest.approx(0.2)
    half = 4.302653 * 0.1 / 3**0.5  # t of 2 degrees of freedom, from a table
    assert found[1:3] == pytest.approx([0.2 - half, 0.2 + half], abs=1e-6)
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
def test_the_sign_flip_test_counts_all_signs(numbers: list[float], p: float) -> None:
    assert sign_flip_p(numbers) == pytest.approx(p)


def test_many_pairs_are_tested_by_some_of_all_signs() -> None:
    assert sign_flip_p([1.0, -1.0] * 20) == 1.0  # 2^40 signs would not fit into memory
    assert 0 < (sign_flip_p([1.0] * 40) or 0) < 1e-3


def test_the_effect_size_is_hedges_g_of_paired_values() -> None:
    # mean 2, deviation 1; 1 - 3 / (4 · 2 - 1) = 4 / 7
    assert hedges_g([1.0, 2.0, 3.0]) == pytest.approx(2 * 4 / 7)
    assert hedges_g([1.0, 2.0]) is None and hedges_g([1.0, 1.0, 1.0]) is None
