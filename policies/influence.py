"""Influence: how much of an observer's reward depends on what the pioneer wrote, rather than on the query or on luck.

    query ──> pioneer's response 1 ──> observer's responses 1, 2
          └─> pioneer's response 2 ──> observer's responses 1, 2

The rewards of the observer's responses vary for three reasons: some queries are easier, some responses of the pioneer
help more, and the rest is the observer's own luck. Where the pioneer's response explains nothing, whatever an agent is
paid for those after it is noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.cory import Cory
from policies.generation.generator import EVALUATION_STREAM
from policies.rollout.prompt_sampling import PromptRef

_RESAMPLES = 1000


class Influence(NamedTuple):
    """Components of the variance of the observer's reward. They are unbiased, so one that is nearly 0 may come out
    below 0.
    """

    query: float
    """Between queries."""
    draft: float
    """Between the pioneer's responses to a query."""
    luck: float
    """Between the observer's responses to the same response of the pioneer."""

    @property
    def share(self) -> float:
        """The influence: the draft's share of the variance; NaN where nothing varies."""
        total = sum(self)
        return self.draft / total if total > 0 else float("nan")


def components(rewards: NDArray[np.floating]) -> Influence:
    """Splits the variance of the observer's rewards, by a nested analysis of variance with random effects.

    Args:
        rewards: `[queries, pioneer's responses, observer's responses]`, at least two of each.
    """
    queries, drafts, answers = rewards.shape
    if min(queries, drafts, answers) < 2:
        raise ValueError(f"The rewards are {queries} x {drafts} x {answers}, but it takes two or more of each.")
    by_draft = rewards.mean(axis=2)
    luck = float(rewards.var(axis=2, ddof=1).mean())
    of_drafts = float(by_draft.var(axis=1, ddof=1).mean())
    of_queries = float(by_draft.mean(axis=1).var(ddof=1))
    return Influence(query=of_queries - of_drafts / drafts, draft=of_drafts - luck / answers, luck=luck)


def share_interval(rewards: NDArray[np.floating]) -> tuple[float, float]:
    """Returns the ends of the influence's 95 % interval, by the percentile bootstrap over queries; NaN where nothing
    varies.

    Args:
        rewards: as for `components`.
    """
    draw = np.random.default_rng(0)
    shares = [components(rewards[draw.integers(len(rewards), size=len(rewards))]).share for _ in range(_RESAMPLES)]
    known = [share for share in shares if not np.isnan(share)]
    low, high = np.quantile(known, [0.025, 0.975]) if known else (np.nan, np.nan)
    return float(low), float(high)


def measure_influence(
    algorithm: Cory, queries: int = 300, drafts: int = 2
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lets an algorithm's chain go on several times from several responses of the pioneer, with its present weights.

    Args:
        algorithm: with two agents or more; the second one is the observer.
        queries: test queries, at most.
        drafts: so many responses of the pioneer per query, and of the observer per response of the pioneer.

    Returns:
        The rewards of pioneers `[queries, drafts]` and of observers `[queries, drafts, drafts]`, of the queries none of
        whose rewards failed (`on_reward_error=skip`).

    Raises:
        GenerationError: no runner came back in time.
        RewardError: the reward failed.
    """
    count = min(queries, len(algorithm.task.test))
    prompt_refs = [PromptRef(query, sample) for query in range(count) for sample in range(drafts)]
    rollout = algorithm.runners.generate(
        prompt_refs, update=EVALUATION_STREAM, mapping=algorithm.mapping, split="test", num_siblings=drafts
    )
    chains: dict[int, list[list[float]]] = {}
    for prompt_ref, sample in zip(rollout.prompt_refs, rollout.samples, strict=True):
        chains.setdefault(prompt_ref.query, []).append([response["task_reward"] for response in sample["responses"]])
    whole = [chain for chain in chains.values() if len(chain) == drafts**2]
    rewards = np.array(whole).reshape(len(whole), drafts, drafts, len(algorithm.mapping.roles))
    return rewards[:, :, 0, 0], rewards[..., 1]
