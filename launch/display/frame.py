"""The long frame of several runs (`launch.run_folder.frame`), its pivots, and means over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import pandas as pd

from launch.display.statistics import Estimate, column_cis
from launch.run_folder.frame import MEAN, metrics_frame

MIN_SEEDS = 3
"""Seeds needed to draw an interval: with two, Student's t makes it 13 standard errors wide on each side."""


class Metrics:
    """The long frame of several runs, and its pivots."""

    def __init__(self, frames: Mapping[str, pd.DataFrame]) -> None:
        """Joins the frames of runs, by the runs' names."""
        joined = pd.concat({"": metrics_frame([]), **frames}, names=["run"])
        self.frame = joined.reset_index("run").reset_index(drop=True)

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
