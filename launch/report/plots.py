"""Curves of a report: of an arm's policies and roles, of several arms, and of what collapse would show in."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise

from matplotlib.axes import Axes

from launch.display.curves import FAINT, INK, PANELS, colours_of, curve, exchanges, points, style
from launch.report.drawing import Key, Panel, Plot
from launch.report.marks import band, bars, label_ends, limit_to
from launch.report.runs import Arm
from launch.report.series import (
    FEWEST,
    TOKEN_KL,
    Series,
    exchanged,
    held_out,
    held_out_mean,
    is_evaluated,
    of_role,
    over_seeds,
    trained_mean,
    training,
)

TOGETHER = 6
"""Arms in one plot of curves, at most."""
BANDS = 4
"""Lines that may have a band, and a label at their end, each."""
APART = 0.012
"""Share of a panel's width between the points of two lines at the same update."""
LONG = 12
"""Letters of such a label, at most."""
HEALTH = (
    ("repetition", "Repetition", "share of token pairs"),
    ("eos_rate", "Ended by itself", "share of responses"),
    (TOKEN_KL, "KL to the initial policy", "nats per token"),
    ("response_length", "Response length", "tokens"),
)
LIMITS = {"repetition": "max_repetition", TOKEN_KL: "max_token_kl"}
"""The settings that say from where on a figure is a sign of collapse, whatever it was before training."""
INTERVAL = "{}: 95 % interval of the mean over seeds (Student's t), from three seeds on. A panel's edge cuts wide ones."


def curves_of(arm: Arm, name: str) -> list[Plot]:
    """Returns an arm's curves: of each policy, and of each role."""
    modules, roles = arm.settings.modules, arm.settings.roles
    plots = [
        _curves(
            f"{name}-policies",
            f"{arm.label}: by policy",
            f"Lines: responses in training. Dots: each policy alone on {held_out_queries([arm])}, mean over seeds.",
            arm,
            {module: partial(_policy, arm, module) for module in modules},
            evaluated=True,
        )
    ]
    if len(roles) > 1:
        plots.append(
            _curves(
                f"{name}-roles",
                f"{arm.label}: by role",
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
    colours = dict(zip(members, colours_of(len(members)), strict=True))
    panels = []
    for key, heading, unit in PANELS:
        lines = {label: found(key) for label, found in members.items()}
        panels.append(
            Panel(
                partial(_lines, heading, unit.format(arm.settings.report_kl_coef), updates, colours, lines),
                f"{heading}, {title}. {_ends(lines)}",
                beside=_beside(lines),
            )
        )
    legend = [Key(label, colour) for label, colour in colours.items()]
    if evaluated:
        legend += [Key("training", INK, "training"), Key("held out, bare query", INK, "held out")]
    if updates:
        legend.append(Key("role exchange", FAINT, "exchange"))
    return Plot(name, title, with_interval(note, [arm], bands=len(members) <= BANDS, bars=evaluated), panels, legend)


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
    lines = _apart(lines)
    if limit is not None:
        panel.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    for label, (trained, evaluated) in lines.items():
        curve(panel, trained.x, trained.mean, colours[label], faintly=evaluated is not None)
        if evaluated is not None:
            points(panel, evaluated.x, evaluated.mean, colours[label])
    banded = len(lines) <= BANDS
    intervals = [pair if banded else pair[1:] for pair in lines.values()]
    limit_to(panel, [series for pair in intervals for series in pair if series is not None])
    exchanges(panel, exchanged_after)
    for label, (trained, evaluated) in lines.items():
        if banded:
            band(panel, trained, colours[label])
        if evaluated is not None:
            bars(panel, evaluated, colours[label])
    if _beside(lines):
        label_ends(panel, {label: _foremost(pair) for label, pair in lines.items()}, colours)


def comparisons(arms: Sequence[Arm]) -> list[Plot]:
    """Returns the arms' curves in the same panels, some at a time: held out, or in training where none is evaluated."""
    evaluated = any(is_evaluated(arm) for arm in arms)
    arms = [arm for arm in arms if is_evaluated(arm) or not evaluated]
    note = "Mean of the policies, in training."
    if evaluated:
        note = f"Mean of the policies, each alone on {held_out_queries(arms)}; points of one update stand side by side."
    plots = []
    for part, some in enumerate(_split(arms), start=1):
        colours = dict(zip([arm.label for arm in some], colours_of(len(some)), strict=True))
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
        suffix = f"-{part}" if len(arms) > TOGETHER else ""
        shown = with_interval(note, some, bands=not evaluated and len(some) <= BANDS, bars=evaluated)
        plots.append(Plot(f"arms{suffix}", "Arms over training", shown, panels, legend))
    return plots


def health(arms: Sequence[Arm]) -> list[Plot]:
    """Returns what collapse would show in, some arms at a time."""
    plots = []
    for part, some in enumerate(_split(arms), start=1):
        colours = dict(zip([arm.label for arm in some], colours_of(len(some)), strict=True))
        panels = []
        for key, heading, unit in HEALTH:
            lines: dict[str, Drawn] = {arm.label: (_trained(arm, key), None) for arm in some}
            limit = max(getattr(arm.settings, LIMITS[key]) for arm in some) if key in LIMITS else None
            panels.append(
                Panel(
                    partial(_lines, heading, unit, (), colours, lines, limit=limit),
                    f"{heading} in training. {_ends(lines)}",
                    beside=_beside(lines),
                )
            )
        legend = [Key(label, colour) for label, colour in colours.items()]
        suffix = f"-{part}" if len(arms) > TOGETHER else ""
        note = f"Mean of the policies, in training. Dashed: the limits {' and '.join(LIMITS.values())}."
        note = with_interval(note, some, bands=len(some) <= BANDS)
        plots.append(Plot(f"health{suffix}", "Signs of collapse", note, panels, legend))
    return plots


def _trained(arm: Arm, key: str) -> Series:
    return over_seeds([trained_mean(run, key) for run in arm.runs])


def _foremost(drawn: Drawn) -> Series:
    trained, evaluated = drawn
    return trained if evaluated is None else evaluated


def _beside(labels: Collection[str]) -> int:
    """Returns how many letters the longest label takes beside its line; 0 where they are too many, or too long."""
    longest = max(map(len, labels))
    return longest if len(labels) <= BANDS and longest <= LONG else 0


def _split(arms: Sequence[Arm]) -> list[Sequence[Arm]]:
    """Deals arms out to as few plots as can hold them, as many to each."""
    plots = math.ceil(len(arms) / TOGETHER)
    ends = [math.ceil(len(arms) * part / plots) for part in range(plots + 1)]
    return [arms[start:end] for start, end in pairwise(ends)]


def _apart(lines: Mapping[str, Drawn]) -> dict[str, Drawn]:
    """Moves the points of several lines a little to the side, so that their bars do not hide one another."""
    updates = [update for _, evaluated in lines.values() if evaluated is not None for update in evaluated.x]
    step = APART * (max(updates) - min(updates)) if updates else 0.0
    moved = {}
    for place, (label, (trained, evaluated)) in enumerate(lines.items()):
        if evaluated is not None:
            aside = step * (place - (len(lines) - 1) / 2)
            evaluated = evaluated._replace(x=[update + aside for update in evaluated.x])
        moved[label] = trained, evaluated
    return moved


def with_interval(note: str, arms: Sequence[Arm], bands: bool = False, bars: bool = False) -> str:
    """Returns a plot's note, with what its intervals are if it has any.

    Args:
        note: what else there is to say.
        arms: in the plot.
        bands: intervals are drawn as bands.
        bars: they are drawn as bars.
    """
    drawn = " and ".join(name for name, are in (("bands", bands), ("bars", bars)) if are)
    several = any(len(arm.runs) >= FEWEST for arm in arms)
    return f"{note} {INTERVAL.format(drawn.capitalize())}" if drawn and several else note


def held_out_queries(arms: Sequence[Arm]) -> str:
    """Returns how many queries the evaluations during training are of, in words; all, if there are fewer."""
    counts = {arm.settings.eval_queries for arm in arms}
    return f"up to {counts.pop()} held-out queries" if len(counts) == 1 else "held-out queries"


def _ends(lines: Mapping[str, Drawn]) -> str:
    """Says where lines end."""
    found = {label: _foremost(pair) for label, pair in lines.items()}
    return "; ".join(f"{label} ends at {series.mean[-1]:.2f}" for label, series in found.items() if series.x)
