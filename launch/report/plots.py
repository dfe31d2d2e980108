"""The plots of a report: curves, the Pareto plane, arms side by side, and sweeps of a setting."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from launch.curves import COLOURS, FAINT, FAINTLY, GRID, INK, PANELS, POINT, curve, exchanges, points, style
from launch.report.drawing import Key, Panel, Plot
from launch.report.marks import annotate, band, bars, dots, label_ends, limit_to
from launch.report.runs import NO_DIFFERENCE, Arm, method
from launch.report.series import (
    Series,
    estimate,
    exchanged,
    final,
    held_out,
    held_out_mean,
    is_evaluated,
    of_role,
    over_seeds,
    trained_mean,
    training,
)
from launch.search_space import show_value

TOGETHER = 6
"""Arms in one plot of curves, at most."""
BANDS = 4
"""Lines that may have a band, and a label at their end, each."""
LONG = 12
"""Letters of such a label, at most."""
HEALTH = (
    ("repetition", "Repetition", "share of token pairs"),
    ("eos_rate", "Ended by itself", "share of responses"),
    ("response_length", "Response length", "tokens"),
)
SWEPT = {"exchange_period": 2, "lr": 2, "kl_coef": 2, "num_agents": 3}
"""Settings whose effect is drawn, and from how many values on."""
HELD_OUT = "Dots: each policy alone on held-out queries, mean over seeds."
INTERVAL = "Bands and bars: 95 % interval of the mean over seeds (Student's t), where there are two or more."


def curves_of(arm: Arm, name: str) -> list[Plot]:
    """Returns an arm's curves: of each policy, and of each role."""
    modules, roles = arm.settings.modules, arm.settings.roles
    plots = [
        _curves(
            f"{name}-policies",
            "By policy",
            f"Lines: responses in training. {HELD_OUT}",
            arm,
            {module: partial(_policy, arm, module) for module in modules},
            evaluated=True,
        )
    ]
    if len(roles) > 1:
        plots.append(
            _curves(
                f"{name}-roles",
                "By role",
                "Responses in training, of whichever policy played the role.",
                arm,
                {role: partial(_role, arm, role) for role in roles},
                evaluated=False,
            )
        )
    return plots


Drawn = tuple[Series, Series | None]
"""What is drawn of one policy, role or arm: a line, and points."""


def _policy(arm: Arm, module: str, key: str) -> Drawn:
    trained = over_seeds([training(run, module, key) for run in arm.runs])
    evaluated = over_seeds([held_out(run, module, key) for run in arm.runs])
    return trained, evaluated if evaluated.x else None


def _role(arm: Arm, role: str, key: str) -> Drawn:
    return over_seeds([of_role(run, role, key) for run in arm.runs]), None


def _curves(
    name: str, title: str, note: str, arm: Arm, members: Mapping[str, Callable[[str], Drawn]], evaluated: bool
) -> Plot:
    updates = exchanged(arm)
    colours = dict(zip(members, _colours(len(members)), strict=True))
    panels = []
    for key, heading, unit in PANELS:
        lines = {label: found(key) for label, found in members.items()}
        panels.append(
            Panel(
                partial(_lines, heading, unit.format(arm.settings.report_kl_coef), updates, colours, lines),
                f"{heading}, {title.lower()}. {_ends(lines)}",
                beside=_beside(lines),
            )
        )
    legend = [Key(label, colour) for label, colour in colours.items()]
    if evaluated:
        legend += [Key("training", INK, "training"), Key("held out, bare query", INK, "held out")]
    if updates:
        legend.append(Key("role exchange", FAINT, "exchange"))
    return Plot(name, title, _with_interval(note, [arm]), panels, legend)


