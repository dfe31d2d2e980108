"""Statistics of evaluations and seeds: pass@k, distinct-n, intervals. Pure functions of numbers."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Estimates the chance that at least one of k responses to a query is correct, without bias.

    1 - C(samples - correct, k) / C(samples, k), as a product of factors between 0 and 1, so nothing overflows
    (Chen et al. 2021, https://arxiv.org/abs/2107.03374, §2.1).

    Args:
        correct: correct ones among the samples.
        samples: responses drawn for the query.
        k: at least 1.

    Returns:
        The estimate; NaN where there are fewer than k samples.
    """
    if samples < k:
        return float("nan")
    if samples - correct < k:  # every choice of k has a correct one
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def distinct(responses: Sequence[Sequence[int]], n: int) -> float:
    """Returns the share of different n-grams among all n-grams of several responses (Li et al. 2016, "distinct-n").

    Args:
        responses: token ids; here, all responses of one policy to one query.
        n: tokens of an n-gram.

    Returns:
        1 where no n-gram occurs twice; NaN where all responses are shorter than n.
    """
    grams = [tuple(tokens[place : place + n]) for tokens in responses for place in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def mean_of_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Averages over the first axis what is not NaN; NaN where all of it is."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)


def means_with_intervals(
    values: NDArray[np.float64], seed: int, resamples: int = RESAMPLES
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Averages over queries, with percentile bootstrap intervals: as many queries are drawn again, with replacement.

    All columns see the same draws, so the intervals of two policies are of the same queries.

    Args:
        values: `[Q, M]`, a row per query and a column per figure; NaN where a query has no value, which leaves it out.
        seed: of the draws.
        resamples: number of draws.

    Returns:
        Per column its mean and the ends of its 95 % interval, `[M]` each; NaN where no query has a value.
    """
    known = ~np.isnan(values)
    filled, counted = np.where(known, values, 0.0), known.astype(np.float64)
    random = np.random.default_rng(seed)
    queries = len(values)
    drawn = np.empty((resamples, values.shape[1]))
    tail = (1 - CONFIDENCE) / 2
    with np.errstate(invalid="ignore"):  # 0 / 0
        mean = filled.sum(axis=0) / counted.sum(axis=0)
        for draw in range(resamples):
            times = np.bincount(random.integers(queries, size=queries), minlength=queries).astype(np.float64)
            drawn[draw] = (times @ filled) / (times @ counted)
    low, high = np.full((2, values.shape[1]), np.nan)
    some = known.any(axis=0)
    # A draw may miss all that is known, hence nan.
    low[some], high[some] = np.nanquantile(drawn[:, some], [tail, 1 - tail], axis=0)
    return mean, low, high


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the ends of a mean's 95 % interval by Student's t, as seeds are few; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return mean - half, mean + half
