"""The metrics of runs as one long data frame, a row per number, from which all tables and plots of runs are made.

run, seed, update
split    `train`: training responses; `validation`: held-out evaluations during training; `test`: the evaluation after
         training; `run`: metrics of no split, such as tokens and seconds
policy   the policy id (in evaluations each policy answers the bare query alone); `mean`: the mean of the policies;
         empty: not a metric of one policy
role     the role of training responses, whichever policy had it; `last answer`: the chain's last response, held out;
         else empty
metric, value
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pandas as pd

from launch.display.statistics import Estimate, column_cis
from launch.run_folder.records import MetricValues, Update, mean_over_policies

FRAME_COLUMNS = ("run", "seed", "update", "split", "policy", "role", "metric", "value")
MEAN, LAST_RESPONSE = "mean", "last answer"
TOKEN_KL = "token_kl"
"""KL to the initial policy per token; `policies.health` compares it with a limit."""
RUN_WIDE = (
    *("tokens", "tokens_per_second", "discarded_tokens", "replaced_queries"),
    *("exchanges", "exchanged", "averaged", "collapsed"),
)
"""Metrics of a whole update, not of one policy or role."""
MIN_SEEDS = 3
"""Seeds needed to draw an interval: with two, Student's t makes it 13 standard errors wide on each side."""

FrameRow = tuple[int, str, str, str, str, float | None]
"""The columns of a row from `update` on."""


def metric_rows(updates: Sequence[Update], final: Mapping[str, Any] | None = None) -> Iterator[FrameRow]:
    """Yields the metrics of one run.

    Args:
        updates: The lines of `metrics.jsonl`.
        final: The evaluation after training: `update`, `policy`, `mean` and `last_response`.
    """
    for line in updates:
        policies = line.get("policy", {})
        train = {policy: {**figures, TOKEN_KL: _token_kl(figures)} for policy, figures in policies.items()}
        groups = [("train", policy, "", figures) for policy, figures in train.items()]
        if train:
            groups.append(("train", MEAN, "", mean_over_policies(list(train.values()))))
        groups += [("train", "", role, figures) for role, figures in line.get("role", {}).items()]
        groups += [("validation", policy, "", figures) for policy, figures in line.get("evaluation", {}).items()]
        if "last_response" in line:
            groups.append(("validation", "", LAST_RESPONSE, line["last_response"]))
        groups.append(("run", "", "", _run_wide(line)))
        yield from _rows(line["update"], groups)
    if final is not None:
        groups = [("test", policy, "", figures) for policy, figures in {**final["policy"], MEAN: final["mean"]}.items()]
        groups.append(("test", "", LAST_RESPONSE, final.get("last_response", {})))
        yield from _rows(final["update"], groups)


def _rows(update: int, groups: Sequence[tuple[str, str, str, MetricValues]]) -> Iterator[FrameRow]:
    for split, policy, role, figures in groups:
        for metric, value in figures.items():
            yield update, split, policy, role, metric, value


def _token_kl(figures: MetricValues) -> float | None:
    kl, length = figures.get("kl"), figures.get("response_length")
    return None if kl is None or length is None else kl / max(length, 1.0)


def _run_wide(line: Update) -> MetricValues:
    values: dict[str, Any] = {name: line[name] for name in RUN_WIDE if name in line}  # type: ignore[literal-required]
    seconds = {f"seconds/{name}": value for name, value in line.get("seconds", {}).items()}
    return {name: int(value) if isinstance(value, bool) else value for name, value in values.items()} | seconds


def as_csv(runs: Mapping[str, Sequence[Update]]) -> str:
    """Returns the metrics of runs as CSV in long format, with a header.

    Args:
        runs: The lines of `metrics.jsonl`, by the run's name in the CSV.
    """
    rows = [(run, *row) for run, updates in runs.items() for row in metric_rows(updates)]
    columns = [column for column in FRAME_COLUMNS if column != "seed"]
    return pd.DataFrame(rows, columns=columns, dtype=object).dropna().to_csv(index=False, lineterminator="\n")


class Metrics:
    """The long frame of several runs, and its pivots."""

    def __init__(self, rows: Sequence[tuple[str, int, *FrameRow]]) -> None:
        """Builds the frame.

        Args:
            rows: Values of `FRAME_COLUMNS`.
        """
        self.frame = pd.DataFrame(rows, columns=list(FRAME_COLUMNS)).astype({"update": int, "value": float})
        self.seeds: pd.Series[int] = self.frame.groupby("run")["seed"].first()
        """By run."""

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """By split: a row per measured run and update, a column per policy, role and metric."""
        return {
            str(split): part.pivot(index=["run", "update"], columns=["policy", "role", "metric"], values="value")
            for split, part in self.frame.groupby("split")
        }

    def get(self, split: str, metric: str, policy: str = MEAN, role: str = "") -> pd.Series[float]:
        """Returns a metric by run and update, for all updates of the split; NaN if unknown."""
        if split not in self.tables:
            return self.frame[:0].set_index(["run", "update"])["value"]
        table = self.tables[split]
        column = policy, role, metric
        return table[column] if column in table.columns else pd.Series(math.nan, table.index)


def mean_over_seeds(values: pd.Series[float]) -> pd.DataFrame:
    """Averages a metric over runs.

    Returns:
        By update, the `mean` of the runs that have a value and the bounds of its interval, `low` and `high`, which are
        NaN for fewer than `MIN_SEEDS` runs.
    """
    table = values.unstack("run")
    means = pd.DataFrame(column_cis(table.to_numpy().T), index=table.index, columns=list(Estimate._fields), dtype=float)
    means.loc[means["n"] < MIN_SEEDS, ["low", "high"]] = math.nan
    return means
