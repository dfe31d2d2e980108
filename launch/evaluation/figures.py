"""Metrics of an evaluation, computed from its recorded responses, and their tables."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from rich.table import Table

from cory_env.chain_settings import role_names
from launch.display.statistics import Estimate, column_cis, mean_ci
from launch.display.tables import METRIC_FORMATS, metric_format, new_table
from launch.run_folder.final import CHAIN_TOKENS
from launch.run_folder.records import BatchRecord, EvaluatedResponse, with_shown_kl

UNBOUNDED_METRICS = ("kl", "response_length", CHAIN_TOKENS)
"""Amounts of nats or tokens, which are never binary, even if all values are 0 or 1."""
REWARD_METRICS = ("task_reward", "combined_reward")
"""Metrics that are binary if the task's reward is. All metrics in neither list are shares, from 0 to 1."""
LAST_ANSWER = "last answer"
"""In place of a role, for the responses at which chains ended."""
BASE = "base"
"""Name of the untrained model; `base of llm_1` etc. if policies start from different models."""


class Scoring(NamedTuple):
    """Parameters of the metrics."""

    queries: int
    kl_coef: float
    """Weight of the KL in the combined reward."""
    solved_at: float | None
    """Task reward from which a response is correct; None: no pass@k."""
    ks: Sequence[int]
    seed: int

    @property
    def names(self) -> list[str]:
        """The metrics, in order."""
        return [*METRIC_FORMATS, *(f"pass@{k}" for k in self.ks)]


class PolicyScores(TypedDict):
    """The metrics of one policy in one role, or of the last answers of a chain."""

    policy: str
    """For last answers, the policies of the chain in order, such as `llm_1,llm_2`."""
    role: str
    after: str | None
    """In a chain of two, the policy whose response it saw; otherwise None."""
    figures: dict[str, Estimate]


class _Row(NamedTuple):
    """Collects the responses to score together."""

    scores: PolicyScores
    responses: dict[int, list[EvaluatedResponse]]
    """By query."""
    chain_tokens: dict[int, list[int]]
    """By query, the number of tokens that each chain generated; only for last answers."""


def compute_scores(
    batches: Sequence[BatchRecord],
    scoring: Scoring,
    orders: Sequence[Sequence[str]] = (),
    agents: Sequence[str] | None = None,
) -> dict[str, PolicyScores]:
    """Computes the metrics by label: first all policies on the bare query, as pioneers, then in later roles.

    Each metric is computed per query from all its responses, then averaged over the queries that have any. A policy in
    a later role responds only in chains that did not stop before it, so these are its figures on the queries and
    samples that were left.

    Args:
        orders: If chains can stop, per batch the names of the policies by position. Then the last answer of each order
            is scored too, with the tokens that its chains generated per query. Empty: all chains are equally long.
        agents: The names of the agents by position; None: a pioneer and observers.
    """
    rows: dict[str, _Row] = {}

    def row(label: str, policy: str, role: str, after: str | None = None) -> _Row:
        return rows.setdefault(label, _Row(PolicyScores(policy=policy, role=role, after=after, figures={}), {}, {}))

    chains = [chain for batch in batches for chain in batch["chains"]]
    num_positions = len(orders[0] if orders else chains[0]) if chains else 0
    roles = (agents or role_names(num_positions))[:num_positions] if chains else ()
    for position, role in enumerate(roles):
        for chain in chains:
            if position >= len(chain):
                continue
            response = chain[position]
            policy = response["policy"]
            after = chain[0]["policy"] if position == 1 and len(roles) == 2 else None
            label = f"{policy} after {after}" if after else f"{policy} as {role}" if position else policy
            response = _with_bare_kl(response) if position == len(roles) - 1 else response
            row(label, policy, role, after).responses.setdefault(response["query"], []).append(response)
    for batch, names in zip(batches, orders, strict=True) if orders and len(roles) > 1 else ():
        for chain in batch["chains"]:
            last = row(" then ".join(names), ",".join(names), LAST_ANSWER)
            query, tokens = chain[-1]["query"], sum(len(response["tokens"]) for response in chain)
            last.responses.setdefault(query, []).append(_with_bare_kl(chain[-1]))
            last.chain_tokens.setdefault(query, []).append(tokens)
    if rows:
        values = [_query_values(group, scoring) for group in rows.values()]
        names = [name for group in rows.values() for name in _figure_names(group, scoring)]
        estimates = iter(_estimates(np.hstack(values), names, scoring))
        for group in rows.values():
            group.scores["figures"] = {name: next(estimates) for name in _figure_names(group, scoring)}
    return {label: group.scores for label, group in rows.items()}


def _with_bare_kl(response: EvaluatedResponse) -> EvaluatedResponse:
    """Returns a response of a last role, or a last answer, with its `bare_kl` as the `kl` that tables show."""
    return EvaluatedResponse(**{**response, "metrics": with_shown_kl(response["metrics"])})


def _figure_names(row: _Row, scoring: Scoring) -> list[str]:
    return [*scoring.names, *([CHAIN_TOKENS] if row.chain_tokens else [])]


def _query_values(row: _Row, scoring: Scoring) -> np.ndarray:
    """Returns the metrics of a row, `[queries, names]`."""
    values = []
    for query in range(scoring.queries):
        metrics = query_metrics(row.responses.get(query, []), scoring)
        tokens = row.chain_tokens.get(query)
        values.append(metrics + ([float(np.mean(tokens)) if tokens else math.nan] if row.chain_tokens else []))
    return np.array(values)


def _estimates(values: np.ndarray, names: Sequence[str], scoring: Scoring) -> list[Estimate]:
    """Averages over queries; binary metrics get Wilson intervals, shares get intervals within 0 and 1.

    Args:
        values: `[queries, columns]`; NaN for queries without a value.
    """
    estimates = column_cis(values, "bootstrap", scoring.seed)
    for column, name in enumerate(names):
        column_values = values[:, column][~np.isnan(values[:, column])]
        if name not in UNBOUNDED_METRICS and len(column_values) and np.isin(column_values, (0, 1)).all():
            estimates[column] = mean_ci(column_values, "wilson")
        elif name not in (*UNBOUNDED_METRICS, *REWARD_METRICS) and estimates[column].low is not None:
            mean, low, high, count = estimates[column]
            estimates[column] = Estimate(mean, max(low or 0.0, 0.0), min(high or 0.0, 1.0), count)
    return estimates


def query_metrics(responses: Sequence[EvaluatedResponse], scoring: Scoring) -> list[float]:
    """Computes the metrics of one policy on one query, in the order of `scoring.names`; NaN if a metric has no value.

    distinct-n is computed over all responses to the query, without their end-of-sequence tokens.
    """
    if not responses:
        return [math.nan] * len(scoring.names)
    metrics = [response["metrics"] for response in responses]
    rewards = [math.nan if (value := figures["task_reward"]) is None else value for figures in metrics]
    kls = [math.nan if (value := figures["kl"]) is None else value for figures in metrics]  # None: without a reference
    reward, kl = float(np.mean(rewards)), float(np.mean(kls))
    texts = [
        response["tokens"][:-1] if response["metrics"]["eos_rate"] else response["tokens"] for response in responses
    ]
    values = [
        reward,
        kl,
        reward - scoring.kl_coef * kl if scoring.kl_coef else reward,
        float(np.mean([len(response["tokens"]) for response in responses])),
        float(np.mean([figures["eos_rate"] for figures in metrics])),
        distinct_n(texts, 1),
        distinct_n(texts, 2),
    ]
    if scoring.solved_at is not None:
        correct = sum(value >= scoring.solved_at for value in rewards)
        values += [pass_at_k(correct, len(responses), k) for k in scoring.ks]
    return values


def score_tables(scores: Mapping[str, PolicyScores], names: Sequence[str]) -> list[Table]:
    """Returns a table per role, with a row per metric and a column per policy."""
    tables = []
    for role in dict.fromkeys(policy_scores["role"] for policy_scores in scores.values()):
        by_label = {label: entry["figures"] for label, entry in scores.items() if entry["role"] == role}
        tables.append(new_table([role], list(by_label)))
        for name in dict.fromkeys([*names, *(name for figures in by_label.values() for name in figures)]):
            heading, pattern = metric_format(name)
            tables[-1].add_row(heading, *(figures[name].format(pattern) for figures in by_label.values()))
    return tables


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Estimates without bias the probability that at least one of k responses to a query is correct.

    1 - C(samples - correct, k) / C(samples, k), computed as a product of factors between 0 and 1 to avoid overflow
    (Chen et al. 2021, https://arxiv.org/abs/2107.03374, §2.1).

    Returns:
        The estimate; NaN for fewer than k samples.
    """
    if samples < k:
        return math.nan
    if samples - correct < k:  # every subset of k contains a correct response
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def distinct_n(responses: Sequence[Sequence[int]], n: int) -> float:
    """Computes distinct-n, the share of unique n-grams among all n-grams of several responses (Li et al. 2016).

    Returns:
        1 if no n-gram occurs twice; NaN if all responses are shorter than n.
    """
    ngrams = [tuple(tokens[start : start + n]) for tokens in responses for start in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else math.nan