def _lines(
    title: str,
    unit: str,
    exchanged_after: Sequence[int],
    colours: Mapping[str, str],
    lines: Mapping[str, Drawn],
    panel: Axes,
    limit: float | None = None,
) -> None:
    style(panel, title, unit)
    if limit is not None:
        panel.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    for label, (trained, evaluated) in lines.items():
        curve(panel, trained.x, trained.mean, colours[label], faintly=evaluated is not None)
        if evaluated is not None:
            points(panel, evaluated.x, evaluated.mean, colours[label])
    drawn = [series for pair in lines.values() for series in pair if series is not None]
    limit_to(panel, drawn)
    exchanges(panel, exchanged_after)
    if len(lines) <= BANDS:
        for label, (trained, evaluated) in lines.items():
            band(panel, trained, colours[label])
            if evaluated is not None:
                bars(panel, evaluated, colours[label])
    if _beside(lines):
        label_ends(panel, {label: _foremost(pair) for label, pair in lines.items()}, colours)


def comparisons(arms: Sequence[Arm]) -> list[Plot]:
    """Returns the arms' curves in the same panels, some at a time: held out, or in training where none is evaluated."""
    evaluated = any(is_evaluated(arm) for arm in arms)
    note = (
        "Mean of the policies, each alone on held-out queries." if evaluated else "Mean of the policies, in training."
    )
    plots = []
    for number_, some in enumerate(_split(arms), start=1):
        colours = dict(zip([arm.label for arm in some], _colours(len(some)), strict=True))
        panels = []
        for key, heading, unit in PANELS:
            lines: dict[str, Drawn] = {
                arm.label: (Series([], [], [], []), held_out_mean(arm, key))
                if evaluated
                else (_trained(arm, key), None)
                for arm in some
            }
            coefs = {arm.settings.report_kl_coef for arm in some}
            unit = unit.format(coefs.pop()) if len(coefs) == 1 else unit.replace("{:g}", "η")
            panels.append(
                Panel(
                    partial(_lines, heading, unit, (), colours, lines),
                    f"{heading} of each arm. {_ends(lines)}",
                    beside=_beside(lines),
                )
            )
        legend = [Key(label, colour) for label, colour in colours.items()]
        suffix = f"-{number_}" if len(arms) > TOGETHER else ""
        plots.append(Plot(f"arms{suffix}", "Arms over training", _with_interval(note, some), panels, legend))
    return plots


def health(arms: Sequence[Arm]) -> list[Plot]:
    """Returns what collapse would show in, some arms at a time."""
    plots = []
    for number_, some in enumerate(_split(arms), start=1):
        colours = dict(zip([arm.label for arm in some], _colours(len(some)), strict=True))
        panels = []
        for key, heading, unit in HEALTH:
            lines: dict[str, Drawn] = {arm.label: (_trained(arm, key), None) for arm in some}
            limit = max(arm.settings.max_repetition for arm in some) if key == "repetition" else None
            panels.append(
                Panel(
                    partial(_lines, heading, unit, (), colours, lines, limit=limit),
                    f"{heading} in training. {_ends(lines)}",
                    beside=_beside(lines),
                )
            )
        legend = [Key(label, colour) for label, colour in colours.items()]
        suffix = f"-{number_}" if len(arms) > TOGETHER else ""
        note = _with_interval("Mean of the policies, in training. Dashed: the limit max_repetition.", some)
        plots.append(Plot(f"health{suffix}", "Signs of collapse", note, panels, legend))
    return plots


def _trained(arm: Arm, key: str) -> Series:
    return over_seeds([trained_mean(run, key) for run in arm.runs])


