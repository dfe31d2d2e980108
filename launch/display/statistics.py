"""Means with their 95 % intervals, and tests of paired differences. Pure functions of numbers.

Over seeds, which are few, Student's t, which takes runs for independent draws from a normal distribution. Over queries,
whose figures are often skewed, the bootstrap-t, nowhere narrower than Student's t: the percentile bootstrap holds the
true mean of 5 queries 8 times in 10. Of yes or no, Wilson's: 20 of 20 is no proof of "always". What has no value is
left out, and `n` says how many have one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launch.display.tables import format_number

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
RESAMPLES = 2000
MIN_VARIANCE_SHARE = 1e-12
"""Share of the variance below which values that were drawn again are all the same."""
MAX_EXACT_PAIRS = 14
"""Pairs up to which all signs are tried."""
NUM_SIGN_FLIPS = 20_000
"""Signs that are drawn for more pairs."""

IntervalMethod = Literal["student", "bootstrap", "wilson"]


class Estimate(NamedTuple):
    """A mean and the ends of its 95 % interval, which are None for fewer than two values; NaN is the mean of none."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def shown(self, pattern: str) -> str:
        """Returns `mean [low, high]`, or the mean alone where there is no interval."""
        mean = format_number(self.mean, pattern)
        if self.low is None or self.high is None:
            return mean
        return f"{mean} [{pattern.format(self.low)}, {pattern.format(self.high)}]"


def mean_ci(values: Iterable[float | None], method: IntervalMethod = "student", seed: int = 0) -> Estimate:
    """Returns the mean of those values that are known and finite, with its interval; see `column_cis`."""
    return column_cis(np.array(list(values), dtype=np.float64)[:, None], method, seed)[0]


def column_cis(values: NDArray[np.float64], method: IntervalMethod = "student", seed: int = 0) -> list[Estimate]:
    """Averages each column of a matrix.

    Args:
        values: `[N, M]`, a row per seed or query and a column per figure; NaN where one has no value.
        method: `student`; `bootstrap`, at least as wide as `student`; or `wilson`, for values of 0 and 1 alone.
        seed: of the bootstrap's draws.

    Returns:
        An estimate per column.
    """
    from scipy.special import stdtrit

    known = np.isfinite(values)
    count = known.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):  # of columns with fewer than two values
        mean = np.where(known, values, 0.0).sum(axis=0) / count
        rest = np.where(known, values - mean, 0.0)
        deviation = np.sqrt((rest**2).sum(axis=0) / (count - 1))
        below = above = stdtrit(count - 1, 1 - TAIL) * deviation / np.sqrt(count)
        if method == "bootstrap" and len(values):
            off_low, off_high = _bootstrap_t(np.where(deviation > 0, rest / deviation, 0.0), known, seed)
            below = np.maximum(below, off_high * deviation / np.sqrt(count))
            above = np.maximum(above, -off_low * deviation / np.sqrt(count))
    ends = np.stack([mean - below, mean + above], axis=1)
    if method == "wilson":
        ends = np.array([_wilson(int(yes), int(n)) for yes, n in zip(mean * count, count, strict=True)])
    least = 1 if method == "wilson" else 2
    return [
        Estimate(value, low, high, n) if n >= least else Estimate(value, None, None, n)
        for value, (low, high), n in zip(mean.tolist(), ends.tolist(), count.tolist(), strict=True)
    ]


def _bootstrap_t(rest: NDArray[np.float64], known: NDArray[np.bool_], seed: int) -> NDArray[np.float64]:
    """Returns how far off a mean may be, in its own standard errors, to either side (Efron 1982).

    As many rows are drawn again, with replacement, and how far their mean lies off, in its own standard errors, says
    how far ours may. All columns see the same draws, so the intervals of two policies are of the same queries.

    Args:
        rest: `[N, M]`, values less their mean, over their deviation; 0 where one is not known.
        known: `[N, M]`.
        seed: of the draws.

    Returns:
        `[2, M]`.
    """
    random, rows = np.random.default_rng(seed), len(rest)
    counted = known.astype(np.float64)
    off = np.full((RESAMPLES, rest.shape[1]), np.nan)
    for draw in range(RESAMPLES):
        times = np.bincount(random.integers(rows, size=rows), minlength=rows).astype(np.float64)
        drawn = times @ counted
        shift = (times @ rest) / drawn
        variance = (times @ rest**2 - drawn * shift**2) / (drawn - 1)
        off[draw] = np.where(variance > MIN_VARIANCE_SHARE, shift / np.sqrt(variance / drawn), np.nan)
    ends = [
        np.quantile(column[~np.isnan(column)], [TAIL, 1 - TAIL]) if not np.isnan(column).all() else (0.0, 0.0)
        for column in off.T
    ]
    return np.array(ends).T


def _wilson(yes: int, count: int) -> tuple[float, float]:
    """Returns the interval of a proportion by Wilson (1927)."""
    from scipy.stats import binomtest

    ends = binomtest(yes, count).proportion_ci(CONFIDENCE, "wilson")
    return float(ends.low), float(ends.high)


class Difference(NamedTuple):
    """Paired differences, by the seed that both have."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """Per seed."""
    estimate: Estimate
    p: float | None
    """Of the exact sign-flip test, two-sided; see `sign_flip_p`."""
    effect: float | None
    """Hedges' g of paired values; see `hedges_g`."""


def differences(by_seed: Mapping[int, float]) -> Difference | None:
    """Returns what several differences say together; None where there are none."""
    values = tuple(by_seed.values())
    if not values:
        return None
    return Difference(tuple(by_seed), values, mean_ci(values), sign_flip_p(values), hedges_g(values))


def sign_flip_p(numbers: Sequence[float]) -> float | None:
    """Tests whether paired differences have mean 0: under the hypothesis each could have had the other sign.

    All 2^n signs are tried, so n differences give p ≥ 2 / 2^n: 0.0625 for five, 0.25 for three. Five seeds can never be
    "significant at 5 %", whatever they show. For more than `EXACT` differences, `DRAWN` of them are drawn, always the
    same ones.

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


def hedges_g(numbers: Sequence[float]) -> float | None:
    """Returns the effect size of paired differences: mean over standard deviation, times 1 - 3 / (4 (n - 1) - 1).

    The factor takes out the upward bias of few pairs (Hedges 1981). None for fewer than three pairs, or without spread.
    """
    n = len(numbers)
    deviation = float(np.std(numbers, ddof=1)) if n > 2 else 0.0
    return float(np.mean(numbers)) / deviation * (1 - 3 / (4 * (n - 1) - 1)) if deviation > 0 else None


def holm(ps: Sequence[float | None], count: int) -> list[float | None]:
    """Corrects the p of several tests for their number, by Holm's step-down method (1979).

    Args:
        ps: of the tests that were made; None where one has no p.
        count: of all tests that are asked for, made or not.
    """
    ranked = sorted((p, index) for index, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    least = 0.0
    for rank, (p, index) in enumerate(ranked):
        least = max(least, min(p * (count - rank), 1.0))
        corrected[index] = least
    return corrected
