"""Measures for claims, in addition to those of `launch.experiments.measures`."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from launch.display.frame import Metrics
from launch.display.statistics import Difference
from launch.experiments.measures import Measure, StudyMetrics, metrics_of, paired_difference
from launch.experiments.results import StudyRun
from launch.run_folder.frame import MEAN
from policies.models.model_names import AVERAGE_POLICY


def values(runs: Iterable[StudyRun], measure: Measure) -> dict[int, float]:
    """Returns a measure by seed, of the runs that have it."""
    return metrics_of(runs).by_seed(measure).to_dict()


def paired_runs(one: Iterable[StudyRun], other: Iterable[StudyRun], measure: Measure) -> Difference | None:
    """Returns the paired difference of two arms, seed by seed; None if they share no seed."""
    return paired_difference(metrics_of(one).by_seed(measure), metrics_of(other).by_seed(measure))


def before(metric: str) -> Measure:
    """Returns the measure of a held-out figure before training, the mean over the run's policies."""

    def measure(metrics: StudyMetrics) -> "pd.Series[float]":
        curve = metrics.get("validation", metric)
        return curve[curve.index.get_level_values("update") == 0].droplevel("update")

    return measure


def gain(metric: str) -> Measure:
    """Returns the measure of a held-out figure's change from before training to the last evaluation in training."""

    def measure(metrics: StudyMetrics) -> "pd.Series[float]":
        points = metrics.complete(metrics.get("validation", metric)).dropna().groupby("run")
        return (points.last() - points.first())[points.size() > 1]

    return measure


def curve(run: StudyRun, metric: str) -> list[tuple[int, float]]:
    """Returns a held-out figure of a run that did all its updates, at every evaluation: (update, value)."""
    metrics = metrics_of([run])
    points = metrics.complete(metrics.get("validation", metric)).dropna().droplevel("run")
    return list(points.items())


def in_roles(metrics: StudyMetrics, metric: str) -> pd.DataFrame:
    """Returns a figure of the training responses in each role, by run and update, whichever policy had the role."""
    rows = metrics.frame.query("split == 'train' and role != '' and metric == @metric")
    return rows.pivot(index=["run", "update"], columns="role", values="value")


def trained(metric: str, last: int) -> Measure:
    """Returns the measure of a figure of the `last` updates' responses in training, the mean over roles."""

    def measure(metrics: StudyMetrics) -> "pd.Series[float]":
        means = metrics.complete(in_roles(metrics, metric).mean(axis=1, skipna=False))
        return means.groupby("run").tail(last).groupby("run").mean()

    return measure


def untrained(metric: str) -> Measure:
    """Returns the measure of a figure of the first update's responses, before anything is learned, over roles."""
    return lambda metrics: (
        in_roles(metrics, metric).mean(axis=1, skipna=False).groupby("run").nth(0).droplevel("update")
    )


def unsteadiness(metrics: StudyMetrics) -> "pd.Series[float]":
    """Returns the deviation of the training task reward from one update to the next, the mean over policies.

    The root mean square of successive differences over √2, which a steady trend hardly adds to (von Neumann 1941).
    Differences across a role exchange are left out: there a policy's prompts change, in some arms and not in others.
    """
    roles = {
        (name, line["update"]): repr(line["roles"])
        for name, run in metrics.runs.items()
        for line in run.metrics
        if "policy" in line
    }
    deviations = {}
    for name, run in metrics.runs.items():
        policy_deviations = []
        for policy in run.settings.policy_ids:
            rewards = metrics.get("train", "task_reward", policy)
            rewards = rewards[rewards.index.get_level_values("run") == name]
            playing = pd.Series([roles.get(key) for key in rewards.index], rewards.index, dtype=object)
            steps = rewards.diff()[playing == playing.shift()]
            policy_deviations.append(math.sqrt(float(np.square(steps).mean()) / 2))
        deviations[name] = float(np.mean(policy_deviations))
    return metrics.complete(pd.Series(deviations, dtype=float).rename_axis("run"))


class ParetoPoint(NamedTuple):
    """A policy, or the mean of several, in the Pareto view."""

    task_reward: float
    kl: float


def pareto_front(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    """Returns the points to which no other is better or equal in both task reward and KL, by growing KL."""
    front: list[ParetoPoint] = []
    for candidate in sorted(set(points), key=lambda point: (point.kl, -point.task_reward)):
        if not front or candidate.task_reward > front[-1].task_reward:
            front.append(candidate)
    return front


def policies_at_end(metrics: Metrics, metric: str) -> pd.DataFrame:
    """Returns a figure after the last update, a row per run and a column per policy; `llm_mean` is none of them."""
    if "test" not in metrics.tables:
        return pd.DataFrame()
    table = metrics.tables["test"].droplevel("update")
    return pd.DataFrame(
        {
            policy: table[policy, role, name]
            for policy, role, name in table.columns
            if name == metric and policy not in (MEAN, AVERAGE_POLICY, "")
        }
    )


def variance(metrics: Metrics, metric: str) -> float:
    """Returns the variance over seeds of a figure after the last update, the mean of the policies' variances.

    Not of their mean: a mean of several policies varies less than one policy, however they were trained.

    Returns:
        With n - 1 in the denominator; NaN for fewer than two runs that have it.
    """
    return float(policies_at_end(metrics, metric).var().mean())


def hedges_g(numbers: Sequence[float]) -> float | None:
    """Returns the effect size of paired differences: mean over standard deviation, times 1 - 3 / (4 (n - 1) - 1).

    The factor corrects the upward bias with few pairs (Hedges 1981). None for fewer than three pairs or zero variance.
    """
    n = len(numbers)
    deviation = float(np.std(numbers, ddof=1)) if n > 2 else 0.0
    return float(np.mean(numbers)) / deviation * (1 - 3 / (4 * (n - 1) - 1)) if deviation > 0 else None
