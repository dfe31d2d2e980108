"""From an evaluation's responses to its figures, and the table of them. Pure functions of what was recorded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cory_env.chain import role_names
from launch.display.rows import show
from launch.evaluation.statistics import distinct, mean_of_known, means_with_intervals, pass_at_k
from launch.run_folder.records import Batch, MeasuredResponse

FIGURES = {
    "task_reward": ("task reward", "{:+.2f}"),
    "kl": ("KL", "{:.2f}"),
    "combined_reward": ("combined", "{:+.2f}"),
    "response_length": ("length", "{:.1f}"),
    "eos_rate": ("EOS rate", "{:.2f}"),
    "distinct_1": ("distinct-1", "{:.2f}"),
    "distinct_2": ("distinct-2", "{:.2f}"),
}
"""Every figure but pass@k, with its heading and format."""
BASE, ALL = "base", "all"
"""Rows that are of no trained policy, or of every one."""
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


class Estimate(TypedDict):
    """A mean over queries with its 95 % interval; None where no query has a value."""

    mean: float | None
    low: float | None
    high: float | None
    n: int
    """Queries that have a value."""


class Row(TypedDict):
    """The figures of one policy in one role, or of all policies in it."""

    policy: str
    """`all`: all policies together, whose figures are each query's means over them."""
    role: str
    after: str | None
    """In a chain of two, the policy whose response it saw; else None."""
    figures: dict[str, Estimate]


def summarise(batches: Iterable[Batch], scoring: Scoring) -> dict[str, Row]:
    """Returns the figures by row: all policies on the bare query, as pioneers answer it, then in each later role.

    Every figure is computed per query, from all responses to it, and averaged over queries. In a chain of three or more
    each later role has a row for all its policies together too.
    """
    answers: dict[int, dict[str, dict[int, list[MeasuredResponse]]]] = {}
    after: dict[str, str] = {}
    longest = 0
    for batch in batches:
        for chain in batch["chains"]:
            longest = max(longest, len(chain["responses"]))
            for place, response in enumerate(chain["responses"]):
                of_policy = answers.setdefault(place, {}).setdefault(response["policy"], {})
                of_policy.setdefault(chain["query"], []).append(response)
                if place == 1:
                    after[response["policy"]] = chain["responses"][0]["policy"]
    rows: dict[str, Row] = {}
    values: list[np.ndarray] = []
    for place, role in enumerate(role_names(longest) if longest else ()):
        found = {
            policy: np.array([of_query(of_policy.get(query, []), scoring) for query in range(scoring.queries)])
            for policy, of_policy in answers[place].items()
        }
        together = [figures for policy, figures in found.items() if policy != BASE]
        if place > 0 and longest > 2 and together:
            found[ALL] = mean_of_known(np.array(together))
        for policy, figures in found.items():
            before = after[policy] if place == 1 and longest == 2 else None
            label = policy if place == 0 else f"{policy} as {role}" if before is None else f"{policy} after {before}"
            rows[label] = Row(policy=policy, role=role, after=before, figures={})
            values.append(figures)
    estimates = iter(_estimates(np.hstack(values), scoring.seed)) if values else iter(())
    for row in rows.values():
        row["figures"] = {name: next(estimates) for name in scoring.names}
    return rows


def of_query(responses: Sequence[MeasuredResponse], scoring: Scoring) -> list[float]:
    """Returns the figures of one policy on one query, in the order of `scoring.names`; NaN for those without a value.

    distinct-n counts over all its responses to the query, without their end-of-sequence tokens.
    """
    if not responses:
        return [math.nan] * len(scoring.names)
    rewards = [math.nan if response["task_reward"] is None else response["task_reward"] for response in responses]
    reward, kl = float(np.mean(rewards)), float(np.mean([response["kl"] for response in responses]))
    texts = [response["tokens"][:-1] if response["ended"] else response["tokens"] for response in responses]
    figures = [
        reward,
        kl,
        reward - scoring.kl_coef * kl,
        float(np.mean([len(response["tokens"]) for response in responses])),
        float(np.mean([response["ended"] for response in responses])),
        distinct(texts, 1),
        distinct(texts, 2),
    ]
    if scoring.solved_at is not None:
        correct = sum(value >= scoring.solved_at for value in rewards)
        figures += [pass_at_k(correct, len(responses), k) for k in scoring.ks]
    return figures


def tables(rows: Mapping[str, Row], names: Sequence[str], width: int) -> list[Table]:
    """Returns the figures as tables of at most `width` characters, as many as that takes.

    Of a later role in a chain of three or more they show the base and all policies together, not each.
    """
    rows = {
        label: row
        for label, row in rows.items()
        if row["role"] == PIONEER or row["after"] is not None or row["policy"] in (BASE, ALL)
    }
    blocks: list[dict[str, list[str]]] = []
    room = 0
    for name in names:
        heading, pattern = FIGURES.get(name, (name, "{:.2f}"))
        cells = [_cell(row["figures"][name], pattern) for row in rows.values()]
        needed = GAP + max(len(text) for text in (heading, *cells))
        if needed > room:
            blocks.append({})
            room = width - max(len(label) for label in rows)
        room -= needed
        blocks[-1][heading] = cells
    return [_table(list(rows), block) for block in blocks]


def _table(labels: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Table:
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    made.add_column("", no_wrap=True)
    for heading in columns:
        made.add_column(heading, justify="right", no_wrap=True)
    for cells in zip(labels, *columns.values(), strict=True):
        made.add_row(*cells)
    return made


def _estimates(values: np.ndarray, seed: int) -> list[Estimate]:
    mean, low, high = means_with_intervals(values, seed)
    count = (~np.isnan(values)).sum(axis=0)
    return [
        Estimate(mean=_known(m), low=_known(lo), high=_known(hi), n=int(n))
        for m, lo, hi, n in zip(mean, low, high, count, strict=True)
    ]


def _known(number: float) -> float | None:
    return None if math.isnan(number) else float(number)


def _cell(estimate: Estimate, pattern: str) -> str:
    mean, low, high = (show(estimate[end], pattern) for end in ("mean", "low", "high"))
    return mean if estimate["mean"] is None else f"{mean} [{low}, {high}]"
