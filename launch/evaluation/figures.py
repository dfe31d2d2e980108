"""From an evaluation's responses to its figures, and the tables of them. Pure functions of what was recorded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from rich.table import Table

from cory_env.chain import role_names
from launch.display.statistics import Estimate, column_cis, mean_ci
from launch.display.tables import METRIC_FORMATS, metric_format, table
from launch.run_folder.records import Batch, Evaluation

UNBOUNDED_METRICS = ("kl", "response_length")
"""Figures of which 0 or 1 is so many nats or tokens, never a no or a yes."""
REWARD_METRICS = ("task_reward", "combined_reward")
"""Figures that may be a no or a yes, if the task's reward is; all that are neither are shares, from 0 to 1."""
BASE = "base"
"""What the untrained model is called; where LLMs start from different models, `base of llm_1` and others."""


class Scoring(NamedTuple):
    """What figures depend on besides the responses."""

    queries: int
    kl_coef: float
    """Weight of the KL in the combined reward."""
    solved_at: float | None
    """The task reward from which a response is correct; None where there is no pass@k."""
    ks: Sequence[int]
    """The k of pass@k."""
    seed: int
    """Of the intervals."""

    @property
    def names(self) -> list[str]:
        """The figures, in order."""
        return [*METRIC_FORMATS, *(f"pass@{k}" for k in self.ks)]


class PolicyScores(TypedDict):
    """The figures of one policy in one role."""

    policy: str
    role: str
    after: str | None
    """In a chain of two, the policy whose response it saw; else None."""
    figures: dict[str, Estimate]


def summarise(batches: Iterable[Batch], scoring: Scoring) -> dict[str, PolicyScores]:
    """Returns the figures by label: all policies on the bare query, as pioneers answer it, then in later roles.

    Every figure is computed per query, from all responses to it, and averaged over queries.
    """
    chains = [chain for batch in batches for chain in batch["chains"]]  # all of one length
    scores: dict[str, PolicyScores] = {}
    responses: dict[str, dict[int, list[Evaluation]]] = {}
    for position, role in enumerate(role_names(len(chains[0])) if chains else ()):
        for chain in chains:
            policy = chain[position]["policy"]
            after = chain[0]["policy"] if position == 1 and len(chain) == 2 else None
            label = f"{policy} after {after}" if after else f"{policy} as {role}" if position else policy
            scores.setdefault(label, PolicyScores(policy=policy, role=role, after=after, figures={}))
            responses.setdefault(label, {}).setdefault(chain[position]["query"], []).append(chain[position])
    if scores:
        queries = range(scoring.queries)
        values = [[query_metrics(found.get(query, []), scoring) for query in queries] for found in responses.values()]
        estimates = iter(_estimates(np.hstack(values), scoring))
        for policy_scores in scores.values():
            policy_scores["figures"] = {name: next(estimates) for name in scoring.names}
    return scores


def _estimates(values: np.ndarray, scoring: Scoring) -> list[Estimate]:
    """Averages over queries; where a figure is a no or a yes of each query, it is a proportion."""
    found = column_cis(values, "bootstrap", scoring.seed)
    for column, name in enumerate(scoring.names * (len(found) // len(scoring.names))):
        of_figure = values[:, column][~np.isnan(values[:, column])]
        if name not in UNBOUNDED_METRICS and len(of_figure) and np.isin(of_figure, (0, 1)).all():
            found[column] = mean_ci(of_figure, "wilson")
        elif name not in (*UNBOUNDED_METRICS, *REWARD_METRICS) and found[column].low is not None:
            mean, low, high, count = found[column]
            found[column] = Estimate(mean, max(low or 0.0, 0.0), min(high or 0.0, 1.0), count)
    return found


def query_metrics(responses: Sequence[Evaluation], scoring: Scoring) -> list[float]:
    """Returns the figures of one policy on one query, in the order of `scoring.names`; NaN for those without a value.

    distinct-n counts over all its responses to the query, without their end-of-sequence tokens.
    """
    if not responses:
        return [math.nan] * len(scoring.names)
    metrics = [response["metrics"] for response in responses]
    rewards = [math.nan if (value := each["task_reward"]) is None else value for each in metrics]
    reward, kl = float(np.mean(rewards)), float(np.mean([each["kl"] for each in metrics]))
    texts = [r["tokens"][:-1] if r["metrics"]["eos_rate"] else r["tokens"] for r in responses]
    figures = [
        reward,
        kl,
        reward - scoring.kl_coef * kl,
        float(np.mean([len(response["tokens"]) for response in responses])),
        float(np.mean([each["eos_rate"] for each in metrics])),
        distinct_n(texts, 1),
        distinct_n(texts, 2),
    ]
    if scoring.solved_at is not None:
        correct = sum(value >= scoring.solved_at for value in rewards)
        figures += [pass_at_k(correct, len(responses), k) for k in scoring.ks]
    return figures


def score_tables(scores: Mapping[str, PolicyScores], names: Sequence[str]) -> list[Table]:
    """Returns the figures as a table per role: a row per figure, a column per policy."""
    tables = []
    for role in dict.fromkeys(each["role"] for each in scores.values()):
        of_role = {label: each["figures"] for label, each in scores.items() if each["role"] == role}
        tables.append(table([role], list(of_role)))
        for name in names:
            heading, pattern = metric_format(name)
            tables[-1].add_row(heading, *(figures[name].shown(pattern) for figures in of_role.values()))
    return tables


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
        return math.nan
    if samples - correct < k:  # every choice of k has a correct one
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def distinct_n(responses: Sequence[Sequence[int]], n: int) -> float:
    """Returns the share of different n-grams among all n-grams of several responses (Li et al. 2016, "distinct-n").

    Args:
        responses: token ids; here, all responses of one policy to one query.
        n: tokens of an n-gram.

    Returns:
        1 where no n-gram occurs twice; NaN where all responses are shorter than n.
    """
    grams = [tuple(tokens[start : start + n]) for tokens in responses for start in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan
