"""From an evaluation's responses to its figures, and the table of them. Pure functions of what was recorded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from rich.table import Table

from cory_env.chain import role_names
from launch.display.statistics import Estimate, column_cis, mean_ci
from launch.display.tables import FIGURES, shown, table
from launch.run_folder.records import Batch, Evaluation
from policies.models.model_names import AVERAGE

AMOUNTS = ("kl", "response_length")
"""Figures of which 0 or 1 is so many nats or tokens, never a no or a yes."""
REWARDS = ("task_reward", "combined_reward")
"""Figures that may be a no or a yes, if the task's reward is; all that are neither are shares, from 0 to 1."""
BASE, ALL = "base", "all"
"""Whose figures those are that are of no trained policy, or of every one; `AVERAGE` is none of these. Where LLMs start
from different models, `base of llm_1` and others."""
PIONEER = role_names(1)[0]
GAP = 3
"""Between two columns: the padding of both, and their border, which is a space."""


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
        return [*FIGURES, *(f"pass@{k}" for k in self.ks)]


def every_k(samples: int, solved_at: float | None) -> list[int]:
    """Returns the k of pass@k where nobody asked for others: 1, 2, 4, … up to the samples."""
    return [] if solved_at is None else [2**power for power in range(samples.bit_length())]


class Standing(TypedDict):
    """The figures of one policy in one role, or of all policies in it."""

    policy: str
    """`all`: all policies together, whose figures are each query's means over them."""
    role: str
    after: str | None
    """In a chain of two, the policy whose response it saw; else None."""
    figures: dict[str, Estimate]


def summarise(batches: Iterable[Batch], scoring: Scoring) -> dict[str, Standing]:
    """Returns who stands where, by label: all policies on the bare query, as pioneers answer it, then in later roles.

    Every figure is computed per query, from all responses to it, and averaged over queries. In a chain of three or more
    each later role has an entry for all its policies together too.
    """
    answers: dict[int, dict[str, dict[int, list[Evaluation]]]] = {}
    after: dict[str, str] = {}
    longest = 0
    for batch in batches:
        for chain in batch["chains"]:
            longest = max(longest, len(chain))
            for position, response in enumerate(chain):
                of_policy = answers.setdefault(position, {}).setdefault(response["policy"], {})
                of_policy.setdefault(response["query"], []).append(response)
                if position == 1:
                    after[response["policy"]] = chain[0]["policy"]
    standings: dict[str, Standing] = {}
    values: list[np.ndarray] = []
    for position, role in enumerate(role_names(longest) if longest else ()):
        found = {
            policy: np.array([of_query(of_policy.get(query, []), scoring) for query in range(scoring.queries)])
            for policy, of_policy in answers[position].items()
        }
        together = [figures for policy, figures in found.items() if policy != AVERAGE and not policy.startswith(BASE)]
        if position > 0 and longest > 2 and together:
            found[ALL] = np.mean(together, axis=0)  # NaN where any policy lacks it, as all means over policies
        for policy, figures in found.items():
            before = after[policy] if position == 1 and longest == 2 else None
            label = policy if position == 0 else f"{policy} as {role}" if before is None else f"{policy} after {before}"
            standings[label] = Standing(policy=policy, role=role, after=before, figures={})
            values.append(figures)
    estimates = iter(_estimates(np.hstack(values), scoring)) if values else iter(())
    for standing in standings.values():
        standing["figures"] = {name: next(estimates) for name in scoring.names}
    return standings


def _estimates(values: np.ndarray, scoring: Scoring) -> list[Estimate]:
    """Averages over queries; where a figure is a no or a yes of each query, it is a proportion."""
    found = column_cis(values, "bootstrap", scoring.seed)
    for column, name in enumerate(scoring.names * (len(found) // len(scoring.names))):
        of_figure = values[:, column][~np.isnan(values[:, column])]
        if name not in AMOUNTS and len(of_figure) and np.isin(of_figure, (0, 1)).all():
            found[column] = mean_ci(of_figure, "wilson")
        elif name not in (*AMOUNTS, *REWARDS) and found[column].low is not None:
            mean, low, high, count = found[column]
            found[column] = Estimate(mean, max(low or 0.0, 0.0), min(high or 0.0, 1.0), count)
    return found


def of_query(responses: Sequence[Evaluation], scoring: Scoring) -> list[float]:
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
        distinct(texts, 1),
        distinct(texts, 2),
    ]
    if scoring.solved_at is not None:
        correct = sum(value >= scoring.solved_at for value in rewards)
        figures += [pass_at_k(correct, len(responses), k) for k in scoring.ks]
    return figures


def tables(standings: Mapping[str, Standing], names: Sequence[str], width: int) -> list[Table]:
    """Returns the figures as tables of at most `width` characters, as many as that takes.

    Of a later role in a chain of three or more they show the base and all policies together, not each.
    """
    standings = {
        label: each
        for label, each in standings.items()
        if each["role"] == PIONEER
        or each["after"] is not None
        or each["policy"] == ALL
        or each["policy"].startswith(BASE)
    }
    blocks: list[dict[str, list[str]]] = []
    room = 0
    for name in names:
        heading, pattern = shown(name)
        cells = [each["figures"][name].shown(pattern) for each in standings.values()]
        needed = GAP + max(len(text) for text in (heading, *cells))
        if needed > room:
            blocks.append({})
            room = width - max(len(label) for label in standings)
        room -= needed
        blocks[-1][heading] = cells
    made = []
    for block in blocks:
        made.append(table([""], list(block)))
        for row in zip(standings, *block.values(), strict=True):
            made[-1].add_row(*row)
    return made


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


def distinct(responses: Sequence[Sequence[int]], n: int) -> float:
    """Returns the share of different n-grams among all n-grams of several responses (Li et al. 2016, "distinct-n").

    Args:
        responses: token ids; here, all responses of one policy to one query.
        n: tokens of an n-gram.

    Returns:
        1 where no n-gram occurs twice; NaN where all responses are shorter than n.
    """
    grams = [tuple(tokens[start : start + n]) for tokens in responses for start in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan
