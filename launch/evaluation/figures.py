"""Metrics of an evaluation, computed from its responses, and their tables."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from rich.table import Table

from launch.display.statistics import Estimate, column_cis
from launch.display.tables import metric_format, new_table
from launch.run_folder.final import CHAIN_TOKENS
from launch.run_folder.records import EvaluatedChain, MetricValues, with_shown_kl

UNBOUNDED_METRICS = ("kl", "response_length", CHAIN_TOKENS)
"""Amounts of nats or tokens, which are never binary, even if all values are 0 or 1."""
REWARD_METRICS = ("task_reward", "combined_reward")
"""Metrics that are binary if the task's reward is. All metrics in neither list are shares, from 0 to 1."""
LAST_ANSWER = "last answer"
"""In place of a role, for the responses at which chains ended."""
BASE = "base"
"""Name of the untrained model; `base of llm_1` etc. if policies start from different models."""


class Scoring(NamedTuple):
    """Parameters of the metrics.

    `kl_coef` is the weight of the KL in the combined reward; `solved_at` the task reward from which a response is
    correct, for pass@k with each of `ks`.
    """

    queries: int
    kl_coef: float
    solved_at: float | None
    ks: Sequence[int]
    seed: int


class PolicyScores(TypedDict):
    """The metrics of one policy in one role, or of the last answers of a chain.

    `policy` has for last answers the policies of the chain in order, such as `llm_1,llm_2`. `after` is in a chain of
    two the policy whose response it saw; otherwise None.
    """

    policy: str
    role: str
    after: str | None
    figures: dict[str, Estimate]


def compute_scores(
    chains: Sequence[EvaluatedChain],
    scoring: Scoring,
    agents: Sequence[str],
    *,
    can_stop: bool = False,
    is_env: bool = False,
) -> dict[str, PolicyScores]:
    """Computes the metrics by label: first all policies on the bare query, as pioneers, then in later roles.

    Each metric is computed per query from all its responses, then averaged over the queries that have any. A policy in
    a later role responds only in chains that did not stop before it, so these are its figures on the queries and
    samples that were left.

    Args:
        agents: The names of the agents by position.
        can_stop: Whether chains can stop. Then the last answer of each order of policies is scored too, with the tokens
            that its chains generated per query.
        is_env: Whether they are episodes of an environment, whose agents have one record each.
    """
    scores: dict[str, PolicyScores] = {}
    measured: dict[str, dict[int, list[MetricValues]]] = {}  # by label and query

    def add(label: str, policy: str, role: str, after: str | None, query: int, metrics: MetricValues) -> None:
        scores.setdefault(label, PolicyScores(policy=policy, role=role, after=after, figures={}))
        measured.setdefault(label, {}).setdefault(query, []).append(metrics)

    num_positions = max((len(chain["policies"]) for chain in chains), default=0)
    for position, role in enumerate(agents[:num_positions]):
        for chain in (chain for chain in chains if len(chain["responses"]) > position):
            response, policy = chain["responses"][position], chain["policies"][position]
            after = chain["policies"][0] if position == 1 and num_positions == 2 and not is_env else None
            label = f"{policy} after {after}" if after else f"{policy} as {role}" if position or is_env else policy
            is_last = position == num_positions - 1
            metrics = with_shown_kl(response["metrics"]) if is_last else response["metrics"]
            add(label, policy, role, after, response["query"], metrics)
    for chain in chains if can_stop and num_positions > 1 else ():
        policies, last = chain["policies"], chain["responses"][-1]
        tokens = float(sum(len(response["tokens"]) for response in chain["responses"]))
        metrics = {**with_shown_kl(last["metrics"]), CHAIN_TOKENS: tokens}
        add(" then ".join(policies), ",".join(policies), LAST_ANSWER, None, last["query"], metrics)
    for label, by_query in measured.items():
        values = [query_metrics(by_query.get(query, []), scoring) for query in range(scoring.queries)]
        names = list(next(filter(None, values)))
        columns = np.array([[metrics.get(name, math.nan) for name in names] for metrics in values])
        scores[label]["figures"] = dict(zip(names, estimate_columns(columns, names, scoring.seed), strict=True))
    return scores


def estimate_columns(values: np.ndarray, names: Sequence[str], seed: int) -> list[Estimate]:
    """Averages over queries; binary metrics get Wilson intervals, shares get intervals within 0 and 1.

    Args:
        values: `[queries, names]`; NaN for queries without a value.
    """
    estimates = column_cis(values, "bootstrap", seed)
    wilson = column_cis(values, "wilson")
    for column, name in enumerate(names):
        mean, low, high, count = estimates[column]
        is_binary = np.isin(values[:, column], (0, 1)) | np.isnan(values[:, column])
        if name not in UNBOUNDED_METRICS and count and is_binary.all():
            estimates[column] = wilson[column]
        elif name not in (*UNBOUNDED_METRICS, *REWARD_METRICS) and low is not None and high is not None:
            estimates[column] = Estimate(mean, max(low, 0.0), min(high, 1.0), count)
    return estimates


def query_metrics(responses: Sequence[MetricValues], scoring: Scoring) -> dict[str, float]:
    """Computes the metrics of one policy on one query from those of its responses; empty without responses."""
    if not responses:
        return {}
    columns = {
        name: [math.nan if (value := metrics[name]) is None else value for metrics in responses]  # None: not measured
        for name in ("task_reward", "kl", "response_length", "eos_rate", CHAIN_TOKENS)
        if name in responses[0]
    }
    means = {name: float(np.mean(values)) for name, values in columns.items()}
    combined = means["task_reward"] - (scoring.kl_coef * means["kl"] if scoring.kl_coef else 0.0)
    values = {"task_reward": means["task_reward"], "kl": means["kl"], "combined_reward": combined, **means}
    if scoring.solved_at is not None:
        correct = sum(reward >= scoring.solved_at for reward in columns["task_reward"])
        values |= {f"pass@{k}": pass_at_k(correct, len(responses), k) for k in scoring.ks}
    return values


def score_tables(scores: Mapping[str, PolicyScores]) -> list[Table]:
    """Returns a table per role, with a row per metric and a column per policy."""
    tables = []
    for role in dict.fromkeys(policy_scores["role"] for policy_scores in scores.values()):
        by_label = {label: entry["figures"] for label, entry in scores.items() if entry["role"] == role}
        tables.append(new_table([role], list(by_label)))
        for name in next(iter(by_label.values())):
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
