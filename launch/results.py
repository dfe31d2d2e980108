"""From an evaluation's responses to its figures, and the table of them. Pure functions of what was recorded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from launch.records import Batch, MeasuredResponse
from launch.rows import show
from launch.statistics import distinct, means_with_intervals, pass_at_k

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
    """The figures of one policy, alone or as observer."""

    policy: str
    after: str | None
    """The policy whose response it saw; None: it saw the bare query."""
    figures: dict[str, Estimate]


def summarise(batches: Iterable[Batch], scoring: Scoring) -> dict[str, Row]:
    """Returns the figures by row: first all policies on the bare query, then as observers.

    Every figure is computed per query, from all responses to it, and averaged over queries.
    """
    answers: dict[tuple[str, str | None], dict[int, list[MeasuredResponse]]] = {}
    for batch in batches:
        for chain in batch["chains"]:
            before = None
            for response in chain["responses"]:
                of_row = answers.setdefault((response["policy"], before), {})
                of_row.setdefault(chain["query"], []).append(response)
                before = response["policy"]
    keys = sorted(answers, key=lambda key: key[1] is not None)
    values = [
        [figure for key in keys for figure in of_query(answers[key].get(query, []), scoring)]
        for query in range(scoring.queries)
    ]
    estimates = iter(_estimates(np.array(values, dtype=np.float64), scoring.seed))
    return {
        policy if after is None else f"{policy} after {after}": Row(
            policy=policy, after=after, figures={name: next(estimates) for name in scoring.names}
        )
        for policy, after in keys
    }


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
    """Returns the figures as tables of at most `width` characters, as many as that takes."""
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
