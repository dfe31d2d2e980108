"""Figures of several runs as one: their mean and its 95 % interval over seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launch.evaluation.intervals import Estimate, over_seeds
from launch.experiments.measures import Measure, at_end
from launch.report.runs import MEAN, ArmRuns, Run
from launch.run_folder.records import Figures

FEWEST = 3
"""Seeds from which on an interval is drawn; with two, Student's t makes it 13 standard errors to either side."""
TOKEN_KL = "token_kl"
"""The key of a policy's KL per token, as health has it."""
Curve = Mapping[int, float]
"""A figure by update."""


class Series(NamedTuple):
    """A curve over seeds; an end of the interval is NaN where fewer than `FEWEST` seeds have a value."""

    x: Sequence[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve_over_seeds(curves: Sequence[Curve]) -> Series:
    """Averages curves, at each update those that have a finite value there."""
    updates = sorted({update for curve in curves for update in curve})
    return series_of({update: [curve.get(update) for curve in curves] for update in updates})


def series_of(by_x: Mapping[int, Sequence[float | None]]) -> Series:
    """Averages, at each x, what the runs there have that is finite."""
    found = [over_seeds(values) for values in by_x.values()]
    ends = [drawn_interval(each) for each in found]
    return Series(
        list(by_x),
        [math.nan if each is None else each.mean for each in found],
        [low for low, _ in ends],
        [high for _, high in ends],
    )


def drawn_interval(found: Estimate | None) -> tuple[float, float]:
    """Returns the ends of an interval as they are drawn: NaN where it is not."""
    if found is None or found.low is None or found.high is None or found.n < FEWEST:
        return math.nan, math.nan
    return found.low, found.high


def of_arm(arm: ArmRuns, measure: Measure) -> list[float]:
    """Returns a measure of each run that counts, NaN where it has none."""
    found = [measure(result) for result in arm.results]
    return [math.nan if value is None else value for value in found]


def ends_of(arm: ArmRuns, key: str) -> list[float]:
    """Returns a figure at the end of each run that counts, the mean of its policies, NaN where there is none."""
    return of_arm(arm, at_end(key))


def training(run: Run, policy: str, key: str) -> Curve:
    """Returns a figure of a policy's own training responses."""
    return {line["update"]: number(line["policy"].get(policy, {}), key) for line in run.updates if "policy" in line}


def of_role(run: Run, role: str, key: str) -> Curve:
    """Returns a figure of the training responses in a role, or else of all those of the policy that played it."""
    curve = {}
    for line in run.updates:
        if "policy" in line and "roles" in line:
            of_policy = line["policy"].get(line["roles"].get(role, ""), {})
            curve[line["update"]] = number({**of_policy, **line.get("role", {}).get(role, {})}, key)
    return curve


def trained_mean(run: Run, key: str) -> Curve:
    """Returns a figure of all training responses: the mean of the policies."""
    curves = [training(run, policy, key) for policy in run.settings.modules]
    return {update: sum(curve[update] for curve in curves) / len(curves) for update in curves[0]}


def held_out(run: Run, policy: str, key: str) -> Curve:
    """Returns a figure of a policy alone on held-out queries; `mean` is that of all policies."""
    return {update: number(found.get(policy, {}), key) for update, found in run.held_out.items()}


def number(figures: Figures, key: str) -> float:
    """Returns a figure, NaN where it is not known."""
    if key == TOKEN_KL:
        return number(figures, "kl") / max(number(figures, "response_length"), 1.0)
    value = figures.get(key)
    return math.nan if value is None else value


def is_evaluated(arm: ArmRuns) -> bool:
    """Tells whether any run of an arm was evaluated after it began to train."""
    return any(update > 0 for run in arm.runs for update in run.held_out)


def held_out_mean(arm: ArmRuns, key: str) -> Series:
    """Returns a held-out figure, mean of the policies, over seeds."""
    return curve_over_seeds([held_out(run, MEAN, key) for run in arm.runs])


def exchanged(arm: ArmRuns) -> list[int]:
    """Returns the updates after which roles were exchanged, in any of the runs."""
    return sorted({line["update"] for run in arm.runs for line in run.updates if line.get("exchanged")})
