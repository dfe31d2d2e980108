"""Where arms end: in the Pareto plane, and side by side."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from launch.display.curves import method
from launch.display.drawing import COLOURS, FAINT, FAINTLY, GRID, INK, POINT, colours_of, draw_runs, style, widened
from launch.display.frame import FEWEST
from launch.display.plot import Key, Panel, Plot
from launch.display.statistics import Estimate, mean_ci
from launch.experiments.measures import ParetoPoint, pareto_front
from launch.report.plots import HELD_OUT, SWEPT, families, family_names, in_words, interval_note
from launch.report.runs import Arm

TOLD_APART = 8
"""Arms that have a colour of their own in the Pareto plane, at most; more share one."""


def pareto(arms: Sequence[Arm]) -> list[Plot]:
    """Returns the Pareto plane: task reward against −KL, where each arm went and where it ended.

    If arms are too many to be told apart, of a study's first tier, and in a plane of its own the sweep of `kl_coef`;
    without tiers, coloured by what their method is called.
    """
    groups = families(arms, "kl_coef", 2)
    first = list(arms) if len(arms) <= TOLD_APART else _first_tier(arms)
    whole = len(first) == len(arms)
    names = [arm.label if len(first) <= TOLD_APART else method(arm.settings) for arm in first]
    title = "Task reward against KL" + ("" if whole else f", tier {first[0].result.tier}")
    plots = [_plane("pareto", title, first, names, groups if whole else [])]
    if groups and not whole:
        swept = [arm for family in groups for arm in family]
        names = [name for name, family in zip(family_names(groups, "kl_coef"), groups, strict=True) for _ in family]
        plots.append(_plane("pareto-kl_coef", "Task reward against KL over kl_coef", swept, names, groups))
    return plots


def _plane(name: str, title: str, arms: Sequence[Arm], names: Sequence[str], groups: Sequence[Sequence[Arm]]) -> Plot:
    """Returns one Pareto plane.

    Args:
        name: of the plot.
        title: of the plot.
        arms: what is drawn.
        names: of each arm, that which has its colour.
        groups: of arms that differ in `kl_coef` alone, whose frontiers are drawn.
    """
    colours = dict(zip(dict.fromkeys(names), colours_of(len(set(names))), strict=True))
    with_runs = len(colours) == len(arms)
    ends = {arm: (arm.at_end("kl"), arm.at_end("task_reward")) for arm in arms}
    says = "; ".join(f"{arm.label}: {in_words(task)} at KL {in_words(kl)}" for arm, (kl, task) in ends.items())
    note = f"{HELD_OUT} Up and to the right is better. Large dots: means over seeds."
    if groups:
        note += " Steps: the frontier over kl_coef of arms that differ in nothing else."
    if with_runs:
        note += " Small dots: single runs; thin lines: the way there."
    coefs = {arm.settings.report_kl_coef for arm in arms}
    coef = coefs.pop() if len(coefs) == 1 else 0.0
    if coef > 0:
        note += f" Along a dotted line the combined reward, task reward − {coef:g} · KL, is the same."

    def draw(panel: Axes) -> None:
        style(panel, "Task reward", "per response")
        panel.set_xlabel("− KL to the initial policy, nats per response", fontsize=9, color=INK)
        panel.xaxis.set_major_locator(MaxNLocator(5))
        means: dict[Arm, tuple[Estimate, Estimate, str]] = {}
        for (arm, (kl, task)), colour in zip(ends.items(), (colours[name] for name in names), strict=True):
            x, y = mean_ci(-value for value in kl), mean_ci(task)
            if with_runs:
                way = -arm.held_out("kl")["mean"], arm.held_out("task_reward")["mean"]
                panel.plot(*way, color=colour, linewidth=1.1, alpha=FAINTLY)
                if len(kl) > 1:
                    draw_runs(panel, [-value for value in kl], task, colour)
            if x.n and y.n:
                panel.plot([x.mean], [y.mean], color=colour, marker="")
                means[arm] = x, y, colour
        limits = panel.get_xlim(), panel.get_ylim()
        for family in groups:
            drawn = [means[arm] for arm in family if arm in means]
            front = pareto_front(ParetoPoint(y.mean, -x.mean) for x, y, _ in drawn)
            if len(front) > 1:
                steps = [-point.kl for point in front], [point.task_reward for point in front]
                panel.step(*steps, where="post", color=drawn[0][2], linewidth=0.9, alpha=0.6)
        for x, y, colour in means.values():
            _draw_mean(panel, x, y, colour)
        if coef > 0:
            _draw_contours(panel, coef, limits)
        panel.set_xlim(limits[0])
        panel.set_ylim(limits[1])

    legend = [Key(label, colour) for label, colour in colours.items()]
    return Plot(name, title, interval_note(note, arms), [Panel(draw, says, height=3.8)], legend)


def _draw_mean(panel: Axes, x: Estimate, y: Estimate, colour: str) -> None:
    """Draws a mean in the plane, with the interval of each coordinate that is of enough seeds."""
    panel.plot(_interval(x), [y.mean] * 2, color=colour, linewidth=1.2, alpha=0.7)
    panel.plot([x.mean] * 2, _interval(y), color=colour, linewidth=1.2, alpha=0.7)
    panel.plot([x.mean], [y.mean], color=colour, **{**POINT, "markersize": 8}, zorder=4)


def _interval(estimate: Estimate) -> tuple[float, float]:
    """Returns the ends of an interval as they are drawn: NaN if it is of too few seeds."""
    if estimate.low is None or estimate.high is None or estimate.n < FEWEST:
        return math.nan, math.nan
    return estimate.low, estimate.high


def _draw_contours(panel: Axes, coef: float, limits: tuple[tuple[float, float], tuple[float, float]]) -> None:
    """Draws lines along which the combined reward is the same."""
    (left, right), (low, high) = limits
    for combined in MaxNLocator(5).tick_values(low + coef * left, high + coef * right):
        heights = [combined - coef * left, combined - coef * right]
        panel.plot([left, right], heights, color=FAINT, linewidth=0.8, ls=":")


def side_by_side(arms: Sequence[Arm]) -> list[Plot]:
    """Returns the arms' final combined reward, a row each, on an axis of its own for each tier of a study.

    Of later tiers without the arms of sweeps, which are drawn as such and may be far off, but with those of the
    first tier that they are compared with.
    """
    first = _first_tier(arms)
    swept = {arm for key, least in SWEPT.items() for family in families(arms, key, least) for arm in family}
    tiers: dict[int, list[Arm]] = {}
    for arm in arms:
        if arm not in first and arm not in swept:
            tiers.setdefault(arm.result.tier, []).append(arm)
    plots = [_side_by_side("ablation", "Final combined reward", first)]
    for tier, of_tier in tiers.items():
        compared = {(arm.result.study, arm.result.against) for arm in of_tier}
        baselines = [arm for arm in first if (arm.result.study, arm.result.arm) in compared]
        title = f"Final combined reward, tier {tier}"
        plots.append(_side_by_side(f"ablation-tier-{tier}", title, [*baselines, *of_tier]))
    return plots


def _first_tier(arms: Sequence[Arm]) -> list[Arm]:
    first = min(arm.result.tier for arm in arms)
    return [arm for arm in arms if arm.result.tier == first]


def _side_by_side(name: str, title: str, arms: Sequence[Arm]) -> Plot:
    values = {arm.label: arm.at_end("combined_reward") for arm in arms}

    def draw(panel: Axes) -> None:
        style(panel, "", "")
        panel.set_xlabel("combined reward", fontsize=9, color=INK)
        panel.xaxis.set_major_locator(MaxNLocator(6))
        panel.grid(axis="x", color=GRID, linewidth=0.8)
        panel.grid(visible=False, axis="y")
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
        for row, runs in enumerate(values.values()):
            draw_runs(panel, runs, [-row] * len(runs), COLOURS[0])
        means = {label: mean_ci(runs) for label, runs in values.items()}
        limits = widened(panel.get_xlim(), (end for mean in means.values() for end in _interval(mean)))
        for row, (label, mean) in enumerate(means.items()):
            if mean.n:
                _draw_mean(panel, mean, Estimate(-row, None, None, 1), COLOURS[0])
            panel.annotate(
                label if mean.n else f"{label} (no figure)",
                (0, -row),
                (0, 7),
                xycoords=panel.get_yaxis_transform(),
                textcoords="offset points",
                fontsize=9,
                color=INK,
            )
        panel.set_xlim(limits)
        panel.set_ylim(0.5 - len(values), 0.75)

    says = "; ".join(f"{label}: {in_words(runs)}" for label, runs in values.items())
    note = interval_note(f"{HELD_OUT} Small dots: single runs.", arms)
    return Plot(name, title, note, [Panel(draw, says, height=0.42 * len(arms) + 0.9, left=0.15)])
