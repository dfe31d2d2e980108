"""Influence: how much of an observer's reward depends on what the pioneer wrote, rather than on the query or on luck.

    query ──> pioneer's response 1 ──> observer's responses 1, 2
          └─> pioneer's response 2 ──> observer's responses 1, 2

The rewards of the observer's responses vary for three reasons: some queries are easier, some responses of the pioneer
help more, and the rest is the observer's own luck. Where the pioneer's response explains nothing, whatever an agent is
paid for those after it is noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cory_env.tasks.task import Split
from policies.cory import Cory
from policies.generation.generator import EVALUATION_STREAM
from policies.rollout.dealing import Deal

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
    def total(self) -> float:
        """The variance of one reward."""
        return self.query + self.draft + self.luck

    @property
    def share(self) -> float:
        """The influence: the draft's share of the variance; NaN where nothing varies."""
        return self.draft / self.total if self.total > 0 else float("nan")


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


def share_interval(rewards: NDArray[np.floating], confidence: float = 0.95) -> tuple[float, float]:
    """Returns the percentile bootstrap's interval of the influence, over queries.

    Args:
        rewards: as for `components`.
        confidence: of the interval.

    Returns:
        Its ends; NaN where nothing varies.
    """
    draw = np.random.default_rng(0)
    shares = [components(rewards[draw.integers(len(rewards), size=len(rewards))]).share for _ in range(_RESAMPLES)]
    known = [share for share in shares if not np.isnan(share)]
    if not known:
        return float("nan"), float("nan")
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Played:
    """What pioneers and observers wrote and got. Skipped rewards are NaN."""

    drafts: list[list[str]]
    """`[queries][pioneer's responses]`"""
    answers: list[list[list[str]]]
    """`[queries][pioneer's responses][observer's responses]`"""
    draft_rewards: NDArray[np.float64]
    """`[queries, pioneer's responses]`"""
    answer_rewards: NDArray[np.float64]
    """`[queries, pioneer's responses, observer's responses]`"""


def measure_influence(algorithm: Cory, queries: int = 300, split: Split = "test", drafts: int = 2) -> Played:
    """Lets an algorithm's chain go on several times from several responses of the pioneer, with its present weights.

    Args:
        algorithm: with two agents or more; the second one is the observer.
        queries: at most so many.
        split: of the task.
        drafts: so many responses of the pioneer per query, and of the observer per response of the pioneer.

    Returns:
        Of the queries none of whose rewards failed (`on_reward_error=skip`).

    Raises:
        GenerationError: no runner came back in time.
        RewardError: the reward failed.
    """
    count = min(queries, len(algorithm.task.queries(split)))
    deals = [Deal(query, sample) for query in range(count) for sample in range(drafts)]
    rollout = algorithm.runners.play(
        deals, stream=EVALUATION_STREAM, mapping=algorithm.mapping, split=split, siblings=drafts
    )
    chains: dict[int, list[Any]] = {}
    for deal, sample in zip(rollout.deals, rollout.samples, strict=True):
        chains.setdefault(deal.query, []).append(sample["responses"])
    whole = [each for each in chains.values() if len(each) == drafts**2]
    firsts = range(0, drafts**2, drafts)
    return Played(
        drafts=[[each[at][0]["text"] for at in firsts] for each in whole],
        answers=[[[turns[1]["text"] for turns in each[at : at + drafts]] for at in firsts] for each in whole],
        draft_rewards=np.array([[each[at][0]["task_reward"] for at in firsts] for each in whole]),
        answer_rewards=np.array(
            [[[turns[1]["task_reward"] for turns in each[at : at + drafts]] for at in firsts] for each in whole]
        ),
    )
