"""Plots of a report: an arm's policies and roles over updates, and arms compared during and after training."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from matplotlib.axes import Axes

from launch.display.curves import (
    COLLAPSE_LIMITS,
    PANELS,
    Curve,
    MetricPanel,
    has_shared_policy,
    plot_over_updates,
    policy_curves,
    with_interval_note,
)
from launch.display.drawing import COLOURS, GRID, INK, POINT_STYLE, choose_colours, draw_runs, style_panel
from launch.display.frame import MIN_SEEDS, TOKEN_KL
from launch.display.plot import LegendEntry, Panel, Plot
from launch.display.statistics import Estimate, mean_ci
from launch.report.runs import ReportedArm

ARMS_PER_PLOT = 6
"""Maximum number of arms in one plot of curves."""
HEALTH_PANELS: tuple[MetricPanel, ...] = (
    ("repetition", "Repetition", "share of token pairs"),
    ("eos_rate", "EOS rate", "share of responses"),
    ("thought_cut_rate", "Thoughts cut off", "share of responses"),
    (TOKEN_KL, "KL to the initial policy", "nats per token"),
    ("response_length", "Response length", "tokens"),
)
HELD_OUT_NOTE = "Held-out queries, mean of the policies, after training. Small dots: single runs."


def arm_curves(arm: ReportedArm, name: str) -> list[Plot]:
    """Plots an arm's curves by policy and, if it has several roles, by role."""
    shared = has_shared_policy(arm.settings)
    title = f"{arm.label}: by {'role' if shared else 'policy'}"
    note = "Lines: training responses. Dots: held-out queries, mean over seeds."
    plots = [policy_curves(f"{name}-{'roles' if shared else 'policies'}", title, note, arm.metrics, arm.settings)]
    if len(arm.settings.agents) > 1 and not shared:
        title, note = f"{arm.label}: by role", "Training responses of whichever policy had the role."
        curves = {role: Curve(arm.metrics, role=role, kinds=("train",)) for role in arm.settings.agents}
        plots.append(plot_over_updates(f"{name}-roles", title, note, curves, [arm.settings], events=arm.metrics))
    return plots


def comparison_plots(arms: Sequence[ReportedArm]) -> list[Plot]:
    """Plots the arms' curves in shared panels: validation metrics, or training metrics if no arm is evaluated."""
    evaluated_arms = [arm for arm in arms if arm.is_evaluated]
    kinds: tuple[str, ...] = ("train",)
    note = "Mean of the policies, training responses."
    if evaluated_arms:
        kinds = ("bare", "last")
        note = "Held-out queries: mean of the policies, each alone, and the last answers of chains. Points of the same "
        note += "update are drawn side by side."
    return _plot_arms("arms", "Arms over training", note, evaluated_arms or arms, PANELS, kinds)


def health_plots(arms: Sequence[ReportedArm]) -> list[Plot]:
    """Plots the metrics in which collapse shows, with their limits."""
    note = f"Mean of the policies, training responses. Dashed: the limits {' and '.join(COLLAPSE_LIMITS.values())}."
    return _plot_arms("health", "Signs of collapse", note, arms, HEALTH_PANELS, ("train",))


def _plot_arms(
    name: str,
    title: str,
    note: str,
    arms: Sequence[ReportedArm],
    metric_panels: Sequence[MetricPanel],
    kinds: tuple[str, ...],
) -> list[Plot]:
    plots = []
    for page_name, page_arms in _paginate(name, arms):
        curves = {arm.label: Curve(arm.metrics, kinds=kinds) for arm in page_arms}
        settings = [arm.settings for arm in page_arms]
        plots.append(plot_over_updates(page_name, title, note, curves, settings, metric_panels))
    return plots


