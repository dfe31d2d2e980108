"""The measures of runs, functions of their data frame, each by run.

A run's figure is the mean over its policies (PPO has one, CORY as many as agents), each alone on the bare held-out
queries after the last update. What is measured after training, or over it, is missing
for a run that did not do all updates, as one that diverged, or of which a policy lacks the figure
(`records.mean_over_policies`); it drops out with its partner, so read differences beside the collapse rate.
Differences between arms are of runs with the same seed, which see the same queries if their number per update is the
same.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from launch.display.frame import LAST, MEAN, Metrics, metric_rows
from launch.display.statistics import Difference, differences
from launch.experiments.results import StudyRun
from launch.run_folder.records import Update
from policies.health import Sign, signs_of_collapse
from policies.models.model_names import AVERAGE

COLLAPSE_METRICS = {"repetition", "eos_rate", "kl", "response_length"}
"""The figures of a policy in which collapse shows."""


class StudyMetrics(Metrics):
    """The data frame of several results, by run."""

    def __init__(self, runs: Mapping[str, StudyRun]) -> None:
        """Makes the frame of runs, by the names that they are to have."""
        super().__init__(
            [(name, run.seed, *row) for name, run in runs.items() for row in metric_rows(run.metrics, run.final)]
        )
        self.runs = runs

    def complete(self, values: "pd.Series[float]") -> "pd.Series[float]":
        """Returns values by run, and perhaps update, of those runs that did all their updates."""
        names = [name for name, run in self.runs.items() if did_all_updates(run)]
        return values[values.index.get_level_values("run").isin(names)]

    def by_seed(self, measure: "Measure") -> "pd.Series[float]":
        """Returns a measure of those runs that have it, by their seed."""
        return measure(self).dropna().rename(index=self.seeds).groupby(level=0).last()


Measure = Callable[[StudyMetrics], "pd.Series[float]"]
"""A figure by run; NaN, or no entry, for a run that has none."""


def metrics_of(runs: Iterable[StudyRun]) -> StudyMetrics:
    """Returns the frame of runs of one arm, named by their seeds."""
    return StudyMetrics({str(run.seed): run for run in runs})


def at_end(metric: str, policy: str = MEAN, role: str = "") -> Measure:
    """Returns the measure of a figure after the last update, the mean over the run's policies unless told otherwise."""
    return lambda metrics: metrics.get("test", metric, policy, role).droplevel("update")


def last_response(metric: str) -> Measure:
    """Returns the measure of a figure of the chain's last answer after the last update."""
    return at_end(metric, "", LAST)


def of_average(metric: str) -> Measure:
    """Returns the measure of a figure, after the last update, of the LLM whose weights are the mean of the others'."""
    return at_end(metric, AVERAGE)


def influence(metrics: StudyMetrics) -> "pd.Series[float]":
    """Returns the share of the variance of the second agent's reward that the pioneer's response explains."""
    return at_end("influence", "")(metrics)


def area(metrics: StudyMetrics) -> "pd.Series[float]":
    """Returns the area under the held-out curve of the combined reward, by trapezoids, per update: its mean height."""

    def mean_height(curve: "pd.Series[float]") -> float:
        updates = curve.index.get_level_values("update")
        return float(np.trapezoid(curve, updates)) / (updates[-1] - updates[0]) if len(curve) > 1 else math.nan

    return metrics.complete(metrics.get("validation", "combined_reward")).dropna().groupby("run").agg(mean_height)


def value_at_tokens(metric: str, policy: str, role: str, tokens: Mapping[int, float]) -> Measure:
    """Returns the measure of a held-out figure in training, when a run had generated at most so many tokens.

    Args:
        metric: the figure.
        policy: whose it is, as in the frame.
        role: likewise.
        tokens: by seed, the most tokens.
    """

    def measure(metrics: StudyMetrics) -> "pd.Series[float]":
        curve = metrics.get("validation", metric, policy, role)
        spent = metrics.get("run", "tokens", "").groupby("run").cumsum().reindex(curve.index).fillna(0.0)
        most = curve.index.get_level_values("run").map(metrics.seeds).map(tokens)
        return curve[spent.to_numpy() <= most.to_numpy()].groupby("run").nth(-1).droplevel("update")

    return measure


def total_tokens(metrics: StudyMetrics) -> "pd.Series[float]":
    """Returns the response tokens that a run generated in all its updates."""
    return metrics.get("run", "tokens", "").groupby("run").sum()


def did_all_updates(run: StudyRun) -> bool:
    """Returns whether a run did all its updates."""
    return bool(run.metrics) and run.metrics[-1]["update"] == run.settings.num_updates


def paired(one: "pd.Series[float]", other: "pd.Series[float]") -> Difference | None:
    """Returns a measure of one arm less that of another, seed by seed; None without a seed that both have."""
    return differences((one - other).dropna().to_dict())


def collapse(run: StudyRun) -> list[Sign]:
    """Returns the signs of collapse that a run's policies show at its last held-out evaluation, by health's limits.

    A policy has collapsed if its responses repeat themselves (`max_repetition`), their end-of-sequence rate has fallen
    below `min_eos_ratio` of that before training, or their KL per token is above `max_token_kl`. A run whose gradient
    was no longer finite has collapsed too.
    """
    evaluated: list[Update] = [line for line in run.metrics if "evaluation" in line]
    signs: list[Sign] = []
    if evaluated:
        first, last = evaluated[0]["evaluation"], dict(evaluated[-1]["evaluation"])
        if run.final is not None:
            last |= run.final["policy"]
        for policy in run.settings.policy_ids:
            figures = {name: value for name, value in last[policy].items() if value is not None}
            if figures.keys() >= COLLAPSE_METRICS:  # runs of before had fewer
                rate = first[policy].get("eos_rate") or 0.0
                signs += signs_of_collapse(run.settings, policy, figures, rate, run.settings.eval_queries)
    if run.status == "diverged":
        signs.append(Sign("diverged", "the run", run.reason or ""))
    return signs


def collapses(runs: Iterable[StudyRun]) -> int:
    """Returns the number of runs in which a policy has collapsed."""
    return sum(bool(collapse(run)) for run in runs)
