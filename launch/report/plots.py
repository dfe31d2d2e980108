"""Plots of a report: an arm's policies and roles over updates, and arms side by side over training and at its end."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from matplotlib.axes import Axes

from launch.display.curves import (
    LIMITS,
    PANELS,
    Figure,
    Member,
    over_updates,
    policy_curves,
    with_interval,
)
from launch.display.drawing import COLOURS, GRID, INK, POINT, colours_of, draw_runs, style
from launch.display.frame import FEWEST, TOKEN_KL
from launch.display.plot import Key, Panel, Plot
from launch.display.statistics import Estimate, mean_ci
from launch.report.runs import Arm

TOGETHER = 6
"""Arms in one plot of curves, at most."""
HEALTH: tuple[Figure, ...] = (
    ("repetition", "Repetition", "share of token pairs"),
    ("eos_rate", "Ended by itself", "share of responses"),
    (TOKEN_KL, "KL to the initial policy", "nats per token"),
    ("response_length", "Response length", "tokens"),
)
HELD_OUT = "Held out, mean of the policies, at the end. Small dots: single runs."


def curves_of(arm: Arm, name: str) -> list[Plot]:
    """Returns an arm's curves: of each policy, and of each role."""
    note = "Lines: responses in training. Dots: each policy alone on held-out queries, mean over seeds."
    plots = [policy_curves(f"{name}-policies", f"{arm.label}: by policy", note, arm.metrics, arm.settings)]
    if len(arm.settings.roles) > 1:
        title, note = f"{arm.label}: by role", "Responses in training, of whichever policy played the role."
        members = {role: Member(arm.metrics, "", role, held_out=False) for role in arm.settings.roles}
        plots.append(over_updates(f"{name}-roles", title, note, members, [arm.settings], events=arm.metrics))
    return plots


def comparisons(arms: Sequence[Arm]) -> list[Plot]:
    """Returns the arms' curves in the same panels, some at a time: held out, or in training if none is evaluated."""
    evaluated = [arm for arm in arms if arm.is_evaluated]
    note = "Mean of the policies, in training."
    if evaluated:
        note = "Mean of the policies, each alone on held-out queries; points of one update stand side by side."
    return _of_arms("arms", "Arms over training", note, evaluated or arms, PANELS, held_out=bool(evaluated))


def health(arms: Sequence[Arm]) -> list[Plot]:
    """Returns what collapse would show in, some arms at a time."""
    note = f"Mean of the policies, in training. Dashed: the limits {' and '.join(LIMITS.values())}."
    return _of_arms("health", "Signs of collapse", note, arms, HEALTH, held_out=False)


def _of_arms(
    name: str, title: str, note: str, arms: Sequence[Arm], figures: Sequence[Figure], held_out: bool
) -> list[Plot]:
    plots = []
    for part, shown in _paginate(name, arms):
        members = {arm.label: Member(arm.metrics, trained=not held_out, held_out=held_out) for arm in shown}
        plots.append(over_updates(part, title, note, members, [arm.settings for arm in shown], figures))
    return plots


def _paginate(name: str, arms: Sequence[Arm]) -> list[tuple[str, Sequence[Arm]]]:
    """Spreads arms over as few plots as can hold them, as many to each; returns each plot's name and arms."""
    plots = math.ceil(len(arms) / TOGETHER)
    ends = [math.ceil(len(arms) * part / plots) for part in range(plots + 1)] if plots else []
    return [
        (f"{name}-{part}" if plots > 1 else name, arms[start:end])
        for part, (start, end) in enumerate(pairwise(ends), start=1)
    ]


def pareto(arms: Sequence[Arm]) -> list[Plot]:
    """Returns where arms end in the Pareto plane, task reward against −KL, some arms at a time."""
    plots = []
    for name, shown in _paginate("pareto", arms):
        legend = [Key(arm.label, colour) for arm, colour in zip(shown, colours_of(len(shown)), strict=True)]
        ends = {arm.label: (arm.at_end("task_reward"), arm.at_end("kl")) for arm in shown}
        says = "; ".join(f"{label}: {_mean(task)} at KL {_mean(kl)}" for label, (task, kl) in ends.items())
        note = with_interval(f"{HELD_OUT} Up and to the right is better.", [arm.metrics for arm in shown])
        panel = Panel(partial(_draw_plane, shown, legend), says)
        plots.append(Plot(name, "Task reward against KL", note, [panel], legend, height=3.8))
    return plots


def _draw_plane(arms: Sequence[Arm], legend: Sequence[Key], panel: Axes) -> None:
    style(panel, "Task reward", "per response", "− KL to the initial policy, nats per response")
    for arm, key in zip(arms, legend, strict=True):
        kl, task = [-value for value in arm.at_end("kl")], arm.at_end("task_reward")
        draw_runs(panel, kl, task, key.colour)
        _draw_mean(panel, mean_ci(kl), mean_ci(task), key.colour)


def side_by_side(arms: Sequence[Arm]) -> list[Plot]:
    """Returns the arms' final combined reward, a row each, in a plot for each tier of a study."""
    plots = []
    first = min(arm.result.tier for arm in arms)
    for tier in sorted({arm.result.tier for arm in arms}):
        values = {arm.label: arm.at_end("combined_reward") for arm in arms if arm.result.tier == tier}
        name, title = "ablation", "Final combined reward"
        if tier != first:
            name, title = f"{name}-tier-{tier}", f"{title}, tier {tier}"
        says = "; ".join(f"{label}: {_mean(runs)}" for label, runs in values.items())
        note = with_interval(HELD_OUT, [arm.metrics for arm in arms])
        height = 0.42 * len(values) + 0.9
        plots.append(Plot(name, title, note, [Panel(partial(_draw_rows, values), says)], height=height))
    return plots


def _draw_rows(values: dict[str, list[float]], panel: Axes) -> None:
    style(panel, "", "", "combined reward")
    panel.grid(axis="x", color=GRID, linewidth=0.8)
    panel.grid(visible=False, axis="y")
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    for row, (label, runs) in enumerate(values.items()):
        draw_runs(panel, runs, [-row] * len(runs), COLOURS[0])
        _draw_mean(panel, mean_ci(runs), Estimate(-row, None, None, 1), COLOURS[0])
        panel.text(0, 0.2 - row, label, transform=panel.get_yaxis_transform(), fontsize=9, color=INK)
    panel.set_ylim(0.5 - len(values), 0.75)


def _draw_mean(panel: Axes, x: Estimate, y: Estimate, colour: str) -> None:
    """Draws a point, with the interval of each coordinate that is of enough seeds."""
    panel.plot(_interval(x), [y.mean] * 2, color=colour, linewidth=1.2, alpha=0.7)
    panel.plot([x.mean] * 2, _interval(y), color=colour, linewidth=1.2, alpha=0.7)
    panel.plot([x.mean], [y.mean], color=colour, **{**POINT, "markersize": 8}, zorder=4)


def _interval(estimate: Estimate) -> tuple[float, float]:
    """Returns the ends of an interval as they are drawn: NaN if it is of too few seeds."""
    if estimate.low is None or estimate.high is None or estimate.n < FEWEST:
        return math.nan, math.nan
    return estimate.low, estimate.high


def _mean(values: Sequence[float]) -> str:
    """Returns a mean in words."""
    estimate = mean_ci(values)
    return f"{estimate.mean:.2f}" if estimate.n else "not known"
