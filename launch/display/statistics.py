"""Means with 95 % confidence intervals, and tests of paired differences.

- Over seeds, which are few: Student's t, which assumes independent draws from a normal distribution.
- Over queries, whose metrics are often skewed: the bootstrap-t, but never narrower than Student's t. With 5 queries,
  the percentile bootstrap would cover the true mean only 8 times in 10.
- Of binary values: Wilson's interval, which is not empty even if 20 of 20 are 1.

Missing values are left out; `n` is the number of values.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launch.display.tables import format_number

TAIL = (1 - 0.95) / 2
Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
RESAMPLES = 2000
MIN_VARIANCE_SHARE = 1e-12  # resamples with less than this share of the variance count as constant
MAX_EXACT_PAIRS, NUM_SIGN_FLIPS = 14, 20_000
"""Of the sign-flip test: it tries all signs of so many pairs, and so many random ones of more pairs."""

Floats = NDArray[np.float64]
IntervalMethod = Literal["student", "bootstrap", "wilson"]


class Estimate(NamedTuple):
    """A mean and the bounds of its 95 % interval, None for fewer than two values; NaN without values."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def format(self, pattern: str) -> str:
        """Returns `mean [low, high]`, or only the mean if there is no interval."""
        mean = format_number(self.mean, pattern)
        if self.low is None or self.high is None:
            return mean
        return f"{mean} [{pattern.format(self.low)}, {pattern.format(self.high)}]"


def mean_ci(values: Iterable[float | None], method: IntervalMethod = "student", seed: int = 0) -> Estimate:
    """Returns the mean of the finite values with its interval; see `column_cis`."""
    return column_cis(np.array(list(values), dtype=np.float64)[:, None], method, seed)[0]


def column_cis(values: NDArray[np.float64], method: IntervalMethod = "student", seed: int = 0) -> list[Estimate]:
    """Averages each column of a matrix.

    Args:
        values: `[N, M]`, a row per seed or query and a column per metric; NaN: no value.
        method: `student`; `bootstrap`, at least as wide as `student`; or `wilson`, for values of 0 and 1 only.

    Returns:
        An estimate per column.
    """
    is_finite = np.isfinite(values)
    count = is_finite.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):  # of columns with fewer than two values
        mean = np.where(is_finite, values, 0.0).sum(axis=0) / count
        residuals = np.where(is_finite, values - mean, 0.0)
        deviation = np.sqrt((residuals**2).sum(axis=0) / (count - 1))
        below = above = _student_quantile(count - 1) * deviation / np.sqrt(count)
        if method == "bootstrap" and len(values):
            t_low, t_high = _bootstrap_t(np.where(deviation > 0, residuals / deviation, 0.0), is_finite, seed)
            below = np.maximum(below, t_high * deviation / np.sqrt(count))
            above = np.maximum(above, -t_low * deviation / np.sqrt(count))
        low, high = wilson(mean, count) if method == "wilson" else (mean - below, mean + above)
    min_count = 1 if method == "wilson" else 2
    return [
        Estimate(value, low, high, n) if n >= min_count else Estimate(value, None, None, n)
        for value, low, high, n in zip(mean.tolist(), low.tolist(), high.tolist(), count.tolist(), strict=True)
    ]


def _student_quantile(degrees: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the quantile of Student's t distribution that bounds an interval; NaN without degrees of freedom."""
    if not (degrees > 0).any():
        return np.full(degrees.shape, np.nan)  # a single run: importing SciPy would delay the end of its training
    from scipy.special import stdtrit

    quantile: NDArray[np.float64] = stdtrit(degrees, 1 - TAIL)
    return quantile


def _bootstrap_t(residuals: NDArray[np.float64], is_finite: NDArray[np.bool_], seed: int) -> NDArray[np.float64]:
    """Estimates the quantiles of the t statistic of a mean by the bootstrap (Efron 1982).

    Rows are resampled with replacement. All columns use the same resamples, so the intervals of two policies are over
    the same queries.

    Args:
        residuals: `[N, M]`, standardised values; 0 for missing ones.
        is_finite: `[N, M]`, whether there is a value.

    Returns:
        `[2, M]`, the lower and the upper quantile, in standard errors of the mean.
    """
    random, rows = np.random.default_rng(seed), len(residuals)
    has_value = is_finite.astype(np.float64)
    t_values = np.full((RESAMPLES, residuals.shape[1]), np.nan)
    for resample in range(RESAMPLES):
        times = np.bincount(random.integers(rows, size=rows), minlength=rows).astype(np.float64)
        count = times @ has_value
        shift = (times @ residuals) / count
        variance = (times @ residuals**2 - count * shift**2) / (count - 1)
        t_values[resample] = np.where(variance > MIN_VARIANCE_SHARE, shift / np.sqrt(variance / count), np.nan)
    quantiles = [
        np.quantile(column[~np.isnan(column)], [TAIL, 1 - TAIL]) if not np.isnan(column).all() else (0.0, 0.0)
        for column in t_values.T
    ]
    return np.array(quantiles).T


def wilson(mean: Floats, count: Floats, z: float = Z) -> tuple[Floats, Floats]:
    """Returns the bounds of intervals of proportions by Wilson (1927).

    Args:
        count: Numbers of independent cases; they need not be whole.
    """
    scale = 1 + z**2 / count
    center = (mean + z**2 / (2 * count)) / scale
    margin = z / scale * np.sqrt(mean * (1 - mean) / count + (z / (2 * count)) ** 2)
    return np.where(mean > 0, center - margin, 0.0), np.where(mean < 1, center + margin, 1.0)


class Difference(NamedTuple):
    """Paired differences between two arms, by their common seeds."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    estimate: Estimate
    p: float | None


def estimate_difference(by_seed: Mapping[int, float]) -> Difference | None:
    """Summarises paired differences; None if there are none."""
    values = tuple(by_seed.values())
    if not values:
        return None
    return Difference(tuple(by_seed), values, mean_ci(values), sign_flip_p(values))


def sign_flip_p(numbers: Sequence[float]) -> float | None:
    """Tests whether paired differences have mean 0: under the null hypothesis, each sign could be flipped.

    All 2^n sign flips are tried, so n differences give p ≥ 2 / 2^n: 0.0625 for five, 0.25 for three. Five seeds can
    never be "significant at 5 %". For more than `MAX_EXACT_PAIRS` differences, `NUM_SIGN_FLIPS` random flips are
    tried, always the same.

    Returns:
        The two-sided p; None for fewer than two differences.
    """
    if len(numbers) < 2:
        return None
    from scipy.stats import permutation_test

    result = permutation_test(
        (np.asarray(numbers), np.zeros(len(numbers))),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf if len(numbers) <= MAX_EXACT_PAIRS else NUM_SIGN_FLIPS,
        rng=0,
    )
    return float(result.pvalue)


def holm(ps: Sequence[float | None], count: int) -> list[float | None]:
    """Corrects p-values for multiple tests by Holm's step-down method (1979).

    Args:
        ps: The p-values; None if a test has none.
        count: Number of planned tests, including those without results.
    """
    ranked = sorted((p, index) for index, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    max_so_far = 0.0
    for rank, (p, index) in enumerate(ranked):
        max_so_far = max(max_so_far, min(p * (count - rank), 1.0))
        corrected[index] = max_so_far
    return corrected
