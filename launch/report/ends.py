"""Where arms end: in the Pareto plane, side by side, and over the values of one setting."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from launch.display.curves import PANELS
from launch.display.drawing import COLOURS, FAINT, FAINTLY, GRID, INK, POINT, colours_of, style
from launch.display.plot import Key, Panel, Plot
from launch.evaluation.intervals import Estimate, over_seeds
from launch.experiments.measures import InPlane, pareto_front
from launch.experiments.space import show_value
from launch.experiments.study_runs import NO_MATTER
from launch.report.marks import bars, dots, limit_to, mean_in_plane, widened
from launch.report.plots import with_interval
from launch.report.runs import NO_DIFFERENCE, ArmRuns, method
from launch.report.series import drawn_interval, ends_of, held_out_mean, series_of

SWEPT = {"exchange_period": 2, "lr": 2, "kl_coef": 2, "partner_reward": 3, "num_agents": 3}
"""Settings whose effect is drawn, and from how many values on."""
TOLD_APART = 8
"""Arms that have a colour of their own in the Pareto plane, at most; more share one."""
HELD_OUT = "Held out, mean of the policies, at the end."


def pareto(arms: Sequence[ArmRuns]) -> list[Plot]:
    """Returns the Pareto plane: task reward against −KL, where each arm went and where it ended.

    Where arms are too many to be told apart, of a study's first tier, and in a plane of its own the sweep of `kl_coef`;
    without tiers, coloured by what their method is called.
    """
    families = _families(arms, "kl_coef", 2)
    first = arms if len(arms) <= TOLD_APART else _first_tier(arms)
    whole = len(first) == len(arms)
    named = [(arm, arm.label if len(first) <= TOLD_APART else method(arm.settings)) for arm in first]
    title = "Task reward against KL" + ("" if whole else f", tier {first[0].runs[0].result.tier}")
    plots = [_plane("pareto", title, named, families if whole else [])]
    if families and not whole:
        of_family = dict(zip(_called(families, "kl_coef"), families, strict=True))
        swept = [(arm, name) for name, family in of_family.items() for arm in family]
        plots.append(_plane("pareto-kl_coef", "Task reward against KL over kl_coef", swept, families))
    return plots


def _plane(name: str, title: str, arms: Sequence[tuple[ArmRuns, str]], families: Sequence[Sequence[ArmRuns]]) -> Plot:
    """Returns one Pareto plane.

    Args:
        name: of the plot.
        title: of the plot.
        arms: each with the name that has its colour.
        families: of arms that differ in `kl_coef` alone, whose frontiers are drawn.
    """
    names = list(dict.fromkeys(each for _, each in arms))
    colours = dict(zip(names, colours_of(len(names)), strict=True))
    says = "; ".join(
        f"{arm.label}: {in_words(ends_of(arm, 'task_reward'))} at KL {in_words(ends_of(arm, 'kl'))}" for arm, _ in arms
    )
    note = f"{HELD_OUT} Up and to the right is better. Large dots: means over seeds."
    if families:
        note += " Steps: the frontier over kl_coef of arms that differ in nothing else."
    if len(names) == len(arms):
        note += " Small dots: single runs; thin lines: the way there."
    coefs = {arm.settings.report_kl_coef for arm, _ in arms}
    coef = coefs.pop() if len(coefs) == 1 else 0.0
    if coef > 0:
        note += f" Along a dotted line the combined reward, task reward − {coef:g} · KL, is the same."
    fronts = [{id(arm) for arm in family} for family in families]
    panel = Panel(partial(_pareto, arms, fronts, colours, coef), says, height=3.8)
    legend = [Key(label, colour) for label, colour in colours.items()]
    return Plot(name, title, with_interval(note, [arm for arm, _ in arms], bars=True), [panel], legend)


def _pareto(
    arms: Sequence[tuple[ArmRuns, str]],
    families: Sequence[set[int]],
    colours: Mapping[str, str],
    coef: float,
    panel: Axes,
) -> None:
    style(panel, "Task reward", "per response")
    panel.set_xlabel("− KL to the initial policy, nats per response", fontsize=9, color=INK)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    ends = [(over_seeds([-x for x in ends_of(arm, "kl")]), over_seeds(ends_of(arm, "task_reward"))) for arm, _ in arms]
    points: dict[int, tuple[InPlane, str]] = {}
    for (arm, name), (x, y) in zip(arms, ends, strict=True):
        if len(colours) == len(arms):
            kl, task = held_out_mean(arm, "kl"), held_out_mean(arm, "task_reward")
            panel.plot([-value for value in kl.mean], task.mean, color=colours[name], linewidth=1.1, alpha=FAINTLY)
            if len(arm.counted) > 1:
                dots(panel, [-value for value in ends_of(arm, "kl")], ends_of(arm, "task_reward"), colours[name])
        if x is not None and y is not None:
            panel.plot([x.mean], [y.mean], color=colours[name], marker="")
            points[id(arm)] = InPlane(y.mean, -x.mean), name
    limits = panel.get_xlim(), panel.get_ylim()
    for family in families:
        of_family = [points[arm] for arm in family if arm in points]
        front = pareto_front(point for point, _ in of_family)
        if len(front) > 1:
            steps = [-at.kl for at in front], [at.task_reward for at in front]
            panel.step(*steps, where="post", color=colours[of_family[0][1]], linewidth=0.9, alpha=0.6)
    for (_, name), (x, y) in zip(arms, ends, strict=True):
        if x is not None and y is not None:
            mean_in_plane(panel, x, y, colours[name])
    if coef > 0:
        _equal(panel, coef, limits)
    panel.set_xlim(limits[0])
    panel.set_ylim(limits[1])


def _equal(panel: Axes, coef: float, limits: tuple[tuple[float, float], tuple[float, float]]) -> None:
    """Draws lines along which the combined reward is the same."""
    (left, right), (low, high) = limits
    for worth in MaxNLocator(5).tick_values(low + coef * left, high + coef * right):
        panel.plot([left, right], [worth - coef * left, worth - coef * right], color=FAINT, linewidth=0.8, ls=":")


def side_by_side(arms: Sequence[ArmRuns]) -> list[Plot]:
    """Returns the arms' final combined reward, a row each, on an axis of its own for each tier of a study.

    Of later tiers without the arms of sweeps, which are drawn as such and may be far off, but with those of the
    first tier that they are compared with.
    """
    first = _first_tier(arms)
    swept = {id(arm) for key, least in SWEPT.items() for family in _families(arms, key, least) for arm in family}
    tiers: dict[int, list[ArmRuns]] = {}
    for arm in arms:
        if arm not in first and id(arm) not in swept:
            tiers.setdefault(arm.runs[0].result.tier, []).append(arm)
    plots = [_side_by_side(first, None)]
    for tier, of_tier in tiers.items():
        compared = {(arm.runs[0].result.study, arm.runs[0].result.against) for arm in of_tier}
        baselines = [arm for arm in first if (arm.runs[0].result.study, arm.runs[0].result.arm) in compared]
        plots.append(_side_by_side([*baselines, *of_tier], tier))
    return plots


def _first_tier(arms: Sequence[ArmRuns]) -> list[ArmRuns]:
    first = min(arm.runs[0].result.tier for arm in arms)
    return [arm for arm in arms if arm.runs[0].result.tier == first]


def _side_by_side(arms: Sequence[ArmRuns], tier: int | None) -> Plot:
    name, title = "ablation", "Final combined reward"
    if tier is not None:
        name, title = f"{name}-tier-{tier}", f"{title}, tier {tier}"
    values = [ends_of(arm, "combined_reward") for arm in arms]
    says = "; ".join(f"{arm.label}: {in_words(found)}" for arm, found in zip(arms, values, strict=True))
    note = with_interval(f"{HELD_OUT} Small dots: single runs.", arms, bars=True)
    panel = Panel(partial(_rows, [arm.label for arm in arms], values), says, height=0.42 * len(arms) + 0.9, left=0.15)
    return Plot(name, title, note, [panel])


def _rows(labels: Sequence[str], values: Sequence[Sequence[float]], panel: Axes) -> None:
    style(panel, "", "")
    panel.set_xlabel("combined reward", fontsize=9, color=INK)
    panel.xaxis.set_major_locator(MaxNLocator(6))
    panel.grid(axis="x", color=GRID, linewidth=0.8)
    panel.grid(visible=False, axis="y")
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    for row, single in enumerate(values):
        dots(panel, single, [-row] * len(single), COLOURS[0])
    means = [over_seeds(found) for found in values]
    limits = widened(panel.get_xlim(), (end for found in means for end in drawn_interval(found)))
    for row, (label, found) in enumerate(zip(labels, means, strict=True)):
        if found is not None:
            mean_in_plane(panel, found, Estimate(-row, None, None, 1), COLOURS[0])
        panel.annotate(
            label if found is not None else f"{label} (no figure)",
            (0, -row),
            (0, 7),
            xycoords=panel.get_yaxis_transform(),
            textcoords="offset points",
            fontsize=9,
            color=INK,
        )
    panel.set_xlim(limits)
    panel.set_ylim(0.5 - len(labels), 0.75)


def sweeps(arms: Sequence[ArmRuns]) -> list[Plot]:
    """Returns, for each setting of which arms differ in that alone, how the final figures depend on it."""
    plots = []
    for key, least in SWEPT.items():
        if some := _families(arms, key, least):
            plots.append(_sweep(key, dict(zip(_called(some, key), some, strict=True))))
    return plots


def _families(arms: Sequence[ArmRuns], key: str, least: int) -> list[list[ArmRuns]]:
    """Returns groups of arms, each of one study or of none, that differ in one setting alone and have enough values."""
    families: dict[str, list[ArmRuns]] = {}
    for arm in arms:
        no_difference = {"seed", *NO_MATTER} if arm.runs[0].result.study else NO_DIFFERENCE
        same = arm.settings.model_dump(exclude={key, "eval_kl_coef", *no_difference})
        key_of = arm.runs[0].result.study, arm.settings.report_kl_coef, same
        families.setdefault(repr(key_of), []).append(arm)
    return [family for family in families.values() if len({getattr(arm.settings, key) for arm in family}) >= least]


def _called(families: Sequence[Sequence[ArmRuns]], key: str) -> list[str]:
    """Returns a name for arms that differ in one setting alone: their method, or else what sets them apart."""
    methods = ["agents" if key == "num_agents" else method(family[0].settings) for family in families]
    if len(set(methods)) == len(methods):
        return methods
    labels = []
    for family in families:
        parts = [part for part in family[0].label.split(", ") if not part.startswith(f"{key}=")]
        labels.append(", ".join(parts) or family[0].label)
    return labels if len(set(labels)) == len(labels) else [family[0].label for family in families]


def _sweep(key: str, families: Mapping[str, Sequence[ArmRuns]]) -> Plot:
    values: set[Any] = {getattr(arm.settings, key) for family in families.values() for arm in family}
    ticks = sorted(values, key=lambda value: math.inf if value is None else value)
    colours = dict(zip(families, colours_of(len(families)), strict=True))
    arms = [arm for family in families.values() for arm in family]
    panels = []
    for figure, heading, unit in PANELS:
        lines = {
            label: sorted((ticks.index(getattr(arm.settings, key)), ends_of(arm, figure)) for arm in family)
            for label, family in families.items()
        }
        says = "; ".join(
            f"{label}: " + ", ".join(f"{show_value(ticks[x])}: {in_words(y)}" for x, y in line)
            for label, line in lines.items()
        )
        draw = partial(_steps, heading, unit.format(f"{arms[0].settings.report_kl_coef:g}"), key, ticks, colours, lines)
        panels.append(Panel(draw, f"{heading} over {key}. {says}"))
    note = with_interval(f"{HELD_OUT} Small dots: single runs. Values stand evenly.", arms, bars=True)
    legend = [Key(label, colour) for label, colour in colours.items()]
    return Plot(f"sweep-{key}", f"Sensitivity to {key}", note, panels, legend)


def _steps(
    title: str,
    unit: str,
    key: str,
    ticks: Sequence[float | None],
    colours: Mapping[str, str],
    lines: Mapping[str, Sequence[tuple[int, Sequence[float]]]],
    panel: Axes,
) -> None:
    style(panel, title, unit)
    panel.set_xlabel(key, fontsize=9, color=INK)
    labels = ["never" if key == "exchange_period" and value is None else show_value(value) for value in ticks]
    panel.set_xticks(range(len(ticks)), labels)
    drawn = {}
    for label, line in lines.items():
        drawn[label] = series_of(dict(line))
        for x, found in line:
            if len(found) > 1:
                dots(panel, [x] * len(found), found, colours[label])
        panel.plot(drawn[label].x, drawn[label].mean, color=colours[label], linewidth=1.8, **POINT, zorder=3)
    limit_to(panel, drawn.values())
    for label, series in drawn.items():
        bars(panel, series, colours[label])
    panel.set_xlim(-0.4, len(ticks) - 0.6)


def in_words(values: Sequence[float]) -> str:
    """Returns a mean in words."""
    found = over_seeds(values)
    return "not known" if found is None else f"{found.mean:.2f}"
