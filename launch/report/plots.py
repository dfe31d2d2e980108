"""Lines of a report: of an arm's policies and roles, of several arms over training and over its cost, and sweeps."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pandas as pd

from launch.display.curves import (
    LIMITS,
    PANELS,
    Figure,
    Line,
    Member,
    line_panel,
    method,
    over_updates,
    policy_curves,
    with_interval,
)
from launch.display.drawing import colours_of
from launch.display.frame import TOKEN_KL, over_seeds
from launch.display.plot import Key, Plot
from launch.display.statistics import mean_ci
from launch.experiments.results import NO_MATTER
from launch.experiments.space import show_value
from launch.report.runs import NO_DIFFERENCE, Arm

TOGETHER = 6
"""Arms in one plot of curves, at most."""
HEALTH: tuple[Figure, ...] = (
    ("repetition", "Repetition", "share of token pairs"),
    ("eos_rate", "Ended by itself", "share of responses"),
    (TOKEN_KL, "KL to the initial policy", "nats per token"),
    ("response_length", "Response length", "tokens"),
)
COSTS = ("1000 tokens generated", "1000 tokens learned from", "minutes")
"""What an update costs."""
COST_NOTE = (
    "Combined reward, mean of the policies, each alone on {}. A token is learned from once an epoch. Minutes are of "
    "updates alone; what else the machine did adds to them."
)
SWEPT = {"exchange_period": 2, "lr": 2, "kl_coef": 2, "partner_reward": 3, "num_agents": 3}
"""Settings whose effect is drawn, and from how many values on."""
HELD_OUT = "Held out, mean of the policies, at the end."


def curves_of(arm: Arm, name: str) -> list[Plot]:
    """Returns an arm's curves: of each policy, and of each role."""
    note = f"Lines: responses in training. Dots: each policy alone on {held_out_queries([arm])}, mean over seeds."
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
        queries = held_out_queries(evaluated)
        note = f"Mean of the policies, each alone on {queries}; points of one update stand side by side."
    return _of_arms("arms", "Arms over training", note, evaluated or arms, PANELS, held_out=bool(evaluated))


def health(arms: Sequence[Arm]) -> list[Plot]:
    """Returns what collapse would show in, some arms at a time."""
    note = f"Mean of the policies, in training. Dashed: the limits {' and '.join(LIMITS.values())}."
    return _of_arms("health", "Signs of collapse", note, arms, HEALTH, held_out=False)


def _of_arms(
    name: str, title: str, note: str, arms: Sequence[Arm], figures: Sequence[Figure], held_out: bool
) -> list[Plot]:
    plots = []
    for part, some in paginate(name, arms):
        members = {arm.label: Member(arm.metrics, trained=not held_out, held_out=held_out) for arm in some}
        plots.append(over_updates(part, title, note, members, [arm.settings for arm in some], figures))
    return plots


def paginate(name: str, arms: Sequence[Arm]) -> list[tuple[str, Sequence[Arm]]]:
    """Spreads arms over as few plots as can hold them, as many to each; returns each plot's name and arms."""
    plots = math.ceil(len(arms) / TOGETHER)
    ends = [math.ceil(len(arms) * part / plots) for part in range(plots + 1)] if plots else []
    return [
        (f"{name}-{part}" if plots > 1 else name, arms[start:end])
        for part, (start, end) in enumerate(pairwise(ends), start=1)
    ]


def costs(arms: Sequence[Arm]) -> list[Plot]:
    """Returns the arms' held-out curves over each cost, some arms at a time; nothing if none is evaluated."""
    plots = []
    for name, some in paginate("costs", [arm for arm in arms if arm.is_evaluated]):
        colours = colours_of(len(some))
        panels = []
        for cost in COSTS:
            lines = [
                Line(arm.label, colour, held_out=over_cost(arm, cost))
                for arm, colour in zip(some, colours, strict=True)
            ]
            says = f"Combined reward over {cost}."
            panels.append(line_panel(f"Over {cost}", "combined reward", lines, says, xlabel=cost))
        note = interval_note(COST_NOTE.format(held_out_queries(some)), some)
        legend = [Key(arm.label, colour) for arm, colour in zip(some, colours, strict=True)]
        plots.append(Plot(name, "Arms over what they cost", note, panels, legend))
    return plots


