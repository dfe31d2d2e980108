"""Influence: the share of the variance of an observer's reward that the pioneer's response explains.

    query ──> pioneer's response 1 ──> observer's responses 1, 2
          └─> pioneer's response 2 ──> observer's responses 1, 2

The observer's rewards vary for three reasons: queries differ in difficulty, the pioneer's responses differ in
helpfulness, and the rest is residual variance of the observer's own sampling. If the pioneer's response explains
nothing, rewarding an agent for later agents' responses adds only noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 1000


class Influence(NamedTuple):
    """Unbiased estimates of the variance components of the observer's reward; those near 0 may be negative."""

    query: float
    """Between queries."""
    draft: float
    """Between the pioneer's responses to a query."""
    residual: float
    """Between the observer's responses to the same response of the pioneer."""

    @property
    def share(self) -> float:
        """The influence: the pioneer's share of the variance; NaN if the variance is 0."""
        total = sum(self)
        return self.draft / total if total > 0 else float("nan")


def variance_components(rewards: NDArray[np.floating]) -> Influence:
    """Estimates the variance components by a nested random-effects analysis of variance.

    Args:
        rewards: the observer's, `[queries, pioneer's responses, observer's responses]`, at least two of each.

    Raises:
        ValueError: a dimension is smaller than two.
    """
    queries, drafts, responses = rewards.shape
    if min(queries, drafts, responses) < 2:
        raise ValueError(f"The shape of rewards is {rewards.shape}; each dimension must be 2 or more.")
    draft_means = rewards.mean(axis=2)
    residual = float(rewards.var(axis=2, ddof=1).mean())
    draft_variance = float(draft_means.var(axis=1, ddof=1).mean())
    query_variance = float(draft_means.mean(axis=1).var(ddof=1))
    return Influence(
        query=query_variance - draft_variance / drafts, draft=draft_variance - residual / responses, residual=residual
    )


def share_interval(rewards: NDArray[np.floating]) -> tuple[float, float]:
    """Estimates the 95 % confidence interval of the influence, by the percentile bootstrap over queries.

    Args:
        rewards: as for `variance_components`.

    Returns:
        Lower and upper bound; NaN if the variance is 0.
    """
    rng = np.random.default_rng(0)
    shares = [
        variance_components(rewards[rng.integers(len(rewards), size=len(rewards))]).share for _ in range(_RESAMPLES)
    ]
    finite_shares = [share for share in shares if not np.isnan(share)]
    low, high = np.quantile(finite_shares, [0.025, 0.975]) if finite_shares else (np.nan, np.nan)
    return float(low), float(high)
