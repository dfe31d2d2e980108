"""Figures of several runs as one: their mean and its 95 % interval over seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launch.records import Figures, Update
from launch.report.runs import MEAN, Arm, Run
from launch.results import Estimate
from launch.search_results import interval

Curve = Mapping[int, float]
"""A figure by update."""


class Series(NamedTuple):
    """A curve over seeds; an end of the interval is NaN where fewer than two seeds have a value."""

    x: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def over_seeds(curves: Sequence[Curve]) -> Series:
    """Averages curves, at each update those that have a finite value there."""
    series = Series([], [], [], [])
    for update in sorted({update for curve in curves for update in curve}):
        found = estimate([curve.get(update) for curve in curves])
        series.x.append(update)
        for column, end in zip(series[1:], (found["mean"], found["low"], found["high"]), strict=True):
            column.append(math.nan if end is None else end)
    return series


def estimate(values: Sequence[float | None]) -> Estimate:
    """Returns the mean of a figure with its 95 % interval by Student's t; what is not known is left out."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = interval(known) or (None, None)
    return Estimate(mean=sum(known) / len(known) if known else None, low=low, high=high, n=len(known))


def training(run: Run, policy: str, key: str) -> Curve:
    """Returns a figure of a policy's own training responses."""
    return {line["update"]: number(line["policy"].get(policy, {}), key) for line in run.updates if "policy" in line}


def of_role(run: Run, role: str, key: str) -> Curve:
    """Returns a figure of the training responses of whichever policy played a role."""
    return {
        line["update"]: number(line["policy"].get(line["roles"].get(role, ""), {}), key)
        for line in run.updates
        if "policy" in line and "roles" in line
    }


def trained_mean(run: Run, key: str) -> Curve:
    """Returns a figure of all training responses: the mean of the policies."""
    curves = [training(run, policy, key) for policy in run.settings.modules]
    return {update: sum(curve[update] for curve in curves) / len(curves) for update in curves[0]}


def held_out(run: Run, policy: str, key: str) -> Curve:
    """Returns a figure of a policy alone on held-out queries; `mean` is that of all policies."""
    return {update: number(found.get(policy, {}), key) for update, found in run.held_out.items()}


def number(figures: Figures, key: str) -> float:
    """Returns a figure, NaN where it is not known."""
    value = figures.get(key)
    return math.nan if value is None else value


def final(arm: Arm, key: str) -> list[float]:
    """Returns a figure at the last held-out evaluation of each run that counts, NaN where there is none."""
    return [number(run.final, key) for run in arm.counted]


def is_evaluated(arm: Arm) -> bool:
    """Tells whether any run of an arm was evaluated after it began to train."""
    return any(update > 0 for run in arm.runs for update in run.held_out)


def held_out_mean(arm: Arm, key: str) -> Series:
    """Returns a held-out figure, mean of the policies, over seeds."""
    return over_seeds([held_out(run, MEAN, key) for run in arm.runs])


def exchanged(arm: Arm) -> list[int]:
    """Returns the updates after which roles were exchanged, in any of the runs."""
    if arm.settings.num_agents == 1:
        return []
    lines: list[Update] = [line for run in arm.runs for line in run.updates]
    return sorted({line["update"] for line in lines if line.get("exchanged")})