def over_cost(arm: Arm, cost: str) -> pd.DataFrame:
    """Returns an arm's held-out combined reward, at each evaluation over the mean of what runs had cost until then."""
    run = partial(arm.metrics.get, "run", policy="")
    if cost == "minutes":
        spent = (run("seconds/total") - run("seconds/evaluate").fillna(0.0)) / 60
    else:
        spent = run("tokens") / 1e3 * (arm.settings.epochs if cost == "1000 tokens learned from" else 1)
    means = spent.groupby("run").cumsum().groupby("update").mean()
    means.loc[0] = 0.0
    curve = arm.held_out("combined_reward")
    return curve.set_axis(means.reindex(curve.index).to_numpy())


def sweeps(arms: Sequence[Arm]) -> list[Plot]:
    """Returns, for each setting of which arms differ in that alone, how the final figures depend on it."""
    plots = []
    for key, least in SWEPT.items():
        if some := families(arms, key, least):
            plots.append(_sweep(key, dict(zip(family_names(some, key), some, strict=True))))
    return plots


def families(arms: Sequence[Arm], key: str, least: int) -> list[list[Arm]]:
    """Returns groups of arms, each of one study or of none, that differ in one setting alone and have enough values."""
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        no_difference = {"seed", *NO_MATTER} if arm.result.study else NO_DIFFERENCE
        same = arm.settings.model_dump(exclude={key, "eval_kl_coef", *no_difference})
        groups.setdefault(repr((arm.result.study, arm.settings.report_kl_coef, same)), []).append(arm)
    return [family for family in groups.values() if len({getattr(arm.settings, key) for arm in family}) >= least]


def family_names(groups: Sequence[Sequence[Arm]], key: str) -> list[str]:
    """Returns a name for arms that differ in one setting alone: their method, or else what sets them apart."""
    methods = ["agents" if key == "num_agents" else method(family[0].settings) for family in groups]
    labels = [family[0].label for family in groups]
    parts = [[part for part in label.split(", ") if not part.startswith(f"{key}=")] for label in labels]
    shorter = [", ".join(some) or label for some, label in zip(parts, labels, strict=True)]
    return next(names for names in (methods, shorter, labels) if len(set(names)) == len(names) or names is labels)


def _sweep(key: str, groups: Mapping[str, Sequence[Arm]]) -> Plot:
    arms = [arm for family in groups.values() for arm in family]
    values: set[Any] = {getattr(arm.settings, key) for arm in arms}
    ticks = sorted(values, key=lambda value: math.inf if value is None else value)
    labels = ["never" if key == "exchange_period" and value is None else show_value(value) for value in ticks]
    colours = dict(zip(groups, colours_of(len(groups)), strict=True))
    panels = []
    for metric, heading, unit in PANELS:
        lines, said = [], []
        for label, family in groups.items():
            runs = dict(sorted((ticks.index(getattr(arm.settings, key)), arm.at_end(metric)) for arm in family))
            lines.append(Line(label, colours[label], held_out=over_values(runs), runs=runs))
            said.append(f"{label}: " + ", ".join(f"{show_value(ticks[x])}: {in_words(y)}" for x, y in runs.items()))
        says = f"{heading} over {key}. {'; '.join(said)}"
        unit = unit.format(f"{arms[0].settings.report_kl_coef:g}")
        panels.append(line_panel(heading, unit, lines, says, xlabel=key, ticks=labels))
    note = interval_note(f"{HELD_OUT} Small dots: single runs. Values stand evenly.", arms)
    legend = [Key(label, colour) for label, colour in colours.items()]
    return Plot(f"sweep-{key}", f"Sensitivity to {key}", note, panels, legend)


def over_values(runs: Mapping[int, Sequence[float]]) -> pd.DataFrame:
    """Averages what runs have at each x, as `over_seeds` does at each update."""
    return over_seeds(pd.concat({x: pd.Series(values) for x, values in runs.items()}, names=["update", "run"]))


def in_words(values: Sequence[float]) -> str:
    """Returns a mean in words."""
    estimate = mean_ci(values)
    return f"{estimate.mean:.2f}" if estimate.n else "not known"


def held_out_queries(arms: Sequence[Arm]) -> str:
    """Returns how many queries the evaluations during training are of, in words; all, if there are fewer."""
    counts = {arm.settings.eval_queries for arm in arms}
    return f"up to {counts.pop()} held-out queries" if len(counts) == 1 else "held-out queries"


def interval_note(note: str, arms: Sequence[Arm]) -> str:
    """Returns a plot's note, with what its bars are if any arm has them."""
    return with_interval(note, [arm.metrics for arm in arms])