def pareto(arms: Sequence[Arm]) -> Plot:
    """Returns the Pareto plane: task reward against −KL, where each arm went and where it ended."""
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(arms))]
    ends = "; ".join(
        f"{arm.label}: {_shown(final(arm, 'task_reward'))} at KL {_shown(final(arm, 'kl'))}" for arm in arms
    )
    note = (
        "Held out, mean of the policies. Up and to the right is better. Large: mean over seeds at the end, with 95 % "
        "intervals; small: single runs; thin line: the way there."
    )
    coefs = {arm.settings.report_kl_coef for arm in arms}
    if len(coefs) == 1 and (coef := next(iter(coefs))) > 0:
        note += f" Along a dotted line the combined reward, task reward − {coef:g} · KL, is the same."
    else:
        coef = 0.0
    legend = [Key(arm.label, colour) for arm, colour in zip(arms, colours, strict=True)]
    panel = Panel(partial(_pareto, arms, colours, coef), f"Task reward against KL. {ends}", height=3.8)
    return Plot("pareto", "Task reward against KL", note, [panel], legend)


def _pareto(arms: Sequence[Arm], colours: Sequence[str], coef: float, panel: Axes) -> None:
    style(panel, "Task reward", "per response")
    panel.set_xlabel("− KL to the initial policy, nats per response", fontsize=9, color=INK)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    for arm, colour in zip(arms, colours, strict=True):
        kl, task = held_out_mean(arm, "kl"), held_out_mean(arm, "task_reward")
        panel.plot([-x for x in kl.mean], task.mean, color=colour, linewidth=1.1, alpha=FAINTLY)
        if len(arm.runs) > 1:
            dots(panel, [-x for x in final(arm, "kl")], final(arm, "task_reward"), colour)
    limits = panel.get_xlim(), panel.get_ylim()
    for arm, colour in zip(arms, colours, strict=True):
        annotate(panel, estimate([-x for x in final(arm, "kl")]), estimate(final(arm, "task_reward")), colour)
    panel.set_xlim(limits[0])
    panel.set_ylim(limits[1])
    if coef > 0:
        (left, right), (low, high) = limits
        for worth in MaxNLocator(5).tick_values(low + coef * left, high + coef * right):
            panel.plot([left, right], [worth - coef * left, worth - coef * right], color=FAINT, linewidth=0.8, ls=":")


def side_by_side(arms: Sequence[Arm]) -> Plot:
    """Returns the arms' final combined reward, a row each."""
    values = [final(arm, "combined_reward") for arm in arms]
    says = "; ".join(f"{arm.label}: {_shown(of_arm)}" for arm, of_arm in zip(arms, values, strict=True))
    note = "Held out, mean of the policies, at the last evaluation. Small dots: single runs. Bars: 95 % interval."
    panel = Panel(partial(_rows, [arm.label for arm in arms], values), says, height=0.42 * len(arms) + 0.9, left=0.15)
    return Plot("ablation", "Final combined reward", note, [panel])


def _rows(labels: Sequence[str], values: Sequence[Sequence[float]], panel: Axes) -> None:
    style(panel, "", "")
    panel.set_xlabel("combined reward", fontsize=9, color=INK)
    panel.xaxis.set_major_locator(MaxNLocator(6))
    panel.grid(axis="x", color=GRID, linewidth=0.8)
    panel.grid(visible=False, axis="y")
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    for row, of_arm in enumerate(values):
        if len(of_arm) > 1:
            dots(panel, of_arm, [-row] * len(of_arm), COLOURS[0])
    known = [value for of_arm in values for value in of_arm if not math.isnan(value)]
    limits = panel.get_xlim()
    for row, (label, of_arm) in enumerate(zip(labels, values, strict=True)):
        found = estimate(of_arm)
        annotate(panel, found, {"mean": -row, "low": None, "high": None, "n": 1}, COLOURS[0])
        missing = "" if found["n"] else " (not evaluated)"
        panel.annotate(
            label + missing,
            (0, -row),
            (0, 7),
            xycoords=panel.get_yaxis_transform(),
            textcoords="offset points",
            fontsize=9,
            color=INK,
        )
    if any(len(of_arm) > 1 for of_arm in values) and len(known) > 1:
        panel.set_xlim(limits)
    panel.set_ylim(0.5 - len(labels), 0.75)


def sweeps(arms: Sequence[Arm]) -> list[Plot]:
    """Returns, for each setting of which arms differ in that alone, how the final figures depend on it."""
    plots = []
    for key, least in SWEPT.items():
        families: dict[str, list[Arm]] = {}
        for arm in arms:
            same = arm.settings.model_dump(exclude={key, *NO_DIFFERENCE})
            families.setdefault(repr(same), []).append(arm)
        lines = {_family(family, key): family for family in families.values() if len(family) >= least}
        if lines:
            plots.append(_sweep(key, lines))
    return plots


def _family(arms: Sequence[Arm], key: str) -> str:
    """Returns what arms that differ in one setting are called together."""
    parts = [part for part in arms[0].label.split(", ") if not part.startswith(f"{key}=")]
    return ", ".join(parts) if parts and key != "num_agents" else method(arms[0].settings).partition(" of")[0]


def _sweep(key: str, families: Mapping[str, Sequence[Arm]]) -> Plot:
    values = {getattr(arm.settings, key) for family in families.values() for arm in family}
    ticks = sorted(values, key=lambda value: math.inf if value is None else value)
    colours = dict(zip(families, _colours(len(families)), strict=True))
    panels = []
    for figure, heading, unit in PANELS:
        lines = {
            label: sorted((ticks.index(getattr(arm.settings, key)), final(arm, figure)) for arm in family)
            for label, family in families.items()
        }
        unit = unit.format(next(iter(families.values()))[0].settings.report_kl_coef)
        says = "; ".join(
            f"{label}: " + ", ".join(f"{show_value(ticks[x])}: {_shown(y)}" for x, y in line)
            for label, line in lines.items()
        )
        panels.append(
            Panel(partial(_steps, heading, unit, key, ticks, colours, lines), f"{heading} over {key}. {says}")
        )
    note = "Held out, mean of the policies, at the last evaluation; values stand evenly. Bars: 95 % interval."
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
    panel.set_xticks(
        range(len(ticks)), ["never" if key == "exchange_period" and t is None else show_value(t) for t in ticks]
    )
    drawn = {
        label: over_seeds([{x: y[s] for x, y in line if s < len(y)} for s in range(max(len(y) for _, y in line))])
        for label, line in lines.items()
    }
    for label, line in lines.items():
        for x, found in line:
            if len(found) > 1:
                dots(panel, [x] * len(found), found, colours[label])
        panel.plot(drawn[label].x, drawn[label].mean, color=colours[label], linewidth=1.8, **POINT, zorder=3)
    limit_to(panel, drawn.values())
    for label, series in drawn.items():
        bars(panel, series, colours[label])
    panel.set_xlim(-0.4, len(ticks) - 0.6)


def _foremost(drawn: Drawn) -> Series:
    trained, evaluated = drawn
    return trained if evaluated is None else evaluated


def _beside(labels: Collection[str]) -> int:
    """Returns how many letters the longest label takes beside its line; 0 where they are too many, or too long."""
    longest = max(map(len, labels))
    return longest if len(labels) <= BANDS and longest <= LONG else 0


def _split(arms: Sequence[Arm]) -> list[Sequence[Arm]]:
    return [arms[start : start + TOGETHER] for start in range(0, len(arms), TOGETHER)]


def _colours(count: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _with_interval(note: str, arms: Sequence[Arm]) -> str:
    return f"{note} {INTERVAL}" if any(len(arm.runs) > 1 for arm in arms) else note


def _ends(lines: Mapping[str, Drawn]) -> str:
    """Says where lines end."""
    found = {label: _foremost(pair) for label, pair in lines.items()}
    return "; ".join(f"{label} ends at {series.mean[-1]:.2f}" for label, series in found.items() if series.x)


def _shown(values: Sequence[float]) -> str:
    mean = estimate(values)["mean"]
    return "not known" if mean is None else f"{mean:.2f}"
