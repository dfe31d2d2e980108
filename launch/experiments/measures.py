"""Measures of runs: functions from a data frame of metrics to one value per run.

A run's value is the mean over its policies (one for PPO, one per agent for CORY), each evaluated alone on the bare
held-out queries after the last update. It is missing if the run did not complete all updates, for example because it
diverged, or if a policy lacks the metric (`records.mean_over_policies`). A missing run drops out of a paired difference
together with its partner, so read differences together with the collapse rate.
Differences between arms pair runs with the same seed, which see the same queries if `queries_per_update` is equal.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import pandas as pd

from launch.display.frame import Metrics
from launch.display.statistics import Difference, estimate_difference
from launch.experiments.results import StudyRun
from launch.run_folder.frame import MEAN, metrics_frame
from launch.run_folder.records import Update
from policies.health import HealthSign, collapse_signs

COLLAPSE_METRICS = {"repetition", "eos_rate", "kl", "response_length"}  # that detection needs


class StudyMetrics(Metrics):
    """The data frame of the metrics of one arm's runs, named by their seeds."""

    def __init__(self, runs: Iterable[StudyRun]) -> None:
        """Builds the frame from results."""
        self.runs = {str(run.seed): run for run in runs}
        super().__init__({name: metrics_frame(run.metrics, run.final) for name, run in self.runs.items()})

    def complete(self, values: "pd.Series[float]") -> "pd.Series[float]":
        """Returns the values of runs that completed all updates."""
        names = [name for name, run in self.runs.items() if did_all_updates(run)]
        return values[values.index.get_level_values("run").isin(names)]

    def by_seed(self, measure: "Measure") -> "pd.Series[float]":
        """Returns a measure by seed, without missing values."""
        return measure(self).dropna().rename(index=int).groupby(level=0).last()


Measure = Callable[[StudyMetrics], "pd.Series[float]"]
"""Returns a value per run; NaN or no entry if it is missing."""


def metrics_of(runs: Iterable[StudyRun]) -> StudyMetrics:
    """Returns the data frame of one arm's runs, named by their seeds."""
    return StudyMetrics(runs)


def final_value(metric: str, policy: str = MEAN, role: str = "") -> Measure:
    """Returns the measure of a metric after the last update, by default the mean over the run's policies."""
    return lambda metrics: metrics.get("test", metric, policy, role).droplevel("update")


def value_at_tokens(metric: str, policy: str, role: str, tokens: Mapping[int, float]) -> Measure:
    """Returns the measure of a held-out metric at the last evaluation within a token budget.

    Args:
        tokens: seed to the maximum number of tokens that the run may have generated.
    """

    def measure(metrics: StudyMetrics) -> "pd.Series[float]":
        curve = metrics.get("validation", metric, policy, role)
        spent = metrics.get("run", "tokens", "").groupby("run").cumsum().reindex(curve.index).fillna(0.0)
        limits = curve.index.get_level_values("run").map(int).map(tokens)
        return curve[spent.to_numpy() <= limits.to_numpy()].groupby("run").nth(-1).droplevel("update")

    return measure


def total_tokens(metrics: StudyMetrics) -> "pd.Series[float]":
    """Returns the number of response tokens that a run generated in all updates."""
    return metrics.get("run", "tokens", "").groupby("run").sum()


def did_all_updates(run: StudyRun) -> bool:
    """Returns whether a run completed all updates."""
    return bool(run.metrics) and run.metrics[-1]["update"] == run.settings.num_updates


def paired_difference(one: "pd.Series[float]", other: "pd.Series[float]") -> Difference | None:
    """Returns the paired difference of two arms, seed by seed; None if they share no seed."""
    return estimate_difference((one - other).dropna().to_dict())


def run_collapse_signs(run: StudyRun) -> list[HealthSign]:
    """Returns the signs of collapse at a run's last held-out evaluation, by the limits of `policies.health`.

    A policy has collapsed if its responses repeat themselves far more than before training, if their end-of-sequence
    rate is far lower, or if their KL per token is above its limit. A run with a non-finite gradient has
    collapsed too.
    """
    evaluated: list[Update] = [line for line in run.metrics if "evaluation" in line]
    signs: list[HealthSign] = []
    if evaluated:
        first, last = evaluated[0]["evaluation"], dict(evaluated[-1]["evaluation"])
        if run.final is not None:
            last |= run.final["policy"]
        for policy in run.settings.policy_ids:
            figures = {name: math.nan if value is None else value for name, value in last[policy].items()}
            if figures.keys() >= COLLAPSE_METRICS:  # results of older versions have fewer metrics
                start = {name: first[policy].get(name) or 0.0 for name in ("eos_rate", "repetition")}
                signs += collapse_signs(run.settings, policy, figures, start, run.settings.eval_queries)
    if run.status == "diverged":
        signs.append(HealthSign("diverged", "the run", run.reason or ""))
    return signs