def _paginate(name: str, arms: Sequence[ReportedArm]) -> list[tuple[str, Sequence[ReportedArm]]]:
    """Spreads arms evenly over as few plots as possible; returns each plot's name and arms."""
    pages = math.ceil(len(arms) / ARMS_PER_PLOT)
    bounds = [math.ceil(len(arms) * page / pages) for page in range(pages + 1)] if pages else []
    return [
        (f"{name}-{page}" if pages > 1 else name, arms[start:end])
        for page, (start, end) in enumerate(pairwise(bounds), start=1)
    ]


def pareto_plots(arms: Sequence[ReportedArm]) -> list[Plot]:
    """Plots the final task reward against −KL, of the arms that measure the KL; not of a single run."""
    plots = []
    measured_arms = [arm for arm in arms if arm.settings.evaluates_with_reference]
    if sum(len(arm.runs) for arm in measured_arms) < 2:
        return []
    for name, page_arms in _paginate("pareto", measured_arms):
        legend = [
            LegendEntry(arm.label, colour)
            for arm, colour in zip(page_arms, choose_colours(len(page_arms)), strict=True)
        ]
        final_values = {arm.label: (arm.at_end("task_reward"), arm.at_end("kl")) for arm in page_arms}
        alt = "; ".join(
            f"{label}: {_format_mean(task)} at KL {_format_mean(kl)}" for label, (task, kl) in final_values.items()
        )
        note = with_interval_note(f"{HELD_OUT_NOTE} Up and to the right is better.", [arm.metrics for arm in page_arms])
        panel = Panel(partial(_draw_pareto, page_arms, legend), alt)
        plots.append(Plot(name, "Task reward against KL", note, [panel], legend, height=3.8))
    return plots


def _draw_pareto(arms: Sequence[ReportedArm], legend: Sequence[LegendEntry], panel: Axes) -> None:
    style_panel(panel, "Task reward", "per response", "− KL to the initial policy, nats per response")
    for arm, entry in zip(arms, legend, strict=True):
        kl, task = [-value for value in arm.at_end("kl")], arm.at_end("task_reward")
        draw_runs(panel, kl, task, entry.colour)
        _draw_mean(panel, mean_ci(kl), mean_ci(task), entry.colour)


def ablation_plots(arms: Sequence[ReportedArm]) -> list[Plot]:
    """Plots the arms' final combined rewards, a row each, with a plot per tier of a study."""
    plots = []
    first = min(arm.result.tier for arm in arms)
    for tier in sorted({arm.result.tier for arm in arms}):
        values = {arm.label: arm.at_end("combined_reward") for arm in arms if arm.result.tier == tier}
        name, title = "ablation", "Final combined reward"
        if tier != first:
            name, title = f"{name}-tier-{tier}", f"{title}, tier {tier}"
        alt = "; ".join(f"{label}: {_format_mean(runs)}" for label, runs in values.items())
        note = with_interval_note(HELD_OUT_NOTE, [arm.metrics for arm in arms])
        height = 0.42 * len(values) + 0.9
        plots.append(Plot(name, title, note, [Panel(partial(_draw_rows, values), alt)], height=height))
    return plots


def _draw_rows(values: dict[str, list[float]], panel: Axes) -> None:
    style_panel(panel, "", "", "combined reward")
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
    """Draws a point, with the interval of each coordinate if there are enough seeds."""
    panel.plot(_interval(x), [y.mean] * 2, color=colour, linewidth=1.2, alpha=0.7)
    panel.plot([x.mean] * 2, _interval(y), color=colour, linewidth=1.2, alpha=0.7)
    panel.plot([x.mean], [y.mean], color=colour, **{**POINT_STYLE, "markersize": 8}, zorder=4)


def _interval(estimate: Estimate) -> tuple[float, float]:
    """Returns the bounds of an interval to draw: NaN if there are too few seeds."""
    if estimate.low is None or estimate.high is None or estimate.n < MIN_SEEDS:
        return math.nan, math.nan
    return estimate.low, estimate.high


def _format_mean(values: Sequence[float]) -> str:
    estimate = mean_ci(values)
    return f"{estimate.mean:.2f}" if estimate.n else "unknown"
