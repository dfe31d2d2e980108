"""Held-out curves over what they cost: responses' tokens, tokens that are learned from, and time."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from matplotlib.axes import Axes

from launch.display.drawing import colours_of, points, style
from launch.display.plot import Key, Panel, Plot
from launch.report.marks import bars, limit_to
from launch.report.plots import dealt_out, held_out_queries, with_interval
from launch.report.runs import ArmRuns, Run
from launch.report.series import Series, held_out_mean, is_evaluated
from launch.run_folder.records import Update

KEY = "combined_reward"
NOTE = (
    "Combined reward, mean of the policies, each alone on {}. A token is learned from once an epoch. Minutes are of "
    "updates alone; what else the machine did adds to them."
)


def _generated(run: Run, line: Update) -> float:
    return line.get("tokens", math.nan) / 1e3


def _learned(run: Run, line: Update) -> float:
    return run.settings.epochs * _generated(run, line)


def _minutes(run: Run, line: Update) -> float:
    seconds = line.get("seconds", {"total": math.nan})
    return (seconds["total"] - seconds.get("evaluate", 0.0)) / 60


COSTS: dict[str, Callable[[Run, Update], float]] = {
    "1000 tokens generated": _generated,
    "1000 tokens learned from": _learned,
    "minutes": _minutes,
}
"""What an update costs."""


def costs(arms: Sequence[ArmRuns]) -> list[Plot]:
    """Returns the arms' held-out curves over each cost, some arms at a time; nothing where none is evaluated."""
    return [_plot(*each) for each in dealt_out("costs", [arm for arm in arms if is_evaluated(arm)])]


def _plot(name: str, arms: Sequence[ArmRuns]) -> Plot:
    colours = colours_of(len(arms))
    panels = [
        Panel(partial(_draw, cost, [over(arm, each) for arm in arms], colours), f"Combined reward over {cost}.")
        for cost, each in COSTS.items()
    ]
    legend = [Key(arm.label, colour) for arm, colour in zip(arms, colours, strict=True)]
    return Plot(
        name,
        "Arms over what they cost",
        with_interval(NOTE.format(held_out_queries(arms)), arms, bars=True),
        panels,
        legend,
    )


def over(arm: ArmRuns, cost: Callable[[Run, Update], float]) -> Series:
    """Returns an arm's held-out curve, at each evaluation over the mean of what the runs had cost until then."""
    curve = held_out_mean(arm, KEY)
    spent = []
    for run in arm.runs:
        trained = [line for line in run.updates if "policy" in line]
        sums = accumulate(cost(run, line) for line in trained)
        spent.append({0: 0.0, **dict(zip((line["update"] for line in trained), sums, strict=True))})
    x = []
    for update in curve.x:
        known = [each[int(update)] for each in spent if int(update) in each]
        x.append(sum(known) / len(known) if known else math.nan)
    return curve._replace(x=x)


def _draw(title: str, lines: Sequence[Series], colours: Sequence[str], panel: Axes) -> None:
    style(panel, f"Over {title}", "combined reward")
    panel.set_xlabel(title, fontsize=9)
    for line, colour in zip(lines, colours, strict=True):
        points(panel, line.x, line.mean, colour)
    limit_to(panel, list(lines))
    for line, colour in zip(lines, colours, strict=True):
        bars(panel, line, colour)
